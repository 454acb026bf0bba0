"""Write a table as JSON text for review: equal bytes for equal tables. Does no I/O."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping

from aot_tune.tables.reader import BUILT_WITH_FIELDS, parse
from aot_tune.tables.strict_json import Json
from aot_tune.tables.table import SCHEMA, Entry, Slopes, StateTimes, Table, entry_order
from aot_tune.values.bucket import Axes
from aot_tune.values.problem import Problem

US_DECIMALS = 3
"""Decimals to which microseconds are rounded."""

_REGRET_DECIMALS = 4
"""Decimals to which a regret is rounded."""

SLOPE_DECIMALS = 3
"""Decimals to which slopes are rounded."""


def dump(table: Table) -> bytes:
    """Return a table's text: fixed key order, one config or entry a line, sorted entries, rounded figures.

    ``dump(parse(text)) == text`` holds for every text that this function writes.

    Raises:
        TableError: The table has a value that `parse` would refuse: no unreadable text is ever written.
    """
    names = tuple(table.entries[0].bucket) if table.entries else ()
    entries = sorted(
        (dataclasses.replace(entry, bucket=_in_order(entry.bucket, names)) for entry in table.entries),
        key=lambda entry: entry_order(table.axes, entry.bucket),
    )
    built_with = {name: getattr(table.built_with, name) for name in BUILT_WITH_FIELDS}
    values: dict[str, str] = {
        "schema": str(SCHEMA),
        "kernel": line(table.kernel),
        "arch": line(str(table.arch)),
        "source_hash": line(table.source_hash),
        "check_hash": line(table.check_hash),
        "built_with": line(built_with),
        "axes": line({name: axis.kind for name, axis in table.axes.items()}),
        "portfolio": lines([config.document for config in table.portfolio]),
        "portfolio_regret": line(rounded(table.portfolio_regret, _REGRET_DECIMALS)),
        **({} if table.slopes is None else {"slopes": line(_slopes(table.slopes))}),
        "entries": lines([_entry_json(entry, table.axes) for entry in entries]),
    }
    text = document(values)
    parse(text)
    return text.encode()


def _slopes(slopes: Slopes) -> Json:
    return {name: [rounded(slope, SLOPE_DECIMALS) for slope in own] for name, own in slopes._asdict().items()}


def _entry_json(entry: Entry, axes: Axes) -> dict[str, Json]:
    points = [
        {
            "size": {name: point.size[name] for name in axes if name in point.size},
            "us": _times(point.us),
            **_states({name: _times(times) for name, times in point.states.items()}),
        }
        for point in entry.points
    ]
    values: dict[str, Json] = {
        "bucket": dict(entry.bucket),
        "config": entry.config.document,
        "mean_us": microseconds(entry.mean_us),
        "error_margin_us": rounded(entry.error_margin_us),
        "default_us": microseconds(entry.default_us),
        "regret": rounded(entry.regret, _REGRET_DECIMALS),
        "evidence": entry.evidence,
    }
    if entry.disturbed is not None:
        values["disturbed"] = entry.disturbed
    values |= _states({name: _state(times) for name, times in entry.states.items()})
    values["points"] = sorted(points, key=lambda point: tuple(point["size"].values()))
    return values


def _states(times: dict[str, Json]) -> dict[str, Json]:
    """Return the key ``states`` with its times, sorted by name; no key where there are none."""
    return {"states": dict(sorted(times.items()))} if times else {}


def _state(times: StateTimes) -> dict[str, Json]:
    return {"mean_us": microseconds(times.mean_us), "default_us": microseconds(times.default_us)}


def _times(us: tuple[float | None, ...]) -> list[Json]:
    return [None if time is None else microseconds(time) for time in us]


def _in_order(bucket: Problem, names: tuple[str, ...]) -> Problem:
    """Return a bucket with its names in the order of the table's first entry; missing names stay missing."""
    return Problem({name: bucket[name] for name in dict.fromkeys((*names, *bucket)) if name in bucket})


def microseconds(us: float) -> Json:
    """Round a time, but never to 0, which the reader refuses. Other invalid values are left to the reader."""
    value = rounded(us)
    return 10**-US_DECIMALS if us > 0 and value == 0 else value


def rounded(value: float, decimals: int = US_DECIMALS) -> Json:
    """Round a value; by default a time in microseconds."""
    if not math.isfinite(value):
        return str(value)  # JSON has no such number; the reader refuses the text with its path
    return round(float(value), decimals) + 0.0  # -0.0 + 0.0 == 0.0


def document(values: Mapping[str, str]) -> str:
    """Return a table's text, from the text of each value."""
    body = ",\n".join(f'  "{key}": {value}' for key, value in values.items())
    return f"{{\n{body}\n}}\n"


def line(value: Json) -> str:
    """Return the text of a value in one line."""
    return json.dumps(value, ensure_ascii=False)


def lines(values: Iterable[Json]) -> str:
    """Return the text of a list with one value a line."""
    text = ",\n".join(f"    {line(value)}" for value in values)
    return f"[\n{text}\n  ]" if text else "[]"
