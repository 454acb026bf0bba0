"""The rule between measured sizes: choose a size's config from the times at points near it. Pure.

It uses no file or GPU, and of a kernel only its count of tiles. Serving follows it; the tuner judges by it.

The rule: at a point a config's *lag* is its time / the fastest config's there. Where a point has times in
several states of the GPU, a config's time is that in its worst state (`aot_tune.tables.states`). A config's
lag at another size is estimated as the weighted geometric mean of its lags at some points, nearer points
counting more (`_NEARNESS`), each first corrected for waves: multiplied by

    (waves at the size / waves at the point) ** exponent

The config with the least estimate is taken. The points are those of the size's own bucket; for a size
without one, those of the nearest bucket and of up to `MOST_BESIDE` others that lie beside it, or of one other
where the nearest is more than a doubling away. What has no time at the nearest point is not estimated.

The *exponent* is 1, 1/2 or 0. Some kernels take whole waves, because their blocks wait for each other's ends;
others are bound by memory, or keep more blocks on a multiprocessor than the config says, and a further wave
costs them little. Inside a bucket it is that with which the rule leaves least at the bucket's points, each
left out in turn. At most a doubling away it is the table's `near_exponent`, with which the rule leaves least
at the table's points, each told from the other buckets (`aot_tune.choose.left_out`); there may be one for
small buckets and one for large ones. Where the table has none, it is that of the nearest bucket's points.
Farther away it is 1/2. Waves at the size count the multiprocessors of the GPU that launches, waves at the
point those of the GPU that was measured. A partly filled last tile is a tile, so waves tell of it too. The
share of each operand that L2 holds does not count: with points of other shares taken to be farther away, the
rule left the same on the tables of sm90.

Where the points are other buckets', the default is taken unless the choice is expected to be faster by more
than `OVERLAP`. On another card than the one that was measured, of the configs whose estimates overlap, the
one that loads the fewest bytes is taken: which of them is the fastest there is not known, and where bandwidth
is less, bytes alone cost more. ``tuned_configs/README.md`` has an example and says what the rule leaves on
measured tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import mul, sub
from typing import Literal, NamedTuple

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

OVERLAP = 0.01
"""Estimates from other buckets overlap where they are within this fraction of each other, half of the tie
band of measured times. On the tables of sm90, buckets left out, the sizes at which the choice loses over 3 %
to the default then are a third fewer."""

MOST_BESIDE = 3
"""Buckets beside the nearest from whose points a size without a bucket of its own is estimated as well."""

Tiles = Callable[[Config, Problem], int]
"""A declaration's function from (config, problem) to the number of tiles, blocks of work."""

Loads = Callable[[Config], float]
"""A function from a config to the bytes that all its blocks load for the problem in question."""

DefaultAt = Callable[[Problem], Config]
"""A function from a problem to the declaration's default for it."""

Where = Literal["inside", "near", "far"]
"""Where a size lies: inside a bucket that was swept, at most a doubling away from one, or farther away."""


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
        near_exponent=table.near_exponent_at(entry.bucket),
    )


def pick(
    entry: Entry,
    rule: BucketRule,
    default: Config,
    problem: Problem,
    allowed: Allowed,
    *,
    where: Where = "inside",
    beside: Sequence[BucketRule] = (),
    sm_count: int | None = None,
    loads: Loads | None = None,
) -> Pick | None:
    """Choose the config for a problem of an entry's bucket, or of none.

    1. At the edge itself it is the entry's config.
    2. Otherwise it is the config with the least estimate (module docstring); at a point, the times there.
       Outside the entry's bucket it is the default, where the estimates of both overlap.
    3. Where no point has a time, it is the entry's config, else the default.
    4. With `loads`, a config whose estimate overlaps with the least takes its place if it loads fewer bytes.

    Each step passes over configs that are not allowed.

    Args:
        entry: The problem's own entry, or the nearest.
        rule: The result of `rule_of` for this entry.
        default: The declaration's default for this problem.
        problem: A problem of this bucket, or of one without an entry.
        allowed: Whether a config may run here: legal, in the search space. Called until one may.
        where: As for `BucketRule.ranking`; so are the arguments below.
        beside: The rules of buckets beside the entry's.
        sm_count: Multiprocessors of the GPU that launches; None for those of the GPU that was measured.
        loads: The bytes that all blocks of a config load at this size; None on the card that was measured.

    Returns:
        The pick, or None when no config is allowed, not even the default.
    """
    edge = None
    if problem == entry.bucket and allowed(entry.config):
        edge = Pick(entry.config, lambda: f"winner at the bucket's edge: {entry.mean_us:.1f} us")
        if loads is None:
            return edge
    ranking = rule.ranking(problem, default, where=where, beside=beside, sm_count=sm_count)
    found = edge or _fastest(entry, ranking, default, allowed)
    return found if found is None or loads is None else _lightest(found, ranking, allowed, loads)


def _fastest(entry: Entry, ranking: Ranking, default: Config, allowed: Allowed) -> Pick | None:
    for lag, config in ranking.fastest_first():
        behind = math.inf if ranking.where == "inside" else ranking.default_lag(lag + _OVERLAP) - lag
        if behind <= _OVERLAP and allowed(default):
            return Pick(default, partial(_overlap, ranking, behind, config))
        if allowed(config):
            return Pick(config, partial(_reason, ranking, lag))
    for config, name in ((entry.config, "the bucket's winner"), (default, "the default")):
        if allowed(config):
            return Pick(config, partial("{}: no point of the bucket has a time".format, name))
    return None


def _lightest(found: Pick, ranking: Ranking, allowed: Allowed, loads: Loads) -> Pick:
    """Of the picked config and those that overlap with the fastest, the one that loads the fewest bytes."""
    fastest = next((lag for lag, config in ranking.fastest_first() if allowed(config)), math.inf)
    near = ranking.within(fastest + _OVERLAP) if fastest < math.inf else ()
    others = [config for config in near if config != found.config]
    least = whole = loads(found.config) if others else 0.0
    lightest = found.config
    for config in others if whole < math.inf else ():
        if (own := loads(config)) * (1 + _LIGHTER) < least and allowed(config):
            least, lightest = own, config
    return found if lightest == found.config else Pick(lightest, partial(_lighter, found, least / whole))


def _lighter(found: Pick, part: float) -> str:
    return (
        f"expected within {OVERLAP:.0%} of the fastest, and loads {part:.0%} of the bytes of {found.config}; "
        f"the times are another card's; {found.reason}"
    )


def _reason(ranking: Ranking, lag: float) -> str:
    us = f", {ranking.us(lag):.1f} us" if ranking.where == "inside" else ""
    return f"fastest expected{us}: estimated from {ranking.basis}"


def _overlap(ranking: Ranking, behind: float, fastest: Config) -> str:
    if not behind:
        return f"the default, fastest expected: estimated from {ranking.basis}"
    return (
        f"the default: expected to take {math.expm1(behind):.1%} longer than {fastest}, and estimates from "
        f"other buckets overlap within {OVERLAP:.0%}; estimated from {ranking.basis}"
    )


# Estimates ------------------------------------------------------------------------------------------------


class Ranking:
    """The estimates of all configs for one size, each computed when it is needed.

    A config's waves are counted last: a count is the slowest part of an estimate, and most configs are so far
    behind that even one wave would not help them.

    Attributes:
        where: Where the size lies.
        exponent: The power of waves with which times are taken to grow.
        points: The points; None without any.
        weights: The weight of each point, in any unit; 0 for one that does not count.
    """

    def __init__(
        self,
        configs: Sequence[Config],
        default_place: int,
        where: Where,
        *,
        exponent: float = 0.0,
        points: _Points | None = None,
        weights: Sequence[float] = (),
        least: Sequence[tuple[float, int]] = (),
        waves_of: Callable[[int], int] | None = None,
        least_gain: float = 0.0,
    ) -> None:
        """Args beside the attributes.

        configs: The configs by place: the portfolio, then the default.
        default_place: The place of the default, the first one where the portfolio has it too.
        least: The lag of each config with one wave, and its place; places ascend.
        waves_of: Counts at the size the waves of the config at a place; None where waves do not count.
        least_gain: How much faster than the default a config must be expected to be, as a fraction.
        """
        self.where, self.exponent, self.points, self.weights = where, exponent, points, weights
        self._configs, self._default_place, self._least = configs, default_place, least
        self._waves_of, self._least_gain = waves_of, least_gain
        self._known: dict[int, float] = {}

    def fastest_first(self) -> Iterator[tuple[float, Config]]:
        """Yield the logarithm of each config's expected time over one that all share, and the config.

        Equal ones come in the portfolio's order.
        """
        # Written for speed: an unseen shape waits for the first.
        configs, own, limit = self._configs, self._default_place, math.inf
        if self._least_gain:
            limit = self.default_lag() - math.log1p(self._least_gain)
        best = (math.inf, -1)
        for least, place in sorted(self._least):
            if least > best[0]:
                break
            lag = self._lag(least, place)
            if (lag, place) < best and (lag <= limit or place == own):
                best = (lag, place)
        if best[1] >= 0:
            yield best[0], configs[best[1]]
        for lag, place in sorted((self._lag(*one), one[1]) for one in self._least):
            if place != best[1] and (lag <= limit or place == own):
                yield lag, configs[place]

    def _lag(self, least: float, place: int) -> float:
        """The lag of a config, given that with one wave."""
        if self._waves_of is None:
            return least
        lag = self._known.get(place)
        if lag is None:
            lag = self._known[place] = least + self.exponent * math.log(self._waves_of(place))
        return lag

    def within(self, limit: float) -> list[Config]:
        """The configs whose lag is at most this, fastest first. Waves are counted of those that can be."""
        lags = [(self._lag(*one), one[1]) for one in self._least if one[0] <= limit]
        return [self._configs[place] for lag, place in sorted(lags) if lag <= limit]

    @property
    def lags(self) -> list[tuple[float, Config]]:
        """All of `fastest_first`."""
        return list(self.fastest_first())

    def default_lag(self, most: float = math.inf) -> float:
        """The lag of the default; infinite where it has no estimate, or one above `most`."""
        for least, place in self._least:
            if place == self._default_place and least <= most:
                return self._lag(least, place)
        return math.inf

    def us(self, lag: float) -> float:
        """The expected time, microseconds, of a config with this lag, for a size inside a bucket."""
        assert self.points is not None
        base = [us for rule in self.points.rules for us in rule._rows_at(self.exponent).us]
        return math.exp(sum(map(mul, self.weights, base)) / sum(self.weights) + lag)

    @property
    def basis(self) -> str:
        """The points with their weights, or the buckets with the weights of theirs, and the exponent."""
        if self.points is None:
            return "no point"
        inside, total = self.where == "inside", sum(self.weights)
        shares: dict[Problem, float] = {}
        at = [(rule.bucket, problem) for rule in self.points.rules for problem in rule.problems]
        for weight, (bucket, problem) in zip(self.weights, at, strict=True):
            if weight:
                told = problem if inside else bucket
                shares[told] = shares.get(told, 0.0) + weight / total
        sizes = [name for name, value in next(iter(shares)).items() if type(value) is int]
        names = [name for name in sizes if len({problem[name] for problem in shares}) > 1] or sizes
        texts = {problem: " ".join(f"{name}={problem[name]}" for name in names) for problem in shares}
        if len(shares) > 1:
            weighed = sorted(shares, key=lambda problem: -shares[problem])
            listed = ", ".join(f"{texts[problem]} ({shares[problem]:.0%})" for problem in weighed)
        else:
            listed = ", ".join(texts.values())
        of = "" if inside else "the bucket " if len(shares) == 1 else "the buckets "
        waves = {0.0: "", 0.5: ", by the root of waves", 1.0: ", by waves"}[self.exponent]
        return f"{of}{listed}{waves}"


def blocks_in_flight(config: Config, sm_count: int) -> int:
    """How many blocks of a config the GPU runs at a time."""
    return max(sm_count * config.hints.get("occupancy", 1) // config.hints.get("num_ctas", 1), 1)


def waves(tiles: int, config: Config, sm_count: int) -> int:
    """How often the GPU must be filled with blocks to run this number of tiles, 1 at least."""
    return max(-(-tiles // blocks_in_flight(config, sm_count)), 1)


_LIGHTER = 0.05
"""Loads that differ by at most this fraction count as the same: a declaration counts the steps of the last
tiles as whole ones."""

_MOST_BESIDE_FAR = 1
"""As `MOST_BESIDE`, for sizes more than a doubling away. More leave the same on the tables of sm90."""

_OVERLAP = math.log1p(OVERLAP)

_NEARNESS = 0.1
"""Doublings that are added to a point's distance; its weight is 1 / (distance + this) squared. With a third
of it, or with cubes, the rule leaves the same on the tables of sm90."""

_EXPONENTS = (1.0, 0.5, 0.0)
"""The exponents of waves."""

_PREFERRED: dict[Where, int] = {"inside": 0, "near": 1}
"""The place of the exponent that is taken unless another leaves clearly less: near a point whole waves
decide, farther away other effects blur them."""

_PREFERENCE = 0.002
"""The sum of logarithms of regrets by which another exponent must leave less than the preferred one: less
than any choice that is worth a change, and more than rounding."""

_FAR = 0.5
"""The exponent of waves for sizes more than a doubling away from any bucket. On the tables of sm90 it leaves
2.5 % there in the geometric mean, and the one of the nearest bucket 3.6 %."""


class _Rows(NamedTuple):
    """What was measured at the points, without waves, at one exponent."""

    lags: list[list[float | None]]
    """For each point, the logarithm of each column's lag, the least being 0; None without a time."""

    us: list[float]
    """For each point, the logarithm of the time that a lag of 0 stands for, microseconds."""


class BucketRule:
    """The rule prepared for one entry; kept, it makes each pick cost one count of tiles for each good config.

    Args:
        axes: The kernel's axes.
        bucket: The problem at the bucket's edge.
        points: The bucket's points; ``us`` is in the order of `portfolio`, with the default's time last.
        portfolio: The table's portfolio.
        default_at: The default at each point, whose time is the point's last.
        tiles: The declaration's count of tiles, or None.
        sm_count: Multiprocessors of the GPU that the points were measured on.
        least_gain: How much faster than the default a config must be expected to be, as a fraction.
        near_exponent: The table's exponent for sizes near this bucket; None where the points tell it.
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
        near_exponent: float | None = None,
    ) -> None:
        self._axes = axes
        self._pow2 = tuple(name for name, axis in axes.items() if isinstance(axis, Pow2))
        self._exact = tuple(name for name in axes if name not in self._pow2)
        self.bucket = bucket
        timed = (point for point in points if any(us is not None for us in point.us))
        self._points = tuple(map(in_worst_state, timed))
        self._portfolio = tuple(portfolio)
        self._default_at = default_at
        self._tiles = tiles
        self._sm_count = sm_count
        self._least_gain = least_gain
        self._near_exponent = near_exponent
        self._rows: dict[float, _Rows] = {}
        self._sets: dict[tuple[BucketRule, ...], _Points] = {}
        self._at_once: dict[int, list[int]] = {}

    def ranking(
        self,
        problem: Problem,
        default: Config,
        *,
        where: Where = "inside",
        beside: Sequence[BucketRule] = (),
        sm_count: int | None = None,
    ) -> Ranking:
        """Estimate the portfolio and the default, fastest first; equal estimates keep the portfolio's order.

        A config without a time at the nearest point is left out. At a point of the bucket its own times alone
        count.

        Args:
            problem: The size.
            default: The default there. Unless it is one of the portfolio, the points' defaults stand for it.
            where: Where the size lies, seen from this bucket.
            beside: The rules of buckets beside this one, of the same table, for a size outside this bucket.
            sm_count: Multiprocessors of the GPU that launches; None for those of the GPU that was measured.
        """
        # Written for speed: an unseen shape waits for it.
        portfolio, last = self._portfolio, len(self._portfolio)
        configs, default_place = (*portfolio, default), self._place_of.get(default, last)
        if not self._points:
            return Ranking(configs, default_place, where)
        pow2, exact = self._logs_of(problem)
        beside = beside[:_MOST_BESIDE_FAR] if where == "far" else beside
        points = self._points_with(beside)
        weights = points.weights(pow2, exact)
        own = weights if not beside else weights[: len(self._points)]
        nearest = len(own) - 1 - own[::-1].index(max(own))  # of equally near ones the larger
        if where == "inside" and self._where[nearest] == pow2:
            exponent, weights = 0.0, [float(place == nearest) for place in range(len(weights))]
        else:
            exponent = self._inside_exponent if where == "inside" else self._outside_exponents[where]
        total, columns, places = sum(weights), points.columns(exponent), self._timed[nearest]
        if default_place < last and places and places[-1] == last:
            places = places[:-1]
        try:
            least = [(sum(map(mul, weights, columns[place])) / total, place) for place in places]
        except TypeError:  # some are None
            least = [(_sum(weights, columns[place]) / total, place) for place in places]
        return Ranking(
            configs,
            default_place,
            where,
            exponent=exponent,
            points=points,
            weights=weights,
            least=least,
            waves_of=self._counter(configs, problem, sm_count or self._sm_count) if exponent else None,
            least_gain=self._least_gain,
        )

    def _counter(self, configs: Sequence[Config], problem: Problem, sm_count: int) -> Callable[[int], int]:
        """Counts the waves of the config at a place."""
        at_once = self._at_once.get(sm_count)
        if at_once is None:
            at_once = [blocks_in_flight(config, sm_count) for config in self._portfolio]
            self._at_once[sm_count] = at_once
        tiles, last = self._tiles, len(self._portfolio)
        assert tiles is not None

        def count(place: int) -> int:
            config = configs[place]
            here = at_once[place] if place < last else blocks_in_flight(config, sm_count)
            return -(-tiles(config, problem) // here) or 1

        return count

    def _points_with(self, beside: Sequence[BucketRule]) -> _Points:
        """The points of this bucket and of those beside it, prepared once for each set of them."""
        key = tuple(beside)
        points = self._sets.get(key)
        if points is None:
            points = self._sets[key] = _Points((self, *[rule for rule in beside if rule._points]))
        return points

    # Where points are --------------------------------------------------------------------------------------

    def _logs_of(self, problem: Problem) -> tuple[list[float], list[float]]:
        """The base-2 logarithms of a problem's sizes, on the Pow2 and on the Exact axes."""
        return (
            [math.log2(problem.size(name) or 1) for name in self._pow2],
            [math.log2(problem.size(name) or 1) for name in self._exact],
        )

    @lazy
    def problems(self) -> tuple[Problem, ...]:
        """The points' problems; they ascend."""
        return tuple(self.bucket.replaced(**point.size) for point in self._points)

    @lazy
    def _where(self) -> list[list[float]]:
        sizes = [[point.size[name] for name in self._pow2] for point in self._points]
        return [[math.log2(size or 1) for size in those] for those in sizes]

    @lazy
    def _exact_logs(self) -> list[float]:
        return self._logs_of(self.bucket)[1]

    # What was measured there -------------------------------------------------------------------------------

    @lazy
    def _place_of(self) -> dict[Config, int]:
        """The column of each config of the portfolio; of a repeated one the first counts."""
        return {config: place for place, config in reversed([*enumerate(self._portfolio)])}

    @lazy
    def _timed(self) -> list[list[int]]:
        """For each point the columns that have a time there, each config once; the last is the default's."""
        places = [*sorted(self._place_of.values()), len(self._portfolio)]
        return [[place for place in places if lags[place] is not None] for lags in self._lags]

    @lazy
    def _lags(self) -> list[list[float | None]]:
        """For each point, the logarithms of the columns' lags."""
        found = []
        for point in self._points:
            least = min(us for us in point.us if us is not None)
            found.append([None if us is None else math.log(us / least) for us in point.us])
        return found

    @lazy
    def _waves(self) -> list[list[float]]:
        """For each point, the logarithms of the columns' waves on the GPU that was measured."""
        found = []
        for problem, lags in zip(self.problems, self._lags, strict=True):
            configs = (*self._portfolio, self._default_at(problem))
            found.append([self._waves_of(*one, problem) for one in zip(configs, lags, strict=True)])
        return found

    def _waves_of(self, config: Config, lag: float | None, problem: Problem) -> float:
        if self._tiles is None or lag is None:
            return 0.0
        return math.log(waves(self._tiles(config, problem), config, self._sm_count))

    def _rows_at(self, exponent: float) -> _Rows:
        rows = self._rows.get(exponent)
        if rows is None:
            rows = _Rows([], [])
            none = [[0.0] * len(lags) for lags in self._lags]
            all_grown = self._waves if exponent else none
            for point, lags, grown in zip(self._points, self._lags, all_grown, strict=True):
                still = [
                    None if lag is None else lag - exponent * waves
                    for lag, waves in zip(lags, grown, strict=True)
                ]
                least = min(lag for lag in still if lag is not None)
                fastest = min(time for time in point.us if time is not None)
                rows.lags.append([None if lag is None else lag - least for lag in still])
                rows.us.append(least + math.log(fastest))
            self._rows[exponent] = rows  # whole or not at all: `tiles` may raise
        return rows

    def left_out(self) -> list[float]:
        """The regret that the rule leaves at each point, t / t_best - 1, told from the other points alone.

        The best is the fastest of the portfolio and the default there; a lone point has 0.
        """
        regrets = []
        for here, (problem, lags) in enumerate(zip(self.problems, self._lags, strict=True)):
            others = BucketRule(
                axes=self._axes,
                bucket=self.bucket,
                points=self._points[:here] + self._points[here + 1 :],
                portfolio=self._portfolio,
                default_at=self._default_at,
                tiles=self._tiles,
                sm_count=self._sm_count,
                least_gain=self._least_gain,
            )
            default = self._default_at(problem)
            columns = [*zip((*self._portfolio, default), lags, strict=True)]
            known = {config: lag for config, lag in reversed(columns) if lag is not None}
            told = (config for _, config in others.ranking(problem, default).lags if config in known)
            taken = next(told, None)
            regrets.append(0.0 if taken is None else math.expm1(known[taken]))
        return regrets

    @lazy
    def _inside_exponent(self) -> float:
        return self._least_left("inside") if self._tiles is not None else 0.0

    @lazy
    def _outside_exponents(self) -> dict[Where, float]:
        """The exponent of waves by where a size lies, seen from this bucket."""
        if self._tiles is None:
            return {"near": 0.0, "far": 0.0}
        near = self._near_exponent
        return {"near": self._least_left("near") if near is None else near, "far": _FAR}

    def _least_left(self, where: Where) -> float:
        preferred, best = _PREFERRED[where], self._sums.index(min(self._sums))
        clearly = self._sums[best] < self._sums[preferred] - _PREFERENCE
        return _EXPONENTS[best if clearly else preferred]

    @lazy
    def _sums(self) -> list[float]:
        """For each of `_EXPONENTS`, the sum of what it leaves at the points, each left out in turn."""
        if len(self._points) < 2:
            return [0.0] * len(_EXPONENTS)
        return [sum(self._left(exponent)) for exponent in _EXPONENTS]

    def _left(self, exponent: float) -> Iterator[float]:
        """The logarithm of the regret that an exponent leaves at each point, told from the others."""
        rows, own = self._rows_at(exponent).lags, self._points_with(())
        for here, (where, lags, grown) in enumerate(zip(self._where, self._lags, self._waves, strict=True)):
            weights = own.weights(where, self._exact_logs)
            del weights[here]
            others, total = [*zip(*rows[:here], *rows[here + 1 :], strict=True)], sum(weights)
            told = [
                (_sum(weights, others[column]) / total + exponent * grown[column], column)
                for column, lag in enumerate(lags)
                if lag is not None and any(one is not None for one in others[column])
            ]
            if told:
                yield lags[min(told)[1]] or 0.0


class _Points:
    """The points of a bucket and of those beside it, prepared to be weighed.

    Args:
        rules: The rules of the buckets; none is without points.
    """

    def __init__(self, rules: Sequence[BucketRule]) -> None:
        self.rules = rules
        self._exact = [rule._exact_logs for rule in rules]
        self._where = [(number, where) for number, rule in enumerate(rules) for where in rule._where]
        self._columns: dict[float, list[tuple[float | None, ...]]] = {}

    def weights(self, pow2: Sequence[float], exact: Sequence[float]) -> list[float]:
        """The weights of the points for a size, given the logarithms of its sizes on both kinds of axes."""
        # Written for speed: products have two Exact axes and one Pow2 axis.
        if len(exact) == 2:
            first, second = exact
            apart = [_NEARNESS + abs(first - one) + abs(second - other) for one, other in self._exact]
        else:
            apart = [_NEARNESS + sum(map(abs, map(sub, exact, logs))) for logs in self._exact]
        if len(pow2) == 1:
            size = pow2[0]
            return [1 / (apart[number] + abs(size - at)) ** 2 for number, (at,) in self._where]
        return [1 / (apart[number] + sum(map(abs, map(sub, pow2, at)))) ** 2 for number, at in self._where]

    def columns(self, exponent: float) -> list[tuple[float | None, ...]]:
        """For each config of the portfolio and the default, its lag at each point without waves."""
        columns = self._columns.get(exponent)
        if columns is None:
            rows = [row for rule in self.rules for row in rule._rows_at(exponent).lags]
            columns = self._columns[exponent] = [*zip(*rows, strict=True)]
        return columns


def _sum(weights: Sequence[float], lags: Sequence[float | None]) -> float:
    """The weighted sum of the lags; where some are None, as the others would have it."""
    try:
        return float(sum(map(mul, weights, lags)))
    except TypeError:  # some are None
        known = [(weight, lag) for weight, lag in zip(weights, lags, strict=True) if lag is not None]
        share = sum(weight for weight, _ in known) / sum(weights)
        return sum(weight * lag for weight, lag in known) / share
