"""The times from which a table is chosen, and the rule when two of them tie. Pure: values and no policy."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aot_tune.choose.points import Tiles
from aot_tune.tables.table import BuiltWith, Evidence
from aot_tune.tuner.choose.states import StateTimes, in_worst_state
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Axes, bucket_of
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

Run = Mapping[Config, Measurement]
"""Each config's time at one problem. A config that failed or was not tried has none."""

Times = Mapping[Problem, Run]
"""Problem to config to its time."""

TIE = 0.02
"""Times within this fraction of each other tie: repeated runs of one kernel differ by as much."""


PREFERENCE = 0.5
"""The part of the tie band within which a slower config may be preferred to a faster one for another reason.
It is half, so that the noise of the next tune, which keeps an incumbent within the whole band, does not undo
the choice."""


FINALS_BAND = 0.05
"""Configs within this fraction of the fastest are timed again; it is two and a half times the tie band."""

MOST_FINALISTS = 8
"""Most configs that are timed again, in addition to the default and the incumbent. If more come near, they
are tied anyway."""


def is_tie(one: Measurement, other: Measurement, *, part: float = 1.0) -> bool:
    """Whether two times tie: they are within `TIE` of each other, or their 95 % intervals overlap.

    Args:
        one: A time.
        other: Another time.
        part: The fraction of that band that counts.
    """
    apart = abs(one.mean_us - other.mean_us)
    near = TIE * min(one.mean_us, other.mean_us)
    return apart <= part * max(near, one.error_margin_us + other.error_margin_us)


def scaled(measurement: Measurement, by: float) -> Measurement:
    """A time multiplied by a factor, as it would be at other clocks."""
    return dataclasses.replace(
        measurement, mean_us=measurement.mean_us * by, error_margin_us=measurement.error_margin_us * by
    )


SPOILT = 0.10
"""A time that changes by more than this fraction when it is taken again was spoilt: clocks change it by 2 to
5 %."""


def finalists(times: Mapping[Config, Measurement], keep: Sequence[Config]) -> list[Config]:
    """The configs to time again: those near the fastest, and those of `keep` that were timed.

    Where nothing else is near the fastest, its time may be a glitch. Then those near the second are timed
    again too.
    """
    if not times:
        return []
    ranked = sorted(times, key=lambda config: times[config].mean_us)

    def near(place: int) -> list[Config]:
        limit = times[ranked[place]].mean_us * (1 + FINALS_BAND)
        return [config for config in ranked if times[config].mean_us <= limit]

    close = near(0) if len(near(0)) > 1 or len(ranked) == 1 else near(1)
    return list(dict.fromkeys([*close[:MOST_FINALISTS], *(config for config in keep if config in times)]))


def as_of_first_run(
    times: Mapping[Config, Measurement], finals: Mapping[Config, Measurement]
) -> dict[Config, Measurement]:
    """Scale the finals' times to the clocks of the first run, to compare them with the other configs' times.

    Under its power cap a GPU's clocks change from second to second. The median change of the finalists' times
    is the factor. A change by more than `SPOILT` does not count, unless all changed by as much.
    """
    if not finals:
        return {}
    changes = [times[config].mean_us / one.mean_us for config, one in finals.items()]
    change = statistics.median([one for one in changes if abs(one - 1) <= SPOILT] or changes)
    return {config: scaled(one, change) for config, one in finals.items()}


@dataclass(frozen=True, kw_only=True)
class ProblemTimes:
    """All times of one problem: of an edge, or of a size inside a bucket."""

    candidates: Run = field(default_factory=dict)
    """The first pass, at an edge: every candidate; a finalist's time is that of the finals."""

    candidate_states: StateTimes = field(default_factory=dict)
    """The first pass in the GPU's other states: the candidates near the fastest."""

    portfolio: Run = field(default_factory=dict)
    """The second pass: the portfolio and the default. It supersedes the first pass."""

    portfolio_states: StateTimes = field(default_factory=dict)
    """The second pass in the GPU's other states. It supersedes the first pass."""

    runoff: Run = field(default_factory=dict)
    """At an edge, the default and the configs near the fastest of the second pass, timed again, interleaved.
    The winner is one of them, and the entry's times are these."""

    barred: frozenset[Config] = frozenset()
    """Configs that failed in another way than by a wrong result when they were verified again as winners:
    they do not win here."""


@dataclass(frozen=True, kw_only=True)
class SweepTimes:
    """All times and facts of one kernel on one arch from which its table is chosen."""

    kernel: str
    """The kernel's declared name."""

    arch: Arch
    """The arch that was swept."""

    source_hash: str
    """Hash of the kernel's code, 16 hex digits."""

    built_with: BuiltWith
    """The device, compiler and driver of the times."""

    axes: Axes
    """The declaration's axes."""

    tiles: Tiles | None
    """The declaration's `tiles`; None where it has none."""

    defaults: Mapping[Problem, Config]
    """The default at every edge, and at sizes inside a bucket where it differs from the edge's."""

    problems: Mapping[Problem, ProblemTimes]
    """The times at edges and at sizes inside their buckets."""

    wrong: frozenset[Config] = frozenset()
    """Configs that computed a wrong result anywhere: they win nowhere."""

    evidence: Evidence = "measured"
    """Whether the times are measured or predicted by the model."""

    least_gain: float = 0.0
    """The least gain over the default with which a config may replace it, as a fraction;
    `rule.PREDICTED_GAIN` for predicted times."""

    def edge_times(self) -> Times:
        """The first pass as `judged`, without wrong configs, at edges where the default has a time."""
        return {
            problem: in_worst_state(right, known.candidate_states)
            for problem, known in self.problems.items()
            if self.default(problem) in (right := self._right(problem, known.candidates))
        }

    def times(self) -> Times:
        """The times of both passes without wrong configs; the first is scaled to the clocks of the second.

        Under its power cap a GPU's clocks change from minute to minute. Times of two runs can be compared
        only through a config that both have, the default.
        """
        return {
            problem: self._right(problem, self._superseded(problem, known.candidates, known.portfolio))
            for problem, known in self.problems.items()
        }

    def in_states(self, problem: Problem) -> StateTimes:
        """As `times` for one problem, in each of the GPU's other states."""
        known = self.problems[problem]
        first, second = known.candidate_states, known.portfolio_states
        return {
            name: self._right(problem, self._superseded(problem, first.get(name, {}), second.get(name, {})))
            for name in sorted({*first, *second})
        }

    def judged(self, times: Times) -> Times:
        """The times by which configs are compared: each as far behind the fastest as in its worst state."""
        return {problem: in_worst_state(known, self.in_states(problem)) for problem, known in times.items()}

    def race(self, edge: Problem, times: Times) -> Run:
        """The times that an entry shows, all of one run: the run-off's, else those of the second pass."""
        runoff = self._right(edge, self.problems[edge].runoff)
        return runoff if self.default(edge) in runoff else times[edge]

    def judged_race(self, edge: Problem, times: Times) -> Run:
        """The times that decide at an edge: those of `race`, lengthened as in `judged`.

        The fastest config of a state need not be in the race.
        """
        race, states = self.race(edge, times), self.in_states(edge)
        if not states:
            return race
        judged = in_worst_state(self._superseded(edge, times[edge], race), states)
        return {config: judged[config] for config in race}

    def _superseded(self, problem: Problem, first: Run, second: Run) -> Run:
        """The times of a later run, and below them those of an earlier one as they would be at its clocks."""
        default = self.default(problem)
        both = default in first and default in second
        scale = second[default].mean_us / first[default].mean_us if both else 1.0
        return {**{config: scaled(time, scale) for config, time in first.items()}, **second}

    def default(self, problem: Problem) -> Config:
        """The default at a problem, else at its bucket's edge."""
        return self.defaults.get(problem) or self.defaults[bucket_of(self.axes, problem)]

    def edges(self, times: Times) -> list[Problem]:
        """The edges that can have an entry, because the default has a time there."""
        return [p for p in times if bucket_of(self.axes, p) == p and self.default(p) in times[p]]

    def _right(self, problem: Problem, times: Run) -> dict[Config, Measurement]:
        out = self.wrong | self.problems[problem].barred
        return {config: time for config, time in times.items() if config not in out}


def unserved(sweep: SweepTimes) -> tuple[str, ...]:
    """A line for each swept edge that gets no entry, because its default has no time to compare with."""
    times = sweep.times()
    served = set(sweep.edges(times))
    return tuple(
        f"{problem}: no entry: its default ({sweep.default(problem)}) has no time"
        for problem in times
        if bucket_of(sweep.axes, problem) == problem and problem not in served
    )
