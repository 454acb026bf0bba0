"""Measure one kernel on one GPU: candidates at edges, a portfolio, the portfolio everywhere. Writes no table.

1. *Candidates*: at each bucket's edge the configs of the shortlist are verified and timed once; those near
   the fastest are timed again, interleaved (the finals).
2. *Portfolio*: a few configs are chosen over all edges.
3. *Portfolio times*: at each edge and at each point inside its bucket the portfolio and the default are
   verified and timed; at the edges those near the fastest are timed again, interleaved (the run-off). Then
   points are added, one a round in each bucket where the rule inside it is not yet good enough.

Compilations go on meanwhile. A result that the journal holds is not measured again. Winners are verified once
more in a fresh process when the table is known (`KernelSweep.recheck`). When a member of the portfolio is
found wrong, the portfolio is chosen again without it and what is new is measured, until no member falls.

A problem that cannot be opened in the worker is left out, with its reason, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Literal, Protocol

from aot_tune.tuner.choose.times import as_of_first_run, finalists
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job import Compiled, CompileJob, CompileResult, compiles_nowhere
from aot_tune.tuner.measure.supervise import ProblemFailedError
from aot_tune.tuner.measure.trials import Conditions
from aot_tune.tuner.outcome import STRIKES, Failure, Measurement, Outcome, Stage
from aot_tune.tuner.plan.candidates import ProblemPlan, SweepPlan, plan_only
from aot_tune.tuner.plan.model import least_us
from aot_tune.tuner.plan.shortlist import shortlist
from aot_tune.tuner.sweep.progress import CompileReporter, Progress
from aot_tune.tuner.sweep.results import Step, SweepResults
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

    def measure(
        self,
        problem: Problem,
        configs: Cubins,
        *,
        on_outcome: Callable[[Outcome], None],
        known: Mapping[Config, Measurement] = ...,
        least_us: float = ...,
    ) -> list[Outcome]:
        """Verify and time each config once.

        Args:
            problem: The problem.
            configs: The configs, each with its cubin.
            on_outcome: Receives each outcome the moment it stands: a time that will be taken again first as
                provisional.
            known: Times of an earlier run. Configs with one are not verified again; those of others say how
                fast the problem is.
            least_us: The least time that this problem can take, microseconds; a shorter one is taken again.
        """

    def finals(
        self,
        problem: Problem,
        configs: Cubins,
        *,
        on_round: Callable[[int, Outcome], None],
        taken: Mapping[Config, Sequence[Measurement]] = ...,
    ) -> list[Outcome]:
        """Time verified configs again, interleaved.

        Args:
            problem: The problem.
            configs: The configs, each with its cubin.
            on_round: Receives a round's number and each config's outcome in it as soon as it is there.
            taken: The rounds of an earlier run.
        """

    def recheck(self, problem: Problem, configs: Cubins) -> list[Failure]:
        """Verify winners again in a fresh process; return a failure for each that does not pass."""

    def remember_fault(self, problem: Problem, config: Config, message: str, stage: Stage) -> None:
        """Count a fault, a time-out or a wrong result that an earlier run recorded in the journal."""


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

    barred: dict[Problem, set[Config]] = field(default_factory=dict)
    """Winners that failed in another way when they were verified again: they do not win at that problem."""

    unopened: dict[Problem, str] = field(default_factory=dict)
    """Problems that could not be opened, each with the reason; they have no times."""

    failures: int = 0
    """Number of candidates that failed on a problem. Those that a rule refuses do not count."""


class KernelSweep:
    """Measures one kernel.

    Args:
        planned: The kernel's problems and their candidates.
        feed: Compiles the plan's jobs, which are submitted to it here.
        session: Measures on the GPU.
        results: Holds the results of an earlier run and takes the new ones.
        progress: Receives each event of the sweep.
        portfolio: Chooses the portfolio from the times at the edges.
        first_sizes: The sizes to measure first inside a bucket, given its edge.
        next_size: The size to measure next inside a bucket, given its edge; None where there are enough.
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
        first_sizes: Callable[[Problem], list[Problem]],
        next_size: Callable[[KernelTimes, Problem], Problem | None],
        exhaustive: bool = False,
    ) -> None:
        self._plan = planned
        self._feed = feed
        self._session = session
        self._results = results
        self._progress = progress
        self._portfolio = portfolio
        self._first_sizes = first_sizes
        self._next_size = next_size
        self._exhaustive = exhaustive
        self._swept = KernelTimes()
        self._plans: dict[Problem, ProblemPlan] = {}
        self._compiled: dict[str, CompileResult] = {}
        self._told: set[tuple[Config, str]] = set()
        self._failed: set[tuple[str, Problem, Config]] = set()
        self._steps = 0
        self._begun = 0
        self._compilations = CompileReporter(feed.counts, progress)

    def run(self) -> KernelTimes:
        """Do all three steps.

        Raises:
            TuneError: The GPU is lost, the disk is full, or nothing can be compiled; finished results are
                kept.
        """
        edges = [each.problem for each in self._plan.problems]
        self._steps = 2 * len(edges) + sum(len(self._first_sizes(edge)) for edge in edges)
        self._submit(self._plan.jobs)
        for each in self._plan.problems:
            for failure in each.refused:
                if failure.stage != "legal":
                    self._report_failure(failure.stage, each.problem, failure)
            self._report_step(each.problem)
            with self._opening(each.problem):
                self._measure_candidates(each)
        self.choose_portfolio()
        return self._swept

    def choose_portfolio(self) -> None:
        """Choose the portfolio and time it everywhere, again and again until no member is found wrong."""
        swept = self._swept
        while True:
            swept.portfolio = self._portfolio(swept)
            self._measure_portfolios()
            if not swept.wrong.intersection(swept.portfolio):
                return

    def recheck(self, winners: Iterable[tuple[Problem, Config]]) -> bool:
        """Verify winners once more in a fresh process. One that is wrong wins nowhere any more.

        A winner that fails in another way, and one whose problem cannot be opened, does not win there.

        Args:
            winners: Each config with the problem at which it is verified, those of one problem in a row.

        Returns:
            Whether all passed.
        """
        passed = True
        for problem, config in winners:
            if problem in self._swept.unopened:
                continue
            failure = None
            with self._opening(problem):
                failure = self._rechecked(problem, config)
            if failure is not None and failure.stage == "verify":
                self._swept.wrong.add(config)
            elif failure is not None:
                self._swept.barred.setdefault(problem, set()).add(config)
            passed = passed and failure is None and problem not in self._swept.unopened
        return passed

    def broken(self) -> str | None:
        """The reason why no compilation of this kernel succeeded; None where one did."""
        return compiles_nowhere(self._compiled.values())

    # The steps ----------------------------------------------------------------------------------------------

    def _report_step(self, problem: Problem) -> None:
        self._progress.measuring(problem, self._begun, self._steps)
        self._begun += 1

    def _measure_candidates(self, each: ProblemPlan) -> None:
        compiled = self._wait("candidates", each, each.candidates)
        listed = shortlist(self._plan.kernel, each, compiled, exhaustive=self._exhaustive)
        for failure in listed.failures:
            self._report_failure("compile", each.problem, failure)
        keep = [each.default, *([each.incumbent] if each.incumbent else [])]
        times, finals = self._timed("candidates", each, listed.configs, keep=keep)
        times.update(as_of_first_run(times, finals))
        # Configs that launch the same code the same way take the same time: one measurement counts for both.
        for twin, leader in listed.twins.items():
            if leader in times:
                times[twin] = replace(times[leader], config=twin)
        self._swept.candidates[each.problem] = times

    def _measure_portfolios(self) -> None:
        """Time the portfolio and the default at every edge that has times, and at the points inside."""
        swept = self._swept
        swept.portfolio_times, swept.runoffs = {}, {}
        problems = {
            problem: edge
            for edge in swept.candidates
            for problem in (*self._first_sizes(edge), edge)
            if problem not in swept.unopened
        }
        self._steps += len(problems) if self._plans else 0  # the first time they are counted already
        self._plans = {}
        self._measure_portfolio_at(problems)
        while added := {size: edge for edge in swept.candidates if (size := self._next_size(swept, edge))}:
            self._steps += len(added)
            self._measure_portfolio_at(added)

    def _measure_portfolio_at(self, problems: Mapping[Problem, Problem]) -> None:
        """Time the portfolio at problems, each given with the edge of its bucket, in any order."""
        members = [config for config in self._swept.portfolio if config not in self._swept.wrong]
        plans = {problem: plan_only(self._plan.kernel, problem, members) for problem in problems}
        self._plans.update(plans)
        self._submit(job for each in plans.values() for job in each.jobs.values())
        for problem, edge in problems.items():
            self._report_step(problem)
            with self._opening(problem):
                self._measure_portfolio(self._plans[problem], finals=problem == edge)

    def _measure_portfolio(self, each: ProblemPlan, *, finals: bool) -> None:
        members = [config for config in each.candidates if config not in self._swept.wrong]
        times, runoff = self._timed("portfolio", each, members, keep=[each.default], finals=finals)
        self._swept.portfolio_times[each.problem] = times
        if finals:
            self._swept.runoffs[each.problem] = runoff

    def _rechecked(self, problem: Problem, config: Config) -> Failure | None:
        """Verify a winner again, unless the journal holds the result; return its failure."""
        if not self._results.is_rechecked(problem, config):
            cubins = self._cubins("recheck", self._plans[problem], [config])
            with self._spending("recheck", problem, verifying=True):
                failures = self._session.recheck(problem, cubins)
            found = next((failure for failure in failures if failure.config == config), None)
            self._results.write_recheck(problem, config, found)
        failure = self._results.recheck_failure(problem, config)
        if failure is not None:
            self._report_failure("recheck", problem, failure)
        return failure

    # One problem --------------------------------------------------------------------------------------------

    @contextmanager
    def _opening(self, problem: Problem) -> Iterator[None]:
        """Leave a problem out that cannot be opened, with all its times."""
        swept = self._swept
        try:
            yield
        except ProblemFailedError as error:
            swept.unopened[problem] = error.reason
            for times in (swept.candidates, swept.portfolio_times, swept.runoffs):
                times.pop(problem, None)
            self._progress.note(f"{self._plan.kernel.tunable.name} {problem}: left out: {error.reason}")

    def _timed(
        self,
        step: Literal["candidates", "portfolio"],
        each: ProblemPlan,
        configs: Sequence[Config],
        *,
        keep: Sequence[Config],
        finals: bool = True,
    ) -> tuple[dict[Config, Measurement], dict[Config, Measurement]]:
        """Verify and time configs, then time those near the fastest again, interleaved; return both runs."""
        times = self._measured(step, each, configs)
        best = finalists(times, keep)
        if not finals or not best:
            return times, {}
        return times, self._raced(
            "candidate finals" if step == "candidates" else "portfolio finals", each, best
        )

    def _measured(
        self, step: Step, each: ProblemPlan, configs: Sequence[Config]
    ) -> dict[Config, Measurement]:
        """The times of a step. What the journal holds is not measured again."""
        problem, results = each.problem, self._results
        missing = self._missing(step, problem, configs)
        if missing:
            known = self._times(step, problem, configs)
            for config in missing:
                if (time := results.provisional(step, problem, config)) is not None:
                    known[config] = time
            cubins = self._cubins(step, each, missing)
            kernel = self._plan.kernel
            least = least_us((kernel.launched(problem, config) for config in missing), kernel.device)
            with self._spending(step, problem):
                outcomes = self._session.measure(
                    problem,
                    cubins,
                    on_outcome=lambda outcome: self._stands(step, problem, outcome),
                    known=known,
                    least_us=least,
                )
            self._settle(step, problem, outcomes)
        return self._times(step, problem, configs)

    def _raced(self, step: Step, each: ProblemPlan, configs: Sequence[Config]) -> dict[Config, Measurement]:
        """The times of finals. Rounds that the journal holds are not timed again."""
        problem, results = each.problem, self._results
        if self._missing(step, problem, configs):
            left = [c for c in configs if not isinstance(results.outcome(step, problem, c), Failure)]
            cubins = self._cubins(step, each, left)
            with self._spending(step, problem):
                outcomes = self._session.finals(
                    problem,
                    cubins,
                    on_round=lambda number, outcome: self._stands(step, problem, outcome, number),
                    taken={config: results.rounds(step, problem, config) for config in left},
                )
            self._settle(step, problem, outcomes)
        return self._times(step, problem, configs)

    def _missing(self, step: Step, problem: Problem, configs: Sequence[Config]) -> list[Config]:
        """The configs without an outcome. Faults and wrong results in the journal count as if made here."""
        missing = []
        for config in configs:
            outcome = self._results.outcome(step, problem, config)
            if outcome is None:
                missing.append(config)
            elif isinstance(outcome, Failure):
                if outcome.stage in STRIKES or outcome.stage == "verify":
                    self._session.remember_fault(problem, config, outcome.message, outcome.stage)
                self._note_failure(step, problem, outcome)
        return missing

    def _stands(self, step: Step, problem: Problem, outcome: Outcome, number: int | None = None) -> None:
        """Keep an outcome, then tell of it."""
        self._results.write(step, problem, outcome, number)
        if isinstance(outcome, Failure):
            self._note_failure(step, problem, outcome)

    def _settle(self, step: Step, problem: Problem, outcomes: Iterable[Outcome]) -> None:
        """Keep the outcomes of a request that were not told as they came."""
        for outcome in outcomes:
            there = self._results.outcome(step, problem, outcome.config)
            if there != outcome and not (isinstance(there, Failure) and isinstance(outcome, Failure)):
                self._stands(step, problem, outcome)

    def _times(self, step: Step, problem: Problem, configs: Sequence[Config]) -> dict[Config, Measurement]:
        outcomes = {config: self._results.outcome(step, problem, config) for config in configs}
        return {config: one for config, one in outcomes.items() if isinstance(one, Measurement)}

    @contextmanager
    def _spending(self, step: Step, problem: Problem, *, verifying: bool = False) -> Iterator[None]:
        """Write down the time that a request took and the GPU's state around it."""
        session = self._session
        started, verified, requests = monotonic(), session.verify_s, len(session.conditions)
        yield
        spent = monotonic() - started
        verify_s = spent if verifying else session.verify_s - verified
        states = (one.as_record() for one in session.conditions[requests:])
        self._results.write_spent(
            step,
            problem,
            measure_s=spent - verify_s,
            verify_s=verify_s,
            conditions=[{name: one[name] for name in ("before", "after")} for one in states],
        )

    # Compilations -------------------------------------------------------------------------------------------

    def _submit(self, jobs: Iterable[CompileJob]) -> None:
        """Have jobs compiled, but for those that the journal knows to fail."""
        wanted = []
        for job in jobs:
            failure = self._results.compile_failure(job.key)
            if failure is None:
                wanted.append(job)
            else:
                self._compiled[job.key] = failure
        self._feed.submit(wanted)

    def _wait(self, step: Step, each: ProblemPlan, configs: Iterable[Config]) -> Mapping[str, CompileResult]:
        asked = {each.jobs[config].key: config for config in configs}
        missing = asked.keys() - self._compiled.keys()
        if missing:
            self._compiled.update(self._feed.wait(missing, self._compilations.report))
            self._compilations.report()
        # Where nothing compiles, the compiler or the kernel is to blame, and a repair must be seen.
        if self.broken() is None:
            for key, config in asked.items():
                self._results.write_compiled(step, each.problem, config, self._compiled[key])
        return {key: self._compiled[key] for key in asked}

    def _cubins(self, step: Step, each: ProblemPlan, configs: Sequence[Config]) -> dict[Config, Path | None]:
        results = self._wait(step, each, configs)
        found: dict[Config, Path | None] = {}
        for config in configs:
            result = results[each.jobs[config].key]
            found[config] = result.path if isinstance(result, Compiled) else None
        return found

    # Failures -----------------------------------------------------------------------------------------------

    def _note_failure(self, step: Step, problem: Problem, failure: Failure) -> None:
        self._report_failure(step, problem, failure)
        if failure.stage == "verify":
            self._swept.wrong.add(failure.config)

    def _report_failure(self, step: str, problem: Problem, failure: Failure) -> None:
        """Count a failure once, and show each config once per stage: else one config may fill the screen."""
        place = (step, problem, failure.config)
        if place not in self._failed:
            self._failed.add(place)
            self._swept.failures += 1
        if (failure.config, failure.stage) not in self._told:
            self._told.add((failure.config, failure.stage))
            self._progress.failure(
                self._plan.kernel.tunable.name, problem, failure.config, failure.stage, failure.message
            )
