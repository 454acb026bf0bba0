"""Choose the sizes to measure inside a bucket, and evenly spread items of a sequence. Pure.

A sweep begins with the edge and the sizes of `sizes_inside`, then adds one size after another where the rule
inside a bucket is worst (`next_size`), until it is good everywhere or `MOST_ADDED` were added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from aot_tune.values.bucket import Axes, Pow2
from aot_tune.values.problem import Problem

Item = TypeVar("Item")

_FIRST = (5, 7)
"""The first points inside a bucket, in eighths of the edge.

Each half of the bucket has one point with a partly filled last tile, because a tile of a quarter of the edge
needs one more row of tiles above 3/4 of the edge: on the recorded sweep (tests/data) points in one half alone
leave a regret of up to 12 % in the other, and one in each half leaves none.
"""

_LESS = 11
"""What is subtracted from a multiple of 16. It leaves no multiple of 16 and no full last tile."""

MOST_ADDED = 4
"""Points that are added to the first ones, at most."""

LEFT_AT_MOST = 0.05
"""The regret, told from the other points, from which on the rule is good enough at a point. On the tables of
sm90, of buckets whose two first points are within it, the rule leaves 0.5 % in the geometric mean at a third
point between them, and over 5 % in 1.4 % of the buckets."""


def sizes_inside(axes: Axes, bucket: Problem) -> list[Problem]:
    """The problems inside a bucket that a sweep measures first, beside its edge, ascending.

    There are two where the bucket is wide enough: none for an edge of 1 or 2, the size 3 for an edge of 4.
    Several Pow2 axes shrink together, so that there are two.
    """
    edges = {name: bucket.size(name) for name, axis in axes.items() if isinstance(axis, Pow2)}
    found: dict[Problem, None] = {}
    for eighths in _FIRST:
        sizes = {name: _inside(edge, eighths) for name, edge in edges.items()}
        found[bucket.replaced(**sizes)] = None
    found.pop(bucket, None)
    return list(found)


def _inside(edge: int, eighths: int) -> int:
    if edge < 8:
        return 3 if edge == 4 else edge
    size = edge * eighths // 8
    return size - _LESS if size % 16 == 0 else size


def next_size(
    axes: Axes, bucket: Problem, left: Mapping[Problem, float], *, at_most: float = LEFT_AT_MOST
) -> Problem | None:
    """The next problem to measure inside a bucket, or None where the rule is good enough.

    It lies in the wider of the two gaps beside the point at which the rule leaves most, told from the other
    points: in the middle of the gap's logarithms, or beside it where that is a multiple of 16. The edge is
    not such a point, since the bucket's winner runs there.

    Args:
        axes: The kernel's axes.
        bucket: The problem at the edge.
        left: Each measured problem of the bucket, the edge among them, with the regret that the rule leaves
            there, told from the others.
        at_most: The regret up to which the rule is good enough at a point.
    """
    inside = sorted((problem for problem in left if problem != bucket), key=_sizes(axes))
    if len(inside) >= len(_FIRST) + MOST_ADDED:
        return None
    for worst in sorted(inside, key=left.__getitem__, reverse=True):
        if left[worst] <= at_most:
            return None
        if (size := _beside(axes, bucket, inside, worst)) is not None:
            return size
    return None


def _beside(axes: Axes, bucket: Problem, inside: Sequence[Problem], worst: Problem) -> Problem | None:
    """The problem in the middle of the wider gap beside a measured one; None where the gaps are full."""
    edges = {name: bucket.size(name) for name, axis in axes.items() if isinstance(axis, Pow2)}
    longest = max(edges, key=edges.__getitem__)
    line = [edges[longest] // 2, *(problem.size(longest) for problem in inside), edges[longest]]
    place = inside.index(worst) + 1
    gaps = [(line[place - 1], line[place]), (line[place], line[place + 1])]
    for low, high in sorted(gaps, key=lambda gap: gap[0] / gap[1]):
        middle = round(math.sqrt(low * high))
        middle -= middle % 16 == 0
        if low < middle < high:
            share = middle / edges[longest]
            sizes = {name: max(edge // 2 + 1, round(edge * share)) for name, edge in edges.items()}
            return bucket.replaced(**{**sizes, longest: middle})
    return None


def _sizes(axes: Axes) -> Callable[[Problem], list[int]]:
    return lambda problem: [problem.size(name) for name, axis in axes.items() if isinstance(axis, Pow2)]


def spread(items: Sequence[Item], most: int | None) -> tuple[Item, ...]:
    """At most `most` of the items, evenly spread, the first and the last among them where two fit."""
    if most is None or most >= len(items):
        return tuple(items)
    if most == 1:
        return (items[0],)
    return tuple(items[round(i * (len(items) - 1) / (most - 1))] for i in range(most))
