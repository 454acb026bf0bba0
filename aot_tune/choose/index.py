"""Find an entry of the loaded tables in microseconds: that of a problem's own bucket, or the nearest. Pure.

`aot_tune.values.bucket.nearest` defines which entry is nearest. The index gives the same answer without
looking at every bucket, which takes over a millisecond for a table of 360 entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter, sub
from pathlib import Path
from typing import NamedTuple

from aot_tune.choose.points import MOST_BESIDE, BucketRule, DefaultAt, Tiles, rule_of
from aot_tune.tables.table import Entry, Table
from aot_tune.values.bucket import Axes, Pow2, edge
from aot_tune.values.problem import Problem, Value

Classes = frozenset[tuple[str, Value]]
"""A problem's values other than sizes, such as its dtype, as a key."""


def classes_of(axes: Axes, problem: Problem) -> Classes:
    """`aot_tune.values.bucket.classes` as a key."""
    return frozenset(item for item in problem.items() if item[0] not in axes)


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """A table that was read and that fits the declaration."""

    table: Table
    """The table without the entries that may not be used."""

    path: Path
    """The file that it was read from."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """An entry and its table."""

    entry: Entry
    """The entry."""

    shipped: Shipped
    """The table that holds it."""


class _Member(NamedTuple):
    """An entry with the values by which `Index.nearest` ranks it."""

    smaller: tuple[int, ...]
    """The bucket's sizes, negated: of two equally near entries the larger is taken."""
    place: int
    """The entry's position in reading order."""
    found: Match


@dataclass(kw_only=True)
class _Group:
    """The entries that have the same classes and the same sizes on the Exact axes."""

    exact: tuple[int, ...]
    """The sizes on the Exact axes."""

    logs: tuple[float, ...]
    """The base-2 logarithms of these sizes."""

    members: dict[tuple[int, ...], _Member] = field(default_factory=dict)
    """The members by the exponents of their edges on the Pow2 axes."""

    closest: dict[tuple[tuple[int, ...], float], tuple[int, _Member] | None] = field(default_factory=dict)
    """The answers of `_closest`, by exponents and reach."""


class _Distances(NamedTuple):
    """How far the groups of some classes are from a bucket on the Exact axes."""

    logs: list[float]
    """The base-2 logarithms of the bucket's sizes on these axes."""
    aparts: list[float]
    """The sum of the distances to each group, in doublings."""
    groups: list[_Group]
    """The groups."""
    order: list[int]
    """The groups' places in these lists, the nearest first."""


class Index:
    """The entries of all tables of one kernel on one arch, in reading order.

    Args:
        axes: The kernel's axes.
        tiles: The declaration's `tiles`, or None.
        tables: The tables in reading order; of several that have a bucket, the first counts.
    """

    def __init__(self, axes: Axes, tiles: Tiles | None, tables: Sequence[Shipped]) -> None:
        self.tables = tuple(tables)
        self._axes = axes
        self._tiles = tiles
        self._exact = tuple(name for name, axis in axes.items() if not isinstance(axis, Pow2))
        self._pow2 = tuple(name for name, axis in axes.items() if isinstance(axis, Pow2))
        self._own: dict[Problem, Match] = {}
        self._groups: dict[Classes, dict[tuple[int, ...], _Group]] = {}
        self._lists: dict[Classes, tuple[list[_Group], list[tuple[float, ...]]]] = {}
        self._rules: dict[int, BucketRule] = {}
        self._beside: dict[int, tuple[BucketRule, ...]] = {}
        self._last: tuple[Problem | None, Problem] = (None, Problem({}))
        self._reached: tuple[Problem | None, _Distances] = (None, _Distances([], [], [], []))
        for shipped in self.tables:
            for entry in shipped.table.entries:
                if entry.bucket not in self._own:
                    self._add(Match(entry=entry, shipped=shipped))

    def _add(self, found: Match) -> None:
        bucket = found.entry.bucket
        place = len(self._own)
        self._own[bucket] = found
        exact = tuple(bucket.size(name) for name in self._exact)
        groups = self._groups.setdefault(classes_of(self._axes, bucket), {})
        group = groups.get(exact)
        if group is None:
            logs = tuple(math.log2(max(size, 1)) for size in exact)
            group = groups[exact] = _Group(exact=exact, logs=logs)
        smaller = tuple(-bucket.size(name) for name in self._axes)
        group.members[self._exponents(bucket)] = _Member(smaller, place, found)

    def own(self, problem: Problem) -> Match | None:
        """The entry of the problem's own bucket."""
        return self._own.get(self.bucket_of(problem))

    def matches(self) -> Iterable[Match]:
        """All entries, each bucket's once, in reading order."""
        return self._own.values()

    def bucket_of(self, problem: Problem) -> Problem:
        """The problem's bucket. The last answer is kept, since one choice asks several times."""
        asked, bucket = self._last
        if asked is not problem:
            bucket = problem.replaced(**{name: edge(problem.size(name)) for name in self._pow2})
            self._last = (problem, bucket)
        return bucket

    def nearest(self, problem: Problem, within: float) -> Match | None:
        """The closest entry of the same classes: see `aot_tune.values.bucket.nearest`."""
        wanted = self.bucket_of(problem)
        exponents = self._exponents(wanted)
        logs, aparts, groups, order = self._distances(wanted)
        reach = (len(self._exact) * within if self._exact else 0.0) + _ROUNDED
        farthest = math.inf
        best: tuple[float, tuple[int, ...], int] | None = None
        chosen: Match | None = None
        # Written for speed: a table may have thousands of groups that are equally near.
        for place in order:
            apart = aparts[place]
            if apart > reach or apart > farthest:
                break
            group = groups[place]
            if apart >= within and not self._reaches(wanted, logs, group, within):
                continue
            closest = _closest(group, exponents, within)
            if closest is None or apart + closest[0] > farthest:
                continue
            steps, member = closest
            # Rounded, so that sums of the same distances in another order still tie.
            rank = (round(round(apart, 9) + steps, 9), member.smaller, member.place)
            if best is None or rank < best:
                best, chosen = rank, member.found
                farthest = best[0] + _ROUNDED
        return chosen

    def _distances(self, wanted: Problem) -> _Distances:
        """The groups of a bucket's classes with their distances on the Exact axes.

        The answer for the last bucket is kept, since a miss asks twice.
        """
        asked, distances = self._reached
        if asked is not wanted:
            logs = [math.log2(max(wanted.size(name), 1)) for name in self._exact]
            groups, places = self._of_classes(classes_of(self._axes, wanted))
            # Written for speed: a miss looks at every group, of which a table has dozens.
            if len(logs) == 2:
                first, second = logs
                aparts = [abs(first - one) + abs(second - other) for one, other in places]
            else:
                aparts = [sum(map(abs, map(sub, logs, where))) for where in places]
            order = sorted(range(len(groups)), key=aparts.__getitem__)
            distances = _Distances(logs, aparts, groups, order)
            self._reached = (wanted, distances)
        return distances

    def _of_classes(self, classes: Classes) -> tuple[list[_Group], list[tuple[float, ...]]]:
        """The groups of some classes, and the logarithms of their sizes on the Exact axes."""
        known = self._lists.get(classes)
        if known is None:
            groups = list(self._groups.get(classes, {}).values())
            known = (groups, [group.logs for group in groups])
            if groups:
                self._lists[classes] = known
        return known

    def _reaches(self, wanted: Problem, logs: list[float], group: _Group, within: float) -> bool:
        """Whether a group is at most `within` doublings away on each Exact axis.

        At the very limit the sizes' ratios decide, since the logarithms are rounded.
        """
        most = max(map(abs, map(sub, logs, group.logs)), default=0.0)
        if abs(most - within) > _ROUNDED:
            return most < within
        return within == math.inf or all(
            abs(math.log2(max(wanted.size(name), 1) / max(other, 1))) <= within
            for name, other in zip(self._exact, group.exact, strict=True)
        )

    def beside(self, found: Match, default_at: DefaultAt) -> tuple[BucketRule, ...]:
        """The rules of up to `MOST_BESIDE` buckets beside an entry's, the nearest first; they are found once.

        They are of the same table and classes and have the same edges, and other sizes on the Exact axes.
        """
        beside = self._beside.get(id(found.entry))
        if beside is None:
            exponents, shipped = self._exponents(found.entry.bucket), found.shipped
            logs = [math.log2(max(found.entry.bucket.size(name), 1)) for name in self._exact]
            matches = [
                (sum(map(abs, map(sub, logs, group.logs))), member.place, member.found)
                for group in self._groups[classes_of(self._axes, found.entry.bucket)].values()
                if (member := group.members.get(exponents)) is not None
                and member.found.shipped is shipped
                and member.found is not found
            ]
            nearest = sorted(matches, key=itemgetter(0, 1))[:MOST_BESIDE]
            beside = tuple(self.rule(match, default_at) for _, _, match in nearest)
            self._beside[id(found.entry)] = beside
        return beside

    def rule(self, found: Match, default_at: DefaultAt) -> BucketRule:
        """The rule near this entry's bucket; it is made once.

        Args:
            found: The entry.
            default_at: The declaration's default for a problem, which is the same at each call.
        """
        rule = self._rules.get(id(found.entry))
        if rule is None:
            rule = rule_of(found.entry, found.shipped.table, self._tiles, default_at)
            self._rules[id(found.entry)] = rule
        return rule

    def _exponents(self, bucket: Problem) -> tuple[int, ...]:
        return tuple(bucket.size(name).bit_length() - 1 for name in self._pow2)


def _closest(group: _Group, exponents: tuple[int, ...], within: float) -> tuple[int, _Member] | None:
    """The nearest member on the Pow2 axes, after the doublings to it; ties go to the larger, then the first.

    The answer is kept: whatever the sizes are, there are few exponents.
    """
    key = (exponents, within)
    if (known := group.closest.get(key, _UNKNOWN)) is not _UNKNOWN:
        return known
    best: tuple[int, tuple[int, ...], int] | None = None
    chosen: tuple[int, _Member] | None = None
    for edges, member in group.members.items():
        steps = [*map(abs, map(sub, exponents, edges))]
        rank = (sum(steps), member.smaller, member.place)
        if max(steps, default=0) <= within and (best is None or rank < best):
            best, chosen = rank, (rank[0], member)
    if len(group.closest) >= _MOST_CLOSEST:
        group.closest.clear()
    group.closest[key] = chosen
    return chosen


_MOST_CLOSEST = 1024
"""The most answers that a group keeps, enough for the exponents of two axes; beyond it all are dropped."""

_ROUNDED = 1e-8
"""Doublings: more than rounding changes a sum of distances."""

_UNKNOWN = (-1, _Member((), -1, None))  # type: ignore[arg-type]  # a sentinel without entry
