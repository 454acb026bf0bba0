"""Choose the sizes to measure inside a bucket, and evenly spread items of a sequence. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from aot_tune.values.bucket import Axes, Pow2
from aot_tune.values.problem import Problem

Item = TypeVar("Item")

_INSIDE = ((5, 11), (6, 0), (7, 11))
"""The points inside a bucket: eighths of the edge, and the number subtracted where those are a multiple of
16.

Each half of the bucket has one point with a partly filled last tile, because a tile of a quarter of the edge
needs one more row of tiles above 3/4 of the edge: on the recorded sweep (tests/data) points in one half alone
leave a regret of up to 12 % in the other, and one in each half leaves none. Between them is 3/4 itself. Its
last tile is full for most tile sizes, as otherwise only the edge's is, and people use it (96, 192, 384, 768).
Subtracting 11 leaves no multiple of 16 and no full last tile.
"""


def sizes_inside(axes: Axes, bucket: Problem) -> list[Problem]:
    """The problems inside a bucket that a sweep measures beside its edge, ascending.

    There are three where the bucket is wide enough, and otherwise all of its sizes: none for an edge of 1 or
    2, the size 3 for an edge of 4, and 5, 6, 7 for an edge of 8. Several Pow2 axes shrink together, so that
    there are three.
    """
    edges = {name: bucket.size(name) for name, axis in axes.items() if isinstance(axis, Pow2)}
    found: dict[Problem, None] = {}
    for eighths, off in _INSIDE:
        sizes = {name: _inside(edge, eighths, off) for name, edge in edges.items()}
        found[bucket.replaced(**sizes)] = None
    found.pop(bucket, None)
    return list(found)


def _inside(edge: int, eighths: int, off: int) -> int:
    if edge < 8:
        return 3 if edge == 4 else edge
    size = edge * eighths // 8
    return size - off if size % 16 == 0 else size


def spread(items: Sequence[Item], most: int | None) -> tuple[Item, ...]:
    """At most `most` of the items, evenly spread, the first and the last among them where two fit."""
    if most is None or most >= len(items):
        return tuple(items)
    if most == 1:
        return (items[0],)
    return tuple(items[round(i * (len(items) - 1) / (most - 1))] for i in range(most))
