"""Measure how near two problems of one search are. Pure.

The rule is that of declared kernels (`aot_tune.choose.nearest`): the smallest sum of doublings between
buckets, each at most one doubling apart; of equally near problems the larger, then the first. Three things
differ, because no axis is declared:

1. Each dimension of each tensor is an axis by powers of two. An empty one is a bucket of its own. The larger
   of two problems is that with more elements.
2. A whole number is equal in both problems or follows the sizes: it is a dimension, the product of
   neighbouring dimensions of one tensor, or the next power of two of one of these, in both the same.
3. All else is equal, a number that is compiled in too: where it follows a size, each size is a problem of its
   own, and each compiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, prod

from aot_tune.choose.nearest import NEAR_DOUBLINGS
from aot_tune.replay.problem import Argument, Array, Fixed, Items, Problem, Whole
from aot_tune.values.bucket import edge

NEAR = int(NEAR_DOUBLINGS)
"""The most doublings between the buckets of one dimension of problems that are near each other."""

ANY = inf
"""At any distance: for processes that may not search."""


def distance(recorded: Problem, asked: Problem, most: float = NEAR) -> int | None:
    """The sum of the doublings between the buckets of all dimensions; None where they are too far apart.

    Args:
        recorded: A problem whose answer is known.
        asked: Another of the same kernel and search space.
        most: The most doublings between the buckets of one dimension.
    """
    if (recorded.names, recorded.sm_count) != (asked.names, asked.sm_count):
        return None
    theirs, ours = list(_flat(recorded.arguments)), list(_flat(asked.arguments))
    if len(theirs) != len(ours):
        return None
    doublings = 0
    wholes: list[tuple[int, int]] = []
    for one, other in zip(theirs, ours, strict=True):
        if isinstance(one, Array) and isinstance(other, Array):
            between = _between(one, other, most)
            if between is None:
                return None
            doublings += between
        elif isinstance(one, Whole) and isinstance(other, Whole):
            wholes.append((one.value, other.value))
        elif one != other:
            return None
    moved = [(one, other) for one, other in wholes if one != other]
    if moved:
        sizes = zip(sizes_of(theirs), sizes_of(ours), strict=True)
        followed = {pair for one, other in sizes for pair in ((one, other), (_bucket(one), _bucket(other)))}
        if any(pair not in followed for pair in moved):
            return None
    return doublings


def larger(recorded: Problem) -> int:
    """The number of elements of all tensors: of two problems that are equally near the larger is taken."""
    return sum(prod(one.shape) for one in _flat(recorded.arguments) if isinstance(one, Array))


def _flat(arguments: Sequence[Argument]) -> Iterator[Argument]:
    """All arguments, lists item by item."""
    for one in arguments:
        if isinstance(one, Items):
            yield Fixed(str(len(one.items)))
            yield from _flat(one.items)
        else:
            yield one


def _between(one: Array, other: Array, most: float) -> int | None:
    same = (one.dtype, one.layout, one.aligned, len(one.shape))
    if same != (other.dtype, other.layout, other.aligned, len(other.shape)):
        return None
    doublings = 0
    for size, size_of_other in zip(one.shape, other.shape, strict=True):
        apart = abs(_bucket(size).bit_length() - _bucket(size_of_other).bit_length())
        if apart > most:
            return None
        doublings += apart
    return doublings


def sizes_of(arguments: Sequence[Argument]) -> Iterator[int]:
    """Each dimension of each tensor and each product of neighbouring ones, always in the same order."""
    for one in arguments:
        if isinstance(one, Array):
            ends = range(len(one.shape) + 1)
            for first in ends:
                for last in range(first + 1, len(one.shape) + 1):
                    yield prod(one.shape[first:last])


def _bucket(size: int) -> int:
    """The edge of a size's bucket; 0 for 0."""
    return edge(size) if size > 0 else 0
