"""A table as JSON text and back: strict to read, the same bytes for the same table. Does no I/O."""

from __future__ import annotations

import dataclasses
import json
import math
import re

from aot_tune.declare.declaration import is_name
from aot_tune.errors import ArchError, NewerSchemaError, TableError
from aot_tune.tables.entry_reader import ENTRY_KEYS, Configs, read_entries
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
from aot_tune.tables.table import SCHEMA, BuiltWith, Entry, Table, entry_order
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import AXIS_KINDS, Axes
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

MOST_CONFIGS = 16
"""A portfolio's configs: a live search runs them all."""

_US_DECIMALS = 3
_REGRET_DECIMALS = 4
_HASH = re.compile(r"[0-9a-f]{16}")

# The keys of each object, in the order in which they are written.
_TOP = (
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
_BUILT_WITH = ("device_name", "sm_count", "cuda_tile", "tileiras", "driver")


# Reading ------------------------------------------------------------------------------


def parse(data: bytes | str) -> Table:
    """Read a document.

    Args:
        data: UTF-8 text of at most 16 MiB.

    Raises:
        NewerSchemaError: A later release wrote it.
        TableError: Anything else that is not a table, with a dotted path such as
            ``entries[3].config.hints.num_ctas``.
    """
    document = loads(data)
    if type(document) is not dict:
        expected("an object", document, "")
    _check_schema(document.get("schema"))
    check_keys(document, "", _TOP)
    kernel, source_hash = document["kernel"], document["source_hash"]
    if not is_name(kernel):
        expected("a kernel's name", kernel, "kernel")
    if type(source_hash) is not str or not _HASH.fullmatch(source_hash):
        expected("16 hex digits", source_hash, "source_hash")
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
        entries=read_entries(document["entries"], axes, configs, len(portfolio) + 1),
    )


def _check_schema(schema: Json) -> None:
    if type(schema) is not int or schema < 1:
        expected(f"the table's schema, {SCHEMA}", schema, "schema")
    if schema > SCHEMA:
        raise NewerSchemaError(
            f"a later release of aot_tune wrote this table: its schema is {schema}, this release reads "
            f"{SCHEMA}; upgrade aot_tune or tune again",
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
    check_keys(value, "built_with", _BUILT_WITH)
    if type(value["sm_count"]) is not int or not 0 < value["sm_count"] < 1 << 16:
        expected("a count of multiprocessors", value["sm_count"], "built_with.sm_count")
    for name in _BUILT_WITH:
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


# Writing ------------------------------------------------------------------------------


def dump(table: Table) -> bytes:
    """Write a document: fixed key order, one config or entry a line, sorted entries, rounded figures.

    Microseconds keep 3 decimals and regrets 4; ``dump(parse(text)) == text`` for all that this writes.

    Raises:
        TableError: The table holds what `parse` would refuse; nothing unreadable is ever written.
    """
    names = tuple(table.entries[0].bucket) if table.entries else ()
    entries = sorted(
        (dataclasses.replace(entry, bucket=_in_order(entry.bucket, names)) for entry in table.entries),
        key=lambda entry: entry_order(table.axes, entry.bucket),
    )
    built_with = {name: getattr(table.built_with, name) for name in _BUILT_WITH}
    values: dict[str, str] = {
        "schema": str(SCHEMA),
        "kernel": _line(table.kernel),
        "arch": _line(str(table.arch)),
        "source_hash": _line(table.source_hash),
        "built_with": _line(built_with),
        "axes": _line({name: axis.kind for name, axis in table.axes.items()}),
        "portfolio": _lines([_config_json(config) for config in table.portfolio]),
        "portfolio_regret": _line(_rounded(table.portfolio_regret, _REGRET_DECIMALS)),
        "entries": _lines([_entry_json(entry, table.axes) for entry in entries]),
    }
    body = ",\n".join(f'  "{key}": {values[key]}' for key in _TOP)
    text = f"{{\n{body}\n}}\n"
    parse(text)
    return text.encode()


def _config_json(config: Config) -> dict[str, Json]:
    return {"constants": dict(config.constants), "hints": dict(config.hints)}


def _entry_json(entry: Entry, axes: Axes) -> dict[str, Json]:
    points = [
        {
            "size": {name: point.size[name] for name in axes if name in point.size},
            "us": [None if us is None else _microseconds(us) for us in point.us],
        }
        for point in entry.points
    ]
    values: dict[str, Json] = {
        "bucket": dict(entry.bucket),
        "config": _config_json(entry.config),
        "mean_us": _microseconds(entry.mean_us),
        "error_margin_us": _rounded(entry.error_margin_us, _US_DECIMALS),
        "default_us": _microseconds(entry.default_us),
        "regret": _rounded(entry.regret, _REGRET_DECIMALS),
        "evidence": entry.evidence,
        "points": sorted(points, key=lambda point: tuple(point["size"].values())),
    }
    return {key: values[key] for key in ENTRY_KEYS}


def _in_order(bucket: Problem, names: tuple[str, ...]) -> Problem:
    """The bucket with its names in the order of the table's first entry; what is missing stays missing."""
    return Problem({name: bucket[name] for name in dict.fromkeys((*names, *bucket)) if name in bucket})


def _microseconds(us: float) -> Json:
    """Rounded, but never to nothing, which the reader refuses. What is no time stays, to be refused."""
    rounded = _rounded(us, _US_DECIMALS)
    return 10**-_US_DECIMALS if us > 0 and rounded == 0 else rounded


def _rounded(value: float, decimals: int) -> Json:
    if not math.isfinite(value):
        return str(value)  # JSON has no such number; as a text it is refused with its path
    return round(float(value), decimals) + 0.0  # -0.0 + 0.0 == 0.0


def _line(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)


def _lines(values: list[Json]) -> str:
    return "[\n" + ",\n".join(f"    {_line(value)}" for value in values) + "\n  ]" if values else "[]"
