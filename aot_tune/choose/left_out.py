"""Judge the rule between measured sizes on a table's points, each left out in turn. Uses no file or GPU.

`near_exponent` chooses by the result how a table's times carry over to sizes near its buckets.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from aot_tune.choose.index import Index
from aot_tune.choose.nearest import NEAR_DOUBLINGS
from aot_tune.choose.points import BucketRule, pick, rule_of
from aot_tune.declare.declaration import Declaration
from aot_tune.tables.states import in_worst_state
from aot_tune.tables.table import NEAR_EXPONENTS, BySize, Entry, Point, Table, size_of
from aot_tune.values.bucket import Pow2
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem


class Left(NamedTuple):
    """Regrets at a size, t / t_best - 1; the best is the fastest of portfolio and default at the size."""

    chosen: float
    """Regret of the rule's choice."""

    default: float
    """Regret of the default."""


def inside(tunable: Declaration, table: Table) -> Iterator[Left]:
    """Leave out each point that is no edge, and choose from the other points of its bucket."""
    default_at = partial(tunable.default_config, table.arch)
    for entry, point in _points(table):
        problem = _at(entry, point)
        others = tuple(other for other in entry.points if other is not point)
        times = _times(tunable, table, entry, point)
        if not others or point is entry.points[-1] or default_at(problem) not in times:
            continue
        rest = dataclasses.replace(entry, points=others)
        rule = rule_of(rest, table, tunable.tiles, default_at)
        chosen = pick(rest, rule, default_at(problem), problem, times.__contains__)
        yield _left(times, chosen.config if chosen else None, default_at(problem))


Exact = tuple[int, ...]
"""Sizes of a problem on the Exact axes."""


def across(
    tunable: Declaration, table: Table, *, near: bool, shapes: Collection[Exact] | None = None
) -> Iterator[Left]:
    """Leave out all entries with equal sizes on the Exact axes, and choose from the nearest buckets.

    Args:
        tunable: The declaration.
        table: Its table.
        near: Whether to yield the sizes whose nearest bucket is within one doubling, or all farther sizes.
        shapes: The sizes on the Exact axes to leave out, each in turn; None for all in the table.
    """
    return (left for _, [left] in _across(tunable, [table], near=near, shapes=shapes))


def _across(
    tunable: Declaration, tables: Sequence[Table], *, near: bool, shapes: Collection[Exact] | None = None
) -> Iterator[tuple[Entry, list[Left]]]:
    """Yield as `across`, with the entry of the nearest bucket and the regrets by each of several tables.

    The tables differ in `Table.near_exponent` alone, so their entries are indexed once.
    """
    table = tables[0]
    default_at = partial(tunable.default_config, table.arch)
    indexes: dict[Exact, Index] = {}
    rules: dict[int, list[BucketRule]] = {}
    for entry, point in _points(table):
        shape = _exact(table, entry)
        if shapes is not None and shape not in shapes:
            continue
        problem, times = _at(entry, point), _times(tunable, table, entry, point)
        default = default_at(problem)
        if default not in times:
            continue
        index = indexes.get(shape)
        if index is None:
            index = indexes[shape] = _without(tunable, table, shape)
        match = index.nearest(problem, NEAR_DOUBLINGS)
        if (match is not None) != near:
            continue
        match = match or index.nearest(problem, math.inf)
        if match is None:
            continue
        key = id(match.entry)
        if key not in rules:
            rules[key] = [rule_of(match.entry, other, tunable.tiles, default_at) for other in tables]
        lefts = []
        for rule in rules[key]:
            chosen = pick(
                match.entry,
                rule,
                default,
                problem,
                times.__contains__,
                where="near" if near else "far",
                # Their points count, not their exponents.
                beside=index.beside(match, default_at),
            )
            lefts.append(_left(times, chosen.config if chosen else None, default))
        yield match.entry, lefts


def near_exponent(
    tunable: Declaration, table: Table, present: float | BySize | None = None
) -> float | BySize | None:
    """Choose the `Table.near_exponent` with the least regret of the rule near the table's buckets.

    The present one stays unless the regret of another is clearly less in the geometric mean (`_CLEARLY`), so
    that noise changes nothing. Two exponents must be clearly better than each alone.

    Args:
        tunable: The declaration.
        table: Its table.
        present: The exponent of the table that this one replaces.
    """
    if tunable.tiles is None:
        return None
    shapes = {_exact(table, entry) for entry in table.entries}
    # In an order that no axis decides: every second shape of a sorted list may have the same last size.
    judged = set(sorted(shapes, key=lambda shape: zlib.crc32(repr(shape).encode()))[:_MOST_SHAPES])
    exponents = (None, *NEAR_EXPONENTS)
    tables = [dataclasses.replace(table, near_exponent=exponent) for exponent in exponents]
    at_size: dict[float | None, dict[int, list[float]]] = {
        exponent: defaultdict(list) for exponent in exponents
    }
    for entry, lefts in _across(tunable, tables, near=True, shapes=judged):
        for exponent, at in zip(exponents, lefts, strict=True):
            at_size[exponent][size_of(table.axes, entry.bucket)].append(math.log1p(at.chosen))
    counts = {size: len(regrets) for size, regrets in sorted(at_size[None].items())}
    if not counts:
        return None  # no size is near another's bucket: nothing supports the present one either

    def left(exponent: float | BySize | None) -> float:
        regrets: list[float] = []
        for size in counts:
            regrets += at_size[exponent.at(size) if isinstance(exponent, BySize) else exponent][size]
        return math.fsum(regrets) / len(regrets)

    best: float | BySize | None = min((None, *NEAR_EXPONENTS), key=left)
    below = [*zip(counts, itertools.accumulate(counts.values()), strict=True)]
    ends = [size for size, count in below if _FEWEST <= count <= below[-1][1] - _FEWEST]
    twos = [BySize(end, *pair) for end in ends for pair in itertools.permutations(NEAR_EXPONENTS, 2)]
    two = min(twos, key=left, default=None)
    if two is not None and left(two) < left(best) - _CLEARLY:
        best = two
    return best if left(best) < left(present) - _CLEARLY else present


_FEWEST = 16
"""Fewest points on either side where small and large buckets have exponents of their own."""

_CLEARLY = 0.0005
"""Least difference of mean regrets that decides: a twentieth of a percent. Less is not worth a change that
has to be reviewed."""

_MOST_SHAPES = 32
"""Most sizes on the Exact axes to judge by: each takes a tenth of a second, and there may be thousands."""


def _exact(table: Table, entry: Entry) -> Exact:
    return tuple(entry.bucket.size(name) for name, axis in table.axes.items() if not isinstance(axis, Pow2))


def _without(tunable: Declaration, table: Table, shape: Exact) -> Index:
    """Index the table's entries except those with these sizes on the Exact axes."""
    kept = tuple(entry for entry in table.entries if _exact(table, entry) != shape)
    rest = {Path("table.json"): dataclasses.replace(table, entries=kept)}
    return Index(tunable.axes, tunable.tiles, rest)


def _points(table: Table) -> Iterator[tuple[Entry, Point]]:
    return ((entry, point) for entry in table.entries for point in entry.points)


def _at(entry: Entry, point: Point) -> Problem:
    return entry.bucket.replaced(**point.size)


def _times(tunable: Declaration, table: Table, entry: Entry, point: Point) -> Mapping[Config, float]:
    """Return the times of the configs that may run at a point."""
    problem = _at(entry, point)
    configs = (*table.portfolio, tunable.default_config(table.arch, problem))
    times: dict[Config, float] = {}
    for config, us in zip(configs, in_worst_state(point).us, strict=True):
        if us is not None and tunable.refusal(config, table.arch, problem) is None:
            times.setdefault(config, us)
    return times


def _left(times: Mapping[Config, float], chosen: Config | None, default: Config) -> Left:
    least = min(times.values())
    return Left(times[chosen or default] / least - 1, times[default] / least - 1)
