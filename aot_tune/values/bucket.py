"""Map a size to its bucket, and measure how far apart two buckets are. Pure: uses no kernel, file or GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from aot_tune.errors import DeclarationError
from aot_tune.values.problem import Problem, Value

NEAR_DOUBLINGS = 1.0
"""On each axis the nearest bucket may be at most this many doublings away."""


@dataclass(frozen=True)
class Pow2:
    """An axis bucketed by power of two: a size belongs to the smallest power not below it, its edge."""

    kind: ClassVar[str] = "pow2"

    @staticmethod
    def edges(low: int, high: int) -> tuple[int, ...]:
        """The edges from `low` to `high`, both powers of two: ``Pow2.edges(1, 8) == (1, 2, 4, 8)``."""
        if low < 1 or high < low or edge(low) != low or edge(high) != high:
            raise DeclarationError(f"Pow2.edges({low}, {high}): both must be powers of two, the lower first")
        return tuple(1 << exponent for exponent in range(low.bit_length() - 1, high.bit_length()))


@dataclass(frozen=True)
class Exact:
    """An axis whose sizes are not grouped: each size is a bucket of its own."""

    kind: ClassVar[str] = "exact"


Axis = Pow2 | Exact
Axes = Mapping[str, Axis]
AXIS_KINDS: Mapping[str, type[Pow2] | type[Exact]] = {"pow2": Pow2, "exact": Exact}


def edge(size: int) -> int:
    """The smallest power of two that is not below `size` (1 for a size of 0 or 1)."""
    return 1 << max(size - 1, 0).bit_length()


def bucket_of(axes: Axes, problem: Problem) -> Problem:
    """The bucket that a problem belongs to: each Pow2 axis at its edge, every other value unchanged."""
    return problem.replaced(
        **{name: edge(problem.size(name)) for name, axis in axes.items() if isinstance(axis, Pow2)}
    )


def doublings(axes: Axes, one: Problem, other: Problem) -> dict[str, float]:
    """The absolute log2 of the ratio of the two sizes, by axis."""
    return {name: abs(math.log2(max(one.size(name), 1) / max(other.size(name), 1))) for name in axes}


def same_classes(axes: Axes, one: Problem, other: Problem) -> bool:
    """Whether two problems agree in everything that is not an axis: dtypes, layouts, flags."""
    return classes(axes, one) == classes(axes, other)


def classes(axes: Axes, problem: Problem) -> dict[str, Value]:
    """The values of a problem that are not axes: dtypes, layouts, flags."""
    return {name: value for name, value in problem.items() if name not in axes}


def nearest(
    axes: Axes, problem: Problem, buckets: Iterable[Problem], *, within: float = NEAR_DOUBLINGS
) -> Problem | None:
    """Find the closest bucket of the same classes: the smallest sum of `doublings` over the axes.

    Args:
        axes: The kernel's axes.
        problem: A problem; its bucket's edge is what distances are measured from.
        buckets: Candidates in the file's order.
        within: Most doublings on any one axis; ``math.inf`` for any distance.

    Returns:
        The nearest bucket; among equally near ones the larger, then the earlier. None when none is in reach.
    """
    wanted = bucket_of(axes, problem)
    best: tuple[float, tuple[int, ...]] | None = None
    chosen: Problem | None = None
    for bucket in buckets:
        if not same_classes(axes, wanted, bucket):
            continue
        distances = doublings(axes, wanted, bucket)
        if any(distance > within for distance in distances.values()):
            continue
        # Rounded so that equal distances summed in another order still tie.
        rank = (round(sum(distances.values()), 9), tuple(-bucket.size(name) for name in axes))
        if best is None or rank < best:
            best, chosen = rank, bucket
    return chosen
