"""Measure one kernel on one GPU: candidates at edges, a portfolio, the portfolio everywhere. Writes no table.

1. *Candidates*: at each bucket's edge the configs of the shortlist are verified and timed once; those near
   the fastest are timed again, interleaved (the finals).
2. *Portfolio*: a few configs are chosen over all edges.
3. *Portfolio times*: at each edge and at each point inside its bucket the portfolio and the default are
   verified and timed; at the edges those near the fastest are timed again, interleaved (the run-off).

Compilations go on meanwhile. A result that the journal holds is not measured again. Winners are verified once
more in a fresh process when the table is known (`KernelSweep.recheck`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Protocol

from aot_tune.tuner.choose.times import as_of_first_run, finalists
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job import Compiled, CompileResult, compiles_nowhere
from aot_tune.tuner.measure.trials import Conditions
from aot_tune.tuner.outcome import STRIKES, Failure, Measurement, Outcome
from aot_tune.tuner.plan.candidates import ProblemPlan, SweepPlan, plan_only
from aot_tune.tuner.plan.shortlist import shortlist
from aot_tune.tuner.plan.sizes import sizes_inside
from aot_tune.tuner.sweep.progress import CompileReporter, Progress
from aot_tune.tuner.sweep.results import Step, StepResult, SweepResults
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

Times = dict[Problem, Mapping[Config, Measurement]]
Cubins = Mapping[Config, "Path | None"]


class Measurer(Protocol):
    """The part of `aot_tune.tuner.measure.session.MeasureSession` that a sweep needs."""

    conditions: list[Conditions]
    """The conditions of each request so far."""

    verify_s: float
    """Time spent verifying so far, seconds."""

    def measure(self, problem: Problem, configs: Cubins) -> list[Outcome]:
        """Verify and time each config once."""

    def finals(self, problem: Problem, configs: Cubins) -> list[Outcome]:
        """Time verified configs again, interleaved."""

    def recheck(self, problem: Problem, configs: Cubins) -> list[Failure]:
        """Verify winners again in a fresh process; return a failure for each that is wrong."""

    def remember_fault(self, problem: Problem, config: Config, message: str) -> None:
        """Count a fault that an earlier run recorded in the journal."""


@dataclass(kw_only=True)
class KernelTimes:
    """All times that were measured of one kernel."""

    candidates: Times = field(default_factory=dict)
    """At each edge, every candidate's time; a finalist's from the finals."""

    portfolio: tuple[Config, ...] = ()
    """The configs chosen to serve every problem."""

    portfolio_times: Times = field(default_factory=dict)
    """At each edge and each point inside, the times of the portfolio and the default, taken together."""

    runoffs: Times = field(default_factory=dict)
    """At each edge, the times of the default and of the configs near the fastest, timed again,
    interleaved."""

    wrong: set[Config] = field(default_factory=set)
    """Configs that computed a wrong result anywhere: they win nowhere."""

    failures: int = 0
    """Number of candidates that failed on a problem. Those that a rule refuses do not count."""

    measure_s: float = 0.0
    """Time spent timing, seconds."""

    verify_s: float = 0.0
    """Time spent verifying, seconds."""


class KernelSweep:
    """Measures one kernel.

    Args:
        planned: The kernel's problems and their candidates.
        feed: Compiles the plan's jobs, which are submitted to it here.
        session: Measures on the GPU.
        results: Holds the results of an earlier run and takes the new ones.
        progress: Receives each event of the sweep.
        portfolio: Chooses the portfolio from the times at the edges.
        exhaustive: Measure every candidate.
    """

    def __init__(
        self,
        planned: SweepPlan,
        feed: CompileFeed,
        session: Measurer,
        results: SweepResults,
        progress: Progress,
        *,
        portfolio: Callable[[KernelTimes], tuple[Config, ...]],
        exhaustive: bool = False,
    ) -> None:
        self._plan = planned
        self._feed = feed
        self._session = session
        self._results = results
        self._progress = progress
        self._portfolio = portfolio
        self._exhaustive = exhaustive
        self._swept = KernelTimes()
        self._plans: dict[Problem, ProblemPlan] = {}
        self._compiled: dict[str, CompileResult] = {}
        self._reported: set[tuple[Config, str]] = set()
        self._steps = 0
        self._begun = 0
        self._compilations = CompileReporter(feed.counts, progress)

    def run(self) -> KernelTimes:
        """Do all three steps.

        Raises:
            TuneError: The GPU is lost, the disk is full, or nothing can be compiled; finished results are
                kept.
        """
        swept, kernel = self._swept, self._plan.kernel
        inside = {
            each.problem: sizes_inside(kernel.tunable.axes, each.problem) for each in self._plan.problems
        }
        self._steps = 2 * len(inside) + sum(map(len, inside.values()))
        self._feed.submit(self._plan.jobs)
        for each in self._plan.problems:
            self._report_step(each.problem)
            self._measure_candidates(each)
        swept.portfolio = self._portfolio(swept)
        everywhere = [problem for edge, sizes in inside.items() for problem in (*sizes, edge)]
        portfolio = [config for config in swept.portfolio if config not in swept.wrong]
        self._plans = {problem: plan_only(kernel, problem, portfolio) for problem in everywhere}
        self._feed.submit(job for each in self._plans.values() for job in each.jobs.values())
        for problem, each in self._plans.items():
            self._report_step(problem)
            self._measure_portfolio(each, finals=problem in inside)
        return swept

    def recheck(self, winners: Mapping[Problem, Config]) -> frozenset[Config]:
        """Verify winners once more in a fresh process.

        Returns:
            The winners that are wrong; they are added to `Swept.wrong`.
        """
        failed: set[Config] = set()
        for problem, config in winners.items():
            if self._results.read("recheck", problem, [config]) is not None:
                continue
            cubins = self._cubins(self._plans[problem], [config])
            started = monotonic()
            failures = self._session.recheck(problem, cubins)
            outcome: Outcome = self._swept.portfolio_times[problem][config]
            for failure in failures:
                outcome = failure
                failed.add(failure.config)
                self._report_failure(problem, failure)
            spent = monotonic() - started
            self._swept.verify_s += spent
            self._results.write("recheck", problem, StepResult(outcomes=(outcome,), verify_s=spent))
        self._swept.wrong |= failed
        return frozenset(failed)

    def broken(self) -> str | None:
        """The reason why no compilation of this kernel succeeded; None where one did."""
        return compiles_nowhere(self._compiled.values())

    # The steps ----------------------------------------------------------------------------------------------

    def _report_step(self, problem: Problem) -> None:
        self._progress.measuring(problem, self._begun, self._steps)
        self._begun += 1

    def _measure_candidates(self, each: ProblemPlan) -> None:
        listed = shortlist(
            self._plan.kernel, each, self._wait(each, each.candidates), exhaustive=self._exhaustive
        )
        for failure in listed.failures:
            self._report_failure(each.problem, failure)
        keep = [each.default, *([each.incumbent] if each.incumbent else [])]
        times, finals = self._timed("candidates", each, listed.configs, keep=keep)
        times.update(as_of_first_run(times, finals))
        # Configs that launch the same code the same way take the same time: one measurement counts for both.
        for twin, leader in listed.twins.items():
            if leader in times:
                times[twin] = replace(times[leader], config=twin)
        self._swept.candidates[each.problem] = times

    def _measure_portfolio(self, each: ProblemPlan, *, finals: bool) -> None:
        members = [config for config in each.candidates if config not in self._swept.wrong]
        times, runoff = self._timed("portfolio", each, members, keep=[each.default], finals=finals)
        self._swept.portfolio_times[each.problem] = times
        if finals:
            self._swept.runoffs[each.problem] = runoff

    # One problem --------------------------------------------------------------------------------------------

    def _timed(
        self,
        step: Step,
        each: ProblemPlan,
        configs: Sequence[Config],
        *,
        keep: Sequence[Config],
        finals: bool = True,
    ) -> tuple[dict[Config, Measurement], dict[Config, Measurement]]:
        """Verify and time configs, then time those near the fastest again, interleaved; return both runs."""
        times = self._result(step, each, configs, self._session.measure).measurements()
        best = finalists(times, keep)
        if not finals or not best:
            return times, {}
        final: Step = "candidate finals" if step == "candidates" else "portfolio finals"
        return times, self._result(final, each, best, self._session.finals).measurements()

    def _result(
        self, step: Step, each: ProblemPlan, configs: Sequence[Config], measure: Callable[..., list[Outcome]]
    ) -> StepResult:
        """Return the result that the journal holds, or measure now and write it there."""
        result = self._results.read(step, each.problem, configs)
        if result is None:
            cubins = self._cubins(each, configs)
            started, verified, requests = monotonic(), self._session.verify_s, len(self._session.conditions)
            outcomes = measure(each.problem, cubins)
            verify_s = self._session.verify_s - verified
            result = StepResult(
                outcomes=tuple(outcomes),
                measure_s=monotonic() - started - verify_s,
                verify_s=verify_s,
                conditions=tuple(one.as_record() for one in self._session.conditions[requests:]),
            )
            self._results.write(step, each.problem, result)
        else:
            for failure in result.failures():
                if failure.stage in STRIKES:
                    self._session.remember_fault(each.problem, failure.config, failure.message)
        for failure in result.failures():
            self._report_failure(each.problem, failure)
            if failure.stage == "verify":
                self._swept.wrong.add(failure.config)
        self._swept.measure_s += result.measure_s
        self._swept.verify_s += result.verify_s
        return result

    def _wait(self, each: ProblemPlan, configs: Iterable[Config]) -> Mapping[str, CompileResult]:
        keys = {each.jobs[config].key for config in configs}
        missing = keys - self._compiled.keys()
        if missing:
            self._compiled.update(self._feed.wait(missing, self._compilations.report))
            self._compilations.report()
        return {key: self._compiled[key] for key in keys}

    def _cubins(self, each: ProblemPlan, configs: Sequence[Config]) -> dict[Config, Path | None]:
        results = self._wait(each, configs)
        found: dict[Config, Path | None] = {}
        for config in configs:
            result = results[each.jobs[config].key]
            found[config] = result.path if isinstance(result, Compiled) else None
        return found

    def _report_failure(self, problem: Problem, failure: Failure) -> None:
        """Report each config once per stage: a config that fails on every problem would fill the screen."""
        self._swept.failures += 1
        if (failure.config, failure.stage) not in self._reported:
            self._reported.add((failure.config, failure.stage))
            self._progress.failure(
                self._plan.kernel.tunable.name, problem, failure.config, failure.stage, failure.message
            )
