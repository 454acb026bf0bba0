"""Parse a table's JSON text strictly: every mistake is an error that names its place. Does no I/O.

`TABLE` states the keys, types and bounds once. Reading and `tuned_configs/schema.json` both follow it.
"""

from __future__ import annotations

import math
from typing import Any

import orjson

from aot_tune.declare.declaration import NAME, is_name
from aot_tune.errors import ArchError, DeclarationError, NewerSchemaError, TableError
from aot_tune.tables.shape import (
    IDENTIFIERS,
    TEXT,
    Fields,
    Shape,
    checked,
    choice,
    listed,
    mapped,
    number,
    record,
    whole,
    within,
)
from aot_tune.tables.strict_json import (
    Json,
    as_list,
    as_number,
    check_identifiers,
    check_text,
    expected,
    loads,
)
from aot_tune.tables.table import (
    SCHEMA,
    BuiltWith,
    Entry,
    Point,
    Slopes,
    StateTimes,
    Table,
    entry_order,
)
from aot_tune.values.arch import KNOWN_ARCHS, Arch
from aot_tune.values.bucket import AXIS_KINDS, Axes, edge
from aot_tune.values.config import HINTS, Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import shortened

MOST_CONFIGS = 16
"""Most configs of a portfolio; a live search runs all of them."""

MOST_ENTRIES = 4096
"""Most entries of a table. The largest shipped table has 134. Where all entries are equally near to a new
size, finding the nearest takes about 5 ms; a table in another folder can hold more shapes."""

MOST_STATES = 8
"""Most states of a GPU in which an entry or a point has times."""


def parse(data: bytes | str) -> Table:
    """Parse a table.

    Args:
        data: UTF-8 text of at most 16 MiB.

    Raises:
        NewerSchemaError: A later release wrote it.
        TableError: An earlier release wrote it, or the text is not a table for any other reason; the error
            has a dotted path such as ``entries[3].config.hints.num_ctas``.
    """
    document = loads(data)
    if type(document) is not dict:
        expected("an object", document, "")
    check_schema(document.get("schema"))
    return TABLE.read(document)


def check_schema(schema: Json) -> None:
    """Refuse a declared or recorded table of another schema, by the schema's number.

    Raises:
        NewerSchemaError: A later release wrote it.
        TableError: An earlier release wrote it, or the value is no version.
    """
    if type(schema) is not int or schema < 1:
        expected(f"the table's schema, {SCHEMA}", schema, "schema")
    if schema == SCHEMA:
        return
    later = schema > SCHEMA
    raise (NewerSchemaError if later else TableError)(
        f"{'a later' if later else 'an earlier'} release of aot_tune wrote this table: its schema is "
        f"{schema}, this release reads {SCHEMA}; {'upgrade aot_tune or ' if later else ''}tune again",
        "schema",
    )


# Single values ----------------------------------------------------------------------------------------------


def _check_name(value: Json, path: str) -> None:
    if not is_name(value):
        expected("a kernel's name", value, path)


def _arch(value: Json) -> Arch:
    try:
        arch = Arch.parse(value) if type(value) is str else None
    except ArchError:
        arch = None
    if arch is None or str(arch) != value:
        expected("an arch this release knows, such as 'sm90'", value, "")
    return arch


def _slope(value: Json) -> float:
    if type(value) not in (int, float) or not -MOST_SLOPE <= value <= MOST_SLOPE:
        expected(f"a number from {-MOST_SLOPE} to {MOST_SLOPE}", value, "")
    return float(value) + 0.0  # -0.0 + 0.0 == 0.0


def _check_hash(value: Json, path: str) -> None:
    if type(value) is not str or len(value) != 16 or set(value) - set("0123456789abcdef"):
        expected("16 hex digits", value, path)


def _check_constant(value: Json, path: str) -> None:
    if type(value) is str:
        check_text(value, path)
    elif type(value) not in (bool, int, float):
        expected("a bool, int, float or str", value, path)


def _check_disturbed(value: Json, path: str) -> None:
    check_text(value, path)
    if not value:
        raise TableError("expected what spoilt the samples; leave the key out where nothing did", path)


_ANY_SIZE = 2**64 - 1
"""Largest whole number that JSON is read with."""

SIZE = whole("a size of 1 or more", 1, _ANY_SIZE)
NAME_OF_KERNEL: Shape[str] = checked(_check_name, {"type": "string", "pattern": f"^{NAME}$"})
ARCH = Shape(_arch, lambda: {"enum": [str(arch) for arch in KNOWN_ARCHS]})
HASH: Shape[str] = checked(_check_hash, {"type": "string", "pattern": "^[0-9a-f]{16}$"})
"""Hash of a kernel's code, of its check, or of a search space."""

MOST_SLOPE = 10
"""Largest slope: a config that takes 2 ** 10 times as long where a count doubles."""

_SLOPE = Shape(_slope, lambda: {"type": "number", "minimum": -MOST_SLOPE, "maximum": MOST_SLOPE})
_SLOPES = record(Slopes, {name: listed(_SLOPE, 8, 8, f"{name} slopes") for name in Slopes._fields})

BUILT_WITH_FIELDS: Fields = {
    "device_name": TEXT,
    "sm_count": whole("a count of multiprocessors", 1, (1 << 16) - 1),
    "cuda_tile": TEXT,
    "tileiras": TEXT,
    "driver": TEXT,
}
BUILT_WITH = record(BuiltWith, BUILT_WITH_FIELDS)
"""GPU and software of a table, declared or recorded."""


# Configs ----------------------------------------------------------------------------------------------------


def _config(**values: Any) -> Config:
    try:
        return Config(**values)
    except DeclarationError as error:
        raise TableError(str(error)) from None


_CONSTANT: Shape[Any] = checked(_check_constant, {"anyOf": [{"type": ["boolean", "number"]}, TEXT.schema()]})
HINT_VALUES: Shape[dict[str, int]] = record(
    dict, {}, {name: choice(values) for name, values in HINTS.items()}
)
"""Hints of a launch; the keys are read in canonical order."""

CONFIG = record(_config, {"constants": mapped(_CONSTANT), "hints": HINT_VALUES}, {"kernel": NAME_OF_KERNEL})
"""A config."""


def _remembered() -> Shape[Config]:
    """Return `CONFIG` with a memory, so that each distinct config of a table is checked once."""
    configs: dict[bytes, Config] = {}

    def read(value: Json) -> Config:
        text = orjson.dumps(value)
        config = configs.get(text)
        if config is None:
            config = configs[text] = CONFIG.read(value)
        return config

    return Shape(read, CONFIG.schema, CONFIG.known)


def _portfolio(value: Json) -> tuple[Config, ...]:
    configs = _CONFIGS.read(value)
    if len(set(configs)) < len(configs):
        raise TableError("the same config is listed twice")
    return configs


_CONFIGS = listed(CONFIG, 0, MOST_CONFIGS, "configs")
_PORTFOLIO = Shape(_portfolio, _CONFIGS.schema, _CONFIGS.known)


# Entries ----------------------------------------------------------------------------------------------------


def _bucket(axes: Axes) -> Shape[Problem]:
    """Return the shape of the entries' buckets: all have the first bucket's keys, and no two are equal."""
    keys: tuple[str, ...] | None = None
    seen: set[Problem] = set()

    def read(value: Json) -> Problem:
        nonlocal keys
        if keys is None or type(value) is not dict:
            check_identifiers(value, "")
            keys = tuple(value)
        elif tuple(value) != keys:
            wanted, got = shortened(", ".join(keys)), shortened(", ".join(value))
            raise TableError(f"expected the keys {wanted} as in entries[0], got {got}")
        for name, axis in axes.items():
            size = value.get(name)
            if type(size) is not int or size < 1:
                expected("a size of 1 or more", size, name)
            if axis.kind == "pow2" and edge(size) != size:
                expected("a power of two, the bucket's edge", size, name)
        for name in value.keys() - axes.keys():
            if type(value[name]) is str:
                check_text(value[name], name)
            elif type(value[name]) is not bool:
                expected("a str or bool, or an axis", value[name], name)
        bucket = Problem(value)
        if bucket in seen:
            raise TableError(f"a second entry for {shortened(str(bucket))}")
        seen.add(bucket)
        return bucket

    values = {"anyOf": [SIZE.schema(), TEXT.schema(), {"type": "boolean"}]}
    schema = {"type": "object", "propertyNames": IDENTIFIERS, "additionalProperties": values}
    return Shape(read, lambda: schema)


_TIME_TYPES = frozenset({float, type(None)})


def _times(columns: int) -> Shape[tuple[float | None, ...]]:
    """Return the shape of the times of the portfolio and the default."""

    def read(value: Json) -> tuple[float | None, ...]:
        times = as_list(value, "")
        if len(times) != columns:
            raise TableError(
                f"expected {columns} times, the portfolio's in order and the default's, got {len(times)}"
            )
        if _TIME_TYPES.issuperset(map(type, times)):  # the usual case, quickly
            known = [time for time in times if time is not None]
            if not known or (min(known) > 0.0 and max(known) < math.inf):
                return tuple(times)
        return tuple(
            None if time is None else as_number(time, f"[{i}]", zero=False) for i, time in enumerate(times)
        )

    time = {"type": ["number", "null"], "exclusiveMinimum": 0}
    return Shape(read, lambda: {"type": "array", "items": time, "minItems": 1, "maxItems": MOST_CONFIGS + 1})


def _states(times: Shape[Any]) -> Shape[dict[str, Any]]:
    """Return the shape of times by the name of a GPU state, sorted, so that they are written in one order."""
    states = mapped(times, 1, MOST_STATES, "states")
    return Shape(lambda value: dict(sorted(states.read(value).items())), states.schema, states.known)


_ABOVE_0 = number(zero=False)
OPTIONAL_ENTRY_FIELDS: Fields = {
    "disturbed": checked(_check_disturbed, TEXT.schema() | {"minLength": 1}),
    "states": _states(record(StateTimes, {"mean_us": _ABOVE_0, "default_us": _ABOVE_0})),
}
"""Keys that an entry may lack."""


def _entry(axes: Axes, columns: int) -> Shape[Entry]:
    """Return the shape of an entry with these axes and this many times at each point."""
    sizes: Shape[dict[str, int]] = record(
        dict, {name: SIZE for name, axis in axes.items() if axis.kind == "pow2"}
    )
    times = _times(columns)
    point = record(
        Point, {"size": Shape(sizes.read, mapped(SIZE).schema), "us": times}, {"states": _states(times)}
    )

    def make(**values: Any) -> Entry:
        values["points"] = _inside(values["bucket"], values["points"])
        return Entry(**values)

    return record(
        make,
        {
            "bucket": _bucket(axes),
            "config": _remembered(),
            "mean_us": _ABOVE_0,
            "error_margin_us": number(),
            "default_us": _ABOVE_0,
            "regret": number(),
            "evidence": choice(("measured", "predicted")),
            "points": listed(point),
        },
        OPTIONAL_ENTRY_FIELDS,
    )


def _entries(axes: Axes, columns: int) -> Shape[tuple[Entry, ...]]:
    return listed(_entry(axes, columns), 0, MOST_ENTRIES, "entries")


def _inside(bucket: Problem, points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Return the points of a bucket, sorted by size."""
    by_size: dict[tuple[int, ...], Point] = {}
    for i, point in enumerate(points):
        for name, size in point.size.items():
            if edge(size) != bucket[name]:
                expected(f"a size in the bucket {name}={bucket[name]}", size, f"points[{i}].size.{name}")
        sizes = tuple(point.size.values())
        if sizes in by_size:
            raise TableError("a second point of the same size", f"points[{i}].size")
        by_size[sizes] = point
    return tuple(by_size[sizes] for sizes in sorted(by_size))


# Tables -----------------------------------------------------------------------------------------------------


def _table(**values: Any) -> Table:
    axes, columns = values["axes"], len(values["portfolio"]) + 1
    try:
        entries = _entries(axes, columns).read(values["entries"])
    except TableError as error:
        within(error, "entries")
    # Reviewers may have merged lines by hand.
    values["entries"] = tuple(sorted(entries, key=lambda entry: entry_order(axes, entry.bucket)))
    return Table(**{name: value for name, value in values.items() if name not in ("schema", "kind")})


def _axes(value: Json) -> Axes:
    return {name: AXIS_KINDS[kind]() for name, kind in _KINDS.read(value).items()}


_KINDS = mapped(choice(tuple(AXIS_KINDS)), 1, None, "axes")
_ENTRIES = _entries({}, 0)

TABLE = record(
    _table,
    {
        "schema": choice((SCHEMA,)),
        "kernel": NAME_OF_KERNEL,
        "arch": ARCH,
        "source_hash": HASH,
        "check_hash": HASH,
        "built_with": BUILT_WITH,
        "axes": Shape(_axes, _KINDS.schema),
        "portfolio": _PORTFOLIO,
        "portfolio_regret": number(),
        # `_table` reads them, since their keys and the number of their times follow from the other values.
        "entries": Shape(lambda value: value, _ENTRIES.schema, _ENTRIES.known),
    },
    {"kind": choice(("declared",)), "slopes": _SLOPES},
)
"""Table of a declared kernel."""
