"""Describe JSON values once: a shape reads a value, and makes the JSON Schema of it. Knows no table.

Reading is part of every import: places such as ``entries[3].config`` are put together for errors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from aot_tune.errors import TableError
from aot_tune.tables.strict_json import (
    LONGEST_TEXT,
    Json,
    as_list,
    as_number,
    check_identifiers,
    check_keys,
    check_text,
    expected,
)

T = TypeVar("T")

IDENTIFIERS = {"pattern": r"^[^0-9\s]\S*$", "maxLength": LONGEST_TEXT}
"""The JSON Schema of Python names as keys; `check_identifiers` demands more."""


def _itself(value: Json, unknown: set[str]) -> Json:
    return value


@dataclass(frozen=True)
class Shape(Generic[T]):
    """The form of a JSON value."""

    read: Callable[[Json], T]
    """Value -> what it means. Raises TableError, whose path begins at the value."""

    schema: Callable[[], Json]
    """The JSON Schema. It allows all that `read` does, and more where a rule has no word in JSON Schema."""

    known: Callable[[Json, set[str]], Json] = _itself
    """The value without the keys that `read` refuses as unknown; their names are added to the set."""


def within(error: TableError, step: str) -> NoReturn:
    """Raise an error again with its place seen from further outside: ``us`` within ``[3]`` is ``[3].us``."""
    dot = "." if error.path and not error.path.startswith("[") else ""
    raise type(error)(error.problem, f"{step}{dot}{error.path}") from None


# Single values ----------------------------------------------------------------------------------------------


def checked(check: Callable[[Json, str], Any], schema: Json) -> Shape[Any]:
    """A value that a function checks and the reader takes as it is."""

    def read(value: Json) -> Any:
        check(value, "")
        return value

    return Shape(read, lambda: schema)


ANY: Shape[Any] = Shape(lambda value: value, dict)
"""Any value: the caller reads it."""

TEXT: Shape[str] = checked(check_text, {"type": "string", "maxLength": LONGEST_TEXT})
"""A short printable text."""


def number(*, zero: bool = True) -> Shape[float]:
    """A finite number of 0 or more, or above 0."""
    schema = {"type": "number", "minimum" if zero else "exclusiveMinimum": 0}
    return Shape(lambda value: as_number(value, "", zero=zero), lambda: schema)


def whole(what: str, least: int, most: int) -> Shape[int]:
    """An int from `least` to `most`, and no bool.

    Args:
        what: What is expected, for the error.
        least: The least value.
        most: The largest value.
    """

    def read(value: Json) -> int:
        if type(value) is not int or not least <= value <= most:
            expected(what, value, "")
        return int(value)

    return Shape(read, lambda: {"type": "integer", "minimum": least, "maximum": most})


def choice(values: Sequence[T], what: str | None = None) -> Shape[T]:
    """One of a few values of one type."""
    kind = type(values[0])

    def read(value: Json) -> T:
        if type(value) is not kind or value not in values:
            expected(what or f"one of {', '.join(map(str, values))}", value, "")
        return values[values.index(value)]

    return Shape(read, lambda: {"enum": list(values)})


def optional(shape: Shape[T]) -> Shape[T | None]:
    """A value, or null."""

    def read(value: Json) -> T | None:
        return None if value is None else shape.read(value)

    return Shape(read, lambda: {"anyOf": [shape.schema(), {"type": "null"}]}, shape.known)


# Lists and objects ------------------------------------------------------------------------------------------


def _bounds(what: str, least: int, most: int | None) -> tuple[Callable[[int], None], dict[str, int]]:
    """How a number of values is checked, and the bounds by the last word of their names in JSON Schema."""
    words = f"{least} or more" if most is None else f"{least} to {most}" if least else f"at most {most}"

    def check(count: int) -> None:
        if count < least or (most is not None and count > most):
            raise TableError(f"expected {words} {what}, got {count}")

    return check, ({"min": least} if least else {}) | ({} if most is None else {"max": most})


def listed(
    item: Shape[T], least: int = 0, most: int | None = None, what: str = "values"
) -> Shape[tuple[T, ...]]:
    """A list of values of one shape.

    Args:
        item: The shape of each value.
        least: The fewest values.
        most: The most values; None: as many as a document holds.
        what: The plural of what it lists, for the error.
    """
    check, bounds = _bounds(what, least, most)

    def read(value: Json) -> tuple[T, ...]:
        items = as_list(value, "")
        check(len(items))
        found: list[T] = []
        try:
            for one in items:
                found.append(item.read(one))
        except TableError as error:
            within(error, f"[{len(found)}]")
        return tuple(found)

    def schema() -> Json:
        return {"type": "array", "items": item.schema()} | {f"{name}Items": n for name, n in bounds.items()}

    return Shape(read, schema, lambda value, unknown: [item.known(one, unknown) for one in value])


def mapped(
    item: Shape[T], least: int = 0, most: int | None = None, what: str = "keys"
) -> Shape[dict[str, T]]:
    """An object whose keys are Python names, with values of one shape.

    Args:
        item: The shape of each value.
        least: The fewest keys.
        most: The most keys; None: as many as a document holds.
        what: The plural of what the keys name, for the error.
    """
    check, bounds = _bounds(what, least, most)

    def read(value: Json) -> dict[str, T]:
        check_identifiers(value, "")
        check(len(value))
        name = ""
        found = {}
        try:
            for name, one in value.items():
                found[name] = item.read(one)
        except TableError as error:
            within(error, name)
        return found

    def schema() -> Json:
        keys = {"type": "object", "propertyNames": IDENTIFIERS, "additionalProperties": item.schema()}
        return keys | {f"{name}Properties": n for name, n in bounds.items()}

    return Shape(
        read, schema, lambda value, unknown: {name: item.known(one, unknown) for name, one in value.items()}
    )


Fields = Mapping[str, Shape[Any]]
"""The shape of each key's value, in the order in which the keys are written."""


def record(make: Callable[..., T], keys: Fields, optional_keys: Fields | None = None) -> Shape[T]:
    """An object of fixed keys.

    Args:
        make: Makes the result from the values, which are passed by key.
        keys: The keys that it has.
        optional_keys: The keys that it may have.
    """
    may = dict(optional_keys or {})
    names, optional_names = tuple(keys), tuple(may)
    readers = [(name, shape.read) for name, shape in keys.items()]
    optional_readers = [(name, shape.read) for name, shape in may.items()]

    def read(value: Json) -> T:
        check_keys(value, "", names, optional_names)
        name = ""
        found = {}
        try:
            for name, reader in readers:
                found[name] = reader(value[name])
            if len(value) > len(found):
                for name, reader in optional_readers:
                    if name in value:
                        found[name] = reader(value[name])
        except TableError as error:
            within(error, name)
        return make(**found)

    def schema() -> Json:
        return {
            "type": "object",
            "properties": {name: shape.schema() for name, shape in (*keys.items(), *may.items())},
            "required": list(names),
            "additionalProperties": False,
        }

    def known(value: Json, unknown: set[str]) -> Json:
        shapes = {**keys, **may}
        unknown.update(value.keys() - shapes.keys())
        return {name: shapes[name].known(one, unknown) for name, one in value.items() if name in shapes}

    return Shape(read, schema, known)
