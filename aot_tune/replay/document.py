"""Read and write the JSON text of a table of recorded searches. Does no I/O.

``parse(dump(table)) == table`` holds for every table, and ``dump(parse(text)) == text`` for every text that
`dump` wrote: the same recordings give the same bytes.
"""

from __future__ import annotations

import json
from typing import Any

from aot_tune.errors import NotRecordableError, TableError
from aot_tune.replay.problem import ALIGNMENT, Argument, Array, Fixed, Items, Problem, Real, Varying, Whole
from aot_tune.replay.spelling import Json, text_of
from aot_tune.replay.table import Launched, Library, RecordedEntry, RecordedTable
from aot_tune.tables.reader import ARCH, BUILT_WITH, BUILT_WITH_FIELDS, HASH, HINT_VALUES, check_schema
from aot_tune.tables.shape import (
    TEXT,
    Shape,
    checked,
    choice,
    listed,
    mapped,
    number,
    optional,
    record,
    remembered,
    whole,
)
from aot_tune.tables.strict_json import expected, loads
from aot_tune.tables.table import SCHEMA
from aot_tune.tables.writer import document, line, lines, microseconds, rounded
from aot_tune.values.config import HINTS

KIND = "recorded"
"""The kind of recorded tables. Tables of declared kernels have another kind, or none."""

MOST_ENTRIES = 5_000
"""Most searches of one kernel. A library's test suite makes a few dozen."""

MOST_LAUNCHED = 1_000
"""Most signatures of one kernel that are launched and not searched."""

_LONGEST_SIGNATURE = 20_000
_LARGEST = 2**62


# Writing ----------------------------------------------------------------------------------------------------


def dump(table: RecordedTable) -> bytes:
    """Return a table's text: keys in fixed order, one sorted entry a line, rounded figures.

    Raises:
        TableError: The table has a value that `parse` refuses, so that no unreadable text is ever written.
    """
    values = {
        "schema": str(SCHEMA),
        "kind": line(KIND),
        "module": line(table.module),
        "kernel": line(table.kernel),
        "arch": line(str(table.arch)),
        "source_hash": line(table.source_hash),
        "library": line({"name": table.library.name, "version": table.library.version}),
        "built_with": line({key: getattr(table.built_with, key) for key in BUILT_WITH_FIELDS}),
        "entries": lines(_entry_json(entry) for entry in sorted(table.entries, key=_order)),
    }
    if table.launched:
        values["launched"] = lines(
            {"hints": dict(launch.hints), "signature": launch.signature} for launch in sorted(table.launched)
        )
    text = document(values)
    parse(text)
    return text.encode()


def _order(entry: RecordedEntry) -> tuple[Any, ...]:
    """Return an entry's sort key. Entries of one problem keep their order: the first one is replayed."""
    return (entry.space, entry.problem.sm_count, line(arguments_json(entry.problem)))


def _entry_json(entry: RecordedEntry) -> Json:
    return {
        "arguments": arguments_json(entry.problem),
        "sm_count": entry.problem.sm_count,
        "space": entry.space,
        "config": entry.config,
        "hints": {name: entry.hints[name] for name in HINTS if name in entry.hints},
        "grid": list(entry.grid),
        "mean_us": microseconds(entry.mean_us),
        "error_margin_us": rounded(entry.error_margin_us),
        "num_samples": entry.num_samples,
        "first_us": None if entry.first_us is None else microseconds(entry.first_us),
        "count": entry.count,
        "signature": entry.signature,
    }


def arguments_json(problem: Problem) -> Json:
    """Return a problem's arguments by name, in the form of a table."""
    pairs = zip(problem.names, problem.arguments, strict=True)
    return {name: _argument_json(argument) for name, argument in pairs}


def _argument_json(argument: Argument) -> Json:
    if isinstance(argument, Array):
        tensor: dict[str, Json] = {"tensor": argument.dtype, "shape": list(argument.shape)}
        tensor["layout"] = argument.layout
        tensor["alignment"] = ALIGNMENT if argument.aligned else 1
        return tensor
    if isinstance(argument, Whole):
        return {"int": argument.value}
    if isinstance(argument, Fixed):
        return {"value": json.loads(argument.text)}
    if isinstance(argument, Items):
        return {"items": [_argument_json(item) for item in argument.items]}
    return "float" if isinstance(argument, Real) else "varies"


# Reading ----------------------------------------------------------------------------------------------------


def is_recorded(document: Json) -> bool:
    """Return whether a parsed document has the kind of a recorded table."""
    return type(document) is dict and document.get("kind") == KIND


def parse(data: bytes | str) -> RecordedTable:
    """Read and check a table's text.

    Raises:
        TableError: The text is not a recorded table. The message names the place and what is expected.
        NewerSchemaError: A later release wrote it.
    """
    value = loads(data)
    if not is_recorded(value):
        raise TableError(f"expected a table of the kind {KIND!r}")
    check_schema(value.get("schema"))
    return TABLE.read(value)


def _check_signature(value: Json, path: str) -> None:
    if type(value) is not str or len(value) > _LONGEST_SIGNATURE or not value.isidentifier():
        expected("a mangled symbol", value, path)


def _text(value: Json) -> str:
    try:
        return text_of(value)
    except (NotRecordableError, ValueError, RecursionError) as error:
        raise TableError(str(error)) from None


_COUNT = whole("a whole number of 1 or more", 1, _LARGEST - 1)
_SIZE = whole("a whole number of 0 or more", 0, _LARGEST - 1)
_SIGNATURE: Shape[str] = checked(
    _check_signature, {"type": "string", "minLength": 1, "maxLength": _LONGEST_SIGNATURE}
)
_SPELLING: Shape[Json] = checked(lambda value, path: _text(value), {})
_ABOVE_0 = number(zero=False)


# Arguments --------------------------------------------------------------------------------------------------


def _array(tensor: str, shape: tuple[int, ...], layout: str, alignment: int) -> Array:
    return Array(dtype=tensor, shape=shape, layout=layout, aligned=alignment == ALIGNMENT)


def _argument(value: Json) -> Argument:
    if value == "float":
        return Real()
    if value == "varies":
        return Varying()
    if type(value) is not dict:
        expected("an argument", value, "")
    form = next((form for key, form in _FORMS.items() if key in value), _FORMS["value"])
    return form.read(value)


_ARGUMENT: Shape[Argument] = Shape(_argument, lambda: {"$ref": "#/$defs/argument"})

_FORMS: dict[str, Shape[Argument]] = {
    "tensor": record(
        _array,
        {"tensor": TEXT, "shape": listed(_SIZE), "layout": TEXT, "alignment": choice((1, ALIGNMENT))},
    ),
    "int": record(lambda int: Whole(int), {"int": whole("a whole number", -2 * _LARGEST, 2 * _LARGEST)}),
    "items": record(lambda items: Items(items), {"items": listed(_ARGUMENT)}),
    "value": record(lambda value: Fixed(value), {"value": Shape(_text, dict)}),
}
"""Forms of an argument that are JSON objects, by the key that identifies each."""


def argument_schema() -> Json:
    """Return the JSON Schema of an argument. The schema of `TABLE` refers to it as ``#/$defs/argument``."""
    return {"anyOf": [{"enum": ["float", "varies"]}, *(form.schema() for form in _FORMS.values())]}


# Entries and tables -----------------------------------------------------------------------------------------


def _entry(arguments: dict[str, Argument], sm_count: int, **values: Any) -> RecordedEntry:
    problem = Problem(names=tuple(arguments), arguments=tuple(arguments.values()), sm_count=sm_count)
    return RecordedEntry(problem=problem, **values)


def _table(**values: Any) -> RecordedTable:
    return RecordedTable(**{name: value for name, value in values.items() if name not in ("schema", "kind")})


_ENTRY_FIELDS: dict[str, Shape[Any]] = {
    "arguments": mapped(_ARGUMENT),
    "sm_count": _COUNT,
    "space": HASH,
    "config": _SPELLING,
    "hints": HINT_VALUES,
    "grid": listed(_SIZE, 1, 3, "numbers"),
    "mean_us": _ABOVE_0,
    "error_margin_us": number(),
    "num_samples": _COUNT,
    "first_us": optional(_ABOVE_0),
    "count": _COUNT,
    "signature": _SIGNATURE,
}
_ENTRIES = listed(record(_entry, _ENTRY_FIELDS), 0, MOST_ENTRIES, "entries")


def _entries(value: Json) -> tuple[RecordedEntry, ...]:
    """Read entries, which differ in few arguments: each distinct one of a table is read once."""
    fields = _ENTRY_FIELDS | {"arguments": mapped(remembered(_ARGUMENT)), "config": remembered(_SPELLING)}
    return listed(record(_entry, fields), 0, MOST_ENTRIES, "entries").read(value)


_LAUNCHED = record(
    lambda hints, signature: Launched(tuple(hints.items()), signature),
    {"hints": HINT_VALUES, "signature": _SIGNATURE},
)

TABLE = record(
    _table,
    {
        "schema": choice((SCHEMA,)),
        "kind": choice((KIND,)),
        "module": TEXT,
        "kernel": TEXT,
        "arch": ARCH,
        "source_hash": TEXT,
        "library": record(Library, {"name": TEXT, "version": TEXT}),
        "built_with": BUILT_WITH,
        "entries": Shape(_entries, _ENTRIES.schema, _ENTRIES.known),
    },
    {"launched": listed(_LAUNCHED, 0, MOST_LAUNCHED, "signatures")},
)
"""Shape of a table of recorded searches: keys, types and bounds."""
