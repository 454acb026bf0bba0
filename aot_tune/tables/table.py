"""A table as frozen values: one kernel's tuned entries on one arch. Does no I/O and knows no kernel.

`aot_tune.tables.reader` makes it of JSON text, and `aot_tune.tables.writer` makes the text of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Axes, Pow2
from aot_tune.values.config import Config
from aot_tune.values.lazy import lazy
from aot_tune.values.problem import Problem

SCHEMA = 2
"""The version of the format of tables, declared and recorded: the only one that is read and written."""

Evidence = Literal["measured", "predicted"]

NEAR_EXPONENTS = (0.0, 0.5, 1.0)
"""The values that an exponent of `Table.near_exponent` may have."""


class BySize(NamedTuple):
    """An exponent for small buckets and one for large ones.

    The work of a small bucket is bound by memory, where a further wave costs little, and that of a large one
    by the arithmetic units, which take whole waves.
    """

    up_to: int
    """The largest size of a small bucket: the product of its sizes on the Pow2 axes, a power of two."""

    small: float
    """The exponent of small buckets, one of `NEAR_EXPONENTS`."""

    large: float
    """The exponent of the others."""

    def at(self, size: int) -> float:
        """The exponent of buckets of this size."""
        return self.small if size <= self.up_to else self.large

    def __str__(self) -> str:
        return f"{self.small} for buckets up to {self.up_to}, {self.large} above"


@dataclass(frozen=True, kw_only=True)
class BuiltWith:
    """The GPU and the software with which a table's figures were taken."""

    device_name: str
    """The GPU's product name; in a predicted table that of the arch's reference device."""

    sm_count: int
    """The GPU's multiprocessors, by which waves are counted."""

    cuda_tile: str
    """Version of cuda-tile."""

    tileiras: str
    """Version of cuTile's compiler."""

    driver: str
    """Version of the GPU driver; empty for predicted tables."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured size of a bucket; the edge is one too."""

    size: Mapping[str, int]
    """The size on each Pow2 axis."""

    us: tuple[float | None, ...]
    """The mean microseconds of the portfolio's configs in order, then the default's; None: it cannot run."""

    states: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """The same times in other states of the GPU, by the state's name."""


@dataclass(frozen=True, kw_only=True)
class StateTimes:
    """The times at a bucket's edge in one state of the GPU, such as under load."""

    mean_us: float
    """The winner's mean time, microseconds."""

    default_us: float
    """The default's mean time, microseconds."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One bucket's winner, with the times behind it."""

    bucket: Problem
    """The problem at the bucket's edge."""

    config: Config
    """The winner at the edge: one of the portfolio, or the default."""

    mean_us: float
    """The winner's mean time, microseconds."""

    error_margin_us: float
    """Half of the 95 % confidence interval of the mean, microseconds."""

    default_us: float
    """The default's mean time in the same run, microseconds."""

    regret: float
    """The worst t / t_best - 1 that the bucket's rule leaves at its points, each of them left out in turn."""

    evidence: Evidence
    """Whether the figures were measured on a GPU or predicted by the model."""

    points: tuple[Point, ...]
    """The sizes that were timed in the bucket, ascending; the edge is the last."""

    disturbed: str | None = None
    """What spoilt samples that could not be taken again, in words; None where nothing did."""

    states: Mapping[str, StateTimes] = field(default_factory=dict)
    """The times at the edge in other states of the GPU, by the state's name."""

    @property
    def gain(self) -> float:
        """The default's mean time / the winner's: 1.5 where the winner takes two thirds of the time."""
        return self.default_us / self.mean_us

    @property
    def gain_in_all_states(self) -> float:
        """The geometric mean of `gain` and of the same in each other state of the GPU."""
        return geometric_mean([self.gain, *(one.default_us / one.mean_us for one in self.states.values())])


@dataclass(frozen=True, kw_only=True)
class Table:
    """One kernel's entries on one arch."""

    kernel: str
    """The kernel's declared name."""

    arch: Arch
    """The arch that it was tuned for, and the only one that reads it."""

    source_hash: str
    """The hash of the kernel's code when it was tuned, 16 hex digits."""

    built_with: BuiltWith
    """The GPU and the software with which the figures were taken."""

    axes: Axes
    """Each axis's kind."""

    portfolio: tuple[Config, ...]
    """The configs that serve every entry beside the default, and that a miss searches."""

    portfolio_regret: float
    """The worst t / t_best - 1 of portfolio and default over all swept problems, against every candidate."""

    entries: tuple[Entry, ...]
    """The entries, sorted by `entry_order`."""

    near_exponent: float | BySize | None = None
    """The power of waves by which times are carried from the nearest buckets to a size that has none of its
    own and is at most a doubling away (`aot_tune.choose.points`), one of `NEAR_EXPONENTS`, or two by the size
    of the nearest bucket; None where each bucket tells its own from its points."""

    def entry(self, bucket: Problem) -> Entry | None:
        """The entry of exactly this bucket."""
        return self._by_bucket.get(bucket)

    def near_exponent_at(self, bucket: Problem) -> float | None:
        """The exponent of `near_exponent` for sizes whose nearest bucket is this one."""
        exponent = self.near_exponent
        if isinstance(exponent, BySize):
            return exponent.at(size_of(self.axes, bucket))
        return exponent

    @lazy
    def _by_bucket(self) -> Mapping[Problem, Entry]:
        return {entry.bucket: entry for entry in self.entries}


def size_of(axes: Axes, bucket: Problem) -> int:
    """The size of a bucket as `BySize` counts it: the product of its sizes on the Pow2 axes."""
    return math.prod(bucket.size(name) or 1 for name, axis in axes.items() if isinstance(axis, Pow2))


def entry_order(axes: Axes, bucket: Problem) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """The sort key of entries in a table: classes, then Exact sizes, then Pow2 sizes, each ascending."""
    return (
        tuple(str(value) for name, value in bucket.items() if name not in axes),
        tuple(bucket.size(name) for name, axis in axes.items() if axis.kind == "exact"),
        tuple(bucket.size(name) for name, axis in axes.items() if axis.kind == "pow2"),
    )


def geometric_mean(ratios: Iterable[float]) -> float:
    """The geometric mean; 1.0 where there is no ratio, as for the speed-up of a table without entries."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else 1.0
