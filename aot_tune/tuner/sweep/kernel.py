"""Measure one kernel on one GPU: candidates at edges, a portfolio, the portfolio everywhere. Writes no table.

1. *Candidates*: at each bucket's edge the shortlist is verified and timed once; what comes near the fastest
   is timed again, interleaved (the finals).
2. *Portfolio*: a few configs are chosen over all edges.
3. *Portfolio times*: at each edge and at each point inside its bucket the portfolio and the default are
   verified and timed, at the edges with finals of their own.

Compiling goes on meanwhile; what the journal holds already is not measured again. Winners are checked once
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
from aot_tune.tuner.outcome import Failure, Measurement, Outcome
from aot_tune.tuner.plan.candidates import Plan, ProblemPlan, plan_only
from aot_tune.tuner.plan.shortlist import shortlist
from aot_tune.tuner.plan.sizes import sizes_inside
from aot_tune.tuner.sweep.pages import Book, Page, Step
from aot_tune.tuner.sweep.progress import Progress
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

Times = dict[Problem, Mapping[Config, Measurement]]
Cubins = Mapping[Config, "Path | None"]


class Measurer(Protocol):
    """What a sweep asks of a measuring session (`aot_tune.tuner.measure.session.MeasureSession`)."""

    conditions: list[Conditions]
    """What each request so far was measured under."""

    verify_s: float
    """Seconds spent verifying so far."""

    def measure(self, problem: Problem, configs: Cubins) -> list[Outcome]:
        """Verify and time each config once."""

    def finals(self, problem: Problem, configs: Cubins) -> list[Outcome]:
        """Time verified configs again, interleaved."""

    def recheck(self, problem: Problem, configs: Cubins) -> list[Failure]:
        """Verify winners again in a fresh process; those that are wrong."""

    def remember_fault(self, problem: Problem, config: Config, message: str) -> None:
        """Count a fault that the journal knows of."""


@dataclass(kw_only=True)
class Swept:
    """All that was measured of one kernel."""

    candidates: Times = field(default_factory=dict)
    """At each edge, every candidate's time; a finalist's from the finals."""

    portfolio: tuple[Config, ...] = ()
    """The configs chosen to serve every problem."""

    portfolio_times: Times = field(default_factory=dict)
    """At each edge and each point inside, the times of the portfolio and the default, taken together."""

    runoffs: Times = field(default_factory=dict)
    """At each edge, the default and what came near the fastest of them, timed again, interleaved."""

    wrong: set[Config] = field(default_factory=set)
    """Configs that computed a wrong result anywhere: they win nowhere."""

    failures: int = 0
    """Candidates that failed on a problem, for whatever reason but a rule's."""

    measure_s: float = 0.0
    """Seconds spent timing."""

    verify_s: float = 0.0
    """Seconds spent verifying."""


class KernelSweep:
    """One kernel's measurements.

    Args:
        planned: The kernel's problems and their candidates.
        feed: Compiles; the plan's jobs are submitted here.
        session: Measures.
        book: What is measured already, and where new measurements go.
        progress: Told what happens.
        portfolio: What was measured at the edges -> the portfolio.
        exhaustive: Measure every candidate.
    """

    def __init__(
        self,
        planned: Plan,
        feed: CompileFeed,
        session: Measurer,
        book: Book,
        progress: Progress,
        *,
        portfolio: Callable[[Swept], tuple[Config, ...]],
        exhaustive: bool = False,
    ) -> None:
        self._plan, self._feed, self._session, self._book = planned, feed, session, book
        self._progress, self._portfolio, self._exhaustive = progress, portfolio, exhaustive
        self._swept = Swept()
        self._plans: dict[Problem, ProblemPlan] = {}
        self._compiled: dict[str, CompileResult] = {}
        self._told: set[tuple[Config, str]] = set()
        self._steps, self._done = 0, 0
        self._earlier = feed.counts()  # of the kernels before
        self._last_counts = (0, 0, 0)

    def run(self) -> Swept:
        """Do all three steps.

        Raises:
            TuneError: The GPU is lost, the disk is full, nothing can be compiled; what was measured is kept.
        """
        swept, kernel = self._swept, self._plan.kernel
        inside = {
            each.problem: sizes_inside(kernel.tunable.axes, each.problem) for each in self._plan.problems
        }
        self._steps = 2 * len(inside) + sum(map(len, inside.values()))
        self._feed.submit(self._plan.jobs)
        for each in self._plan.problems:
            self._step(each, lambda each=each: self._candidates(each))  # type: ignore[misc]
        swept.portfolio = self._portfolio(swept)
        everywhere = [problem for edge, sizes in inside.items() for problem in (*sizes, edge)]
        portfolio = [config for config in swept.portfolio if config not in swept.wrong]
        self._plans = {problem: plan_only(kernel, problem, portfolio) for problem in everywhere}
        self._feed.submit(job for each in self._plans.values() for job in each.jobs.values())
        for problem, each in self._plans.items():
            finals = problem in inside
            self._step(each, lambda each=each, finals=finals: self._everywhere(each, finals))  # type: ignore[misc]
        return swept

    def recheck(self, winners: Mapping[Problem, Config]) -> frozenset[Config]:
        """Verify winners once more in a fresh process.

        Returns:
            Those that are wrong; they have joined `Swept.wrong`.
        """
        failed: set[Config] = set()
        for problem, config in winners.items():
            if self._book.read("recheck", problem, [config]) is not None:
                continue
            cubins = self._cubins(self._plans[problem], [config])
            started = monotonic()
            failures = self._session.recheck(problem, cubins)
            outcome: Outcome = self._swept.portfolio_times[problem][config]
            for failure in failures:
                outcome = failure
                failed.add(failure.config)
                self._tell(problem, failure)
            spent = monotonic() - started
            self._swept.verify_s += spent
            self._book.write("recheck", problem, Page(outcomes=(outcome,), verify_s=spent))
        self._swept.wrong |= failed
        return frozenset(failed)

    def broken(self) -> str | None:
        """Why nothing of this kernel could be compiled; None where something was."""
        return compiles_nowhere(self._compiled.values())

    # The steps ----------------------------------------------------------------------------------------------

    def _step(self, each: ProblemPlan, do: Callable[[], None]) -> None:
        self._progress.measuring(each.problem, self._done, self._steps)
        do()
        self._done += 1

    def _candidates(self, each: ProblemPlan) -> None:
        listed = shortlist(
            self._plan.kernel, each, self._wait(each, each.candidates), exhaustive=self._exhaustive
        )
        for failure in listed.failures:
            self._tell(each.problem, failure)
        keep = [each.default, *([each.incumbent] if each.incumbent else [])]
        times, finals = self._timed("candidates", each, listed.configs, keep=keep)
        times.update(as_of_first_run(times, finals))
        # What launches the same code the same way takes the same time: measured once, it counts for both.
        for twin, leader in listed.twins.items():
            if leader in times:
                times[twin] = replace(times[leader], config=twin)
        self._swept.candidates[each.problem] = times

    def _everywhere(self, each: ProblemPlan, finals: bool) -> None:
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
        """Verify and time configs; then those near the fastest again, interleaved. Two runs, kept apart."""
        times = self._page(step, each, configs, self._session.measure).measurements()
        best = finalists(times, keep)
        if not finals or not best:
            return times, {}
        final: Step = "candidate finals" if step == "candidates" else "portfolio finals"
        return times, self._page(final, each, best, self._session.finals).measurements()

    def _page(
        self, step: Step, each: ProblemPlan, configs: Sequence[Config], measure: Callable[..., list[Outcome]]
    ) -> Page:
        page = self._book.read(step, each.problem, configs)
        if page is None:
            cubins = self._cubins(each, configs)
            started, verified, requests = monotonic(), self._session.verify_s, len(self._session.conditions)
            outcomes = measure(each.problem, cubins)
            verify_s = self._session.verify_s - verified
            page = Page(
                outcomes=tuple(outcomes),
                measure_s=monotonic() - started - verify_s,
                verify_s=verify_s,
                conditions=tuple(one.as_record() for one in self._session.conditions[requests:]),
            )
            self._book.write(step, each.problem, page)
        else:
            for failure in page.failures():
                if failure.stage in ("fault", "timeout"):
                    self._session.remember_fault(each.problem, failure.config, failure.message)
        for failure in page.failures():
            self._tell(each.problem, failure)
            if failure.stage == "verify":
                self._swept.wrong.add(failure.config)
        self._swept.measure_s += page.measure_s
        self._swept.verify_s += page.verify_s
        return page

    def _wait(self, each: ProblemPlan, configs: Iterable[Config]) -> Mapping[str, CompileResult]:
        keys = {each.jobs[config].key for config in configs}
        missing = keys - self._compiled.keys()
        if missing:
            self._compiled.update(self._feed.wait(missing, self._tell_compiled))
            self._tell_compiled()
        return {key: self._compiled[key] for key in keys}

    def _cubins(self, each: ProblemPlan, configs: Sequence[Config]) -> dict[Config, Path | None]:
        results = self._wait(each, configs)
        found: dict[Config, Path | None] = {}
        for config in configs:
            result = results[each.jobs[config].key]
            found[config] = result.path if isinstance(result, Compiled) else None
        return found

    def _tell_compiled(self) -> None:
        done, total, failed = (
            now - then for now, then in zip(self._feed.counts(), self._earlier, strict=True)
        )
        if (done, total, failed) != self._last_counts:
            self._last_counts = done, total, failed
            self._progress.compiled(done, total, failed)

    def _tell(self, problem: Problem, failure: Failure) -> None:
        """Report a failure once a config and stage; a config refused everywhere would fill the screen."""
        self._swept.failures += 1
        if (failure.config, failure.stage) not in self._told:
            self._told.add((failure.config, failure.stage))
            self._progress.failure(
                self._plan.kernel.tunable.name, problem, failure.config, failure.stage, failure.message
            )
