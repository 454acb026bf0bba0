"""aot_tune.tables.shape: one description reads a value, names the place of a mistake, and makes a schema."""

from __future__ import annotations

import pytest

from aot_tune.errors import TableError
from aot_tune.tables.shape import TEXT, choice, listed, mapped, number, optional, record, whole

POINT = record(
    dict, {"size": mapped(whole("a size", 1, 8), 1, 2, "sizes")}, {"us": listed(optional(number()), 1)}
)
POINTS = record(dict, {"name": TEXT, "points": listed(POINT, 0, 2, "points")}, {"kind": choice(("a", "b"))})


def test_a_value_is_read_with_its_optional_keys_and_numbers_as_floats() -> None:
    value = {"name": "x", "points": [{"size": {"M": 1}, "us": [1, None]}], "kind": "b"}
    assert POINTS.read(value) == {
        "name": "x", "points": ({"size": {"M": 1}, "us": (1.0, None)},), "kind": "b"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "path", "problem"),
    [
        ([], "", "expected an object"),
        ({"name": "x"}, "", "'points' is missing"),
        ({"name": "x", "points": [], "more": 1}, "", "'more' is unknown; expected name, points, kind"),
        ({"name": 1, "points": []}, "name", "expected a printable text"),
        ({"name": "x", "points": [], "kind": 1}, "kind", "expected one of a, b"),
        ({"name": "x", "points": [{}]}, "points[0]", "'size' is missing"),
        ({"name": "x", "points": [{"size": {"M": 1}}] * 3}, "points", "at most 2 points, got 3"),
        ({"name": "x", "points": [{"size": {}}]}, "points[0].size", "1 to 2 sizes, got 0"),
        ({"name": "x", "points": [{"size": {"a b": 1}}]}, "points[0].size", "a Python name"),
        ({"name": "x", "points": [{"size": {"M": True}}]}, "points[0].size.M", "expected a size, got bool"),
        ({"name": "x", "points": [{"size": {"M": 1}, "us": []}]}, "points[0].us", "1 or more values"),
        ({"name": "x", "points": [{"size": {"M": 1}, "us": [1, -1]}]}, "points[0].us[1]", "0 or more"),
    ],
)
def test_a_mistake_has_its_place_from_the_outside_in(value: object, path: str, problem: str) -> None:
    with pytest.raises(TableError) as caught:
        POINTS.read(value)
    assert caught.value.path == path
    assert problem in caught.value.problem


def test_unknown_keys_are_left_out_at_every_depth_and_named() -> None:
    value = {"name": "x", "old": 1, "points": [{"size": {"M": 1}, "older": 2}]}
    unknown: set[str] = set()
    assert POINTS.known(value, unknown) == {"name": "x", "points": [{"size": {"M": 1}}]}
    assert unknown == {"old", "older"}


def test_the_schema_has_the_same_keys_and_bounds() -> None:
    size = {"type": "integer", "minimum": 1, "maximum": 8}
    names = {"pattern": r"^[^0-9\s]\S*$", "maxLength": 200}
    us = {"anyOf": [{"type": "number", "minimum": 0}, {"type": "null"}]}
    assert POINT.schema() == {
        "type": "object",
        "properties": {
            "size": {
                "type": "object", "propertyNames": names, "additionalProperties": size, "minProperties": 1,
                "maxProperties": 2,
            },
            "us": {"type": "array", "items": us, "minItems": 1},
        },
        "required": ["size"],
        "additionalProperties": False,
    }  # fmt: skip
