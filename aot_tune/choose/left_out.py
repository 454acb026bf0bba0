"""Judge the rule between measured sizes by a table's own points: each is told as if it had not been measured.

`near_exponent` chooses by it how a table's times are carried to sizes near its buckets. Uses no file or GPU.
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
    """What is left at a size, as t / t_best - 1; the best is the fastest of portfolio and default there."""

    chosen: float
    """The regret of the rule's choice."""

    default: float
    """The regret of the default."""


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


Exact = tuple[int, ...]
"""The sizes of a problem on the Exact axes."""


def across(
    tunable: Declaration, table: Table, *, near: bool, shapes: Collection[Exact] | None = None
) -> Iterator[Left]:
    """Leave out all entries with a size's sizes on the Exact axes, and tell it from the nearest buckets.

    Args:
        tunable: The declaration.
        table: Its table.
        near: Whether to yield the sizes whose nearest bucket is within one doubling, or the others.
        shapes: The sizes on the Exact axes to leave out, each in turn; None for all of the table's.
    """
    return (left for _, [left] in _across(tunable, [table], near=near, shapes=shapes))


def _across(
    tunable: Declaration, tables: Sequence[Table], *, near: bool, shapes: Collection[Exact] | None = None
) -> Iterator[tuple[Entry, list[Left]]]:
    """As `across`, each with the entry of the nearest bucket, and what is left by each of several tables.

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
        found = index.nearest(problem, NEAR_DOUBLINGS)
        if (found is not None) != near:
            continue
        found = found or index.nearest(problem, math.inf)
        if found is None:
            continue
        if id(found.entry) not in rules:
            rules[id(found.entry)] = [rule_of(found.entry, one, tunable.tiles, default_at) for one in tables]
        lefts = []
        for rule in rules[id(found.entry)]:
            chosen = pick(
                found.entry,
                rule,
                default,
                problem,
                times.__contains__,
                where="near" if near else "far",
                # Of these the points count, not their exponents.
                beside=index.beside(found, default_at),
            )
            lefts.append(_left(times, chosen.config if chosen else None, default))
        yield found.entry, lefts


def near_exponent(
    tunable: Declaration, table: Table, present: float | BySize | None = None
) -> float | BySize | None:
    """Choose the `Table.near_exponent` with which the rule leaves least near the table's buckets.

    The present one stays unless another leaves clearly less in the geometric mean (`_CLEARLY`), so that noise
    changes nothing; and two exponents must leave clearly less than each alone.

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
    at_size: dict[float | None, dict[int, list[float]]] = {one: defaultdict(list) for one in exponents}
    for entry, lefts in _across(tunable, tables, near=True, shapes=judged):
        for exponent, at in zip(exponents, lefts, strict=True):
            at_size[exponent][size_of(table.axes, entry.bucket)].append(math.log1p(at.chosen))
    counts = {size: len(regrets) for size, regrets in sorted(at_size[None].items())}
    if not counts:
        return None  # no size is near another's bucket: nothing speaks for the present one either

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
"""Points on either side, at least, where small and large buckets have exponents of their own."""

_CLEARLY = 0.0005
"""The least difference of mean regrets that decides: a twentieth of a percent. Less is not worth a change
that somebody has to review."""

_MOST_SHAPES = 32
"""Sizes on the Exact axes to judge by, at most: of thousands, each would take a tenth of a second."""


def _exact(table: Table, entry: Entry) -> Exact:
    return tuple(entry.bucket.size(name) for name, axis in table.axes.items() if not isinstance(axis, Pow2))


def _without(tunable: Declaration, table: Table, shape: Exact) -> Index:
    """The table's entries but for those with these sizes on the Exact axes."""
    kept = tuple(entry for entry in table.entries if _exact(table, entry) != shape)
    rest = {Path("table.json"): dataclasses.replace(table, entries=kept)}
    return Index(tunable.axes, tunable.tiles, rest)


def _points(table: Table) -> Iterator[tuple[Entry, Point]]:
    return ((entry, point) for entry in table.entries for point in entry.points)


def _at(entry: Entry, point: Point) -> Problem:
    return entry.bucket.replaced(**point.size)


def _times(tunable: Declaration, table: Table, entry: Entry, point: Point) -> Mapping[Config, float]:
    """The times of the configs that may run at a point."""
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
