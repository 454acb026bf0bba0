"""The document: one kernel's tuned entries on one arch, as values. Does no I/O and knows no kernel.

`aot_tune.tables.reader` turns it into JSON text and back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Axes
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

SCHEMA = 1
"""The version of the document this release writes, and the newest it reads."""

Evidence = Literal["measured", "predicted"]


@dataclass(frozen=True, kw_only=True)
class BuiltWith:
    """What the figures were taken with."""

    device_name: str
    """The GPU's product name; ``predicted`` entries name the reference device of the arch."""

    sm_count: int
    """Its multiprocessors, by which waves are counted."""

    cuda_tile: str
    """Version of cuda-tile."""

    tileiras: str
    """Version of cuTile's compiler."""

    driver: str
    """Version of the GPU driver; empty for predicted tables."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured size inside a bucket, its edge included."""

    size: Mapping[str, int]
    """The size on each Pow2 axis."""

    us: tuple[float | None, ...]
    """Mean microseconds of the portfolio's configs in order, the default's last; None where it cannot run."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One bucket's winner."""

    bucket: Problem
    """The problem at the bucket's edge."""

    config: Config
    """The winner at the edge: one of the portfolio, or the default."""

    mean_us: float
    """Its mean, microseconds."""

    error_margin_us: float
    """Half of the 95 % confidence interval of the mean, microseconds."""

    default_us: float
    """The default's mean in the same run, microseconds."""

    regret: float
    """The worst t / t_best - 1 that the rule in the bucket leaves at its points, each left out in turn."""

    evidence: Evidence
    """Whether the figures are measured or a model's."""

    points: tuple[Point, ...]
    """The sizes measured inside the bucket, ascending; the edge is the last."""

    @property
    def gain(self) -> float:
        """The default's mean time / the winner's: 1.5 where the winner takes two thirds of the time."""
        return self.default_us / self.mean_us


@dataclass(frozen=True, kw_only=True)
class Table:
    """One kernel's entries on one arch."""

    kernel: str
    """The kernel's declared name."""

    arch: Arch
    """The arch it was tuned for; read on no other."""

    source_hash: str
    """Hash of the kernel's code when it was tuned, 16 hex digits."""

    built_with: BuiltWith
    """What the figures were taken with."""

    axes: Axes
    """Each axis's kind."""

    portfolio: tuple[Config, ...]
    """The configs that serve every entry, and that a miss searches."""

    portfolio_regret: float
    """The worst t / t_best - 1 of portfolio and default over all swept problems, against every candidate."""

    entries: tuple[Entry, ...]
    """Sorted by `entry_order`."""

    def entry(self, bucket: Problem) -> Entry | None:
        """The entry of exactly this bucket."""
        return self._by_bucket.get(bucket)

    @cached_property
    def _by_bucket(self) -> Mapping[Problem, Entry]:
        return {entry.bucket: entry for entry in self.entries}


def entry_order(axes: Axes, bucket: Problem) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """The order of entries in a table: classes, then Exact sizes, then Pow2 sizes, each ascending."""
    return (
        tuple(str(value) for name, value in bucket.items() if name not in axes),
        tuple(bucket.size(name) for name, axis in axes.items() if axis.kind == "exact"),
        tuple(bucket.size(name) for name, axis in axes.items() if axis.kind == "pow2"),
    )


def geometric_mean(ratios: Iterable[float]) -> float:
    """The geometric mean; 1.0 of nothing, as a speed-up over no entries."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else 1.0
