"""Measure how near two problems of one search are. Pure.

The rule is that of declared kernels (`aot_tune.choose.nearest`): the smallest sum of doublings between
buckets; of equally near problems the larger, then the first. On each axis they are at most one doubling
apart (`NEAR`), not two. Three things differ, because no axis is declared:

1. Each dimension of each tensor is an axis by powers of two. An empty dimension is a bucket of its own. The
   larger of two problems has more elements.
2. A whole number is equal in both problems, or follows the sizes in both in the same way: it is a dimension,
   the product of neighbouring dimensions of one tensor, or the next power of two of one of these. Otherwise
   it is an axis by powers of two itself, such as the rows of a flattened tensor, if both are at least
   `LEAST_SIZE`; smaller numbers are modes, ranks and flags.
3. All else is equal. This holds for a compiled-in number too: where it follows a size, each size is a problem
   of its own, and each compiles. Fractions are equal as float32, such as `1 / sqrt(128)` and `128**-0.5`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, prod
from struct import pack

from aot_tune.choose import nearest
from aot_tune.replay.problem import Argument, Array, Fixed, Items, Problem, Whole
from aot_tune.values.bucket import edge

NEAR = 1
"""Most doublings between two near problems' buckets of one dimension: a recorded winner has no times that
tell how others change with the size."""

LEAST_SIZE = 16
"""Least whole number that counts as a size where it follows no tensor's."""

ANY = inf
"""Any distance, for processes that may not search."""


def distance(recorded: Problem, asked: Problem, most: float = NEAR) -> int | None:
    """Return the doublings between the buckets, summed over all axes; None where too far apart.

    Args:
        recorded: A problem whose answer is known.
        asked: Another problem of the same kernel and search space.
        most: The most doublings between two buckets of one axis.
    """
    if (recorded.names, recorded.sm_count) != (asked.names, asked.sm_count):
        return None
    olds, news = list(_flat(recorded.arguments)), list(_flat(asked.arguments))
    if len(olds) != len(news):
        return None
    doublings = 0
    moved: list[tuple[int, int]] = []
    for old, new in zip(olds, news, strict=True):
        if isinstance(old, Array) and isinstance(new, Array):
            between = _between(old, new, most)
            if between is None:
                return None
            doublings += between
        elif isinstance(old, Whole) and isinstance(new, Whole):
            if old != new:
                moved.append((old.value, new.value))
        elif old != new and not (
            isinstance(old, Fixed) and isinstance(new, Fixed) and _is_one_fraction(old.text, new.text)
        ):
            return None
    if moved:
        sizes = zip(sizes_of(olds), sizes_of(news), strict=True)
        followed = {pair for old, new in sizes for pair in ((old, new), (_bucket(old), _bucket(new)))}
        for old_value, new_value in {*moved} - followed:
            if min(old_value, new_value) < LEAST_SIZE:
                return None
            apart = nearest.distance([edge(old_value)], [edge(new_value)], most)
            if apart is None:
                return None
            doublings += round(apart)
    return doublings


def apart(recorded: Problem, asked: Problem, most: float = NEAR) -> list[int]:
    """Return the positions of the arguments that keep two problems of one kernel from being near.

    Args:
        recorded: A problem whose answer is known.
        asked: Another problem of the same kernel and search space.
        most: The most doublings between two buckets of one axis.
    """

    def near(places: Sequence[int]) -> bool:
        old, new = (p._replace(arguments=tuple(p.arguments[at] for at in places)) for p in (recorded, asked))
        return distance(old, new, most) is not None

    places = range(len(asked.arguments))
    alone = [at for at in places if near([at])]
    return [at for at in places if at not in alone and not near([*alone, at])]  # a number may follow others


def larger(recorded: Problem) -> tuple[int, int]:
    """Return a sort key: the elements of all tensors, then the sum of the numbers.

    Of two equally near problems the larger is taken.
    """
    arguments = list(_flat(recorded.arguments))
    elements = sum(prod(array.shape) for array in arguments if isinstance(array, Array))
    return elements, sum(number.value for number in arguments if isinstance(number, Whole))


def _flat(arguments: Sequence[Argument]) -> Iterator[Argument]:
    """Yield all arguments, lists item by item."""
    for argument in arguments:
        if isinstance(argument, Items):
            yield Fixed(str(len(argument.items)))
            yield from _flat(argument.items)
        else:
            yield argument


def _is_one_fraction(old: str, new: str) -> bool:
    """Whether two compiled-in values are fractions and one float32 number, as kernels compute with."""
    try:
        return "." in old and "." in new and pack("<f", float(old)) == pack("<f", float(new))
    except (ValueError, OverflowError):
        return False


def _between(old: Array, new: Array, most: float) -> int | None:
    """Return the doublings between two tensors; None where they differ in more than size, or are far."""
    same = (old.dtype, old.layout, old.aligned, len(old.shape))
    if same != (new.dtype, new.layout, new.aligned, len(new.shape)):
        return None
    # An empty dimension lies a doubling below one of size 1.
    olds, news = ([2 * _bucket(size) or 1 for size in array.shape] for array in (old, new))
    doublings = nearest.distance(olds, news, most)
    return None if doublings is None else round(doublings)


def sizes_of(arguments: Sequence[Argument]) -> Iterator[int]:
    """Yield each dimension of each tensor and each product of neighbouring ones, in a fixed order."""
    for argument in arguments:
        if isinstance(argument, Array):
            shape = argument.shape
            for first in range(len(shape)):
                for last in range(first + 1, len(shape) + 1):
                    yield prod(shape[first:last])


def _bucket(size: int) -> int:
    """Return the edge of a size's bucket; 0 for 0."""
    return edge(size) if size > 0 else 0
