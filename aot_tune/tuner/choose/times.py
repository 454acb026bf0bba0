"""The times from which a table is chosen, and the rule for ties. Pure: values and no policy."""

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
"""Config to its time at one problem, for configs that were measured."""

Times = Mapping[Problem, Run]
"""Problem to config to its time."""

TIE = 0.02
"""Times within this fraction of each other tie: repeated runs of one kernel differ by as much."""


PREFERENCE = 0.5
"""Fraction of the tie band within which a slower config may be preferred for another reason. It is half, so
that the noise of the next tune, which keeps an incumbent within the whole band, does not undo the choice."""


FINALS_BAND = 0.05
"""Configs within this fraction of the fastest are timed again: two and a half times the tie band."""

MOST_FINALISTS = 8
"""Most configs that are timed again, in addition to the default and the incumbent. If more are near, they are
tied anyway."""


def is_tie(first: Measurement, second: Measurement, *, part: float = 1.0) -> bool:
    """Return whether two times tie: within `TIE` of each other, or with overlapping 95 % intervals.

    Args:
        first: A time.
        second: Another time.
        part: The fraction of that band that counts.
    """
    distance = abs(first.mean_us - second.mean_us)
    near = TIE * min(first.mean_us, second.mean_us)
    return distance <= part * max(near, first.error_margin_us + second.error_margin_us)


def scaled(measurement: Measurement, by: float) -> Measurement:
    """Multiply a time by a factor, to convert it to other clocks."""
    return dataclasses.replace(
        measurement, mean_us=measurement.mean_us * by, error_margin_us=measurement.error_margin_us * by
    )


SPOILT = 0.10
"""Largest change of a repeated time that is not spoilt, as a fraction: clocks change it by 2 to 5 %."""


def finalists(times: Mapping[Config, Measurement], keep: Sequence[Config]) -> list[Config]:
    """Return the configs to time again: the configs near the fastest, and the timed configs of `keep`.

    Where no other config is near the fastest, its time may be a glitch. Then the configs near the second are
    timed again too.
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
    changes = [times[config].mean_us / time.mean_us for config, time in finals.items()]
    change = statistics.median([ratio for ratio in changes if abs(ratio - 1) <= SPOILT] or changes)
    return {config: scaled(time, change) for config, time in finals.items()}


@dataclass(frozen=True, kw_only=True)
class ProblemTimes:
    """All times of one problem: of an edge, or of a size inside a bucket."""

    candidates: Run = field(default_factory=dict)
    """First pass at an edge: the times of every candidate, of finalists from the finals."""

    candidate_states: StateTimes = field(default_factory=dict)
    """First pass in the GPU's other states: the times of the candidates near the fastest."""

    portfolio: Run = field(default_factory=dict)
    """Second pass: the times of the portfolio and the default. It supersedes the first pass."""

    portfolio_states: StateTimes = field(default_factory=dict)
    """Second pass in the GPU's other states. It supersedes the first pass."""

    runoff: Run = field(default_factory=dict)
    """Run-off at an edge: the times of the default and the configs near the fastest of the second pass, timed
    again, interleaved. It decides the winner and gives the entry's times."""

    barred: frozenset[Config] = frozenset()
    """Configs that do not win here: their second verification as winners failed, but not by a wrong
    result."""


@dataclass(frozen=True, kw_only=True)
class SweepTimes:
    """All times and facts from which the table of a kernel on an arch is chosen."""

    kernel: str
    """The kernel's declared name."""

    arch: Arch
    """The arch that was swept."""

    source_hash: str
    """Hash of the kernel's code, 16 hex digits."""

    check_hash: str
    """Hash of the check that its configs passed, 16 hex digits."""

    built_with: BuiltWith
    """The device, compiler and driver of the times."""

    axes: Axes
    """The declaration's axes."""

    tiles: Tiles | None
    """The declaration's `tiles`; None where it has none."""

    defaults: Mapping[Problem, Config]
    """The default at every edge, and at sizes inside a bucket where it is another."""

    problems: Mapping[Problem, ProblemTimes]
    """The times at edges and at sizes inside their buckets."""

    wrong: frozenset[Config] = frozenset()
    """Configs that computed a wrong result anywhere: they win nowhere."""

    faulty: Mapping[Problem, str] = field(default_factory=dict)
    """Problems at which the default failed, each with the reason; their buckets have no entry."""

    evidence: Evidence = "measured"
    """Whether the times are measured or predicted by the model."""

    least_gain: float = 0.0
    """Least gain over the default with which a config may replace it, as a fraction;
    `aot_tune.choose.points.PREDICTED_GAIN` for predicted times."""

    def edge_times(self) -> Times:
        """Return the first pass as `judged`, without wrong configs, at edges with a time of the default."""
        return {
            problem: in_worst_state(right, known.candidate_states)
            for problem, known in self.problems.items()
            if self.default(problem) in (right := self._right(problem, known.candidates))
        }

    def times(self) -> Times:
        """Return the times of both passes without wrong configs, at the clocks of the second pass.

        Under its power cap a GPU's clocks change from minute to minute. Times of two runs can be compared
        only through a config that both have, the default.
        """
        return {
            problem: self._right(problem, self._superseded(problem, known.candidates, known.portfolio))
            for problem, known in self.problems.items()
        }

    def in_states(self, problem: Problem) -> StateTimes:
        """Return the `times` of one problem in each of the GPU's other states."""
        known = self.problems[problem]
        first, second = known.candidate_states, known.portfolio_states
        return {
            name: self._right(problem, self._superseded(problem, first.get(name, {}), second.get(name, {})))
            for name in sorted({*first, *second})
        }

    def judged(self, times: Times) -> Times:
        """Return the times that decide: each scaled to the config's slowdown in its worst state."""
        return {problem: in_worst_state(known, self.in_states(problem)) for problem, known in times.items()}

    def race(self, edge: Problem, times: Times) -> Run:
        """Return an entry's times, all of one run: of the run-off, else of the second pass."""
        runoff = self._right(edge, self.problems[edge].runoff)
        return runoff if self.default(edge) in runoff else times[edge]

    def judged_race(self, edge: Problem, times: Times) -> Run:
        """Return the times that decide at an edge: the times of `race`, scaled as in `judged`.

        The fastest config of a state need not be in the race.
        """
        race, states = self.race(edge, times), self.in_states(edge)
        if not states:
            return race
        judged = in_worst_state(self._superseded(edge, times[edge], race), states)
        return {config: judged[config] for config in race}

    def _superseded(self, problem: Problem, first: Run, second: Run) -> Run:
        """Merge two runs at the clocks of the second, whose times take precedence."""
        default = self.default(problem)
        both = default in first and default in second
        scale = second[default].mean_us / first[default].mean_us if both else 1.0
        return {**{config: scaled(time, scale) for config, time in first.items()}, **second}

    def default(self, problem: Problem) -> Config:
        """Return the default at a problem, else at its bucket's edge."""
        return self.defaults.get(problem) or self.defaults[bucket_of(self.axes, problem)]

    def edges(self, times: Times) -> list[Problem]:
        """Return the edges that can have an entry: those whose default did not fail."""
        out = {bucket_of(self.axes, problem) for problem in self.faulty}
        edges = (problem for problem in times if bucket_of(self.axes, problem) == problem)
        return [edge for edge in edges if edge not in out and self.default(edge) in times[edge]]

    def _right(self, problem: Problem, times: Run) -> dict[Config, Measurement]:
        out = self.wrong | self.problems[problem].barred
        return {config: time for config, time in times.items() if config not in out}


def unserved(sweep: SweepTimes) -> tuple[str, ...]:
    """List the problems whose default failed, so that their buckets have no entry, one line each."""
    times = sweep.times()
    edges = (problem for problem in times if bucket_of(sweep.axes, problem) == problem)
    untimed = {edge: "it has no time" for edge in edges if sweep.default(edge) not in times[edge]}
    return tuple(
        f"{bucket_of(sweep.axes, problem)}: no entry: its default ({sweep.default(problem)}) failed at "
        f"{problem}: {reason}"
        for problem, reason in {**untimed, **sweep.faulty}.items()
    )
