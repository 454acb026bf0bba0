"""The rule inside a bucket: which config a size takes, told from the times at the bucket's points. Pure.

Knows a kernel only by its count of tiles, and no file or GPU. Serving follows it; the tuner judges by it.

The rule in one sentence: a config's time is that at the nearest point whose last tile is full, or not, as
its own would be, times the waves it takes here over the waves it takes there; the fastest config is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from aot_tune.tables.estimate import BucketRule as BucketRule
from aot_tune.tables.estimate import Estimate as Estimate
from aot_tune.tables.estimate import Tiles as Tiles
from aot_tune.tables.estimate import waves as waves
from aot_tune.tables.table import Entry, Point, Table
from aot_tune.values.bucket import Axes, Pow2
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

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


class Pick(NamedTuple):
    """What the rule chose."""

    config: Config
    """The config to run."""

    why: Callable[[], str]
    """Puts `reason` into words, which few picks are asked for."""

    @property
    def reason(self) -> str:
        """Why, for people: the point it was told from and the time expected there."""
        return self.why()


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
        return Pick(entry.config, lambda: f"winner at the bucket's edge: {entry.mean_us:.1f} us")
    for estimate in (rule or rule_of(entry, table, tiles)).fastest_first(problem, default):
        if allowed(estimate.config):
            return Pick(estimate.config, partial(_reason, estimate))
    for config, name in ((entry.config, "the bucket's winner"), (default, "the default")):
        if allowed(config):
            return Pick(config, partial("{}: no point of the bucket tells a time".format, name))
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
