"""The rule inside a bucket: which config a size takes, computed from the times at the bucket's points. Pure.

Knows a kernel only by its count of tiles, and no file or GPU. Serving follows it; the tuner judges by it.

The rule in one sentence: a config's time is that at the nearest point whose last tile is full, or not, as
its own would be, times the waves it takes here over the waves it takes there; the fastest config is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from heapq import heappop, heappush
from typing import NamedTuple

from aot_tune.tables.table import Entry, Point, Table
from aot_tune.values.bucket import Axes, Pow2
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

Allowed = Callable[[Config], bool]
"""Whether a config may run for the problem asked about."""

PREDICTED_GAIN = 0.10
"""A predicted entry leaves the default only for a predicted gain of this much. Measured on an H200: with it
one of 54 problems ran over 2 % slower than the default; the model's own error is of this size."""

Tiles = Callable[[Config, Problem], int]
"""(config, problem) -> blocks of work, as a declaration gives it."""


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


# What each config is expected to take ---------------------------------------------------------------------


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


def blocks_in_flight(config: Config, sm_count: int) -> int:
    """How many blocks of a config the GPU runs at a time."""
    return max(sm_count * config.hints.get("occupancy", 1) // config.hints.get("num_ctas", 1), 1)


def waves(tiles: int, config: Config, sm_count: int) -> int:
    """How often the GPU's blocks in flight must be filled to run so many tiles."""
    return max(-(-tiles // blocks_in_flight(config, sm_count)), 1)


class _Cell(NamedTuple):
    """One config at one point."""

    us: float
    waves: int
    full: list[bool]
    """By Pow2 axis, whether its last tile is full: whether one more would take another tile."""
    point: Point


class _Column(NamedTuple):
    """One config at all points."""

    config: Config
    in_flight: int
    mixed: bool
    """Whether its last tile is full at some points and not at others."""
    cells: tuple[_Cell | None, ...]


class _Ready(NamedTuple):
    """A column at the points that tell of a size, nearest first."""

    least_us: float
    """No estimate from it is below this: one wave, of the cell whose waves are shortest."""
    place: int
    column: _Column
    cells: list[_Cell]


_ROUNDED = 1 - 1e-12
"""A bound must not lie above an estimate that was rounded otherwise."""


class _Grown:
    """A problem with one more on each Pow2 axis, made when first asked for: most columns need none."""

    def __init__(self, problem: Problem, names: Sequence[str]) -> None:
        self._problem, self._names = problem, names

    @cached_property
    def problems(self) -> list[Problem]:
        """Where one more takes another tile, the last one was full."""
        return [self._problem.replaced(**{name: self._problem.size(name) + 1}) for name in self._names]


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
        self._bucket = bucket
        self._points = tuple(points)
        self._portfolio = tuple(portfolio)
        self._tiles = tiles
        self._sm_count = sm_count
        self._least_gain = least_gain
        self._columns: dict[Config, tuple[_Column, ...]] = {}
        self._orders: dict[tuple[Config, tuple[int, ...]], list[_Ready]] = {}

    def estimates(self, problem: Problem, default: Config) -> list[Estimate]:
        """What is expected of the portfolio and the default, fastest first; ties in the portfolio's order.

        A config without a time at any point is left out, and so is one without a time at exactly this size.
        """
        return list(self.fastest_first(problem, default))

    def fastest_first(self, problem: Problem, default: Config) -> Iterator[Estimate]:
        """`estimates`, one by one: a config is only looked at while it may be the next.

        Of the first one a third of the columns tell, since none is faster than one wave of it.
        """
        here = self._logs(problem)
        # Nearest first by the sum of |log2|, ties to the larger point: points ascend.
        order = sorted((sum(map(_apart, here, where)), -i) for i, where in enumerate(self._where))
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
        # From the nearest cell that is as full as the config's last tile is here, else from the nearest.
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
        """Each config with what it took at these points, in their order: made once for each order."""
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
        """What the points tell of each config, once for each default."""
        columns = self._columns.get(default)
        if columns is None:
            columns = self._of_portfolio
            if all(column.config != default for column in columns):
                columns = (*columns, self._column(default, len(self._portfolio)))
            self._columns[default] = columns
        return columns

    @cached_property
    def _of_portfolio(self) -> tuple[_Column, ...]:
        configs = dict.fromkeys(self._portfolio)  # a config that is there twice counts where it is first
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

    @cached_property
    def _problems(self) -> tuple[Problem, ...]:
        return tuple(self._bucket.replaced(**point.size) for point in self._points)

    @cached_property
    def _where(self) -> tuple[tuple[float, ...], ...]:
        return tuple(self._logs(problem) for problem in self._problems)

    def _logs(self, problem: Problem) -> tuple[float, ...]:
        return tuple(math.log2(max(problem.size(name), 1)) for name in self._names)


def _apart(one: float, other: float) -> float:
    return abs(one - other)
