"""Parse a table's JSON text strictly: every mistake is an error that names its place. Does no I/O.

`TABLE` states the keys, types and bounds once. Reading and `tuned_configs/schema.json` both follow it.
`parse` reads all at once, for tools; `parse_as_asked` what a serving process needs, when it needs it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from aot_tune.declare.declaration import NAME, is_name
from aot_tune.errors import ArchError, DeclarationError, NewerSchemaError, TableError, TableWarning
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
    remembered,
    whole,
    within,
)
from aot_tune.tables.strict_json import (
    Json,
    as_list,
    as_number,
    check_count,
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
from aot_tune.warn import warn

MOST_CONFIGS = 16
"""Most configs of a portfolio; a live search runs all of them."""

MOST_ENTRIES = 4096
"""Most entries of a table. The largest shipped table has 178. Where all entries are equally near to a new
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
_SLOPES = record(Slopes, {name: listed(_SLOPE, 2, 2, f"{name} slopes") for name in Slopes._fields})

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
    sizes = [(name, axis.kind == "pow2") for name, axis in axes.items()]
    texts: set[str] = set()
    seen: set[Problem] = set()

    def read(value: Json) -> Problem:  # written for speed: serving reads all buckets at once
        nonlocal keys
        if keys is None or type(value) is not dict:
            check_identifiers(value, "")
            keys = tuple(value)
        elif tuple(value) != keys:
            wanted, got = shortened(", ".join(keys)), shortened(", ".join(value))
            raise TableError(f"expected the keys {wanted} as in entries[0], got {got}")
        for name, is_pow2 in sizes:
            size = value.get(name)
            if type(size) is not int or size < 1:
                expected("a size of 1 or more", size, name)
            if is_pow2 and size & (size - 1):
                expected("a power of two, the bucket's edge", size, name)
        for name in keys:
            text = value[name]
            if name in axes or type(text) is bool:
                continue
            if type(text) is not str:
                expected("a str or bool, or an axis", text, name)
            if text not in texts:
                check_text(text, name)
                texts.add(text)
        bucket, count = Problem(value), len(seen)
        seen.add(bucket)
        if len(seen) == count:
            raise TableError(f"a second entry for {shortened(str(bucket))}")
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


def _figures(axes: Axes, columns: int) -> Fields:
    """Return the shapes of an entry's required keys but its bucket and config, with these axes and times."""
    sizes: Shape[dict[str, int]] = record(
        dict, {name: SIZE for name, axis in axes.items() if axis.kind == "pow2"}
    )
    times = _times(columns)
    point = record(
        Point, {"size": Shape(sizes.read, mapped(SIZE).schema), "us": times}, {"states": _states(times)}
    )
    return {
        "mean_us": _ABOVE_0,
        "error_margin_us": number(),
        "default_us": _ABOVE_0,
        "regret": number(),
        "evidence": choice(("measured", "predicted")),
        "points": listed(point),
    }


def _entry(axes: Axes, columns: int) -> Shape[Entry]:
    """Return the shape of an entry with these axes and this many times at each point."""

    def make(**values: Any) -> Entry:
        values["points"] = _inside(values["bucket"], values["points"])
        return Entry(**values)

    required: Fields = {"bucket": _bucket(axes), "config": remembered(CONFIG), **_figures(axes, columns)}
    return record(make, required, OPTIONAL_ENTRY_FIELDS)


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


# As far as it is asked ------------------------------------------------------------------------------------


class UnreadEntry(Entry):
    """Entry of which bucket, config and evidence are known, until more is asked for.

    It counts as an `Entry` for `isinstance`, ``==`` and `dataclasses.replace`. Its type stays: changing the
    class of an object crashes CPython where an audit hook looks at the object.
    """

    def __init__(
        self, bucket: Problem, config: Config, timed: bool, figures: Callable[[], dict[str, Any]]
    ) -> None:
        known = {"bucket": bucket, "config": config, "evidence": "measured"}
        self.__dict__.update(known, _timed=timed, _figures=figures)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Entry]:  # type: ignore[override]
        return Entry

    def __getattr__(self, name: str) -> Any:
        if name not in Entry.__dataclass_fields__:
            raise AttributeError(name)
        return self._read()[name]

    @property
    def disturbed(self) -> str | None:
        """Cause that spoilt samples: the field's default, which is the class's, must not hide it."""
        cause: str | None = self._read()["disturbed"]
        return cause

    def _read(self) -> dict[str, Any]:
        """Read all values, once; of threads that read at the same time all take the values of one."""
        values = self.__dict__
        figures = values.get("_figures")
        if figures is not None:
            for name, value in (_NO_FIGURES | figures()).items():
                values.setdefault(name, value)
            values["_figures"] = None
        return values

    def is_sound(self) -> bool:
        """Read the entry; return False where it is malformed."""
        try:
            self._read()
            return True
        except TableError:
            return False

    def is_timed(self) -> bool:
        """Whether a config has a time at a point."""
        return self.__dict__["_timed"] or (self.is_sound() and Entry.is_timed(self))


_NO_FIGURES: dict[str, Any] = {"disturbed": None, "states": {}}
_BEFORE_ENTRIES, _AFTER_ENTRIES = b'  "entries": [\n', b"\n  ]\n}\n"
_BEFORE_BUCKET, _BEFORE_CONFIG, _BEFORE_FIGURES = b'    {"bucket": ', b', "config": ', b', "mean_us": '
_MEASURED = b'"evidence": "measured", '
_TIMED = re.compile(rb'"us": \[(?:null, )*[0-9]')


class _OtherForm(Exception):
    """A text is not in the form that `aot_tune.tables.writer` writes."""


def parse_as_asked(data: bytes, where: str) -> Table:
    """Parse a table without its entries' figures and points, which are parsed when they are read.

    Head, buckets and configs are checked at once. A mistake in the rest of an entry gives one warning for
    the table, and is an error whenever that entry is read. Only measured entries in the form that
    `aot_tune.tables.writer` writes are left unread; a text in any other form is parsed whole.

    Args:
        data: UTF-8 text of at most 16 MiB.
        where: Path of the file, for the warning.

    Raises:
        TableError: As of `parse`.
    """
    start = data.find(_BEFORE_ENTRIES)
    if start > 0 and data.endswith(_AFTER_ENTRIES) and b"\\" not in data:
        with suppress(TableError, TypeError, _OtherForm):  # `parse` finds the mistake, if there is any
            check_count(data)
            table = TABLE.read(loads(data[:start] + b'"entries": []}'))
            return replace(table, entries=_unread(table, data, start + len(_BEFORE_ENTRIES), where))
    return parse(data)


def _unread(table: Table, data: bytes, start: int, where: str) -> tuple[Entry, ...]:
    """Return a table's entries, whose lines begin at `start`.

    Raises:
        TableError: There is a mistake.
        TypeError: Buckets have values of different types.
        _OtherForm: The lines are in another form.
    """
    axes, columns, warned = table.axes, len(table.portfolio) + 1, list[str]()
    figures: Shape[dict[str, Any]] = record(dict, _figures(axes, columns), OPTIONAL_ENTRY_FIELDS)

    def read(place: int, bucket: Problem, start: int, end: int) -> dict[str, Any]:
        try:
            values = figures.read(loads(b'{"mean_us": ' + data[start:end]))
            return values | {"points": _inside(bucket, values["points"])}
        except TableError as error:
            step, problem = f"entries[{place}]", error.problem
            try:
                loads(data)
            except TableError as of_file:  # with the file's lines and columns
                problem = of_file.problem
            mistake = TableError(f"{where}: {problem}", f"{step}.{error.path}" if error.path else step)
            if not warned:
                text = f"{mistake}; entries with such a mistake are left out: restore the file"
                warn(shortened(text, 2000), TableWarning)
                warned.append(text)
            raise mistake from None

    lines = [*_lines(data, start)]
    if data.count(b'{"bucket": ', start) != len(lines) or len(lines) > MOST_ENTRIES:
        raise _OtherForm
    values = loads(b"[" + b",".join(bucket for bucket, *_ in lines) + b"]")
    if not values or len(values) != len(lines):
        raise _OtherForm
    config_of = {text: CONFIG.read(loads(text)) for text in {config for _, config, *_ in lines}}
    entries = []
    for place, bucket in enumerate(map(_bucket(axes).read, values)):
        _, config, start, end = lines[place]
        timed = _TIMED.search(data, start, end) is not None
        entries.append(
            UnreadEntry(bucket, config_of[config], timed, partial(read, place, bucket, start, end))
        )
    # Sorted as by `entry_order`, which takes longer.
    names = [name for name in values[0] if name not in axes]
    names += sorted(axes, key=lambda name: axes[name].kind)  # exact, then pow2
    in_order = sorted(zip(map(itemgetter(*names), values), entries, strict=True), key=itemgetter(0))
    return tuple([entry for _, entry in in_order])


def _lines(data: bytes, start: int) -> Iterator[tuple[bytes, bytes, int, int]]:
    """Yield the text of each line's bucket and config, and where its figures begin and end."""
    last, end = len(data) - len(_AFTER_ENTRIES), start
    while end != last:
        bucket = start + len(_BEFORE_BUCKET)
        bucket_end = data.find(_BEFORE_CONFIG, bucket)
        config = bucket_end + len(_BEFORE_CONFIG)
        config_end = data.find(_BEFORE_FIGURES, config)
        figures = config_end + len(_BEFORE_FIGURES)
        end = data.find(b"\n", figures)
        if (
            not data.startswith(_BEFORE_BUCKET, start)
            or not bucket < bucket_end < config_end < end
            or data.find(_MEASURED, figures, end) < 0
            or (end != last and data[end - 1 : end] != b",")
        ):
            raise _OtherForm
        yield data[bucket:bucket_end], data[config:config_end], figures, end - (end != last)
        start = end + 1
