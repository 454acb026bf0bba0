"""Rule between measured sizes: choose a size's config from the times at points near it. Pure.

It uses no file and no GPU, and of a kernel only its count of tiles. Serving follows it; the tuner judges by
it.

The rule: a config's *slowdown* at a point is its time / the fastest config's time at this point. Where a
point has times in several states of the GPU, a config's time is that of its worst state
(`aot_tune.tables.states`). A config's slowdown at another size is estimated as the weighted geometric mean of
its slowdowns at some points. Nearer points count more (`_NEARNESS`), and each slowdown is first corrected for
waves: multiplied by

    (waves at the size / waves at the point) ** exponent

The config with the least estimate is taken. The points are those of the size's own bucket. For a size without
a bucket they are those of the nearest bucket and of up to `MOST_BESIDE` neighbouring buckets, or of one
neighbour where the nearest bucket is more than a doubling away. A config without a time at the nearest point
is not estimated.

The *exponent* is 1, 1/2 or 0. Some kernels take whole waves, because their blocks wait for each other's ends.
Other kernels are bound by memory, or keep more blocks on a multiprocessor than the config states, and a
further wave costs them little.

- Inside a bucket, the exponent is the one with the least regret at the bucket's points, each left out in
  turn.
- At most a doubling away, it is the table's `near_exponent`, which has the least regret at the table's
  points, each estimated from the other buckets (`aot_tune.choose.left_out`). Small and large buckets may have
  different ones. Where the table has none, the nearest bucket's points decide.
- Farther away, it is 1/2.

Waves at the size count the multiprocessors of the GPU that launches, waves at the point those of the GPU that
was measured. A partly filled last tile is a tile, so waves include it. The share of each operand that L2
holds does not count: with points of other shares treated as farther away, the regret on the tables of sm90
was the same.

Where the points are other buckets', the default is taken unless the choice is expected to be faster by more
than `OVERLAP`. On another GPU model than the measured one, of the configs whose estimates overlap, the config
that loads the fewest bytes is taken: the fastest of them is not known, and with less bandwidth only bytes
cost more. ``tuned_configs/README.md`` has an example and the rule's regret on measured tables.
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
"""Function that returns whether a config may run for the problem."""

PREDICTED_GAIN = 0.10
"""Fraction by which a config of a predicted entry must be expected to be faster than the default. Measured on
an H200: one of 54 problems then ran over 2 % slower than with the default. The model's error has this
size."""

OVERLAP = 0.01
"""Fraction within which estimates from other buckets overlap, half of the tie band of measured times. On the
tables of sm90, with buckets left out, a third fewer sizes then lose over 3 % to the default."""

MOST_BESIDE = 3
"""Most neighbours of the nearest bucket whose points count too, for a size without a bucket of its own."""

Tiles = Callable[[Config, Problem], int]
"""Declaration's function from (config, problem) to the number of tiles, blocks of work."""

Loads = Callable[[Config], float]
"""Function from a config to the bytes that all its blocks load for the problem."""

DefaultAt = Callable[[Problem], Config]
"""Function from a problem to the declaration's default for it."""

Where = Literal["inside", "near", "far"]
"""Position of a size: inside a swept bucket, at most a doubling away from one, or farther away."""


class Pick(NamedTuple):
    """Choice of the rule."""

    config: Config
    """Config to run."""

    why: Callable[[], str]
    """Function that makes `reason`, which is read of few picks."""

    @property
    def reason(self) -> str:
        """Reason in words: the points of the estimate, and the expected time."""
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

    1. At the edge itself: the entry's config.
    2. Otherwise: the config with the least estimate (module docstring); at a point, with the least time.
       Outside the entry's bucket: the default, where the estimates of both overlap.
    3. Where no point has a time: the entry's config, else the default.
    4. With `loads`, a config whose estimate overlaps with the least takes its place if it loads fewer bytes.

    Each step passes over configs that are not allowed.

    Args:
        entry: The problem's own entry, or the nearest.
        rule: The result of `rule_of` for this entry.
        default: The declaration's default for this problem.
        problem: A problem of this bucket, or of a bucket without an entry.
        allowed: Whether a config may run: legal, in the search space. Called until one may.
        where: As for `BucketRule.ranking`; so are the arguments below.
        beside: The rules of neighbouring buckets.
        sm_count: Multiprocessors of the launching GPU; None for the measured GPU's.
        loads: The bytes that all blocks of a config load at this size; None on the measured GPU model.

    Returns:
        The pick; None where no config is allowed, not even the default.
    """
    edge = None
    if problem == entry.bucket and allowed(entry.config):
        edge = Pick(entry.config, lambda: f"winner at the bucket's edge: {entry.mean_us:.1f} us")
        if loads is None:
            return edge
    ranking = rule.ranking(problem, default, where=where, beside=beside, sm_count=sm_count)
    fastest = edge or _fastest(entry, ranking, default, allowed)
    return fastest if fastest is None or loads is None else _lightest(fastest, ranking, allowed, loads)


def _fastest(entry: Entry, ranking: Ranking, default: Config, allowed: Allowed) -> Pick | None:
    for slowdown, config in ranking.fastest_first():
        behind = math.inf
        if ranking.where != "inside":
            behind = ranking.default_slowdown(slowdown + _OVERLAP) - slowdown
        if behind <= _OVERLAP and allowed(default):
            return Pick(default, partial(_overlap, ranking, behind, config))
        if allowed(config):
            return Pick(config, partial(_reason, ranking, slowdown))
    for config, name in ((entry.config, "the bucket's winner"), (default, "the default")):
        if allowed(config):
            return Pick(config, partial("{}: no point of the bucket has a time".format, name))
    return None


def _lightest(picked: Pick, ranking: Ranking, allowed: Allowed, loads: Loads) -> Pick:
    """Return the config that loads the fewest bytes, of the pick and the configs within `OVERLAP`."""
    fastest = next((slowdown for slowdown, config in ranking.fastest_first() if allowed(config)), math.inf)
    near = ranking.within(fastest + _OVERLAP) if fastest < math.inf else ()
    others = [config for config in near if config != picked.config]
    least = whole = loads(picked.config) if others else 0.0
    lightest = picked.config
    for config in others if whole < math.inf else ():
        if (own := loads(config)) * (1 + _LIGHTER) < least and allowed(config):
            least, lightest = own, config
    return picked if lightest == picked.config else Pick(lightest, partial(_lighter, picked, least / whole))


def _lighter(picked: Pick, part: float) -> str:
    return (
        f"expected within {OVERLAP:.0%} of the fastest, and loads {part:.0%} of the bytes of "
        f"{picked.config}; the times are another GPU model's; {picked.reason}"
    )


def _reason(ranking: Ranking, slowdown: float) -> str:
    us = f", {ranking.us(slowdown):.1f} us" if ranking.where == "inside" else ""
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
    """Estimates of all configs for a size, each computed when it is needed.

    Waves are counted last: a count is the slowest part of an estimate, and most configs are so slow that even
    one wave would not help them.

    Attributes:
        where: The size's position.
        exponent: The power of waves with which times are taken to grow.
        points: The points; None without any.
        weights: The weight of each point, in any unit; 0 for a point that does not count.
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
        """Take the attributes and the following arguments.

        configs: The configs by place: the portfolio, then the default.
        default_place: The place of the default, the first where the portfolio has it too.
        least: The log slowdown of each config with one wave, and its place; places ascend.
        waves_of: Counts the waves at the size of the config at a place; None where waves do not count.
        least_gain: The fraction by which a config must be expected to be faster than the default.
        """
        self.where, self.exponent, self.points, self.weights = where, exponent, points, weights
        self._configs, self._default_place, self._least = configs, default_place, least
        self._waves_of, self._least_gain = waves_of, least_gain
        self._known: dict[int, float] = {}

    def fastest_first(self) -> Iterator[tuple[float, Config]]:
        """Yield each config's log slowdown, relative to a time that all share, and the config.

        Equal configs come in the portfolio's order.
        """
        # Written for speed: an unseen shape waits for the first.
        configs, own, limit = self._configs, self._default_place, math.inf
        if self._least_gain:
            limit = self.default_slowdown() - math.log1p(self._least_gain)
        best = (math.inf, -1)
        for least, place in sorted(self._least):
            if least > best[0]:
                break
            slowdown = self._slowdown(least, place)
            if (slowdown, place) < best and (slowdown <= limit or place == own):
                best = (slowdown, place)
        if best[1] >= 0:
            yield best[0], configs[best[1]]
        for slowdown, place in sorted((self._slowdown(least, place), place) for least, place in self._least):
            if place != best[1] and (slowdown <= limit or place == own):
                yield slowdown, configs[place]

    def _slowdown(self, least: float, place: int) -> float:
        """Return the log slowdown of a config, from its log slowdown with one wave."""
        if self._waves_of is None:
            return least
        slowdown = self._known.get(place)
        if slowdown is None:
            slowdown = self._known[place] = least + self.exponent * math.log(self._waves_of(place))
        return slowdown

    def within(self, limit: float) -> list[Config]:
        """Return the configs with at most this log slowdown, fastest first; count waves only where needed."""
        near = [(self._slowdown(least, place), place) for least, place in self._least if least <= limit]
        return [self._configs[place] for slowdown, place in sorted(near) if slowdown <= limit]

    @property
    def slowdowns(self) -> list[tuple[float, Config]]:
        """List of all of `fastest_first`."""
        return list(self.fastest_first())

    def default_slowdown(self, most: float = math.inf) -> float:
        """Return the log slowdown of the default; infinite without an estimate up to `most`."""
        for least, place in self._least:
            if place == self._default_place and least <= most:
                return self._slowdown(least, place)
        return math.inf

    def us(self, slowdown: float) -> float:
        """Return the expected microseconds at this log slowdown, for a size inside a bucket."""
        assert self.points is not None
        base = [us for rule in self.points.rules for us in rule._rows_at(self.exponent).us]
        return math.exp(sum(map(mul, self.weights, base)) / sum(self.weights) + slowdown)

    @property
    def basis(self) -> str:
        """Points with their weights, or buckets with the sums of their points' weights, and the exponent."""
        if self.points is None:
            return "no point"
        inside, total = self.where == "inside", sum(self.weights)
        shares: dict[Problem, float] = {}
        at = [(rule.bucket, problem) for rule in self.points.rules for problem in rule.problems]
        for weight, (bucket, problem) in zip(self.weights, at, strict=True):
            if weight:
                source = problem if inside else bucket
                shares[source] = shares.get(source, 0.0) + weight / total
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
    """Return the number of blocks of a config that the GPU runs at a time."""
    return max(sm_count * config.hints.get("occupancy", 1) // config.hints.get("num_ctas", 1), 1)


def waves(tiles: int, config: Config, sm_count: int) -> int:
    """Return the number of times that the GPU is filled with blocks to run these tiles, at least 1."""
    return max(-(-tiles // blocks_in_flight(config, sm_count)), 1)


_LIGHTER = 0.05
"""Fraction within which loads count as equal: a declaration counts the steps of last tiles as whole steps."""

_MOST_BESIDE_FAR = 1
"""As `MOST_BESIDE`, for sizes more than a doubling away. More have the same regret on the tables of sm90."""

_OVERLAP = math.log1p(OVERLAP)

_NEARNESS = 0.1
"""Doublings added to a point's distance; the point's weight is 1 / (distance + `_NEARNESS`) squared. With a
third of it, or with cubes, the regret on the tables of sm90 is the same."""

_EXPONENTS = (1.0, 0.5, 0.0)
"""Exponents of waves."""

_PREFERRED: dict[Where, int] = {"inside": 0, "near": 1}
"""Place of the exponent that is taken unless another is clearly better: near a point whole waves decide,
farther away other effects blur them."""

_PREFERENCE = 0.002
"""Sum of log regrets by which another exponent must be better than the preferred one: less than any choice
that is worth a change, and more than rounding."""

_FAR = 0.5
"""Exponent of waves for sizes more than a doubling away from any bucket. On the tables of sm90 its regret is
2.5 % in the geometric mean, and that of the nearest bucket's exponent 3.6 %."""


class _Rows(NamedTuple):
    """Measurements at the points, without waves, at an exponent."""

    slowdowns: list[list[float | None]]
    """Log slowdown of each column at each point, the least being 0; None without a time."""

    us: list[float]
    """Logarithm of the microseconds at a log slowdown of 0, for each point."""


class BucketRule:
    """Rule prepared for an entry, so that a pick costs one count of tiles for each good config.

    Args:
        axes: The kernel's axes.
        bucket: The problem at the bucket's edge.
        points: The bucket's points; ``us`` is in the order of `portfolio`, with the default's time last.
        portfolio: The table's portfolio.
        default_at: Returns the default at each point, whose time is the point's last.
        tiles: The declaration's count of tiles, or None.
        sm_count: Multiprocessors of the GPU that the points were measured on.
        least_gain: The fraction by which a config must be expected to be faster than the default.
        near_exponent: The table's exponent for sizes near this bucket; None where the points decide.
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
        """Estimate the portfolio and the default, fastest first; ties keep the portfolio's order.

        A config without a time at the nearest point is left out. At a point of the bucket only its own times
        count.

        Args:
            problem: The size.
            default: The default at the size. Outside the portfolio, the points' defaults represent it.
            where: The size's position relative to this bucket.
            beside: The rules of neighbouring buckets of the same table, for a size outside this bucket.
            sm_count: Multiprocessors of the launching GPU; None for the measured GPU's.
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
        nearest = len(own) - 1 - own[::-1].index(max(own))  # of equally near points the larger
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
        """Return a function that counts the waves of the config at a place."""
        at_once = self._at_once.get(sm_count)
        if at_once is None:
            at_once = [blocks_in_flight(config, sm_count) for config in self._portfolio]
            self._at_once[sm_count] = at_once
        tiles, last = self._tiles, len(self._portfolio)
        assert tiles is not None

        def count(place: int) -> int:
            config = configs[place]
            blocks = at_once[place] if place < last else blocks_in_flight(config, sm_count)
            return -(-tiles(config, problem) // blocks) or 1

        return count

    def _points_with(self, beside: Sequence[BucketRule]) -> _Points:
        """Return the points of this bucket and its neighbours, prepared once for each set of them."""
        key = tuple(beside)
        points = self._sets.get(key)
        if points is None:
            points = self._sets[key] = _Points((self, *[rule for rule in beside if rule._points]))
        return points

    # Where points are --------------------------------------------------------------------------------------

    def _logs_of(self, problem: Problem) -> tuple[list[float], list[float]]:
        """Return the base-2 logarithms of a problem's sizes, on the Pow2 and on the Exact axes."""
        return (
            [math.log2(problem.size(name) or 1) for name in self._pow2],
            [math.log2(problem.size(name) or 1) for name in self._exact],
        )

    @lazy
    def problems(self) -> tuple[Problem, ...]:
        """Problems of the points; they ascend."""
        return tuple(self.bucket.replaced(**point.size) for point in self._points)

    @lazy
    def _where(self) -> list[list[float]]:
        sizes = [[point.size[name] for name in self._pow2] for point in self._points]
        return [[math.log2(size or 1) for size in point_sizes] for point_sizes in sizes]

    @lazy
    def _exact_logs(self) -> list[float]:
        return self._logs_of(self.bucket)[1]

    # Measurements at the points -----------------------------------------------------------------------------

    @lazy
    def _place_of(self) -> dict[Config, int]:
        """Column of each config of the portfolio; of a repeated config the first counts."""
        return {config: place for place, config in reversed([*enumerate(self._portfolio)])}

    @lazy
    def _timed(self) -> list[list[int]]:
        """Columns with a time at each point, each config once; the last is the default's."""
        places = [*sorted(self._place_of.values()), len(self._portfolio)]
        return [[place for place in places if row[place] is not None] for row in self._slowdowns]

    @lazy
    def _slowdowns(self) -> list[list[float | None]]:
        """Log slowdowns of the columns at each point."""
        rows = []
        for point in self._points:
            least = min(us for us in point.us if us is not None)
            rows.append([None if us is None else math.log(us / least) for us in point.us])
        return rows

    @lazy
    def _waves(self) -> list[list[float]]:
        """Logarithms of the columns' waves at each point, on the measured GPU."""
        rows = []
        for problem, slowdowns in zip(self.problems, self._slowdowns, strict=True):
            configs = (*self._portfolio, self._default_at(problem))
            pairs = zip(configs, slowdowns, strict=True)
            rows.append([self._waves_of(config, slowdown, problem) for config, slowdown in pairs])
        return rows

    def _waves_of(self, config: Config, slowdown: float | None, problem: Problem) -> float:
        if self._tiles is None or slowdown is None:
            return 0.0
        return math.log(waves(self._tiles(config, problem), config, self._sm_count))

    def _rows_at(self, exponent: float) -> _Rows:
        rows = self._rows.get(exponent)
        if rows is None:
            rows = _Rows([], [])
            none = [[0.0] * len(slowdowns) for slowdowns in self._slowdowns]
            all_grown = self._waves if exponent else none
            for point, slowdowns, grown in zip(self._points, self._slowdowns, all_grown, strict=True):
                without = [
                    None if slowdown is None else slowdown - exponent * waves
                    for slowdown, waves in zip(slowdowns, grown, strict=True)
                ]
                least = min(slowdown for slowdown in without if slowdown is not None)
                fastest = min(time for time in point.us if time is not None)
                rows.slowdowns.append(
                    [None if slowdown is None else slowdown - least for slowdown in without]
                )
                rows.us.append(least + math.log(fastest))
            self._rows[exponent] = rows  # whole or not at all: `tiles` may raise
        return rows

    def left_out(self) -> list[float]:
        """Return the rule's regret at each point, t / t_best - 1, estimated from the other points alone.

        The best is the fastest of the portfolio and the default at the point; a single point has 0.
        """
        regrets = []
        for here, (problem, slowdowns) in enumerate(zip(self.problems, self._slowdowns, strict=True)):
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
            columns = [*zip((*self._portfolio, default), slowdowns, strict=True)]
            known = {config: slowdown for config, slowdown in reversed(columns) if slowdown is not None}
            ranked = (config for _, config in others.ranking(problem, default).slowdowns if config in known)
            taken = next(ranked, None)
            regrets.append(0.0 if taken is None else math.expm1(known[taken]))
        return regrets

    @lazy
    def _inside_exponent(self) -> float:
        return self._least_left("inside") if self._tiles is not None else 0.0

    @lazy
    def _outside_exponents(self) -> dict[Where, float]:
        """Exponent of waves by the position of a size relative to this bucket."""
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
        """Sum of log regrets at the points, each left out in turn, for each of `_EXPONENTS`."""
        if len(self._points) < 2:
            return [0.0] * len(_EXPONENTS)
        return [sum(self._left(exponent)) for exponent in _EXPONENTS]

    def _left(self, exponent: float) -> Iterator[float]:
        """Yield the log regret of an exponent at each point, estimated from the other points."""
        rows, own = self._rows_at(exponent).slowdowns, self._points_with(())
        measured = zip(self._where, self._slowdowns, self._waves, strict=True)
        for here, (where, slowdowns, grown) in enumerate(measured):
            weights = own.weights(where, self._exact_logs)
            del weights[here]
            others, total = [*zip(*rows[:here], *rows[here + 1 :], strict=True)], sum(weights)
            estimates = [
                (_sum(weights, others[column]) / total + exponent * grown[column], column)
                for column, slowdown in enumerate(slowdowns)
                if slowdown is not None and any(other is not None for other in others[column])
            ]
            if estimates:
                yield slowdowns[min(estimates)[1]] or 0.0


class _Points:
    """Points of a bucket and its neighbours, prepared to be weighted.

    Args:
        rules: The rules of the buckets; none is without points.
    """

    def __init__(self, rules: Sequence[BucketRule]) -> None:
        self.rules = rules
        self._exact = [rule._exact_logs for rule in rules]
        self._where = [(number, where) for number, rule in enumerate(rules) for where in rule._where]
        self._columns: dict[float, list[tuple[float | None, ...]]] = {}

    def weights(self, pow2: Sequence[float], exact: Sequence[float]) -> list[float]:
        """Return the points' weights for a size, given the logarithms of its sizes on both kinds of axes."""
        # Written for speed: products have two Exact axes and one Pow2 axis.
        if len(exact) == 2:
            first, second = exact
            apart = [_NEARNESS + abs(first - x) + abs(second - y) for x, y in self._exact]
        else:
            apart = [_NEARNESS + sum(map(abs, map(sub, exact, logs))) for logs in self._exact]
        if len(pow2) == 1:
            size = pow2[0]
            return [1 / (apart[number] + abs(size - at)) ** 2 for number, (at,) in self._where]
        return [1 / (apart[number] + sum(map(abs, map(sub, pow2, at)))) ** 2 for number, at in self._where]

    def columns(self, exponent: float) -> list[tuple[float | None, ...]]:
        """Return the log slowdown without waves of each config, portfolio then default, at each point."""
        columns = self._columns.get(exponent)
        if columns is None:
            rows = [row for rule in self.rules for row in rule._rows_at(exponent).slowdowns]
            columns = self._columns[exponent] = [*zip(*rows, strict=True)]
        return columns


def _sum(weights: Sequence[float], slowdowns: Sequence[float | None]) -> float:
    """Return the weighted sum of the slowdowns; for None, the known ones are scaled up."""
    try:
        return float(sum(map(mul, weights, slowdowns)))
    except TypeError:  # some are None
        pairs = zip(weights, slowdowns, strict=True)
        known = [(weight, slowdown) for weight, slowdown in pairs if slowdown is not None]
        share = sum(weight for weight, _ in known) / sum(weights)
        return sum(weight * slowdown for weight, slowdown in known) / share
