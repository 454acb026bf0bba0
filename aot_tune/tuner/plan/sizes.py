"""Choose the sizes to measure inside a bucket, and evenly spread items of a sequence. Pure.

A sweep begins with the edge and the sizes of `sizes_inside`. It then adds one size after another where the
rule inside a bucket is worst (`next_size`), until the rule is good everywhere or `MOST_ADDED` were added.
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
needs one more row of tiles above 3/4 of the edge. On the recorded sweep (tests/data) points in only one half
leave a regret of up to 12 % in the other half; one point in each half leaves none.
"""

_LESS = 11
"""Subtracted from a multiple of 16, so that the size is odd and the last tile is not full."""

MOST_ADDED = 4
"""Most points added to the first points."""

LEFT_AT_MOST = 0.05
"""Largest regret, estimated from the other points, at which the rule is good enough at a point. In the tables
of sm90, in buckets whose two first points are within it, the rule leaves 0.5 % in the geometric mean at a
third point between them, and over 5 % in 1.4 % of the buckets."""


def sizes_inside(axes: Axes, bucket: Problem) -> list[Problem]:
    """Return the problems inside a bucket that a sweep measures first, ascending, without the edge.

    Their sizes are odd. There are two where the bucket is wide enough: none for an edge of 1 or 2, the size 3
    for an edge of 4. Several Pow2 axes shrink together, so that there are two.
    """
    edges = {name: bucket.size(name) for name, axis in axes.items() if isinstance(axis, Pow2)}
    inside: dict[Problem, None] = {}
    for eighths in _FIRST:
        sizes = {name: _inside(edge, eighths) for name, edge in edges.items()}
        inside[bucket.replaced(**sizes)] = None
    inside.pop(bucket, None)
    return list(inside)


def _inside(edge: int, eighths: int) -> int:
    if edge < 8:
        return 3 if edge == 4 else edge
    size = edge * eighths // 8
    return size - _LESS if size % 16 == 0 else size | 1


def is_odd(axes: Axes, problem: Problem) -> bool:
    """Return whether all sizes on Pow2 axes are odd. The bucket of 2, which has no odd size, does not count.

    A kernel may be wrong at odd sizes alone: a launch then takes other paths for alignment and for tails.
    """
    sizes = [problem.size(name) for name, axis in axes.items() if isinstance(axis, Pow2)]
    return all(size % 2 or size == 2 for size in sizes)


def next_size(
    axes: Axes, bucket: Problem, left: Mapping[Problem, float], *, at_most: float = LEFT_AT_MOST
) -> Problem | None:
    """Return the next problem to measure inside a bucket, or None where the rule is good enough.

    It lies next to the point at which the rule leaves the largest regret, in the wider of the two gaps: at
    the gap's geometric mean, or one below where that is a multiple of 16. The edge is not such a point, since
    the bucket's winner runs there.

    Args:
        axes: The kernel's axes.
        bucket: The problem at the edge.
        left: The rule's regret at each measured problem of the bucket, the edge included, estimated from the
            other problems.
        at_most: The regret up to which the rule is good enough at a point.
    """
    inside = sorted((problem for problem in left if problem != bucket), key=_sizes(axes))
    if len(inside) >= len(_FIRST) + MOST_ADDED:
        return None
    for worst in sorted(inside, key=left.__getitem__, reverse=True):
        if left[worst] <= at_most:
            return None
        if (size := _in_wider_gap(axes, bucket, inside, worst)) is not None:
            return size
    return None


def _in_wider_gap(axes: Axes, bucket: Problem, inside: Sequence[Problem], worst: Problem) -> Problem | None:
    """Return the middle of the wider gap next to a measured problem; None where both are full."""
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
    """Return at most `most` items, evenly spread; the first and the last included where two fit."""
    if most is None or most >= len(items):
        return tuple(items)
    if most == 1:
        return (items[0],)
    return tuple(items[round(i * (len(items) - 1) / (most - 1))] for i in range(most))
