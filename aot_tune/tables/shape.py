"""Describe JSON values once: a shape reads a value and makes its JSON Schema. Imports nothing of tables.

Reading is part of every import, so places such as ``entries[3].config`` are built only for errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import orjson

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
"""JSON Schema of Python names as keys; `check_identifiers` demands more."""


def _itself(value: Json, unknown: set[str]) -> Json:
    return value


class Shape(Generic[T]):
    """Form of a JSON value.

    Args:
        read: Value -> its meaning. Raises TableError, whose path begins at the value.
        schema: Returns the JSON Schema. It allows all that `read` does, and more where JSON Schema has no
            such rule.
        known: Returns the value without the keys that `read` refuses as unknown, and adds their names to the
            set.
    """

    def __init__(
        self,
        read: Callable[[Json], T],
        schema: Callable[[], Json],
        known: Callable[[Json, set[str]], Json] = _itself,
    ) -> None:
        self.read, self.schema, self.known = read, schema, known


def within(error: TableError, step: str) -> NoReturn:
    """Raise an error again with an outer step before its path: ``us`` within ``[3]`` is ``[3].us``."""
    dot = "." if error.path and not error.path.startswith("[") else ""
    raise type(error)(error.problem, f"{step}{dot}{error.path}") from None


# Single values ----------------------------------------------------------------------------------------------


def checked(check: Callable[[Json, str], Any], schema: Json) -> Shape[Any]:
    """Return the shape of a value that a function checks and the reader keeps unchanged."""

    def read(value: Json) -> Any:
        check(value, "")
        return value

    return Shape(read, lambda: schema)


ANY: Shape[Any] = Shape(lambda value: value, dict)
"""Any value; the caller reads it."""

TEXT: Shape[str] = checked(check_text, {"type": "string", "maxLength": LONGEST_TEXT})
"""Short printable text."""


def number(*, zero: bool = True) -> Shape[float]:
    """Return the shape of a finite number of 0 or more, or above 0."""
    schema = {"type": "number", "minimum" if zero else "exclusiveMinimum": 0}
    return Shape(lambda value: as_number(value, "", zero=zero), lambda: schema)


def whole(what: str, least: int, most: int) -> Shape[int]:
    """Return the shape of an int from `least` to `most`; a bool is refused.

    Args:
        what: Name of the expected value, for the error.
        least: The least value.
        most: The largest value.
    """

    def read(value: Json) -> int:
        if type(value) is not int or not least <= value <= most:
            expected(what, value, "")
        return int(value)

    return Shape(read, lambda: {"type": "integer", "minimum": least, "maximum": most})


def choice(values: Sequence[T], what: str | None = None) -> Shape[T]:
    """Return the shape of one of a few values of one type."""
    kind = type(values[0])

    def read(value: Json) -> T:
        if type(value) is not kind or value not in values:
            expected(what or f"one of {', '.join(map(str, values))}", value, "")
        return values[values.index(value)]

    return Shape(read, lambda: {"enum": list(values)})


def optional(shape: Shape[T]) -> Shape[T | None]:
    """Return the shape of a value or null."""

    def read(value: Json) -> T | None:
        return None if value is None else shape.read(value)

    return Shape(read, lambda: {"anyOf": [shape.schema(), {"type": "null"}]}, shape.known)


def remembered(shape: Shape[T]) -> Shape[T]:
    """Return a shape with a memory: each distinct value, such as a config of a table, is read once."""
    values: dict[bytes, T] = {}

    def read(value: Json) -> T:
        text = orjson.dumps(value)
        if text not in values:
            values[text] = shape.read(value)
        return values[text]

    return Shape(read, shape.schema, shape.known)


# Lists and objects ------------------------------------------------------------------------------------------


def _bounds(what: str, least: int, most: int | None) -> tuple[Callable[[int], None], dict[str, int]]:
    """Return a check of a number of values, and its bounds by the prefix of their JSON Schema names."""
    words = f"{least} or more" if most is None else f"{least} to {most}" if least else f"at most {most}"
    if least == most:
        words = str(least)

    def check(count: int) -> None:
        if count < least or (most is not None and count > most):
            raise TableError(f"expected {words} {what}, got {count}")

    return check, ({"min": least} if least else {}) | ({} if most is None else {"max": most})


def listed(
    item: Shape[T], least: int = 0, most: int | None = None, what: str = "values"
) -> Shape[tuple[T, ...]]:
    """Return the shape of a list of values of one shape.

    Args:
        item: The shape of each value.
        least: The fewest values.
        most: The most values; None: as many as a document holds.
        what: Plural noun for the values, for the error.
    """
    check, bounds = _bounds(what, least, most)

    def read(value: Json) -> tuple[T, ...]:
        items = as_list(value, "")
        check(len(items))
        results: list[T] = []
        try:
            for element in items:
                results.append(item.read(element))
        except TableError as error:
            within(error, f"[{len(results)}]")
        return tuple(results)

    def schema() -> Json:
        return {"type": "array", "items": item.schema()} | {f"{name}Items": n for name, n in bounds.items()}

    return Shape(read, schema, lambda value, unknown: [item.known(element, unknown) for element in value])


def mapped(
    item: Shape[T], least: int = 0, most: int | None = None, what: str = "keys"
) -> Shape[dict[str, T]]:
    """Return the shape of an object whose keys are Python names, with values of one shape.

    Args:
        item: The shape of each value.
        least: The fewest keys.
        most: The most keys; None: as many as a document holds.
        what: Plural noun for the keys, for the error.
    """
    check, bounds = _bounds(what, least, most)

    def read(value: Json) -> dict[str, T]:
        check_identifiers(value, "")
        check(len(value))
        name = ""
        results = {}
        try:
            for name, element in value.items():
                results[name] = item.read(element)
        except TableError as error:
            within(error, name)
        return results

    def schema() -> Json:
        keys = {"type": "object", "propertyNames": IDENTIFIERS, "additionalProperties": item.schema()}
        return keys | {f"{name}Properties": n for name, n in bounds.items()}

    def known(value: Json, unknown: set[str]) -> Json:
        return {name: item.known(element, unknown) for name, element in value.items()}

    return Shape(read, schema, known)


Fields = Mapping[str, Shape[Any]]
"""Shape of each key's value, in the order in which the keys are written."""


def record(make: Callable[..., T], keys: Fields, optional_keys: Fields | None = None) -> Shape[T]:
    """Return the shape of an object of fixed keys.

    Args:
        make: Makes the result from the values, passed by key.
        keys: The required keys.
        optional_keys: The keys that may be missing.
    """
    may = dict(optional_keys or {})
    names, optional_names = tuple(keys), tuple(may)
    readers = [(name, shape.read) for name, shape in keys.items()]
    optional_readers = [(name, shape.read) for name, shape in may.items()]

    def read(value: Json) -> T:
        check_keys(value, "", names, optional_names)
        name = ""
        results = {}
        try:
            for name, reader in readers:
                results[name] = reader(value[name])
            if len(value) > len(results):
                for name, reader in optional_readers:
                    if name in value:
                        results[name] = reader(value[name])
        except TableError as error:
            within(error, name)
        return make(**results)

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
        return {name: shapes[name].known(inner, unknown) for name, inner in value.items() if name in shapes}

    return Shape(read, schema, known)
