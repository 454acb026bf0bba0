"""Map a size to its bucket. Pure: uses no kernel, file or GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from aot_tune.errors import DeclarationError
from aot_tune.values.problem import Problem, Value


@dataclass(frozen=True)
class Pow2:
    """An axis bucketed by power of two: a bucket's edge is the smallest power not below its sizes."""

    kind: ClassVar[str] = "pow2"

    @staticmethod
    def edges(low: int, high: int) -> tuple[int, ...]:
        """Return the edges from `low` to `high`, both powers of two: ``Pow2.edges(1, 8) == (1, 2, 4, 8)``."""
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


def axes_in_words(axes: Axes) -> str:
    """Return axes with their kinds: ``M:pow2 N:exact``."""
    return " ".join(f"{name}:{axis.kind}" for name, axis in axes.items())


def edge(size: int) -> int:
    """Return the smallest power of two not below `size` (1 for a size of 0 or 1)."""
    return 1 << max(size - 1, 0).bit_length()


def bucket_of(axes: Axes, problem: Problem) -> Problem:
    """Return a problem's bucket: each Pow2 axis at its edge, every other value unchanged."""
    return problem.replaced(
        **{name: edge(problem.size(name)) for name, axis in axes.items() if isinstance(axis, Pow2)}
    )


Classes = frozenset[tuple[str, Value]]
"""Classes of a problem as a key: its values other than sizes, such as its dtype."""


def classes_of(axes: Axes, problem: Problem) -> Classes:
    """Return a problem's classes, its values that are not axes: dtypes, layouts, flags."""
    return frozenset(item for item in problem.items() if item[0] not in axes)
