"""What the rule between measured sizes leaves on a table, with a size's points or buckets left out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from aot_tune.declare.declaration import Declaration
from aot_tune.serve.choose.index import Index, Shipped
from aot_tune.tables.rule import pick, rule_of
from aot_tune.tables.table import Entry, Point, Table
from aot_tune.values.bucket import NEAR_DOUBLINGS, Pow2
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

Left = tuple[float, float]
"""The regret of the rule's choice at a size, against portfolio and default, and that of the default."""


def inside(tunable: Declaration, table: Table) -> Iterator[Left]:
    """Leave each point out that is no edge, and tell it from the others of its bucket."""
    default_at = partial(tunable.default_config, table.arch)
    for entry, point in _points(table):
        problem, others = _at(entry, point), tuple(one for one in entry.points if one is not point)
        times = _times(tunable, table, entry, point)
        if not others or point is entry.points[-1] or default_at(problem) not in times:
            continue
        rest = dataclasses.replace(entry, points=others)
        rule = rule_of(rest, table, tunable.tiles, default_at)
        chosen = pick(rest, rule, default_at(problem), problem, times.__contains__)
        yield _left(times, chosen.config if chosen else None, default_at(problem))


def across(tunable: Declaration, table: Table, *, near: bool) -> Iterator[Left]:
    """Leave out all entries with a size's sizes on the Exact axes, and tell it from the nearest buckets.

    Args:
        tunable: The declaration.
        table: Its table.
        near: Whether to yield the sizes whose nearest bucket is within one doubling, or the others.
    """
    exact = [name for name, axis in table.axes.items() if not isinstance(axis, Pow2)]
    default_at = partial(tunable.default_config, table.arch)
    for entry, point in _points(table):
        problem, times = _at(entry, point), _times(tunable, table, entry, point)
        default = default_at(problem)
        if default not in times:
            continue
        index = _without(tunable, table, tuple((name, entry.bucket[name]) for name in exact))
        found = index.nearest(problem, NEAR_DOUBLINGS)
        if (found is not None) != near:
            continue
        found = found or index.nearest(problem, math.inf)
        if found is None:
            continue
        chosen = pick(
            found.entry,
            index.rule(found, default_at),
            default,
            problem,
            times.__contains__,
            where="near" if near else "far",
            beside=index.beside(problem, found, default_at),
        )
        yield _left(times, chosen.config if chosen else None, default)


_indexes: dict[tuple[int, object], Index] = {}


def _without(tunable: Declaration, table: Table, sizes: tuple[tuple[str, object], ...]) -> Index:
    key = (id(table), sizes)
    if key not in _indexes:
        kept = tuple(e for e in table.entries if any(e.bucket[name] != size for name, size in sizes))
        shipped = Shipped(table=dataclasses.replace(table, entries=kept), path=Path("table.json"))
        _indexes[key] = Index(tunable.axes, tunable.tiles, [shipped])
    return _indexes[key]


def _points(table: Table) -> Iterator[tuple[Entry, Point]]:
    return ((entry, point) for entry in table.entries for point in entry.points)


def _at(entry: Entry, point: Point) -> Problem:
    return entry.bucket.replaced(**point.size)


def _times(tunable: Declaration, table: Table, entry: Entry, point: Point) -> dict[Config, float]:
    """The times of the configs that may run at a point."""
    problem = _at(entry, point)
    configs = (*table.portfolio, tunable.default_config(table.arch, problem))
    times: dict[Config, float] = {}
    for config, us in zip(configs, point.us, strict=True):
        if us is not None and tunable.refusal(config, table.arch, problem) is None:
            times.setdefault(config, us)
    return times


def _left(times: dict[Config, float], chosen: Config | None, default: Config) -> Left:
    least = min(times.values())
    return times[chosen or default] / least - 1, times[default] / least - 1


def summary(left: Iterable[float]) -> tuple[float, float, float]:
    """The geometric mean, the 95th percentile and the worst of regrets, in percent."""
    values = sorted(left)
    mean = math.expm1(math.fsum(map(math.log1p, values)) / len(values))
    return 100 * mean, 100 * values[math.ceil(0.95 * len(values)) - 1], 100 * values[-1]
