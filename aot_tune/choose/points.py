"""Rule between measured sizes: choose a size's config from the times at points near it. Pure.

It uses no file and no GPU, and of a kernel only its count of tiles. Serving follows it; the tuner judges by
it.

A config's *slowdown* at a point is the logarithm of its time / the fastest config's time at this point. Where
a point has times in several states of the GPU, a config's time is that of its worst state
(`aot_tune.tables.states`). Its estimate at another size is a weighted mean over some points,

    mean of (slowdown + part x slopes . (counts at the size - counts at the point)) + unseen

and the config with the least estimate is taken.

- **Points.** Inside a measured bucket, the bucket's own. For any other size, those of the `Rule.most_near`
  nearest buckets of the whole table, whatever their edges and classes: all points of the `Rule.whole`
  nearest, and of each of the others the `Rule.of_others` nearest. The distance of two sizes is the sum of
  |log2| of their ratios over all axes, plus `Rule.other_class` for each class value (dtype, flag) that
  differs.
- **Weight** of a point: 1 / (distance + `_NEARNESS`) ** 2.
- **Counts**, as logarithms: *waves*, tiles over the blocks that the GPU runs at a time, rounded up; *tiles*.
  At the size they are of the GPU that launches, at a point of the one that was measured. Without `tiles` both
  are 0.
- **Slopes**, one for each count, are the table's, fitted to its own points (`aot_tune.choose.left_out`), else
  `COMMON`, which are fitted to all shipped tables.
- **Part** of a point: the sum of logarithms of its sizes on the Pow2 axes over the table's largest, since
  small batches are bound by the operand that all their rows share. Times 0 where all configs take equally
  long within `Rule.equal`, as where a launch takes most of the time; times 1 from twice of it on.
- **Unseen**: `Rule.unseen` times the weight of the points at which the config has no time. A config without
  a time at any point is not estimated.

Outside buckets all estimates shrink towards none the farther the points are (`Rule.far`), and the default is
taken unless the choice is expected to be faster by more than `Rule.overlap`; where the slowest config of each
point is, in the mean of the points, within one and a half of `Rule.equal`, also by more than `Rule.few_us`.
On another GPU model than the measured one, of the configs whose estimates overlap, the config that loads the
fewest bytes is taken: the fastest of them is not known, and with less bandwidth only bytes cost more.
``tuned_configs/README.md`` has an example and the rule's regret on measured tables.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from operator import add, mul
from typing import NamedTuple

from aot_tune.choose.nearest import Buckets, Logs, distances
from aot_tune.tables.states import worst_times
from aot_tune.tables.table import Entry, Point, Slopes, Table
from aot_tune.values.bucket import Pow2
from aot_tune.values.config import Config
from aot_tune.values.lazy import lazy
from aot_tune.values.problem import Problem

Allowed = Callable[[Config], bool]
"""Function that returns whether a config may run for the problem."""

Tiles = Callable[[Config, Problem], int]
"""Declaration's function from (config, problem) to the number of tiles, blocks of work."""

Loads = Callable[[Config], float]
"""Function from a config to the bytes that all its blocks load for the problem."""

DefaultAt = Callable[[Problem], Config]
"""Function from a problem to the declaration's default for it."""

Exact = tuple[int, ...]
"""Sizes of a problem on the Exact axes."""

PREDICTED_GAIN = 0.10
"""Fraction by which a config of a predicted entry must be expected to be faster than the default. Measured on
an H200: one of 54 problems then ran over 2 % slower than with the default. The model's error has this
size."""


class Rule(NamedTuple):
    """Parameters of the rule."""

    most_near: int = 6
    """Most buckets whose points estimate a size without a bucket of its own."""

    whole: int = 2
    """Buckets of which all points do, the nearest."""

    of_others: int = 2
    """Points of each of the others: those nearest to the size's bucket."""

    other_class: float = 2.0
    """Doublings that a class value adds to the distance where it differs."""

    unseen: float = 0.05
    """Log slowdown by which a config would be charged that has no time at any point."""

    far: float = 0.05
    """Weight of a point at which all configs take equally long, 4.4 doublings away from every size."""

    equal: float = 0.05
    """Log slowdown within which all configs count as equal at a point; its part is whole from twice of it."""

    overlap: float = 0.01
    """Fraction within which estimates from other buckets overlap, half of the tie band of measured times."""

    few_us: float = 0.2
    """Microseconds within which they overlap too, where `Points.spread` is within 1.5 times `equal`."""

    def needed(self, spread: float, us: float) -> float:
        """Return the log slowdown by which the default must be behind, for another config to be taken.

        Args:
            spread: As of `Points.spread`.
            us: Expected time of the fastest, microseconds.
        """
        few = self.few_us / us if spread < 1.5 * self.equal else 0.0
        return math.log1p(max(self.overlap, few))


RULE = Rule()
"""Rule that serving follows. ``aot-tune bench --left-out --ablate`` prints what each part gives."""

COMMON = Slopes(inside=(0.587, 0.308), outside=(0.544, -0.338))
"""Slopes that fit all shipped tables together, within a few hundredths: of a table without its own, towards
which its own are held. ``aot-tune bench --left-out --ablate`` prints them anew."""

NO_SLOPES = Slopes(inside=(0.0, 0.0), outside=(0.0, 0.0))
"""Slopes of a kernel without `tiles`."""

_NEARNESS = 0.1
"""Doublings added to each distance. With a third of it, or with cubes in place of squares, the regret on the
tables of sm90 is the same."""

_LIGHTER = 0.05
"""Fraction within which loads count as equal: a declaration counts the steps of last tiles as whole steps."""


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


def pick(
    entry: Entry,
    estimator: Estimator,
    default: Config,
    problem: Problem,
    allowed: Allowed,
    *,
    bucket: Problem | None = None,
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
        estimator: The estimator of the entry's table.
        default: The declaration's default for this problem.
        problem: A problem of this bucket, or of a bucket without an entry.
        allowed: Whether a config may run: legal, in the search space. Called until one may.
        bucket: The problem's bucket, where it is another than the entry's.
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
    points = estimator.inside(entry) if bucket is None else estimator.near(bucket)
    estimates = estimator.estimates(problem, default, points, sm_count=sm_count)
    ranked = estimates.of(entry)
    fastest = edge or _fastest(entry, estimates, ranked, allowed)
    return (
        fastest if fastest is None or loads is None else _lightest(fastest, estimates, ranked, allowed, loads)
    )


def _fastest(entry: Entry, estimates: Estimates, ranked: Sequence[Estimate], allowed: Allowed) -> Pick | None:
    default = estimates.configs[-1]
    for slowdown, place in ranked:
        config = estimates.configs[place]
        behind = math.inf if estimates.points.is_inside else estimates.default_slowdown - slowdown
        if behind < math.inf and behind <= estimates.needed and allowed(default):
            return Pick(default, partial(_overlap, estimates, behind, config))
        if allowed(config):
            return Pick(config, partial(_reason, estimates, slowdown))
    for config, name in ((entry.config, "the bucket's winner"), (default, "the default")):
        if allowed(config):
            return Pick(config, partial("{}: no point near it has a time".format, name))
    return None


def _lightest(
    picked: Pick, estimates: Estimates, ranked: Sequence[Estimate], allowed: Allowed, loads: Loads
) -> Pick:
    """Return the config that loads the fewest bytes, of the pick and the configs within `Rule.overlap`."""
    configs = estimates.configs
    fastest = next((slowdown for slowdown, place in ranked if allowed(configs[place])), -math.inf)
    limit = fastest + math.log1p(RULE.overlap)
    near = [configs[place] for slowdown, place in ranked if slowdown <= limit]
    others = [config for config in near if config != picked.config]
    least = whole = loads(picked.config) if others else 0.0
    lightest = picked.config
    for config in others if whole < math.inf else ():
        if (own := loads(config)) * (1 + _LIGHTER) < least and allowed(config):
            least, lightest = own, config
    return picked if lightest == picked.config else Pick(lightest, partial(_lighter, picked, least / whole))


def _lighter(picked: Pick, part: float) -> str:
    return (
        f"expected within {RULE.overlap:.0%} of the fastest, and loads {part:.0%} of the bytes of "
        f"{picked.config}; the times are another GPU model's; {picked.reason}"
    )


def _reason(estimates: Estimates, slowdown: float) -> str:
    us = f", {estimates.us(slowdown):.1f} us" if estimates.points.is_inside else ""
    return f"fastest expected{us}: estimated from {estimates.basis}"


def _overlap(estimates: Estimates, behind: float, fastest: Config) -> str:
    if not behind:
        return f"the default, fastest expected: estimated from {estimates.basis}"
    return (
        f"the default: expected to take {math.expm1(behind):.1%} longer than {fastest}, and estimates from "
        f"other buckets overlap within {math.expm1(estimates.needed):.0%}; estimated from {estimates.basis}"
    )


# Points -----------------------------------------------------------------------------------------------------

Counts = tuple[float, float]
"""Logarithms of a config's waves and tiles."""

NO_COUNTS: Counts = (0.0, 0.0)


def blocks_in_flight(config: Config, sm_count: int) -> int:
    """Return the number of blocks of a config that the GPU runs at a time."""
    return max(sm_count * config.hints.get("occupancy", 1) // config.hints.get("num_ctas", 1), 1)


def waves(tiles: int, config: Config, sm_count: int) -> int:
    """Return the number of times that the GPU is filled with blocks to run these tiles, at least 1."""
    return max(-(-tiles // blocks_in_flight(config, sm_count)), 1)


class Source(NamedTuple):
    """Point of a table, prepared for estimates. Columns are the portfolio's configs, then the default."""

    entry: Entry
    """Entry of the point's bucket."""

    problem: Problem
    """The point's problem."""

    logs: Logs
    """Base-2 logarithms of its sizes."""

    part: float
    """Part of its time that counts change."""

    us: float
    """Logarithm of the shortest time in its worst state, microseconds."""

    slowdowns: Sequence[float | None]
    """Log slowdown of each column; None without a time."""

    spread: float
    """Log slowdown of the slowest."""

    counts: Mapping[int, Counts]
    """Counts on the measured GPU of each column with a time; none where they change no part of it."""

    kept: dict[Sequence[float], list[float | None]]
    """Answers of `rests`."""

    def rests(self, slopes: Sequence[float]) -> list[float | None]:
        """Return the slowdowns without what counts add by some slopes; None without a time."""
        if slopes not in self.kept:
            rests, (of_waves, of_tiles), part = [*self.slowdowns], slopes, self.part
            for place, (waves, tiles) in self.counts.items():
                rests[place] -= part * (of_waves * waves + of_tiles * tiles)  # type: ignore[operator]
            self.kept[slopes] = rests
        return self.kept[slopes]


class Column(NamedTuple):
    """Column of some points, at one of which at least it has a time."""

    place: int
    """Its place: of a config of the portfolio, then of the default."""

    rests: Sequence[float]
    """As of `Source.rests` of each point; 0 where it has no time."""

    known: Sequence[float] | None
    """Whether it has a time, as 1 or 0, at each point; None where it has at all."""

    parts: Sequence[float]
    """Parts of the points; 0 where it has no time."""


class Points:
    """Points that estimate sizes of one bucket.

    Args:
        sources: The points.
        more: Doublings to add to the distance of each point.
        slopes: Slopes of the counts.
        far: Weight of a point at which all configs take equally long; 0 for points of the sizes' own bucket.
    """

    def __init__(
        self, sources: Sequence[Source], more: Sequence[float], slopes: Sequence[float], far: float = 0.0
    ) -> None:
        self.sources, self.slopes, self.far, self._more = sources, slopes, far, more
        self._logs = [source.logs for source in sources]

    @property
    def is_inside(self) -> bool:
        """Whether they are of the sizes' own bucket."""
        return not self.far

    @lazy
    def parts(self) -> list[float]:
        """Parts of the points."""
        return [source.part for source in self.sources]

    @lazy
    def columns(self) -> list[Column]:
        """Columns with a time."""
        columns = []
        rests = zip(*[source.rests(self.slopes) for source in self.sources], strict=True)
        for place, rest in enumerate(rests):
            known = [float(one is not None) for one in rest] if None in rest else None
            if known is None:
                columns.append(Column(place, rest, None, self.parts))
            elif any(known):
                filled = [one or 0.0 for one in rest]
                columns.append(Column(place, filled, known, [*map(mul, known, self.parts)]))
        return columns

    def weights(self, logs: Sequence[float]) -> list[float]:
        """Return the points' weights for a size, given the logarithms of its sizes."""
        apart = map(add, distances(logs, self._logs), self._more)
        return [doublings**-2 for doublings in apart]

    def us(self, weights: Sequence[float]) -> float:
        """Return the time of the fastest config in the mean of the points, microseconds."""
        total: float = sum(map(mul, weights, [source.us for source in self.sources]))
        return math.exp(total / sum(weights))

    def spread(self, weights: Sequence[float]) -> float:
        """Return the mean over the points of the log slowdown of each point's slowest config."""
        total: float = sum(map(mul, weights, [source.spread for source in self.sources]))
        return total / sum(weights)


Estimate = tuple[float, int]
"""Log slowdown of a config, relative to a time that all share, and the config's column."""


class Estimates(NamedTuple):
    """Estimates of all configs for a size."""

    configs: Sequence[Config]
    """Configs by column: the portfolio, then the default."""

    ranked: Sequence[Estimate]
    """All estimates, least first; ties keep the portfolio's order."""

    points: Points
    """The points."""

    weights: Sequence[float]
    """Their weights, in any unit."""

    default_place: int
    """Column of the default, the first where the portfolio has it too."""

    unseen: float
    """As `Rule.unseen`."""

    def parts(self, place: int) -> tuple[float, float]:
        """Return two parts of an estimate: the mean slowdown at the points, and the charge for unseen ones.

        The rest is what the counts change.
        """
        total = sum(self.weights)
        pairs = zip(self.weights, self.points.sources, strict=True)
        known = [(weight, time) for weight, source in pairs if (time := source.slowdowns[place]) is not None]
        own, scale = sum(weight for weight, _ in known), total / (total + self.points.far)
        mean = sum(weight * slowdown for weight, slowdown in known) / own
        return scale * mean, scale * self.unseen * (1 - own / total)

    @property
    def default_slowdown(self) -> float:
        """Log slowdown of the default; infinite without an estimate."""
        return next((slowdown for slowdown, place in self.ranked if place == self.default_place), math.inf)

    def of(self, entry: Entry) -> Sequence[Estimate]:
        """Return the estimates; of a predicted entry only the default's and those with `PREDICTED_GAIN`."""
        if entry.evidence == "measured":
            return self.ranked
        limit = self.default_slowdown - math.log1p(PREDICTED_GAIN)
        return [row for row in self.ranked if row[0] <= limit or row[1] == self.default_place]

    def us(self, slowdown: float) -> float:
        """Return the expected microseconds at a log slowdown, for a size inside a bucket."""
        return self.points.us(self.weights) * math.exp(slowdown)

    @property
    def needed(self) -> float:
        """Log slowdown by which the default must be behind, for another config to be taken."""
        return RULE.needed(self.points.spread(self.weights), self.points.us(self.weights))

    @property
    def basis(self) -> str:
        """Points with their shares of the weight; of other buckets, the buckets."""
        if not self.points.sources:
            return "no point"
        total, inside = sum(self.weights), self.points.is_inside
        shares: dict[Problem, float] = defaultdict(float)
        for weight, source in zip(self.weights, self.points.sources, strict=True):
            shares[source.problem if inside else source.entry.bucket] += weight / total
        values = next(iter(shares))
        names = [name for name in values if len({problem[name] for problem in shares}) > 1]
        names = names or [name for name, value in values.items() if type(value) is int]
        texts = {problem: " ".join(f"{name}={problem[name]}" for name in names) for problem in shares}
        if len(shares) == 1:
            return ("" if inside else "the bucket ") + next(iter(texts.values()))
        weighed = sorted(shares, key=lambda problem: -shares[problem])
        listed = ", ".join(f"{texts[problem]} ({shares[problem]:.0%})" for problem in weighed)
        return ("" if inside else "the buckets ") + listed


# Tables -----------------------------------------------------------------------------------------------------


class Estimator:
    """Estimates of a table, from points that are prepared when they are first needed.

    Args:
        table: The table.
        tiles: The declaration's count of tiles, or None.
        default_at: Returns the default at each point, whose time is the point's last.
        rule: The rule.
        buckets: The buckets of the table's entries, where they were prepared before.
    """

    def __init__(
        self,
        table: Table,
        tiles: Tiles | None,
        default_at: DefaultAt,
        rule: Rule = RULE,
        buckets: Buckets | None = None,
    ) -> None:
        self.table, self.default_at, self.rule = table, default_at, rule
        self.slopes = NO_SLOPES if tiles is None else table.slopes or COMMON
        self._tiles = tiles
        self.buckets = buckets or Buckets(table.axes, [e.bucket for e in table.entries], rule.other_class)
        self._pow2 = [name for name, axis in table.axes.items() if isinstance(axis, Pow2)]
        self._sources: dict[int, Source] = {}
        self._points: dict[Problem, Points] = {}
        self._shared: dict[tuple[object, ...], Points] = {}
        self._blocks_of = lru_cache(_MOST_KEPT)(self._blocks)

    def estimates(
        self, problem: Problem, default: Config, points: Points, sm_count: int | None = None
    ) -> Estimates:
        """Estimate the portfolio and the default for a size.

        At a point of the size's bucket only its own times count.

        Args:
            problem: The size.
            default: The default at the size. Outside the portfolio, the points' defaults represent it.
            points: The points: `inside` or `near`.
            sm_count: Multiprocessors of the launching GPU; None for the measured GPU's.
        """
        sm_count, logs = sm_count or self.table.built_with.sm_count, self._logs_of(problem)
        weights = points.weights(logs)
        own = [source for source in points.sources if source.logs == logs] if points.is_inside else []
        if own:
            points, weights = Points(own, [_NEARNESS], NO_SLOPES.inside), [1.0]
        configs = (*self.table.portfolio, default)
        ranked = self._ranked(problem, default, points, weights, sm_count) if weights else []
        default_place = self._place_of.get(default, len(configs) - 1)
        if default_place < len(configs) - 1:
            ranked = [row for row in ranked if row[1] < len(configs) - 1]
        return Estimates(configs, ranked, points, weights, default_place, self.rule.unseen)

    def _ranked(
        self, problem: Problem, default: Config, points: Points, weights: Sequence[float], sm_count: int
    ) -> list[Estimate]:
        # Written for speed: an unseen shape waits for it.
        counts = self._counts(problem, default, [column.place for column in points.columns], sm_count)
        total, (of_waves, of_tiles), ranked = sum(weights), points.slopes, []
        whole, scale = sum(map(mul, weights, points.parts)) / total, total / (total + points.far)
        for (place, rests, known, parts), (waves, tiles) in zip(points.columns, counts, strict=True):
            slowdown, part = sum(map(mul, weights, rests)) / total, whole
            if known is not None:
                own = sum(map(mul, weights, known))
                slowdown = slowdown * total / own + self.rule.unseen * (1 - own / total)
                part = sum(map(mul, weights, parts)) / own
            ranked.append(((slowdown + part * (of_waves * waves + of_tiles * tiles)) * scale, place))
        ranked.sort()
        return ranked

    def counts_at(self, problem: Problem, places: Sequence[int]) -> dict[int, Counts]:
        """Return the counts of some columns at a point, on the measured GPU."""
        if not places:
            return {}
        sm_count = self.table.built_with.sm_count
        return dict(
            zip(places, self._counts(problem, self.default_at(problem), places, sm_count), strict=True)
        )

    def _counts(
        self, problem: Problem, default: Config, places: Sequence[int], sm_count: int
    ) -> list[Counts]:
        """Return the counts of some columns at a problem, on a GPU of some multiprocessors."""
        tiles_of, log = self._tiles, math.log
        if tiles_of is None:
            return [NO_COUNTS] * len(places)
        configs = (*self.table.portfolio, default)
        blocks = [*self._blocks_of(sm_count), blocks_in_flight(default, sm_count)]
        return [
            (log(-(-tiles // blocks[place])), log(tiles))
            if (tiles := tiles_of(configs[place], problem)) > 1
            else NO_COUNTS
            for place in places
        ]

    def inside(self, entry: Entry) -> Points:
        """Return the points of an entry's bucket; kept."""
        points = self._points.get(entry.bucket)
        if points is None:
            points = self._points[entry.bucket] = self.points_inside(self.sources(entry))
        return points

    def points_inside(self, sources: Sequence[Source]) -> Points:
        """Return some points of one bucket."""
        return Points(sources, [_NEARNESS] * len(sources), self.slopes.inside)

    def near(self, bucket: Problem) -> Points:
        """Return the points of the nearest buckets; kept, and shared on one edge."""
        points = self._points.get(bucket)
        if points is None:
            entries = self.nearest(bucket)
            key = (*self.buckets.order(bucket).split[1:], *map(id, entries))
            points = self._shared.get(key) or self.points_of(bucket, entries)
            for kept in (self._points, self._shared):
                if len(kept) >= _MOST_KEPT:
                    kept.clear()
            self._points[bucket] = self._shared[key] = points
        return points

    def points_of(self, bucket: Problem, entries: Sequence[Entry]) -> Points:
        """Return the points of some entries for the sizes of another bucket."""
        sources, more = list[Source](), list[float]()
        for place, entry in enumerate(entries):
            if place < self.rule.whole:
                own = [self._prepared(entry, point) for point in _timed(entry, _TELLING)]
            else:
                own = self._sources_near(entry, bucket)
            sources += own
            more += [_NEARNESS + self.buckets.of_classes(bucket, entry.bucket)] * len(own)
        return Points(sources, more, self.slopes.outside, self.rule.far)

    def nearest(self, bucket: Problem, without: Collection[Exact] = ()) -> list[Entry]:
        """Return the entries of the nearest buckets, nearest first.

        Args:
            bucket: The bucket.
            without: Sizes on the Exact axes of buckets that are left out.
        """
        entries = map(self.table.entries.__getitem__, self.buckets.order(bucket).places)
        timed = (e for e in entries if e.is_timed() and not (without and self.exact(e.bucket) in without))
        telling = (entry for entry in timed if _timed(entry, _TELLING))
        return [*islice(telling, self.rule.most_near)]

    def left_out(self, entry: Entry) -> dict[Problem, float]:
        """Return the rule's regret at each point of an entry, t / t_best - 1, estimated from its others.

        The best is the fastest of the portfolio and the default at the point; a single point has 0.
        """
        regrets, sources = {}, self.sources(entry)
        for source in sources:
            points = self.points_inside([other for other in sources if other is not source])
            estimates = self.estimates(source.problem, self.default_at(source.problem), points)
            ranked = (source.slowdowns[place] for _, place in estimates.of(entry))
            chosen = next((slowdown for slowdown in ranked if slowdown is not None), 0.0)
            regrets[source.problem] = math.expm1(chosen)
        return regrets

    def sources(self, entry: Entry) -> list[Source]:
        """Return the prepared points of an entry."""
        return [self._prepared(entry, point) for point in _timed(entry)]

    def _sources_near(self, entry: Entry, bucket: Problem) -> list[Source]:
        """Return the `Rule.of_others` points of an entry that are nearest to a bucket."""

        def apart(point: Point) -> float:
            return sum(abs(math.log2(size / (bucket.size(name) or 1))) for name, size in point.size.items())

        nearest = sorted(_timed(entry, _TELLING), key=apart)[: self.rule.of_others]
        return [self._prepared(entry, point) for point in nearest]

    def _prepared(self, entry: Entry, point: Point) -> Source:
        source = self._sources.get(id(point))
        if source is None:
            source = self._sources[id(point)] = self._source(entry, point)
        return source

    def _source(self, entry: Entry, point: Point) -> Source:
        problem, us = entry.bucket.replaced(**point.size), worst_times(point.us, point.states)
        least = min([time for time in us if time is not None])
        slowdowns = [None if time is None else math.log(time / least) for time in us]
        spread = max([slowdown for slowdown in slowdowns if slowdown is not None])
        share = min(max(spread / self.rule.equal - 1, 0.0), 1.0)
        part = share * (self._batch_of(problem) / self._largest if self._largest else 1.0)
        timed = [place for place, time in enumerate(us) if time is not None and part]
        return Source(
            entry=entry,
            problem=problem,
            logs=self._logs_of(problem),
            part=part,
            us=math.log(least),
            slowdowns=slowdowns,
            spread=spread,
            counts=self.counts_at(problem, timed),
            kept={},
        )

    def _blocks(self, sm_count: int) -> list[int]:
        """Return the number of blocks of each member of the portfolio that a GPU runs at a time."""
        return [blocks_in_flight(config, sm_count) for config in self.table.portfolio]

    def exact(self, problem: Problem) -> Exact:
        """Return a problem's sizes on the Exact axes."""
        return tuple([problem.size(name) for name in self.table.axes if name not in self._pow2])

    def _logs_of(self, problem: Problem) -> Logs:
        return tuple([math.log2(problem.size(name) or 1) for name in self.table.axes])

    @lazy
    def _largest(self) -> float:
        """Largest sum of logarithms on the Pow2 axes of a bucket."""
        return max(self._batch_of(entry.bucket) for entry in self.table.entries)

    def _batch_of(self, problem: Problem) -> float:
        """Return the sum of a problem's logarithms on the Pow2 axes."""
        return sum([math.log2(problem.size(name) or 1) for name in self._pow2])

    @lazy
    def _place_of(self) -> dict[Config, int]:
        """Column of each config of the portfolio; of a repeated config the first counts."""
        return {config: place for place, config in reversed([*enumerate(self.table.portfolio)])}


def _timed(entry: Entry, least: int = 1) -> list[Point]:
    """Return the points of an entry with that many times; none where it is malformed."""
    points = entry.points if entry.is_sound() else ()
    return [point for point in points if len(point.us) - point.us.count(None) >= least]


_TELLING = 2
"""Fewest times of a point that counts for other buckets: one alone tells of no difference."""

_MOST_KEPT = 1024
"""Most sets of points that are kept; beyond it all are dropped."""
