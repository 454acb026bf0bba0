"""Fit the slopes of the rule between measured sizes to a table's points, and judge it by them. Pure.

Each point is estimated from others, as if it had not been measured: inside from those of its bucket, outside
from the nearest buckets of other sizes on the Exact axes. What the mean of their slowdowns leaves of its own
slowdowns is fitted by the differences of counts (`aot_tune.choose.points`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add, mul, sub
from typing import NamedTuple

from aot_tune.choose.points import COMMON, NO_COUNTS, RULE, Counts, Estimator, Exact, Points, Rule, Source
from aot_tune.declare.declaration import Declaration
from aot_tune.tables.table import Entry, Slopes, Table
from aot_tune.values.lazy import lazy
from aot_tune.values.problem import Problem


class Left(NamedTuple):
    """Regrets at a size, t / t_best - 1; the best is the fastest of portfolio and default at the size."""

    chosen: float
    """Regret of the choice."""

    default: float
    """Regret of the default."""


class Row(NamedTuple):
    """One config at a point that is left out."""

    place: int
    """Column of the config."""

    slowdown: float
    """Its own log slowdown."""

    near: float
    """Its mean log slowdown at the other points."""

    unseen: float
    """Part of their weight at which it has no time."""

    changes: Sequence[float]
    """Differences of its counts, in the order of the slopes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Point that is left out, as others estimate it."""

    source: Source
    """The point."""

    nearest: Entry
    """Entry of the nearest bucket, or of its own."""

    is_inside: bool
    """Whether the others are of its own bucket."""

    slowdowns: Mapping[int, float]
    """Log slowdowns of the configs that may run, by column."""

    default: int
    """Column of the default."""

    rows: Sequence[Row]
    """Configs that can be estimated."""

    scale: float
    """Factor by which their estimates shrink."""

    spread: float
    """As of `Points.spread`."""

    us: float
    """As of `Points.us`."""

    def left(self, slopes: Slopes, rule: Rule = RULE) -> Left:
        """Return the regrets of the rule's choice and of the default."""
        own = slopes.inside if self.is_inside else slopes.outside
        estimates = {
            row.place: row.near + rule.unseen * row.unseen + sum(map(mul, own, row.changes))
            for row in self.rows
        }
        chosen = min(estimates, key=lambda place: (estimates[place], place), default=self.default)
        if not self.is_inside and self.default in estimates:
            behind = self.scale * (estimates[self.default] - estimates[chosen])
            chosen = self.default if behind <= rule.needed(self.spread, self.us) else chosen
        return self.regrets(chosen)

    def regrets(self, chosen: int) -> Left:
        """Return the regrets of a config, or of the default where it has no time, and of the default."""
        least, default = min(self.slowdowns.values()), self.slowdowns[self.default]
        return Left(math.expm1(self.slowdowns.get(chosen, default) - least), math.expm1(default - least))

    @lazy
    def equations(self) -> list[float]:
        """Sums of products, row by row: of changes with each other, and with what the mean leaves.

        A config weighs as much as it is fast, since only good ones matter. Both sides are centred, because
        slowdowns are relative.
        """
        sums = [0.0] * (_SLOPES * (_SLOPES + 1))
        values = [(*row.changes, row.slowdown - row.near) for row in self.rows]
        weights = [math.exp(-row.slowdown) for row in self.rows]
        means = [sum(map(mul, weights, column)) / sum(weights) for column in zip(*values, strict=True)]
        for weight, row in zip(weights, values, strict=True):
            *changes, left = centred = [*map(sub, row, means)]
            if abs(left) < _MOST_LEFT:
                sums = [*map(add, sums, [weight * x * y for x in changes for y in centred])]
        return sums


class LeaveOut:
    """Cases of a table's points, each left out in turn.

    Args:
        tunable: The declaration.
        table: Its table.
        rule: The rule.
    """

    def __init__(self, tunable: Declaration, table: Table, rule: Rule = RULE) -> None:
        self.table = table
        self.estimator = Estimator(table, tunable.tiles, partial(tunable.default_config, table.arch), rule)
        self._outside: dict[tuple[object, ...], Case] = {}
        self._legal: dict[Problem, tuple[Mapping[int, float], int, Mapping[int, Counts]]] = {}

    def exact(self, case: Case) -> Exact:
        """Return a case's sizes on the Exact axes."""
        return self.estimator.exact(case.source.problem)

    @lazy
    def inside(self) -> list[Case]:
        """Each point as the others of its bucket estimate it."""
        cases = []
        for source in self._sources:
            others = [other for other in self.estimator.sources(source.entry) if other is not source]
            if others:
                cases.append(self._case(source, source.entry, self.estimator.points_inside(others)))
        return cases

    def outside(self, without: Exact | None = None) -> list[Case]:
        """Return each point as the nearest buckets of other sizes on the Exact axes estimate it.

        Args:
            without: Sizes on the Exact axes that are neither left out nor estimated from.
        """
        cases, near = [], dict[Problem, list[Entry]]()
        for source in self._sources:
            bucket, shape = source.entry.bucket, self.estimator.exact(source.problem)
            if bucket not in near:
                hidden = [shape] if without is None else [shape, without]
                near[bucket] = [] if shape == without else self.estimator.nearest(bucket, hidden)
            if near[bucket]:
                key = (source.problem, *map(id, near[bucket]))
                if key not in self._outside:
                    points = self.estimator.points_of(bucket, near[bucket])
                    self._outside[key] = self._case(source, near[bucket][0], points)
                cases.append(self._outside[key])
        return cases

    def equations(self, without: Exact | None = None) -> tuple[Equations, Equations]:
        """Return what fits the slopes inside and outside, without some sizes on the Exact axes."""
        inside = [case for case in self.inside if self.exact(case) != without]
        return _equations(inside), _equations(self.outside(without))

    @lazy
    def _sources(self) -> list[Source]:
        return [source for entry in self.table.entries for source in self.estimator.sources(entry)]

    def _case(self, source: Source, nearest: Entry, points: Points) -> Case:
        if source.problem not in self._legal:
            self._legal[source.problem] = self._legal_at(source)
        slowdowns, default, here = self._legal[source.problem]
        weights, rows = points.weights(source.logs), []
        total = sum(weights)
        for place, slowdown in slowdowns.items():
            known = [
                (weight, own, other.part, other.counts.get(place, NO_COUNTS))
                for weight, other in zip(weights, points.sources, strict=True)
                if (own := other.slowdowns[place]) is not None
            ]
            if known:
                held = sum(weight for weight, *_ in known)
                changes = [0.0] * _SLOPES
                for weight, _, part, counts in known:
                    heavy = weight * part / held
                    changes = [
                        c + heavy * (own - other)
                        for c, own, other in zip(changes, here[place], counts, strict=True)
                    ]
                near = sum(weight * own for weight, own, _, _ in known) / held
                rows.append(Row(place, slowdown, near, 1 - held / total, changes))
        return Case(
            source=source,
            nearest=nearest,
            is_inside=points.is_inside,
            slowdowns=slowdowns,
            default=default,
            rows=rows,
            scale=total / (total + points.far),
            spread=points.spread(weights),
            us=points.us(weights),
        )

    def _legal_at(self, source: Source) -> tuple[Mapping[int, float], int, Mapping[int, Counts]]:
        """Return the log slowdowns of the configs that may run at a point, the default's column, counts."""
        configs = (*self.table.portfolio, self.estimator.default_at(source.problem))
        pairs = reversed([*zip(configs, source.slowdowns, strict=True)])
        slowdowns = {configs.index(config): own for config, own in pairs if own is not None}
        return slowdowns, configs.index(configs[-1]), self.estimator.counts_at(source.problem, [*slowdowns])


# Slopes -----------------------------------------------------------------------------------------------------


class Equations(NamedTuple):
    """Normal equations of slopes."""

    sums: list[float]
    """Sum of `Case.equations`."""

    cases: int
    """Number of cases."""

    @staticmethod
    def joined(every: Iterable[Equations]) -> Equations:
        """Add up equations."""
        nothing = Equations([0.0] * (_SLOPES * (_SLOPES + 1)), 0)
        sums, cases = zip(nothing, *every, strict=True)
        return Equations([*map(math.fsum, zip(*sums, strict=True))], sum(cases))

    def slopes(self, prior: Sequence[float]) -> tuple[float, ...]:
        """Return the slopes that fit best, held to a prior that weighs as much as some cases (ridge)."""
        rows = [self.sums[i * (_SLOPES + 1) : (i + 1) * (_SLOPES + 1)] for i in range(_SLOPES)]
        mean = sum(row[i] for i, row in enumerate(rows)) / _SLOPES
        if mean <= _NOISE * self.cases:  # the counts do not differ, but for rounding
            return tuple(prior)
        held = _HELD * (1 + _HELD_CASES / self.cases)
        for i, row in enumerate(rows):
            ridge = held * (row[i] + _LEAST * mean)
            row[i] += ridge
            row[-1] += ridge * prior[i]
        return tuple(round(slope, 3) + 0.0 for slope in _solved(rows))


def _equations(cases: Iterable[Case]) -> Equations:
    return Equations.joined(Equations(case.equations, 1) for case in cases if len(case.rows) > 1)


def _solved(rows: list[list[float]]) -> list[float]:
    """Solve linear equations, each a row of coefficients and the right side; positive definite."""
    for i, row in enumerate(rows):
        for other in rows[i + 1 :]:
            factor = other[i] / row[i]
            other[i:] = [value - factor * own for value, own in zip(other[i:], row[i:], strict=True)]
    solution = [0.0] * len(rows)
    for i in reversed(range(len(rows))):
        solution[i] = (rows[i][-1] - sum(map(mul, rows[i], solution))) / rows[i][i]
    return solution


def fitted(equations: tuple[Equations, Equations], prior: Slopes = COMMON) -> Slopes:
    """Return the slopes inside and outside that fit best."""
    inside, outside = equations
    return Slopes(inside.slopes(prior.inside), outside.slopes(prior.outside))


def fitted_slopes(tunable: Declaration, table: Table, present: Slopes | None = None) -> Slopes | None:
    """Fit slopes to a table's points.

    The present ones stay unless others leave clearly less regret at the points (`_CLEARLY`), so that noise
    changes nothing.

    Args:
        tunable: The declaration.
        table: Its table.
        present: The slopes of the table that this one replaces.
    """
    if tunable.tiles is None or not table.entries:
        return None
    left_out = LeaveOut(tunable, table)
    new = fitted(left_out.equations())
    if present is None:
        return new
    cases = [*left_out.inside, *left_out.outside()]
    left = [
        math.fsum(math.log1p(case.left(slopes).chosen) for case in cases if case.default in case.slowdowns)
        for slopes in (present, new)
    ]
    return new if left[1] < left[0] - _CLEARLY * len(cases) else present


_SLOPES = 2
"""Number of slopes."""

_MOST_LEFT = 1.0
"""Log slowdown beyond which a config is left out of a fit."""

_HELD = 0.05
"""Weight of the prior of slopes, relative to the cases' own."""

_HELD_CASES = 100
"""Cases of which a fit weighs as much as twice `_HELD`: of few cases the prior weighs more."""

_NOISE = 1e-12
"""Mean square of the changes of counts that is rounding alone."""

_LEAST = 0.001
"""Part of the mean weight by which slopes are held of whose counts the cases say nothing."""

_CLEARLY = 0.0005
"""Least difference of mean regrets that decides: a twentieth of a percent. Less is not worth a change that
has to be reviewed."""
