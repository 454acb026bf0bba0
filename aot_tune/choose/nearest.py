"""Find the nearest buckets, by the rule of tables and batches. Pure: takes only sizes and classes.

Two sizes are |log2(size / other)| doublings apart. The distance of two buckets is the sum of doublings over
all axes, and some more for each class value that differs. `Buckets.order` gives all buckets by their
distance. `Buckets.nearest` gives one of equal classes, at most `within` doublings away on each axis: the one
with the least distance; of equally near ones the larger, by the sizes in the order of the axes, then the
earlier.

Replays share the distance (`distance`) and break ties by a rule of their own:
`_rank` in `aot_tune.replay.answer.records`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import compress
from math import inf
from math import log2 as _log2
from operator import add, sub
from typing import NamedTuple

from aot_tune.values.bucket import Axes, Pow2
from aot_tune.values.lazy import lazy
from aot_tune.values.problem import Problem, Value

NEAR_DOUBLINGS = 2.0
"""Most doublings on each axis within which a bucket is near; a farther bucket serves only a miss. On the
tables of sm90, choices two doublings away from every other bucket leave no more than those at one."""

Sizes = tuple[int, ...]
"""Sizes of a bucket on each axis, in the declaration's order. A size of 0 counts as 1."""

Logs = tuple[float, ...]
"""Base-2 logarithms of sizes."""

Classes = tuple[Value | None, ...]
"""Classes of a problem in the order of a table's buckets."""

Near = tuple[int, Sizes, int]
"""Distance of a bucket as a negative number, its sizes and its place."""


def distance(one: Sequence[int], other: Sequence[int], within: float = inf) -> float | None:
    """Return the sum of doublings between two lists of sizes; None where one axis exceeds `within`."""
    doublings = [abs(_log2((size or 1) / (another or 1))) for size, another in zip(one, other, strict=True)]
    return sum(doublings) if max(doublings, default=0.0) <= within + _ROUNDED else None


def distances(logs: Sequence[float], others: Iterable[Sequence[float]]) -> list[float]:
    """Return the sums of doublings between a size and others, given the logarithms of all."""
    # Written for speed: most kernels have two or three axes.
    if len(logs) == 3:
        x, y, z = logs
        return [abs(x - a) + abs(y - b) + abs(z - c) for a, b, c in others]
    if len(logs) == 2:
        x, y = logs
        return [abs(x - a) + abs(y - b) for a, b in others]
    return [sum(map(abs, map(sub, logs, other))) for other in others]


class Order(NamedTuple):
    """Buckets by their distance from one."""

    bucket: Problem
    """Bucket from which they are ordered."""

    split: tuple[Logs, Classes, Logs]
    """Its `Buckets.split`."""

    places: Sequence[int]
    """Places of the others, nearest first; of equally near ones the earlier is first."""

    distances: Sequence[int]
    """Distance of each place, in units of `_UNIT`."""


class Buckets:
    """Buckets of a table, prepared to be ordered by their distance from another.

    Args:
        axes: The axes.
        buckets: The buckets; all have the same names.
        other_class: Doublings that a class value adds to the distance where it differs.
    """

    def __init__(self, axes: Axes, buckets: Sequence[Problem], other_class: float = 0.0) -> None:
        self._axes, self._buckets, self._other_class = axes, buckets, other_class
        self._is_pow2 = [isinstance(axis, Pow2) for axis in axes.values()]
        self._is_exact = [not is_pow2 for is_pow2 in self._is_pow2]
        self._from_edge = lru_cache(_MOST_KEPT)(self._apart_at_edges)  # there are few edges
        self._kept: dict[tuple[Problem, float], Near | None] = {}
        self._last: Order | None = None

    def order(self, bucket: Problem) -> Order:
        """Order the buckets by their distance from another; the last answer is kept, for `nearest`."""
        # Written for speed, since an unseen shape waits for it.
        order = self._last
        if order is None or order.bucket is not bucket:
            shapes, shape_of, *_ = self._parts
            split = shape, *edge = self.split(bucket)
            aparts = [round(_UNIT * apart) for apart in distances(shape, shapes)]
            whole = [*map(add, map(aparts.__getitem__, shape_of), self._from_edge(*edge))]
            order = Order(bucket, split, sorted(range(len(whole)), key=whole.__getitem__), whole)
            self._last = order  # whole, since other threads read it
        return order

    def nearest(self, bucket: Problem, within: float) -> Near | None:
        """Return the nearest bucket of equal classes; kept."""
        kept, key = self._kept, (bucket, within)
        near = kept.get(key, _UNKNOWN)
        if near is _UNKNOWN:
            if len(kept) >= _MOST_KEPT:  # all at once: one by one, garbage collections take longer
                kept.clear()
            near = kept[key] = self._nearest(bucket, within)
        return near

    def _nearest(self, bucket: Problem, within: float) -> Near | None:
        _, (shape, classes, pow2), places, aparts = self.order(bucket)
        shapes, shape_of, edges, edge_of = self._parts
        own, within = (*shape, *pow2), within + _ROUNDED
        limit, nearest = within * len(own) * _UNIT if own else 0.0, None
        for place in places:
            if aparts[place] > limit:
                break
            (of, logs), other = edges[edge_of[place]], self._buckets[place]
            apart = map(abs, map(sub, own, shapes[shape_of[place]] + logs))
            if of == classes and len(other) == len(bucket) and max(apart, default=0.0) <= within:
                limit = aparts[place]
                sizes = tuple([other.size(name) for name in self._axes])
                if nearest is None or sizes > nearest[1]:
                    nearest = (-aparts[place], sizes, place)
        return nearest

    def split(self, bucket: Problem) -> tuple[Logs, Classes, Logs]:
        """Return a bucket's logarithms on the Exact axes, its classes, its logarithms on the others."""
        logs = [_log2(bucket.size(name) or 1) for name in self._axes]
        exact, pow2 = tuple(compress(logs, self._is_exact)), tuple(compress(logs, self._is_pow2))
        return exact, self._classes_of(bucket), pow2

    def of_classes(self, bucket: Problem, other: Problem) -> float:
        """Return the part of a distance that classes add."""
        return self._apart(self._classes_of(bucket), self._classes_of(other))

    def _apart(self, classes: Classes, others: Classes) -> float:
        return self._other_class * sum(own != other for own, other in zip(classes, others, strict=True))

    def _classes_of(self, bucket: Problem) -> Classes:
        return tuple([bucket.get(name) for name in self._class_names])

    @lazy
    def _class_names(self) -> list[str]:
        return [name for name in (self._buckets[0] if self._buckets else ()) if name not in self._axes]

    @lazy
    def _parts(self) -> tuple[list[Logs], list[int], list[tuple[Classes, Logs]], list[int]]:
        """Distinct sizes of the buckets on the Exact axes, each bucket's; likewise classes and Pow2 axes."""
        shapes, edges = dict[Logs, int](), dict[tuple[Classes, Logs], int]()
        shape_of, edge_of = list[int](), list[int]()
        for bucket in self._buckets:
            shape, classes, pow2 = self.split(bucket)
            shape_of.append(shapes.setdefault(shape, len(shapes)))
            edge_of.append(edges.setdefault((classes, pow2), len(edges)))
        return [*shapes], shape_of, [*edges], edge_of

    def _apart_at_edges(self, classes: Classes, pow2: Logs) -> list[int]:
        """Return the distance of each bucket by classes and Pow2 axes."""
        *_, edges, edge_of = self._parts
        pairs = zip(distances(pow2, [logs for _, logs in edges]), edges, strict=True)
        aparts = [round(_UNIT * (apart + self._apart(classes, of))) for apart, (of, _) in pairs]
        return [*map(aparts.__getitem__, edge_of)]


_UNKNOWN: Near = (0, (), 0)
"""Answer that is not kept yet."""

_UNIT = 1e6
"""Units of a doubling in which distances are compared, as whole numbers: equal distances are equal."""

_MOST_KEPT = 1024
"""Most answers that are kept, enough for the edges of two axes."""

_ROUNDED = 1e-9
"""Difference in doublings that counts as rounding."""
