"""The rule between measured sizes: choose a size's config from the times at points near it. Pure.

It uses no file or GPU, and of a kernel only its count of tiles. Serving follows it; the tuner judges by it.

The rule: at a point a config's *lag* is its time / the fastest config's there, the worst over the states of
the GPU that were timed. A config's lag at another size is estimated as the weighted geometric mean of its
lags at a few points, nearer points counting more (`_NEARNESS`), each first corrected for waves: multiplied by

    (waves at this size / waves at the point) ** exponent

The config with the least estimate is taken. The points are those of the size's own bucket; for a size without
a bucket of its own, the nearest point of each of the nearest buckets (`MOST_NEIGHBOURS`). What has no time at
the nearest point, or takes more than twice the fastest's there, is not estimated.

The *exponent* is 1, 1/2 or 0: that with which the rule leaves least at the bucket's points, each left out in
turn; for a size without a bucket, at those of buckets spread over the table. Some kernels take whole waves,
because their blocks wait for each other's ends; others are bound by memory, or keep more blocks on a
multiprocessor than the config says, and a further wave costs them little. More than a doubling away 1/2 is
taken. Waves at the size count the multiprocessors of the GPU that launches, waves at the
point those of the GPU that was measured. A partly filled last tile is a tile, so waves tell of it too. The
share of each operand that L2 holds does not count: with points of other shares taken to be farther away, the
rule left the same on the tables of sm90.

Where the points are other buckets', the default is taken unless the choice is expected to be faster by more
than a tie (`OVERLAP`). ``tuned_configs/README.md`` has an example, and ``tests/tables/test_rule.py`` holds
what the rule leaves on measured tables.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import sub
from typing import NamedTuple

from aot_tune.tables.states import in_worst_state
from aot_tune.tables.table import Entry, Point, Table
from aot_tune.values.bucket import Axes, Pow2, edge
from aot_tune.values.config import Config
from aot_tune.values.lazy import lazy
from aot_tune.values.problem import Problem

Allowed = Callable[[Config], bool]
"""A function that says whether a config may run for the problem in question."""

PREDICTED_GAIN = 0.10
"""A predicted entry leaves the default only for a config that is expected to be faster by this fraction.
Measured on an H200: one of 54 problems then ran over 2 % slower than with the default. The model's own error
is of this size."""

OVERLAP = 0.02
"""Estimates from other buckets overlap where they are within this fraction of each other, the tie band of
measured times. On the tables of sm90 this halves the sizes at which the choice loses over 3 % to the
default."""

MOST_NEIGHBOURS = 4
"""Buckets from whose nearest points a size without a bucket of its own is estimated. On the tables of sm90,
buckets left out, one leaves 2.0 % in the geometric mean, two 1.9 %, four 1.7 % and eight 1.8 %."""

FAR_EXPONENT = 0.5
"""The exponent of waves for sizes more than a doubling away from any bucket."""

Tiles = Callable[[Config, Problem], int]
"""A declaration's function from (config, problem) to the number of tiles, blocks of work."""

DefaultAt = Callable[[Problem], Config]
"""A function from a problem to the declaration's default for it."""


class Pick(NamedTuple):
    """The rule's choice."""

    config: Config
    """The config to run."""

    why: Callable[[], str]
    """A function that makes `reason`, which is read of few picks."""

    @property
    def reason(self) -> str:
        """The reason in words: the points that the estimate is from, and how fast it is expected to be."""
        return self.why()


def rule_of(entry: Entry, table: Table, tiles: Tiles | None, default_at: DefaultAt) -> BucketRule:
    """Prepare the rule for an entry of a table; keep it for the next size near the same bucket."""
    return BucketRule(
        axes=table.axes,
        bucket=entry.bucket,
        points=entry.points,
        portfolio=table.portfolio,
        default_at=default_at,
        tiles=tiles,
        sm_count=table.built_with.sm_count,
        least_gain=PREDICTED_GAIN if entry.evidence == "predicted" else 0.0,
    )


def pick(
    entry: Entry,
    rule: BucketRule,
    default: Config,
    problem: Problem,
    allowed: Allowed,
    *,
    neighbours: Sequence[BucketRule] = (),
    outside: float = FAR_EXPONENT,
    sm_count: int | None = None,
) -> Pick | None:
    """Choose the config for a problem of an entry's bucket, or of none.

    1. At the edge itself it is the entry's config.
    2. Otherwise it is the config with the least estimate (module docstring); at a point, the times there.
       Outside the entry's bucket it is the default, where the estimates of both overlap.
    3. Where no point has a time, it is the entry's config, else the default.

    Each step passes over configs that are not allowed.

    Args:
        entry: The problem's own entry, or the nearest.
        rule: The result of `rule_of` for this entry.
        default: The declaration's default for this problem.
        problem: A problem of this bucket, or of one without an entry.
        allowed: Whether a config may run here: legal, in the search space. Called until one may.
        neighbours: The rules of the next nearest entries, for a problem outside the entry's bucket.
        outside: As for `BucketRule.ranking`.
        sm_count: Multiprocessors of the GPU that launches; None for those of the GPU that was measured.

    Returns:
        The pick, or None when no config is allowed, not even the default.
    """
    if problem == entry.bucket and allowed(entry.config):
        return Pick(entry.config, lambda: f"winner at the bucket's edge: {entry.mean_us:.1f} us")
    ranking = rule.ranking(problem, default, neighbours=neighbours, outside=outside, sm_count=sm_count)
    own = math.inf if ranking.inside else ranking.lag_of(default)
    for lag, config in ranking.lags:
        if own - lag <= _OVERLAP and allowed(default):
            return Pick(default, partial(_overlap, ranking, own - lag, config))
        if allowed(config):
            return Pick(config, partial(_reason, ranking, lag))
    for config, name in ((entry.config, "the bucket's winner"), (default, "the default")):
        if allowed(config):
            return Pick(config, partial("{}: no point of the bucket has a time".format, name))
    return None


def _reason(ranking: Ranking, lag: float) -> str:
    us = f", {ranking.us(lag):.1f} us" if ranking.inside else ""
    return f"fastest expected{us}: estimated from {ranking.basis}"


def _overlap(ranking: Ranking, behind: float, fastest: Config) -> str:
    if not behind:
        return f"the default, fastest expected: estimated from {ranking.basis}"
    return (
        f"the default: expected to take {math.expm1(behind):.1%} longer than {fastest}, and estimates from "
        f"other buckets overlap within {OVERLAP:.0%}; estimated from {ranking.basis}"
    )


# Estimates ------------------------------------------------------------------------------------------------


class Ranking(NamedTuple):
    """The estimates of all configs for one size."""

    lags: list[tuple[float, Config]]
    """The logarithm of each config's expected time over one that all share, the fastest first."""

    base: float
    """The logarithm of that shared time, microseconds; of other buckets' sizes where `inside` is false."""

    inside: bool
    """Whether the points are of the size's own bucket."""

    exponent: float
    """The power of waves with which times are taken to grow."""

    near: Sequence[tuple[float, BucketRule, int]]
    """The points: how far each is, its rule and its place there."""

    weights: Sequence[float]
    """The points' weights; their sum is 1."""

    def lag_of(self, config: Config) -> float:
        """The lag of a config; infinite where it has no estimate."""
        column = self.near[0][1].column(config) if self.near else None
        return next((lag for lag, other in self.lags if other is column), math.inf)

    def us(self, lag: float) -> float:
        """The expected time, microseconds, of a config with this lag."""
        return math.exp(self.base + lag)

    @property
    def basis(self) -> str:
        """The points with their weights and the exponent, in words."""
        problems = [rule.problems[place] for _, rule, place in self.near]
        sizes = [name for name, value in problems[0].items() if type(value) is int]
        told = [name for name in sizes if len({problem[name] for problem in problems}) > 1] or sizes
        points = [" ".join(f"{name}={problem[name]}" for name in told) for problem in problems]
        if len(points) > 1:
            weighed = sorted(zip(self.weights, points, strict=True), reverse=True)
            points = [f"{point} ({weight:.0%})" for weight, point in weighed]
        waves = {0.0: "", 0.5: ", by the root of waves", 1.0: ", by waves"}[self.exponent]
        return f"{', '.join(points)}{waves}"


def blocks_in_flight(config: Config, sm_count: int) -> int:
    """How many blocks of a config the GPU runs at a time."""
    occupancy, num_ctas = _sharing(config)
    return max(sm_count * occupancy // num_ctas, 1)


def _sharing(config: Config) -> tuple[int, int]:
    """Blocks that share a multiprocessor, and multiprocessors that share a block."""
    return config.hints.get("occupancy", 1), config.hints.get("num_ctas", 1)


def waves(tiles: int, config: Config, sm_count: int) -> int:
    """How often the GPU must be filled with blocks to run this number of tiles, 1 at least."""
    return max(-(-tiles // blocks_in_flight(config, sm_count)), 1)


_NEARNESS = 0.1
"""Doublings that are added to a point's distance; its weight is 1 / (distance + this) squared. With half or
twice as much the rule leaves the same on the tables of sm90."""

_EXPONENTS = (1.0, 0.5, 0.0)
"""The exponents of waves, the preferred one first."""

_PREFERENCE = 0.002
"""The sum of logarithms of regrets over a bucket's points by which another exponent must be better than the
preferred one: less than any choice that is worth a change, and more than rounding."""


_HOPELESS = 2.0
"""The lag at the nearest point beyond which a config is not estimated: it keeps that lag. On the tables of
sm90 this changes nothing."""


class _Row(NamedTuple):
    """What was measured at one point, without waves, at one exponent."""

    lags: list[float | None]
    """The logarithm of each column's lag, the least being 0; None without a time."""

    us: float
    """The logarithm of the time that a lag of 0 stands for, microseconds."""


class _Candidate(NamedTuple):
    """A config that may be the fastest near a point."""

    config: Config
    """The config."""

    column: int
    """Its column."""

    waves: float
    """The logarithm of its waves at the point."""

    occupancy: int
    """Blocks that share a multiprocessor, as the config says."""

    num_ctas: int
    """Multiprocessors that share a block, as the config says."""


class BucketRule:
    """The rule prepared for one entry; kept, it makes each pick cost one count of tiles a config.

    Args:
        axes: The kernel's axes.
        bucket: The problem at the bucket's edge.
        points: The bucket's points; ``us`` is in the order of `portfolio`, with the default's time last.
        portfolio: The table's portfolio.
        default_at: The default at each point, whose time is the point's last.
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
        default_at: DefaultAt,
        tiles: Tiles | None,
        sm_count: int,
        least_gain: float = 0.0,
    ) -> None:
        self._axes = axes
        self._pow2 = tuple(name for name, axis in axes.items() if isinstance(axis, Pow2))
        self._exact = tuple(name for name in axes if name not in self._pow2)
        self._names = (*self._pow2, *self._exact)
        self._bucket = bucket
        self._points = tuple(
            map(in_worst_state, (point for point in points if any(us is not None for us in point.us)))
        )
        self._portfolio = tuple(portfolio)
        self._default_at = default_at
        self._tiles = tiles
        self._sm_count = sm_count
        self._least_gain = least_gain
        self._rows: dict[float, list[_Row]] = {}

    def column(self, config: Config) -> Config | None:
        """The very object that stands for a config here; None where none does."""
        place = self._place_of.get(config)
        return None if place is None else self._columns[place]

    def ranking(
        self,
        problem: Problem,
        default: Config,
        *,
        neighbours: Sequence[BucketRule] = (),
        outside: float = FAR_EXPONENT,
        sm_count: int | None = None,
    ) -> Ranking:
        """Estimate the portfolio and the defaults, fastest first; equal estimates keep the portfolio's order.

        A config without a time at any of the points is left out; so is the default, where another was the
        default at the points. At a point of the bucket its own times alone count.

        Args:
            problem: The size.
            default: The default there, which `least_gain` is compared with.
            neighbours: The rules of the next nearest buckets, for a size outside this bucket.
            outside: The exponent for such a size.
            sm_count: Multiprocessors of the GPU that launches; None for those of the GPU that was measured.
        """
        here, inside = self._logs_of(problem), self._holds(problem)
        if inside:
            order = sorted((self._distance(here, place), -place) for place in range(len(self._points)))
            if order and not order[0][0]:
                del order[1:]
            near = [(distance, self, -place) for distance, place in order]
        else:
            near = [rule._nearest(here) for rule in (self, *neighbours) if rule._points]
        exact = inside and near and not near[0][0]
        exponent = 0.0 if exact else self.exponent if inside else outside
        weights = [1 / (distance + _NEARNESS) ** 2 for distance, _, _ in near]
        total = sum(weights)
        weights = [weight / total for weight in weights]
        lags, base = self._lags_at(problem, near, weights, exponent, sm_count or self._sm_count)
        if self._least_gain:
            own = next((lag for lag, config in lags if config == default), math.inf)
            limit = own - math.log1p(self._least_gain)
            lags = [one for one in lags if one[0] <= limit or one[1] == default]
        return Ranking(lags, base, inside, exponent, near, weights)

    def _lags_at(
        self,
        problem: Problem,
        near: Sequence[tuple[float, BucketRule, int]],
        weights: Sequence[float],
        exponent: float,
        sm_count: int,
    ) -> tuple[list[tuple[float, Config]], float]:
        """Each config's lag, the least first, and the base of the lags."""
        # Written for speed: an unseen shape waits for it.
        if not near:
            return [], 0.0
        _, rule, nearest = near[0]
        tiles = self._tiles if exponent else None
        rows, base = [], 0.0
        for weight, (_, each, place) in zip(weights, near, strict=True):
            cells, us = each._rows_at(exponent)[place]
            base += weight * us
            rows.append((weight, cells, each))
        hopeful, hopeless = rule._candidates[nearest]
        means = []
        for candidate in hopeful:
            place = candidate[1]
            total = share = 0.0
            for weight, cells, each in rows:
                if place >= self._shared and each is not rule:
                    cell = each._cell_of(candidate[0], cells)
                else:
                    cell = cells[place]
                if cell is not None:
                    total += weight * cell
                    share += weight
            mean = total / share
            means.append((mean + exponent * candidate[2], place, mean, candidate))
        if tiles is None:
            means.sort()
            lags = [(mean, candidate.config) for _, _, mean, candidate in means]
        else:
            lags = _with_waves(problem, means, tiles, exponent, sm_count)
        least = lags[0][0]
        lags += [(least + lag, config) for lag, config in hopeless]
        return lags, base

    # Where points are --------------------------------------------------------------------------------------

    def _holds(self, problem: Problem) -> bool:
        """Whether a problem is of this rule's bucket; the classes are the same, as the caller knows."""
        bucket = self._bucket
        return all(problem.size(name) == bucket.size(name) for name in self._exact) and all(
            edge(problem.size(name)) == bucket.size(name) for name in self._pow2
        )

    def _logs_of(self, problem: Problem) -> tuple[float, ...]:
        """The base-2 logarithms of a problem's sizes, on the Pow2 axes first."""
        return tuple([math.log2(max(problem.size(name), 1)) for name in self._names])

    def _distance(self, here: tuple[float, ...], place: int) -> float:
        return math.fsum(map(abs, map(sub, here, self._where[place])))

    def _nearest(self, here: tuple[float, ...]) -> tuple[float, BucketRule, int]:
        """This bucket's point nearest to a size, and how far it is; the larger of two equally near ones."""
        if len(self._pow2) != 1:
            distance, last = min((self._distance(here, place), -place) for place in range(len(self._points)))
            return distance, self, -last
        size, line = here[0], self._line
        place = bisect_left(line, size)
        if place == len(line) or (place and size - line[place - 1] < line[place] - size):
            place -= 1
        return self._distance(here, place), self, place

    @lazy
    def problems(self) -> tuple[Problem, ...]:
        """The points' problems; they ascend."""
        return tuple(self._bucket.replaced(**point.size) for point in self._points)

    @lazy
    def _where(self) -> tuple[tuple[float, ...], ...]:
        return tuple(map(self._logs_of, self.problems))

    @lazy
    def _line(self) -> list[float]:
        """The points on the only Pow2 axis."""
        return [where[0] for where in self._where]

    # What was measured there -------------------------------------------------------------------------------

    @lazy
    def _columns(self) -> tuple[Config, ...]:
        """The portfolio and the points' defaults, each once."""
        return tuple(dict.fromkeys((*self._portfolio, *map(self._default_at, self.problems))))

    @lazy
    def _lags(self) -> list[list[float | None]]:
        """For each point, the logarithms of the columns' lags, the worst of the states."""
        lags = []
        for point, problem in zip(self._points, self.problems, strict=True):
            default = self._default_at(problem)
            worst: list[float | None] = [None] * len(self._columns)
            for us in (point.us, *point.states.values()):
                configs = (*self._portfolio, default)
                # Reversed, so that of a repeated config the first column counts.
                times = {c: t for c, t in zip(configs[::-1], us[::-1], strict=True) if t is not None}
                least = min(times.values(), default=1.0)
                for place, config in enumerate(self._columns):
                    if (time := times.get(config)) is not None:
                        worst[place] = max(worst[place] or 0.0, math.log(time / least))
            lags.append(worst)
        return lags

    @lazy
    def _waves(self) -> list[list[float]]:
        """For each point, the logarithms of the columns' waves on the GPU that was measured."""
        tiles, sms = self._tiles, self._sm_count
        return [
            [
                0.0 if tiles is None or lag is None else math.log(waves(tiles(config, problem), config, sms))
                for config, lag in zip(self._columns, lags, strict=True)
            ]
            for problem, lags in zip(self.problems, self._lags, strict=True)
        ]

    @lazy
    def _candidates(self) -> list[tuple[list[_Candidate], list[tuple[float, Config]]]]:
        """For each point, the columns to estimate, and the lags of the hopeless ones, the least first."""
        found = []
        for lags, grown in zip(self._lags, self._waves, strict=True):
            timed = [(lag, place) for place, lag in enumerate(lags) if lag is not None]
            hopeful = [
                _Candidate(config, place, grown[place], *_sharing(config))
                for lag, place in timed
                if lag <= math.log(_HOPELESS)
                for config in [self._columns[place]]
            ]
            rest = sorted(one for one in timed if one[0] > math.log(_HOPELESS))
            found.append((hopeful, [(lag, self._columns[place]) for lag, place in rest]))
        return found

    @lazy
    def _shared(self) -> int:
        """The number of columns that all rules of a table have: the portfolio's, which come first."""
        return len(dict.fromkeys(self._portfolio))

    def _cell_of(self, config: Config, cells: Sequence[float | None]) -> float | None:
        place = self._place_of.get(config)
        return None if place is None else cells[place]

    @lazy
    def _place_of(self) -> dict[Config, int]:
        return {config: place for place, config in enumerate(self._columns)}

    def _rows_at(self, exponent: float) -> list[_Row]:
        rows = self._rows.get(exponent)
        if rows is None:
            rows = []
            for point, lags, grown in zip(self._points, self._lags, self._waves, strict=True):
                still = [
                    None if lag is None else lag - exponent * waves
                    for lag, waves in zip(lags, grown, strict=True)
                ]
                least = min(lag for lag in still if lag is not None)
                fastest = min(time for time in point.us if time is not None)
                rows.append(
                    _Row([None if lag is None else lag - least for lag in still], least + math.log(fastest))
                )
            self._rows[exponent] = rows  # whole or not at all: `tiles` may raise
        return rows

    def left_out(self) -> list[float]:
        """The regret that the rule leaves at each point, t / t_best - 1, told from the other points alone.

        It is the worst over the states, against the fastest of the portfolio and the default; 0 for a lone
        point.
        """
        regrets = []
        for here, (problem, lags) in enumerate(zip(self.problems, self._lags, strict=True)):
            others = BucketRule(
                axes=self._axes,
                bucket=self._bucket,
                points=self._points[:here] + self._points[here + 1 :],
                portfolio=self._portfolio,
                default_at=self._default_at,
                tiles=self._tiles,
                sm_count=self._sm_count,
                least_gain=self._least_gain,
            )
            told = others.ranking(problem, self._default_at(problem)).lags
            known = {c: lag for c, lag in zip(self._columns, lags, strict=True) if lag is not None}
            taken = next((known[config] for _, config in told if config in known), None)
            regrets.append(0.0 if taken is None else math.expm1(taken - min(known.values())))
        return regrets

    @lazy
    def exponent(self) -> float:
        """The exponent of waves inside the bucket; 1 where a lone point tells nothing of it."""
        return least_left([self]) if len(self._points) > 1 else 1.0

    @lazy
    def left(self) -> tuple[float, ...]:
        """For each of `_EXPONENTS`, the sum of what it leaves at the points, each left out in turn."""
        if self._tiles is None or len(self._points) < 2:
            return (0.0,) * len(_EXPONENTS)
        return tuple(sum(self._left(exponent)) for exponent in _EXPONENTS)

    def _left(self, exponent: float) -> Iterator[float]:
        """The logarithm of the regret that an exponent leaves at each point, told from the others."""
        rows = self._rows_at(exponent)
        for left_out, (here, lags, grown) in enumerate(
            zip(self._where, self._lags, self._waves, strict=True)
        ):
            others = [
                (1 / (self._distance(here, place) + _NEARNESS) ** 2, row)
                for place, row in enumerate(rows)
                if place != left_out
            ]
            told = []
            for column, lag in enumerate(lags):
                cells = [(weight, cell) for weight, row in others if (cell := row.lags[column]) is not None]
                if lag is not None and cells:
                    mean = sum(weight * cell for weight, cell in cells) / sum(weight for weight, _ in cells)
                    told.append((mean + exponent * grown[column], lag))
            if told:
                yield min(told)[1] - min(lag for _, lag in told)


def _with_waves(
    problem: Problem,
    means: Sequence[tuple[float, int, float, _Candidate]],
    tiles: Tiles,
    exponent: float,
    sm_count: int,
) -> list[tuple[float, Config]]:
    """The lags with their waves, the least first.

    Candidates are taken by their lags at the points. Those that are far behind there keep these lags.
    """
    lags: list[tuple[float, int, Config]] = []
    shift, limit = 0.0, math.inf
    for before, place, mean, (config, _, _, occupancy, num_ctas) in sorted(means):
        if before > limit:
            lags.append((before + shift, place, config))
            continue
        in_flight = sm_count * occupancy // num_ctas or 1
        lag = mean + exponent * math.log(-(-tiles(config, problem) // in_flight) or 1)
        if not lags:
            shift, limit = lag - before, before + exponent * _DOUBLED
        lags.append((lag, place, config))
    lags.sort()
    return [(lag, config) for lag, _, config in lags]


_OVERLAP = math.log1p(OVERLAP)

_DOUBLED = math.log(2.2)
"""The logarithm of how much less a config's waves may grow from the nearest point to the size than those of
the fastest there: rounding up to whole waves at most doubles them."""


def least_left(rules: Sequence[BucketRule]) -> float:
    """The exponent that leaves least at the points of some rules, the preferred one where they tie."""
    sums = [sum(left) for left in zip(*[rule.left for rule in rules], strict=True)]
    best = min(range(len(sums)), key=sums.__getitem__)
    return _EXPONENTS[best if sums[best] < sums[0] - _PREFERENCE else 0]
