"""The rule inside a bucket: choose a size's config from the times at the bucket's points. Pure.

It uses no file or GPU, and of a kernel only its count of tiles. Serving follows it; the tuner judges by it.

The rule: a config's time at a size is estimated from one point of the bucket. That is the nearest point where
the config's last tile is full, if it is full at this size, or partly filled, if it is so here; where there is
none such, the nearest point. The time there is multiplied by the waves at this size and divided by the waves
at the point. The config with the shortest estimate is taken. Where a point has times in several states of
the GPU, each config's time is that in its worst state (`aot_tune.tables.states`). ``tuned_configs/README.md``
has an example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from aot_tune.tables.states import in_worst_state
from aot_tune.tables.table import Entry, Point, Table
from aot_tune.values.bucket import Axes, Pow2
from aot_tune.values.config import Config
from aot_tune.values.lazy import lazy
from aot_tune.values.problem import Problem

Allowed = Callable[[Config], bool]
"""A function that says whether a config may run for the problem in question."""

PREDICTED_GAIN = 0.10
"""A predicted entry leaves the default only for a config that is expected to be faster by this fraction.
Measured on an H200: one of 54 problems then ran over 2 % slower than with the default. The model's own error
is of this size."""

Tiles = Callable[[Config, Problem], int]
"""A declaration's function from (config, problem) to the number of tiles, blocks of work."""


class Pick(NamedTuple):
    """The rule's choice."""

    config: Config
    """The config to run."""

    why: Callable[[], str]
    """A function that makes `reason`, which is read of few picks."""

    @property
    def reason(self) -> str:
        """The reason in words: the point that the estimate is from, and the expected time."""
        return self.why()


def rule_of(entry: Entry, table: Table, tiles: Tiles | None) -> BucketRule:
    """Prepare the rule for an entry of a table; keep it for the next size of the same bucket."""
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
    """Choose the config for a problem of an entry's bucket.

    1. At the edge itself it is the entry's config.
    2. Otherwise it is the config with the shortest estimate (module docstring); at a point, the times there.
    3. Where no point has a time, it is the entry's config, else the default.

    Each step passes over configs that are not allowed.

    Args:
        entry: The bucket's entry.
        table: The entry's table.
        tiles: The declaration's count of tiles, or None.
        default: The declaration's default for this problem; the points' last times are taken for its times.
        problem: A problem of this bucket, or of another bucket that this entry shall serve.
        allowed: Whether a config may run here: legal, in the search space. Called until one may.
        rule: The result of `rule_of` for this entry, where the caller kept it.

    Returns:
        The pick, or None when no config is allowed, not even the default.
    """
    if problem == entry.bucket and allowed(entry.config):
        return Pick(entry.config, lambda: f"winner at the bucket's edge: {entry.mean_us:.1f} us")
    for estimate in (rule or rule_of(entry, table, tiles)).fastest_first(problem, default):
        if allowed(estimate.config):
            return Pick(estimate.config, partial(_reason, estimate))
    for config, name in ((entry.config, "the bucket's winner"), (default, "the default")):
        if allowed(config):
            return Pick(config, partial("{}: no point of the bucket has a time".format, name))
    return None


def _reason(estimate: Estimate) -> str:
    sizes = " ".join(f"{name}={size}" for name, size in estimate.point.size.items())
    scaled = "" if estimate.scale == 1 else f", times {estimate.scale:.2f} for its waves"
    return f"fastest expected, {estimate.us:.1f} us: estimated from the point {sizes}{scaled}"


# Estimates ------------------------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """The expected time of one config at one size. A tuple for speed: a pick makes one for each config."""

    us: float
    """Expected time, microseconds."""

    config: Config
    """The config."""

    point: Point
    """The point that the estimate is from."""

    scale: float
    """Waves at the size over waves at the point; 1 where the kernel declares no tiles."""


def blocks_in_flight(config: Config, sm_count: int) -> int:
    """How many blocks of a config the GPU runs at a time."""
    return max(sm_count * config.hints.get("occupancy", 1) // config.hints.get("num_ctas", 1), 1)


def waves(tiles: int, config: Config, sm_count: int) -> int:
    """How often the GPU must be filled with blocks to run this number of tiles, 1 at least."""
    return max(-(-tiles // blocks_in_flight(config, sm_count)), 1)


class _Cell(NamedTuple):
    """The time of one config at one point, and what scaling it needs."""

    us: float
    waves: int
    full: list[bool]
    """For each Pow2 axis, whether the last tile is full: a size larger by one would take another tile."""
    point: Point


class _Column(NamedTuple):
    """The times of one config at all points."""

    config: Config
    in_flight: int
    mixed: bool
    """Whether the config's last tile is full at some points and partly filled at others."""
    cells: tuple[_Cell | None, ...]


class _Ready(NamedTuple):
    """A column's cells at the points that are used for a size, nearest first."""

    least_us: float
    """A lower bound of the column's estimates: one wave of the cell whose waves are shortest."""
    place: int
    column: _Column
    cells: list[_Cell]


_ROUNDED = 1 - 1e-12
"""The factor that keeps a lower bound below an estimate whose rounding differs."""


class _Grown:
    """A problem made larger by one on each Pow2 axis in turn, on demand: most columns do not need it."""

    def __init__(self, problem: Problem, names: Sequence[str]) -> None:
        self._problem, self._names = problem, names

    @lazy
    def problems(self) -> list[Problem]:
        """One problem for each axis: where it has more tiles, the last tile was full."""
        return [self._problem.replaced(**{name: self._problem.size(name) + 1}) for name in self._names]


class BucketRule:
    """The rule prepared for one entry; kept, it makes each pick cost one or two counts of tiles a config.

    Args:
        axes: The kernel's axes.
        bucket: The problem at the bucket's edge.
        points: The bucket's points; ``us`` is in the order of `portfolio`, with the default's time last.
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
        self._bucket = bucket
        self._points = tuple(map(in_worst_state, points))
        self._portfolio = tuple(portfolio)
        self._tiles = tiles
        self._sm_count = sm_count
        self._least_gain = least_gain
        self._columns: dict[Config, tuple[_Column, ...]] = {}
        self._orders: dict[tuple[Config, tuple[int, ...]], list[_Ready]] = {}

    def estimates(self, problem: Problem, default: Config) -> list[Estimate]:
        """Estimate the portfolio and the default, fastest first; equal estimates keep the portfolio's order.

        A config without a time at any point is left out. At a point, so is one without a time there.
        """
        return list(self.fastest_first(problem, default))

    def fastest_first(self, problem: Problem, default: Config) -> Iterator[Estimate]:
        """Yield `estimates` one by one, computing only as many as the next one depends on.

        Usually a third of the columns decide the first: the others could not be faster even with one wave.
        """
        here = self._logs(problem)
        # The nearest first by the sum of |log2|, of equally near ones the larger point: points ascend.
        order = sorted((sum(map(_log_distance, here, where)), -i) for i, where in enumerate(self._where))
        places = tuple(-i for _, i in order)
        if places and self._problems[places[0]] == problem:
            places = places[:1]
        columns, grown = self._ordered(default, places), _Grown(problem, self._names)
        limit = math.inf
        if self._least_gain:
            own = next((ready for ready in columns if ready.column.config == default), None)
            if own is not None:
                limit = self._estimate(own, problem, grown).us / (1 + self._least_gain)
        waiting: list[tuple[float, int, Estimate]] = []
        for ready in columns:
            while waiting and waiting[0][0] < ready.least_us:
                yield heappop(waiting)[2]
            expected = self._estimate(ready, problem, grown)
            if expected.us <= limit or expected.config == default:
                heappush(waiting, (expected.us, ready.place, expected))
        while waiting:
            yield heappop(waiting)[2]

    def _estimate(self, ready: _Ready, problem: Problem, grown: _Grown) -> Estimate:
        # From the nearest cell whose last tile is full on the same axes as here, else from the nearest.
        column, tiles = ready.column, self._tiles
        nearest, config = ready.cells[0], column.config
        if tiles is None:
            return Estimate(nearest.us, config, nearest.point, 1.0)
        count = tiles(config, problem)
        if column.mixed:
            full = [tiles(config, larger) > count for larger in grown.problems]
            for cell in ready.cells:
                if cell.full == full:
                    nearest = cell
                    break
        scale = (-(-count // column.in_flight) or 1) / nearest.waves
        return Estimate(nearest.us * scale, config, nearest.point, scale)

    def _ordered(self, default: Config, places: tuple[int, ...]) -> list[_Ready]:
        """Each config with its cells at these points, in their order; made once for each order."""
        key = (default, places)
        ordered = self._orders.get(key)
        if ordered is None:
            ordered = []
            for place, column in enumerate(self._columns_with(default)):
                cells = [cell for i in places if (cell := column.cells[i]) is not None]
                if cells:
                    waved = self._tiles is not None
                    least_us = min(cell.us / cell.waves for cell in cells) if waved else cells[0].us
                    ordered.append(_Ready(least_us * _ROUNDED, place, column, cells))
            ordered.sort(key=lambda ready: ready.least_us)
            self._orders[key] = ordered
        return ordered

    def _columns_with(self, default: Config) -> tuple[_Column, ...]:
        """Each config's column, the default's included; made once for each default."""
        columns = self._columns.get(default)
        if columns is None:
            columns = self._of_portfolio
            if all(column.config != default for column in columns):
                columns = (*columns, self._column(default, len(self._portfolio)))
            self._columns[default] = columns
        return columns

    @lazy
    def _of_portfolio(self) -> tuple[_Column, ...]:
        configs = dict.fromkeys(self._portfolio)  # of a repeated config the first column counts
        return tuple(self._column(config, self._portfolio.index(config)) for config in configs)

    def _column(self, config: Config, place: int) -> _Column:
        cells: list[_Cell | None] = []
        in_flight = blocks_in_flight(config, self._sm_count)
        for point, problem in zip(self._points, self._problems, strict=True):
            us = point.us[place]
            if us is None:
                cells.append(None)
                continue
            count = self._tiles(config, problem) if self._tiles else 1
            full = (
                [self._tiles(config, larger) > count for larger in _Grown(problem, self._names).problems]
                if self._tiles
                else []
            )
            cells.append(_Cell(us, max(-(-count // in_flight), 1), full, point))
        kinds = [cell.full for cell in cells if cell is not None]
        return _Column(config, in_flight, any(full != kinds[0] for full in kinds), tuple(cells))

    @lazy
    def _problems(self) -> tuple[Problem, ...]:
        return tuple(self._bucket.replaced(**point.size) for point in self._points)

    @lazy
    def _where(self) -> tuple[tuple[float, ...], ...]:
        return tuple(self._logs(problem) for problem in self._problems)

    def _logs(self, problem: Problem) -> tuple[float, ...]:
        return tuple(math.log2(max(problem.size(name), 1)) for name in self._names)


def _log_distance(one: float, other: float) -> float:
    return abs(one - other)
