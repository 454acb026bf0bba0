"""Parse a table's JSON text strictly: every mistake is an error that names its place. Does no I/O."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import cast

import orjson

from aot_tune.declare.declaration import is_name
from aot_tune.errors import ArchError, DeclarationError, NewerSchemaError, TableError
from aot_tune.tables.strict_json import (
    Json,
    as_list,
    as_number,
    check_identifiers,
    check_keys,
    check_text,
    expected,
    loads,
)
from aot_tune.tables.table import (
    NEAR_EXPONENTS,
    SCHEMA,
    BuiltWith,
    BySize,
    Entry,
    Evidence,
    Point,
    StateTimes,
    Table,
    entry_order,
)
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import AXIS_KINDS, Axes, edge
from aot_tune.values.config import HINTS, Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import shortened

MOST_CONFIGS = 16
"""The most configs of a portfolio; a live search runs all of them."""

MOST_ENTRIES = 4096
"""The most entries of a table. The largest shipped one has 134. Where all of them are equally near to a new
size, finding the nearest takes about 5 ms; more shapes may be in a table of another folder."""

MOST_STATES = 8
"""The most states of a GPU in which an entry or a point has times."""

_HASH = re.compile(r"[0-9a-f]{16}")

TOP_KEYS = (
    "schema",
    "kernel",
    "arch",
    "source_hash",
    "built_with",
    "axes",
    "portfolio",
    "portfolio_regret",
    "entries",
)
BUILT_WITH_KEYS = ("device_name", "sm_count", "cuda_tile", "tileiras", "driver")
"""The keys of a table and of its `built_with`, in the order in which they are written."""

ENTRY_KEYS = ("bucket", "config", "mean_us", "error_margin_us", "default_us", "regret", "evidence", "points")
"""An entry's keys, in the order in which they are written."""

CONFIG_KEYS = ("constants", "hints")
POINT_KEYS = ("size", "us")
"""The keys of a config and of a point."""

_STATE_KEYS = ("mean_us", "default_us")
_EVIDENCE = ("measured", "predicted")

OPTIONAL_TOP_KEYS = ("kind", "near_exponent")
OPTIONAL_ENTRY_KEYS = ("disturbed", "states")
OPTIONAL_CONFIG_KEYS = ("kernel",)
OPTIONAL_POINT_KEYS = ("states",)
"""The keys of a table, an entry, a config and a point that may be absent."""


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
    check_keys(document, "", TOP_KEYS, OPTIONAL_TOP_KEYS)
    kernel, source_hash = document["kernel"], document["source_hash"]
    if not is_name(kernel):
        expected("a kernel's name", kernel, "kernel")
    if type(source_hash) is not str or not _HASH.fullmatch(source_hash):
        expected("16 hex digits", source_hash, "source_hash")
    if document.get("kind", "declared") != "declared":
        expected("'declared', as of every table with a portfolio", document["kind"], "kind")
    axes, configs = _axes(document["axes"]), Configs()
    portfolio = _portfolio(document["portfolio"], configs)
    return Table(
        kernel=kernel,
        arch=_arch(document["arch"]),
        source_hash=source_hash,
        built_with=_built_with(document["built_with"]),
        axes=axes,
        portfolio=portfolio,
        portfolio_regret=as_number(document["portfolio_regret"], "portfolio_regret"),
        entries=_Entries(axes, configs, len(portfolio) + 1).read(document["entries"]),
        near_exponent=_near_exponent(document["near_exponent"]) if "near_exponent" in document else None,
    )


def _near_exponent(value: Json) -> float | BySize:
    if type(value) is not dict:
        return _exponent(value, "near_exponent")
    check_keys(value, "near_exponent", BySize._fields)
    up_to = value["up_to"]
    if type(up_to) is not int or up_to < 1 or up_to & (up_to - 1):
        expected("a power of two", up_to, "near_exponent.up_to")
    small, large = (_exponent(value[name], f"near_exponent.{name}") for name in ("small", "large"))
    if small == large:
        expected(f"an exponent that differs from small, {small}", value["large"], "near_exponent.large")
    return BySize(up_to, small, large)


def _exponent(value: Json, path: str) -> float:
    if type(value) not in (int, float) or value not in NEAR_EXPONENTS:
        expected(f"one of {', '.join(map(str, NEAR_EXPONENTS))}", value, path)
    return float(cast(float, value)) + 0.0  # -0.0 + 0.0 == 0.0


def check_schema(schema: Json) -> None:
    """Refuse a table of another schema, declared or recorded, by its number.

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


def _portfolio(value: Json, configs: Configs) -> tuple[Config, ...]:
    items = as_list(value, "portfolio")
    if len(items) > MOST_CONFIGS:
        raise TableError(f"expected at most {MOST_CONFIGS} configs, got {len(items)}", "portfolio")
    portfolio = tuple(configs.read(item, f"portfolio[{i}]") for i, item in enumerate(items))
    if len(set(portfolio)) < len(portfolio):
        raise TableError("the same config is listed twice", "portfolio")
    return portfolio


def _arch(value: Json) -> Arch:
    try:
        arch = Arch.parse(value) if type(value) is str else None
    except ArchError:
        arch = None
    if arch is None or str(arch) != value:
        expected("an arch this release knows, such as 'sm90'", value, "arch")
    return arch


def _built_with(value: Json) -> BuiltWith:
    check_keys(value, "built_with", BUILT_WITH_KEYS)
    if type(value["sm_count"]) is not int or not 0 < value["sm_count"] < 1 << 16:
        expected("a count of multiprocessors", value["sm_count"], "built_with.sm_count")
    for name in BUILT_WITH_KEYS:
        if name != "sm_count":
            check_text(value[name], f"built_with.{name}")
    return BuiltWith(**value)


def _axes(value: Json) -> Axes:
    check_identifiers(value, "axes")
    if not value:
        raise TableError("expected at least one axis, got none", "axes")
    for name, kind in value.items():
        if type(kind) is not str or kind not in AXIS_KINDS:
            expected(f"one of {', '.join(AXIS_KINDS)}", kind, f"axes.{name}")
    return {name: AXIS_KINDS[kind]() for name, kind in value.items()}


# Configs and entries ----------------------------------------------------------------------


class Configs:
    """Reads configs, and checks each different one once: a table repeats few of them often."""

    def __init__(self) -> None:
        self._known: dict[bytes, Config] = {}

    def read(self, value: Json, path: str) -> Config:
        """Read a config; an error has the path of the wrong value in it."""
        text = orjson.dumps(value)
        config = self._known.get(text)
        if config is None:
            config = self._known[text] = _config(value, path)
        return config


def _config(value: Json, path: str) -> Config:
    check_keys(value, path, CONFIG_KEYS, OPTIONAL_CONFIG_KEYS)
    constants, hints = value["constants"], value["hints"]
    check_identifiers(constants, f"{path}.constants")
    if type(hints) is not dict:
        expected("an object", hints, f"{path}.hints")
    for name, constant in constants.items():
        if type(constant) is str:
            check_text(constant, f"{path}.constants.{name}")
        elif type(constant) not in (bool, int, float):
            expected("a bool, int, float or str", constant, f"{path}.constants.{name}")
    for name, hint in hints.items():
        if name not in HINTS:
            raise TableError(f"expected one of {', '.join(HINTS)}, got {name!r:.80}", f"{path}.hints")
        if type(hint) is not int or hint not in HINTS[name]:
            expected(f"one of {', '.join(map(str, HINTS[name]))}", hint, f"{path}.hints.{name}")
    kernel = value.get("kernel")
    if "kernel" in value and not is_name(kernel):
        expected("a kernel's name", kernel, f"{path}.kernel")
    try:
        return Config(constants=constants, hints=hints, kernel=kernel)
    except DeclarationError as error:
        raise TableError(str(error), path) from None


@dataclass(frozen=True)
class _Entries:
    """Reads a table's entries."""

    axes: Axes
    """The table's axes."""

    configs: Configs
    """The reader of configs, shared with the portfolio."""

    columns: int
    """How many times each point has: one for each config of the portfolio and the default's."""

    def read(self, value: Json) -> tuple[Entry, ...]:
        """Read the entries and sort them, because reviewers may have merged lines by hand."""
        keys: tuple[str, ...] | None = None
        entries: dict[Problem, Entry] = {}
        items = as_list(value, "entries")
        if len(items) > MOST_ENTRIES:
            raise TableError(f"expected at most {MOST_ENTRIES} entries, got {len(items)}", "entries")
        for i, item in enumerate(items):
            path = f"entries[{i}]"
            check_keys(item, path, ENTRY_KEYS, OPTIONAL_ENTRY_KEYS)
            bucket = _bucket(item["bucket"], f"{path}.bucket", self.axes, keys)
            keys = keys or tuple(bucket)
            if bucket in entries:
                raise TableError(f"a second entry for {shortened(str(bucket))}", f"{path}.bucket")
            entries[bucket] = self._entry(item, path, bucket)
        return tuple(sorted(entries.values(), key=lambda entry: entry_order(self.axes, entry.bucket)))

    def _entry(self, item: Json, path: str, bucket: Problem) -> Entry:
        evidence = item["evidence"]
        if evidence not in _EVIDENCE:
            expected(f"one of {', '.join(_EVIDENCE)}", evidence, f"{path}.evidence")
        return Entry(
            bucket=bucket,
            config=self.configs.read(item["config"], f"{path}.config"),
            mean_us=as_number(item["mean_us"], f"{path}.mean_us", zero=False),
            error_margin_us=as_number(item["error_margin_us"], f"{path}.error_margin_us"),
            default_us=as_number(item["default_us"], f"{path}.default_us", zero=False),
            regret=as_number(item["regret"], f"{path}.regret"),
            evidence=cast(Evidence, evidence),
            points=self._points(item["points"], f"{path}.points", bucket),
            **(_optional_values(item, path) if len(item) > len(ENTRY_KEYS) else {}),
        )

    def _points(self, value: Json, path: str, bucket: Problem) -> tuple[Point, ...]:
        inside = tuple(name for name, axis in self.axes.items() if axis.kind == "pow2")
        points: dict[tuple[int, ...], Point] = {}
        for i, item in enumerate(as_list(value, path)):
            check_keys(item, f"{path}[{i}]", POINT_KEYS, OPTIONAL_POINT_KEYS)
            check_keys(item["size"], f"{path}[{i}].size", inside)
            size = tuple(item["size"][name] for name in inside)
            for name, number in zip(inside, size, strict=True):
                if type(number) is not int or number < 1 or edge(number) != bucket[name]:
                    expected(
                        f"a size in the bucket {name}={bucket[name]}", number, f"{path}[{i}].size.{name}"
                    )
            if size in points:
                raise TableError("a second point of the same size", f"{path}[{i}].size")
            states = {}
            if "states" in item:
                states = {
                    name: _times(times, f"{path}[{i}].states.{name}", self.columns)
                    for name, times in _states(item["states"], f"{path}[{i}].states").items()
                }
            points[size] = Point(
                size=dict(zip(inside, size, strict=True)),
                us=_times(item["us"], f"{path}[{i}].us", self.columns),
                states=states,
            )
        return tuple(points[size] for size in sorted(points))


def _optional_values(item: Json, path: str) -> dict[str, Json]:
    """The values of the keys that an entry may lack, of those that it has."""
    found: dict[str, Json] = {}
    if "disturbed" in item:
        check_text(item["disturbed"], f"{path}.disturbed")
        if not item["disturbed"]:
            raise TableError(
                "expected what spoilt the samples; leave the key out where nothing did", f"{path}.disturbed"
            )
        found["disturbed"] = item["disturbed"]
    if "states" in item:
        found["states"] = {
            name: _state(times, f"{path}.states.{name}")
            for name, times in _states(item["states"], f"{path}.states").items()
        }
    return found


def _states(value: Json, path: str) -> dict[str, Json]:
    """The values by states' names, which are sorted, so that they are written back in one order."""
    check_identifiers(value, path)
    if not 0 < len(value) <= MOST_STATES:
        raise TableError(f"expected 1 to {MOST_STATES} states, got {len(value)}", path)
    return dict(sorted(value.items()))


def _state(value: Json, path: str) -> StateTimes:
    check_keys(value, path, _STATE_KEYS)
    return StateTimes(
        mean_us=as_number(value["mean_us"], f"{path}.mean_us", zero=False),
        default_us=as_number(value["default_us"], f"{path}.default_us", zero=False),
    )


def _bucket(value: Json, path: str, axes: Axes, keys: tuple[str, ...] | None) -> Problem:
    if keys is None or type(value) is not dict:
        check_identifiers(value, path)
    elif tuple(value) != keys:
        wanted, got = shortened(", ".join(keys)), shortened(", ".join(value))
        raise TableError(f"expected the keys {wanted} as in entries[0], got {got}", path)
    for name, axis in axes.items():
        size = value.get(name)
        if type(size) is not int or size < 1:
            expected("a size of 1 or more", size, f"{path}.{name}")
        if axis.kind == "pow2" and edge(size) != size:
            expected("a power of two, the bucket's edge", size, f"{path}.{name}")
    for name in value.keys() - axes.keys():
        if type(value[name]) is str:
            check_text(value[name], f"{path}.{name}")
        elif type(value[name]) is not bool:
            expected("a str or bool, or an axis", value[name], f"{path}.{name}")
    return Problem(value)


_TIME_TYPES = frozenset({float, type(None)})


def _times(value: Json, path: str, columns: int) -> tuple[float | None, ...]:
    times = as_list(value, path)
    if len(times) != columns:
        raise TableError(
            f"expected {columns} times, the portfolio's in order and the default's, got {len(times)}", path
        )
    if _TIME_TYPES.issuperset(
        map(type, times)
    ):  # the usual case, quickly; the loop below names the wrong time
        known = [time for time in times if time is not None]
        if not known or (min(known) > 0.0 and max(known) < math.inf):
            return tuple(times)
    return tuple(
        None if time is None else as_number(time, f"{path}[{i}]", zero=False) for i, time in enumerate(times)
    )
