"""Read and write the JSON text of a table of recorded searches. Does no I/O.

``parse(dump(table)) == table`` holds for every table, and ``dump(parse(text)) == text`` for every text that
`dump` wrote: the same recordings give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from aot_tune.errors import ArchError, NotRecordableError, TableError
from aot_tune.replay.problem import ALIGNMENT, Argument, Array, Fixed, Items, Problem, Real, Varying, Whole
from aot_tune.replay.spelling import HASH_DIGITS, Json, text_of
from aot_tune.replay.table import Launched, Library, RecordedEntry, RecordedTable
from aot_tune.tables.reader import check_schema
from aot_tune.tables.strict_json import as_list, as_number, check_keys, check_text, expected, loads
from aot_tune.tables.table import SCHEMA, BuiltWith
from aot_tune.values.arch import Arch
from aot_tune.values.config import HINTS

KIND = "recorded"
"""The kind of these tables: those of declared kernels are of another, or name none."""

MOST_ENTRIES = 5_000
"""The most searches of one kernel; a library's test suite makes a few dozen."""

MOST_LAUNCHED = 1_000
"""The most signatures of one kernel that are launched and not searched."""

_TOP_KEYS = ("schema", "kind", "module", "kernel", "arch", "source_hash", "library", "built_with", "entries")
_OPTIONAL_KEYS = ("launched",)
_BUILT_WITH_KEYS = ("device_name", "sm_count", "cuda_tile", "tileiras", "driver")
_ENTRY_KEYS = (
    "arguments", "sm_count", "space", "config", "hints", "grid", "mean_us", "error_margin_us", "num_samples",
    "first_us", "count", "signature",
)  # fmt: skip
_LAUNCHED_KEYS = ("hints", "signature")
_US_DECIMALS = 3
_LONGEST_SIGNATURE = 20_000
_LARGEST = 2**62


# Writing ----------------------------------------------------------------------------------------------------


def dump(table: RecordedTable) -> bytes:
    """A table's text: fixed order of keys, one entry a line, sorted entries, rounded figures.

    Raises:
        TableError: The table has a value that `parse` would refuse: no unreadable text is ever written.
    """
    values = {
        "schema": str(SCHEMA),
        "kind": _line(KIND),
        "module": _line(table.module),
        "kernel": _line(table.kernel),
        "arch": _line(str(table.arch)),
        "source_hash": _line(table.source_hash),
        "library": _line({"name": table.library.name, "version": table.library.version}),
        "built_with": _line({key: getattr(table.built_with, key) for key in _BUILT_WITH_KEYS}),
        "entries": _lines(_entry_json(entry) for entry in sorted(table.entries, key=_order)),
    }
    if table.launched:
        values["launched"] = _lines(_launched_json(one) for one in sorted(table.launched))
    body = ",\n".join(f'  "{key}": {value}' for key, value in values.items())
    text = f"{{\n{body}\n}}\n".encode()
    parse(text)
    return text


def _order(entry: RecordedEntry) -> tuple[Any, ...]:
    """Entries of one problem keep their order, since the first of them counts."""
    return (entry.space, entry.problem.sm_count, _line(arguments_json(entry.problem)))


def _entry_json(entry: RecordedEntry) -> Json:
    return {
        "arguments": arguments_json(entry.problem),
        "sm_count": entry.problem.sm_count,
        "space": entry.space,
        "config": entry.config,
        "hints": {name: entry.hints[name] for name in HINTS if name in entry.hints},
        "grid": list(entry.grid),
        "mean_us": _us(entry.mean_us),
        "error_margin_us": round(entry.error_margin_us, _US_DECIMALS),
        "num_samples": entry.num_samples,
        "first_us": None if entry.first_us is None else _us(entry.first_us),
        "count": entry.count,
        "signature": entry.signature,
    }


def _launched_json(launched: Launched) -> Json:
    return {"hints": dict(launched.hints), "signature": launched.signature}


def _us(us: float) -> float:
    """Round a time, but never to 0, which the reader refuses."""
    return float(max(round(us, _US_DECIMALS), 10**-_US_DECIMALS))


def arguments_json(problem: Problem) -> Json:
    """A problem's arguments by name, as a table has them."""
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
        return {"items": [_argument_json(one) for one in argument.items]}
    return "float" if isinstance(argument, Real) else "varies"


def _line(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _lines(values: Iterable[Json]) -> str:
    lines = [f"    {_line(value)}" for value in values]
    return "[\n" + ",\n".join(lines) + "\n  ]" if lines else "[]"


# Reading ----------------------------------------------------------------------------------------------------


def is_recorded(document: Json) -> bool:
    """Whether a parsed document calls itself a recorded table."""
    return type(document) is dict and document.get("kind") == KIND


def parse(data: bytes | str) -> RecordedTable:
    """Read and check a table's text.

    Raises:
        TableError: The text is not such a table; the message says where and what is expected.
        NewerSchemaError: A later release wrote it.
    """
    value = loads(data)
    if not is_recorded(value):
        raise TableError(f"expected a table of the kind {KIND!r}")
    check_schema(value.get("schema"))
    check_keys(value, "", _TOP_KEYS, _OPTIONAL_KEYS)
    for key in ("module", "kernel", "source_hash"):
        check_text(value[key], key)
    check_keys(value["library"], "library", ("name", "version"))
    for key in ("name", "version"):
        check_text(value["library"][key], f"library.{key}")
    entries = as_list(value["entries"], "entries")
    if len(entries) > MOST_ENTRIES:
        raise TableError(f"{len(entries)} entries; a table has at most {MOST_ENTRIES}", "entries")
    return RecordedTable(
        module=value["module"],
        kernel=value["kernel"],
        arch=_arch(value["arch"]),
        source_hash=value["source_hash"],
        library=Library(**value["library"]),
        built_with=_built_with(value["built_with"]),
        entries=tuple(_entry(entry, f"entries[{at}]") for at, entry in enumerate(entries)),
        launched=_all_launched(value.get("launched", [])),
    )


def _arch(value: Json) -> Arch:
    check_text(value, "arch")
    try:
        arch = Arch.parse(value)
    except ArchError as error:
        raise TableError(str(error), "arch") from None
    if str(arch) != value:
        expected(str(arch), value, "arch")
    return arch


def _built_with(value: Json) -> BuiltWith:
    check_keys(value, "built_with", _BUILT_WITH_KEYS)
    for key in _BUILT_WITH_KEYS:
        if key != "sm_count":
            check_text(value[key], f"built_with.{key}")
    return BuiltWith(**{**value, "sm_count": _count(value["sm_count"], "built_with.sm_count")})


def _all_launched(value: Json) -> tuple[Launched, ...]:
    listed = as_list(value, "launched")
    if len(listed) > MOST_LAUNCHED:
        raise TableError(f"{len(listed)} signatures; a table has at most {MOST_LAUNCHED}", "launched")
    found = []
    for at, one in enumerate(listed):
        path = f"launched[{at}]"
        check_keys(one, path, _LAUNCHED_KEYS)
        _check_signature(one["signature"], f"{path}.signature")
        found.append(Launched(tuple(_hints(one["hints"], f"{path}.hints").items()), one["signature"]))
    return tuple(found)


def _check_signature(value: Json, path: str) -> None:
    if type(value) is not str or len(value) > _LONGEST_SIGNATURE or not value.isidentifier():
        expected("a mangled symbol", value, path)


def _entry(value: Json, path: str) -> RecordedEntry:
    check_keys(value, path, _ENTRY_KEYS)
    _check_signature(value["signature"], f"{path}.signature")
    first_us = value["first_us"]
    _check_hash(value["space"], f"{path}.space")
    return RecordedEntry(
        space=value["space"],
        problem=_problem(value["arguments"], value["sm_count"], path),
        config=_spelling(value["config"], f"{path}.config"),
        hints=_hints(value["hints"], f"{path}.hints"),
        grid=_grid(value["grid"], f"{path}.grid"),
        mean_us=as_number(value["mean_us"], f"{path}.mean_us", zero=False),
        error_margin_us=as_number(value["error_margin_us"], f"{path}.error_margin_us"),
        num_samples=_count(value["num_samples"], f"{path}.num_samples"),
        first_us=None if first_us is None else as_number(first_us, f"{path}.first_us", zero=False),
        signature=value["signature"],
        count=_count(value["count"], f"{path}.count"),
    )


def _check_hash(value: Json, path: str) -> None:
    if type(value) is not str or len(value) != HASH_DIGITS or set(value) - set("0123456789abcdef"):
        expected(f"{HASH_DIGITS} hexadecimal digits", value, path)


def _spelling(value: Json, path: str) -> Json:
    try:
        text_of(value)
    except (NotRecordableError, ValueError, RecursionError) as error:
        raise TableError(str(error), path) from None
    return value


def _hints(value: Json, path: str) -> dict[str, int]:
    if type(value) is not dict:
        expected("an object", value, path)
    for name, number in value.items():
        if name not in HINTS or type(number) is not int or number not in HINTS[name]:
            raise TableError(f"{name!r:.80} is not a hint with a value that cuTile takes", path)
    return {name: value[name] for name in HINTS if name in value}


def _grid(value: Json, path: str) -> tuple[int, ...]:
    sizes = as_list(value, path)
    if not 1 <= len(sizes) <= 3:
        expected("a list of one to three numbers", value, path)
    return tuple(_count(size, f"{path}[{at}]", least=0) for at, size in enumerate(sizes))


def _problem(value: Json, sm_count: Json, path: str) -> Problem:
    if type(value) is not dict:
        expected("an object", value, f"{path}.arguments")
    for name in value:
        if not name.isidentifier():
            expected("a Python name as key", name, f"{path}.arguments")
    return Problem(
        names=tuple(value),
        arguments=tuple(_argument(one, f"{path}.arguments.{name}") for name, one in value.items()),
        sm_count=_count(sm_count, f"{path}.sm_count"),
    )


def _argument(value: Json, path: str) -> Argument:
    if value == "float":
        return Real()
    if value == "varies":
        return Varying()
    if type(value) is not dict:
        expected("an argument", value, path)
    if "tensor" in value:
        return _array(value, path)
    if "int" in value:
        check_keys(value, path, ("int",))
        return Whole(_whole(value["int"], f"{path}.int"))
    if "items" in value:
        check_keys(value, path, ("items",))
        items = as_list(value["items"], f"{path}.items")
        return Items(tuple(_argument(one, f"{path}.items[{at}]") for at, one in enumerate(items)))
    check_keys(value, path, ("value",))
    return Fixed(text_of(_spelling(value["value"], f"{path}.value")))


def _array(value: Json, path: str) -> Array:
    check_keys(value, path, ("tensor", "shape", "layout", "alignment"))
    check_text(value["tensor"], f"{path}.tensor")
    check_text(value["layout"], f"{path}.layout")
    if value["alignment"] not in (1, ALIGNMENT) or type(value["alignment"]) is not int:
        expected(f"1 or {ALIGNMENT}", value["alignment"], f"{path}.alignment")
    shape = as_list(value["shape"], f"{path}.shape")
    return Array(
        dtype=value["tensor"],
        shape=tuple(_count(size, f"{path}.shape[{at}]", least=0) for at, size in enumerate(shape)),
        layout=value["layout"],
        aligned=value["alignment"] == ALIGNMENT,
    )


def _count(value: Json, path: str, *, least: int = 1) -> int:
    if type(value) is not int or not least <= value < _LARGEST:
        expected(f"a whole number of {least} or more", value, path)
    return int(value)


def _whole(value: Json, path: str) -> int:
    if type(value) is not int or abs(value) > _LARGEST * 2:
        expected("a whole number", value, path)
    return int(value)
