"""The times a table is chosen from, and when two of them are the same. Pure: values and no policy."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aot_tune.tables.rule import Tiles
from aot_tune.tables.table import BuiltWith, Evidence
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Axes, bucket_of
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

Times = Mapping[Problem, Mapping[Config, Measurement]]
"""What is known of each config at each problem. A config that failed or was not tried is not there."""

TIE = 0.02
"""Times closer than this fraction are the same: repeated runs of one kernel differ by as much."""


PREFERENCE = 0.5
"""The part of the tie band within which a slower config is preferred to a faster for another reason. Half,
so that the noise of the next tune, which keeps an incumbent within the whole band, does not undo it."""


FINALS_BAND = 0.05
"""Who comes within this fraction of the fastest is timed again: two and a half times the tie band."""

MOST_FINALISTS = 8
"""Timed again at most, the default and the incumbent beside them: beyond, more are tied than can matter."""


def is_tie(one: Measurement, other: Measurement, *, part: float = 1.0) -> bool:
    """Whether two times are the same: within `TIE` of each other, or with overlapping 95 % intervals.

    Args:
        one: A time.
        other: Another.
        part: How much of that band counts, as a fraction.
    """
    apart = abs(one.mean_us - other.mean_us)
    near = TIE * min(one.mean_us, other.mean_us)
    return apart <= part * max(near, one.error_margin_us + other.error_margin_us)


def scaled(measurement: Measurement, by: float) -> Measurement:
    """A time as it would be at other clocks."""
    return dataclasses.replace(
        measurement, mean_us=measurement.mean_us * by, error_margin_us=measurement.error_margin_us * by
    )


def finalists(times: Mapping[Config, Measurement], keep: Sequence[Config]) -> list[Config]:
    """Who is timed again: what comes near the fastest, and `keep` where it was timed."""
    if not times:
        return []
    fastest = min(one.mean_us for one in times.values())
    near = [config for config, one in times.items() if one.mean_us <= fastest * (1 + FINALS_BAND)]
    near.sort(key=lambda config: times[config].mean_us)
    return list(dict.fromkeys([*near[:MOST_FINALISTS], *(config for config in keep if config in times)]))


def as_of_first_run(
    times: Mapping[Config, Measurement], finals: Mapping[Config, Measurement]
) -> dict[Config, Measurement]:
    """The finals' times as they would have been in the run before, to compare with those not in the finals.

    Under its power cap a GPU runs at other clocks from second to second; the finalists' median tells by how
    much.
    """
    if not finals:
        return {}
    change = statistics.median(times[config].mean_us / one.mean_us for config, one in finals.items())
    return {config: scaled(one, change) for config, one in finals.items()}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is known of one kernel on one arch when its table is chosen."""

    kernel: str
    """The kernel's declared name."""

    arch: Arch
    """The arch it was swept on."""

    source_hash: str
    """Hash of the kernel's code, 16 hex digits."""

    built_with: BuiltWith
    """What the figures were taken with."""

    axes: Axes
    """The declaration's axes."""

    tiles: Tiles | None
    """The declaration's count of tiles."""

    defaults: Mapping[Problem, Config]
    """The default at every edge; inside a bucket too where it is another one there."""

    candidates: Times
    """First pass: every candidate at the edges."""

    finals: Times = field(default_factory=dict)
    """Second pass: the portfolio and the default, at edges and inside buckets. Supersedes the first pass."""

    runoffs: Times = field(default_factory=dict)
    """At edges, the default and who came near the fastest in the second pass, timed again, interleaved. The
    winner is one of them, and the entry's figures are these."""

    wrong: frozenset[Config] = frozenset()
    """Configs that computed a wrong result anywhere: they win nowhere."""

    evidence: Evidence = "measured"
    """Whether the times are measured or a model's."""

    least_gain: float = 0.0
    """How much faster than the default a config must be, as a fraction; `rule.PREDICTED_GAIN` for a model's
    times."""

    def edge_times(self) -> Times:
        """The first pass without wrong configs, at edges where the default has a time."""
        return {
            problem: right
            for problem, times in self.candidates.items()
            if self.default(problem) in (right := self._right(times))
        }

    def times(self) -> Times:
        """Both passes without wrong configs, told as of the second where there are both.

        A GPU under its power cap runs at other clocks from minute to minute: times of two runs compare only
        by what both have, the default.
        """
        problems = dict.fromkeys((*self.candidates, *self.finals))
        return {problem: self._right(self._as_of_the_second(problem)) for problem in problems}

    def race(self, edge: Problem, times: Times) -> Mapping[Config, Measurement]:
        """The times that decide at an edge, all of one run: the runoff's, else those of the second pass."""
        runoff = self._right(self.runoffs.get(edge, {}))
        return runoff if self.default(edge) in runoff else times[edge]

    def _as_of_the_second(self, problem: Problem) -> Mapping[Config, Measurement]:
        first, second = self.candidates.get(problem, {}), self.finals.get(problem, {})
        default = self.default(problem)
        scale = (
            second[default].mean_us / first[default].mean_us
            if default in first and default in second
            else 1.0
        )
        return {**{config: scaled(time, scale) for config, time in first.items()}, **second}

    def default(self, problem: Problem) -> Config:
        """The default at a problem, else at its bucket's edge."""
        return self.defaults.get(problem) or self.defaults[bucket_of(self.axes, problem)]

    def edges(self, times: Times) -> list[Problem]:
        """The edges that can have an entry: those where the default has a time."""
        return [p for p in times if bucket_of(self.axes, p) == p and self.default(p) in times[p]]

    def _right(self, times: Mapping[Config, Measurement]) -> dict[Config, Measurement]:
        return {config: time for config, time in times.items() if config not in self.wrong}


def unserved(sweep: Sweep) -> tuple[str, ...]:
    """The swept edges that get no entry, a line each: the default has no time there to be compared with."""
    times = sweep.times()
    served = set(sweep.edges(times))
    return tuple(
        f"{problem}: no entry: its default ({sweep.default(problem)}) has no time"
        for problem in times
        if bucket_of(sweep.axes, problem) == problem and problem not in served
    )
