"""Which sizes are measured: those inside a bucket beside its edge, an even spread where not all are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from aot_tune.values.bucket import Axes, Pow2
from aot_tune.values.problem import Problem

Item = TypeVar("Item")

_INSIDE = ((5, 11), (6, 0), (7, 11))
"""Points inside a bucket: eighths of the edge, and what is taken off where those are a multiple of 16.

One point with a partly filled last tile in each half of the bucket, because a tile of a quarter of the edge
takes one more row of tiles above 3/4 of it: on the recorded sweep (tests/data), points in one half alone
leave up to 12 % in the other, one in each half leaves none. Between them 3/4 itself: its last tile is full
for most tile sizes, as only the edge's is otherwise, and it is a size people use (96, 192, 384, 768). 11 off
leaves no multiple of 16, and no tile size full.
"""


def sizes_inside(axes: Axes, bucket: Problem) -> list[Problem]:
    """The problems inside a bucket that a sweep measures beside its edge, ascending.

    Three where the bucket is wide enough, else all there are: none for an edge of 1 or 2, 3 for 4, and 5, 6,
    7 for 8. With several Pow2 axes all of them shrink together, so that the count stays three.
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
