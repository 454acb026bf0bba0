"""Table as frozen values: a kernel's tuned entries on one arch. Does no I/O and imports no kernel.

`aot_tune.tables.reader` parses it from JSON text, and `aot_tune.tables.writer` writes the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Axes
from aot_tune.values.config import Config
from aot_tune.values.lazy import lazy
from aot_tune.values.problem import Problem

SCHEMA = 2
"""Version of the format of declared and recorded tables, the only one that is read and written."""

Evidence = Literal["measured", "predicted"]


class Slopes(NamedTuple):
    """Slopes by which slowdowns are carried from points to other sizes (`aot_tune.choose.points`).

    Each has two numbers: of the logarithms of waves and of tiles.
    """

    inside: tuple[float, ...]
    """Slopes between the points of a bucket."""

    outside: tuple[float, ...]
    """Slopes from the nearest buckets to a size without a bucket."""


@dataclass(frozen=True, kw_only=True)
class BuiltWith:
    """GPU and software with which a table's figures were taken."""

    device_name: str
    """GPU's product name; in a predicted table the name of the arch's reference device."""

    sm_count: int
    """Number of the GPU's multiprocessors, by which waves are counted."""

    cuda_tile: str
    """Version of cuda-tile."""

    tileiras: str
    """Version of cuTile's compiler."""

    driver: str
    """Version of the GPU driver; empty for predicted tables."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Measured size of a bucket; the edge is a point too."""

    size: Mapping[str, int]
    """Size on each Pow2 axis."""

    us: tuple[float | None, ...]
    """Mean microseconds of the portfolio's configs in order, then of the default; None: it cannot run."""

    states: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Times in other states of the GPU, in the same order, by the state's name."""


@dataclass(frozen=True, kw_only=True)
class StateTimes:
    """Times at a bucket's edge in one state of the GPU, such as under load."""

    mean_us: float
    """The winner's mean time, microseconds."""

    default_us: float
    """The default's mean time, microseconds."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Winner of a bucket, with its times."""

    bucket: Problem
    """Problem at the bucket's edge."""

    config: Config
    """Winner at the edge: a config of the portfolio, or the default."""

    mean_us: float
    """The winner's mean time, microseconds."""

    error_margin_us: float
    """Half the 95 % confidence interval of the mean, microseconds."""

    default_us: float
    """Default's mean time in the same run, microseconds."""

    regret: float
    """Worst t / t_best - 1 of the bucket's rule at its points, each left out in turn."""

    evidence: Evidence
    """Whether the figures were measured on a GPU or predicted by the model."""

    points: tuple[Point, ...]
    """Sizes that were timed in the bucket, ascending; the edge is the last."""

    disturbed: str | None = None
    """Cause, in words, that spoilt samples that could not be taken again; None without one."""

    states: Mapping[str, StateTimes] = field(default_factory=dict)
    """Times at the edge in other states of the GPU, by the state's name."""

    def is_sound(self) -> bool:
        """Whether its values can be read: False for a malformed `aot_tune.tables.reader.UnreadEntry`."""
        return True

    def is_timed(self) -> bool:
        """Whether a config has a time at a point."""
        return any(us is not None for point in self.points for us in point.us)

    @property
    def gain(self) -> float:
        """Ratio of the default's mean time to the winner's: 1.5 where the winner takes two thirds of it."""
        return self.default_us / self.mean_us


@dataclass(frozen=True, kw_only=True)
class Table:
    """Entries of a kernel on one arch."""

    kernel: str
    """Kernel's declared name."""

    arch: Arch
    """Arch that the table was tuned for, and the only one that reads it."""

    source_hash: str
    """Hash of the kernel's code when it was tuned, 16 hex digits."""

    check_hash: str
    """Hash of the check that its configs passed: make_args, reference, tolerances; 16 hex digits."""

    built_with: BuiltWith
    """GPU and software with which the figures were taken."""

    axes: Axes
    """Kind of each axis."""

    portfolio: tuple[Config, ...]
    """Configs that serve every entry in addition to the default, and that a miss searches."""

    portfolio_regret: float
    """Worst t / t_best - 1 of portfolio and default over all swept problems, against every candidate."""

    entries: tuple[Entry, ...]
    """Entries, sorted by `entry_order`."""

    slopes: Slopes | None = None
    """Slopes fitted to the table's points; None takes those that fit all shipped tables together."""

    def entry(self, bucket: Problem) -> Entry | None:
        """Return the entry of exactly this bucket."""
        return self._by_bucket.get(bucket)

    @lazy
    def configs(self) -> tuple[Config, ...]:
        """Configs of the portfolio and of the entries, each once."""
        return tuple(dict.fromkeys((*self.portfolio, *(entry.config for entry in self.entries))))

    @lazy
    def _by_bucket(self) -> Mapping[Problem, Entry]:
        return {entry.bucket: entry for entry in self.entries}


def entry_order(axes: Axes, bucket: Problem) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the sort key of an entry in a table: classes, Exact sizes, then Pow2 sizes, each ascending."""
    return (
        tuple(str(value) for name, value in bucket.items() if name not in axes),
        tuple(bucket.size(name) for name, axis in axes.items() if axis.kind == "exact"),
        tuple(bucket.size(name) for name, axis in axes.items() if axis.kind == "pow2"),
    )


def geometric_mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean; 1.0 without ratios, as for the speed-up of a table without entries."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else 1.0
