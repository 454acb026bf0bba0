"""The rule inside a bucket: which config a size takes, told from the times at the bucket's points. Pure.

Knows a kernel only by its count of tiles, and no file or GPU. Serving follows it; the tuner judges by it.

The rule in one sentence: a config's time is that at the nearest point whose last tile is full, or not, as
its own would be, times the waves it takes here over the waves it takes there; the fastest config is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aot_tune.bucket import Axes, Pow2
from aot_tune.config import Config
from aot_tune.problem import Problem
from aot_tune.table import Entry, Point, Table

Tiles = Callable[[Config, Problem], int]
"""(config, problem) -> blocks of work, as a declaration gives it."""

Allowed = Callable[[Config], bool]
"""Whether a config may run for the problem asked about."""

PREDICTED_GAIN = 0.10
"""A predicted entry leaves the default only for a predicted gain of this much. Measured on an H200: with it
one of 54 problems ran over 2 % slower than the default; the model's own error is of this size."""

_INSIDE = ((5, 11), (6, 0), (7, 11))
"""Points inside a bucket: eighths of the edge, and what is taken off where those are a multiple of 16.

One point with a partly filled last tile in each half of the bucket, because a tile of a quarter of the edge
takes one more row of tiles above 3/4 of it: on the recorded sweep (tests/data), points in one half alone
leave up to 12 % in the other, one in each half leaves none. Between them 3/4 itself: its last tile is full
for most tile sizes, as only the edge's is otherwise, and it is a size people use (96, 192, 384, 768). 11 off
leaves no multiple of 16, and no tile size full.
"""


@dataclass(frozen=True, kw_only=True)
class Pick:
    """What the rule chose."""

    config: Config
    """The config to run."""

    reason: str
    """Why, for people: the point it was told from and the time expected there."""


class Estimate(NamedTuple):
    """What the rule expects of one config at one size. A tuple, because a pick makes one of each config."""

    us: float
    """Expected time, microseconds."""

    config: Config
    """The config."""

    point: Point
    """The point it was told from."""

    scale: float
    """Waves at the size over waves at the point; 1 where the kernel declares no tiles."""


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


def waves(tiles: int, config: Config, sm_count: int) -> int:
    """How often the GPU's blocks in flight must be filled to run so many tiles."""
    in_flight = sm_count * config.hints.get("occupancy", 1) // config.hints.get("num_ctas", 1)
    return max(-(-tiles // max(in_flight, 1)), 1)


class BucketRule:
    """The rule made ready for one entry: keep it, and each pick costs one or two counts of tiles a config.

    Args:
        axes: The kernel's axes.
        bucket: The problem at the bucket's edge.
        points: Measured sizes; ``us`` in the order of `portfolio`, the default's last.
        portfolio: The table's portfolio.
        tiles: The declaration's count of tiles, or None.
        sm_count: Multiprocessors of the GPU that the points were measured on.
        least_gain: How much faster than the default a config must be expected to be, as a fraction.
    """

    def __init__(
        self,
        *,
        axes: Axes,
        bucket: Problem,
        points: Sequence[Point],
        portfolio: Sequence[Config],
        tiles: Tiles | None,
        sm_count: int,
        least_gain: float = 0.0,
    ) -> None:
        self._names = tuple(name for name, axis in axes.items() if isinstance(axis, Pow2))
        self._points = tuple(points)
        self._problems = tuple(bucket.replaced(**point.size) for point in points)
        self._where = tuple(self._logs(problem) for problem in self._problems)
        self._portfolio = tuple(portfolio)
        self._tiles = tiles
        self._sm_count = sm_count
        self._least_gain = least_gain
        self._counted: dict[tuple[int, Config], tuple[int, tuple[bool, ...]]] = {}

    def estimates(self, problem: Problem, default: Config) -> list[Estimate]:
        """What is expected of the portfolio and the default, fastest first; ties in the portfolio's order.

        A config without a time at any point is left out, and so is one without a time at exactly this size.
        """
        here = self._logs(problem)
        # Nearest first by the sum of |log2|, ties to the larger point: points ascend.
        order = sorted(range(len(self._points)), key=lambda i: (sum(map(_apart, here, self._where[i])), -i))
        if order and self._problems[order[0]] == problem:
            order = order[:1]
        grown = self._grown(problem)
        found: dict[Config, Estimate] = {}
        for column, config in enumerate((*self._portfolio, default)):
            known = [i for i in order if self._points[i].us[column] is not None]
            if known and config not in found:
                found[config] = self._estimate(config, column, self._count(config, problem, grown), known)
        if self._least_gain and default in found:
            limit = found[default].us / (1 + self._least_gain)
            found = {config: e for config, e in found.items() if config == default or e.us <= limit}
        return sorted(found.values(), key=_us)

    def _estimate(
        self, config: Config, column: int, count: tuple[int, tuple[bool, ...]], known: Sequence[int]
    ) -> Estimate:
        """From the nearest of the points `known` that is as full as `count` says, else from the nearest."""
        waves_here, full = count
        nearest = next((i for i in known if self._count_at(i, config)[1] == full), known[0])
        point = self._points[nearest]
        us, scale = point.us[column], waves_here / self._count_at(nearest, config)[0]
        assert us is not None
        return Estimate(us * scale, config, point, scale)

    def _count_at(self, index: int, config: Config) -> tuple[int, tuple[bool, ...]]:
        key = (index, config)
        if key not in self._counted:
            problem = self._problems[index]
            self._counted[key] = self._count(config, problem, self._grown(problem))
        return self._counted[key]

    def _count(
        self, config: Config, problem: Problem, grown: Sequence[Problem]
    ) -> tuple[int, tuple[bool, ...]]:
        """Waves, and by axis whether the last tile is full: whether one more would take another tile."""
        if self._tiles is None:
            return 1, ()
        tiles = self._tiles(config, problem)
        full = tuple(self._tiles(config, larger) > tiles for larger in grown)
        return waves(tiles, config, self._sm_count), full

    def _grown(self, problem: Problem) -> list[Problem]:
        if self._tiles is None:
            return []
        return [problem.replaced(**{name: problem.size(name) + 1}) for name in self._names]

    def _logs(self, problem: Problem) -> tuple[float, ...]:
        return tuple(math.log2(max(problem.size(name), 1)) for name in self._names)


def _apart(one: float, other: float) -> float:
    return abs(one - other)


def _us(estimate: Estimate) -> float:
    return estimate.us


def rule_of(entry: Entry, table: Table, tiles: Tiles | None) -> BucketRule:
    """The rule made ready for an entry of a table; keep it for the next size of the same bucket."""
    return BucketRule(
        axes=table.axes,
        bucket=entry.bucket,
        points=entry.points,
        portfolio=table.portfolio,
        tiles=tiles,
        sm_count=table.built_with.sm_count,
        least_gain=PREDICTED_GAIN if entry.evidence == "predicted" else 0.0,
    )


def pick(
    entry: Entry,
    table: Table,
    tiles: Tiles | None,
    default: Config,
    problem: Problem,
    allowed: Allowed,
    rule: BucketRule | None = None,
) -> Pick | None:
    """The config for a problem of an entry's bucket.

    1. at the edge itself, the entry's config
    2. else the config that is expected to be fastest (module docstring); at a point its own times tell
    3. where no point tells anything, the entry's config, then the default

    Args:
        entry: The bucket's entry.
        table: The table it is of.
        tiles: The declaration's count of tiles, or None.
        default: The declaration's default for this problem; the points' last times are taken to be its.
        problem: A problem of this bucket, or of another one that this entry shall serve.
        allowed: Whether a config may run here: legal, in the search space. Asked only until one may.
        rule: What `rule_of` gave for this entry, to save making it again.

    Returns:
        The pick, or None when nothing is allowed, not even the default.
    """
    if problem == entry.bucket and allowed(entry.config):
        return Pick(config=entry.config, reason=f"winner at the bucket's edge: {entry.mean_us:.1f} us")
    for estimate in (rule or rule_of(entry, table, tiles)).estimates(problem, default):
        if allowed(estimate.config):
            return Pick(config=estimate.config, reason=_reason(estimate))
    for config, name in ((entry.config, "the bucket's winner"), (default, "the default")):
        if allowed(config):
            return Pick(config=config, reason=f"{name}: no point of the bucket tells a time")
    return None


def _reason(estimate: Estimate) -> str:
    sizes = " ".join(f"{name}={size}" for name, size in estimate.point.size.items())
    scaled = "" if estimate.scale == 1 else f", times {estimate.scale:.2f} for its waves"
    return f"fastest expected, {estimate.us:.1f} us: told from the point {sizes}{scaled}"


def leave_one_out_regret(
    points: Sequence[Point],
    *,
    axes: Axes,
    bucket: Problem,
    portfolio: Sequence[Config],
    default: Config,
    tiles: Tiles | None,
    sm_count: int,
    least_gain: float = 0.0,
) -> float:
    """The worst t / t_best - 1 that the rule leaves at an entry's points, each left out in turn.

    The best is the best of the portfolio and the default. A bucket of one point leaves nothing to be told: 0.
    """
    worst = 0.0
    columns = (*portfolio, default)
    for left_out in points:
        rule = BucketRule(
            axes=axes, bucket=bucket, points=[p for p in points if p is not left_out], portfolio=portfolio,
            tiles=tiles, sm_count=sm_count, least_gain=least_gain,
        )  # fmt: skip
        times = {config: us for config, us in zip(columns, left_out.us, strict=True) if us is not None}
        told = rule.estimates(bucket.replaced(**left_out.size), default)
        chosen = next((estimate.config for estimate in told if estimate.config in times), None)
        if chosen is not None:
            worst = max(worst, times[chosen] / min(times.values()) - 1)
    return worst
