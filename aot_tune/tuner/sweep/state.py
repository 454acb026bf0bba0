"""Shared state of one kernel's sweep: times, results, compilations, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aot_tune.tuner.choose.times import ProblemTimes
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job import CompileJob, CompileResult, compiles_nowhere
from aot_tune.tuner.outcome import Failure
from aot_tune.tuner.plan.candidates import ProblemPlan, SweepPlan
from aot_tune.tuner.sweep.progress import (
    MESSAGE_CHARACTERS,
    CandidateFailed,
    CompileReporter,
    Measuring,
    Progress,
)
from aot_tune.tuner.sweep.results import Listed, Step, SweepResults
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import shortened


@dataclass(kw_only=True)
class KernelTimes:
    """All measured times of a kernel."""

    problems: dict[Problem, ProblemTimes] = field(default_factory=dict)
    """The times at edges and at sizes inside their buckets; the edges come first."""

    portfolio: tuple[Config, ...] = ()
    """The configs chosen to serve every problem."""

    wrong: set[Config] = field(default_factory=set)
    """Configs that computed a wrong result anywhere: they win nowhere."""

    unreached: set[Problem] = field(default_factory=set)
    """Edges skipped when the time budget ran out; they have no times."""

    unopened: dict[Problem, str] = field(default_factory=dict)
    """Problems that could not be opened, each with the reason; they have no times."""

    faulty: dict[Problem, str] = field(default_factory=dict)
    """Problems at which the default failed, each with the reason; their buckets have no entry."""

    failures: int = 0
    """Number of candidates that failed on a problem, without candidates that a rule refuses."""

    def add(self, problem: Problem, **times: Any) -> None:
        """Set fields of a problem's `ProblemTimes`."""
        self.problems[problem] = replace(self.problems.get(problem, ProblemTimes()), **times)

    def keep(self, order: Iterable[Problem]) -> None:
        """Keep only some problems, in their order; the order of measuring is lost."""
        self.problems = {problem: self.problems[problem] for problem in order if problem in self.problems}

    def best_edge(self, member: Config, edges: Iterable[Problem]) -> Problem | None:
        """Return the edge where a config loses least to the fastest; None where it may win at no edge.

        A member of the portfolio that wins no entry is verified again at that edge.
        """
        slowdowns = {}
        for edge in edges:
            known = self.problems.get(edge, ProblemTimes())
            if member in known.portfolio and member not in known.barred:
                fastest_us = min(time.mean_us for time in known.portfolio.values())
                slowdowns[edge] = known.portfolio[member].mean_us / fastest_us
        return min(slowdowns, key=slowdowns.__getitem__) if slowdowns else None


class KernelState:
    """The state of one kernel's sweep. Several threads may use it.

    Args:
        planned: The kernel's problems and their candidates.
        feed: Compiles the plan's jobs.
        results: Holds the results of an earlier run and takes the new results.
        progress: Receives each event of the sweep.
        exhaustive: Whether every candidate is measured.

    Attributes:
        lock: Held where shared state changes, and where the declaration's functions run.
        times: The times so far.
    """

    def __init__(
        self,
        planned: SweepPlan,
        feed: CompileFeed,
        results: SweepResults,
        progress: Progress,
        *,
        exhaustive: bool,
    ) -> None:
        self.plan, self.results, self.exhaustive = planned, results, exhaustive
        self.name = planned.kernel.tunable.name
        self.lock = threading.RLock()
        self.times = KernelTimes()
        self._feed, self._progress = feed, progress
        self.twins: dict[Problem, Mapping[Config, Config]] = {}
        """Maps configs of a bucket, by its edge, to the config with the same machine code and launch."""
        self._compiled: dict[str, CompileResult] = {}
        self._counted: set[tuple[str, Problem, Config]] = set()
        self._reasons: dict[tuple[Problem, Config], str] = {}
        self._shown: set[tuple[Config, str]] = set()
        self._compilations = CompileReporter(feed.counts, self.name, progress)

    def restart(self) -> None:
        """Forget all times and failures: the results in the journal are taken over anew."""
        self.times = KernelTimes()
        self.twins.clear()
        self._counted.clear()

    # Compilations -------------------------------------------------------------------------------------------

    def jobs(self, step: Step, problem_plan: ProblemPlan) -> list[CompileJob]:
        """Return a step's compilations for a problem."""
        known = self.known_list(problem_plan) if step == "candidates" else None
        if known is None:
            return list(problem_plan.jobs.values())
        left = (c for c in known.configs if self.results.outcome(step, problem_plan.problem, c) is None)
        return [problem_plan.jobs[config] for config in left]

    def submit(self, jobs: Iterable[CompileJob]) -> None:
        """Submit jobs to the compilers, except jobs with a permanent failure in the journal."""
        wanted = []
        for job in jobs:
            failure = self.results.compile_failure(job.key)
            if failure is None:
                wanted.append(job)
            else:
                with self.lock:
                    self._compiled[job.key] = failure
        self._feed.submit(wanted)

    def waits_for(self, jobs: Iterable[CompileJob]) -> set[str]:
        """Return the keys of the jobs without a result."""
        return {job.key for job in jobs} - self._compiled.keys()

    def is_ready(self, keys: Collection[str]) -> bool:
        """Return whether some compilations have ended."""
        return self._feed.ready(keys)

    def compiled(
        self,
        step: Step,
        problem_plan: ProblemPlan,
        configs: Iterable[Config],
        gpu: str,
        check: Callable[[], None],
    ) -> Mapping[str, CompileResult]:
        """Wait for the compilations of some configs, and write them to the journal.

        Args:
            step: The step that needs them.
            problem_plan: The problem.
            configs: The configs.
            gpu: The uuid of the GPU that waits.
            check: Called repeatedly while waiting; raises to end it.

        Returns:
            Job key to result.
        """
        needed = {problem_plan.jobs[config].key: config for config in configs}
        missing = needed.keys() - self._compiled.keys()
        if missing:
            self.submit(problem_plan.jobs[needed[key]] for key in missing)
            missing -= self._compiled.keys()
            results = self._feed.wait(missing, check)
            with self.lock:
                self._compiled.update(results)
                self._compilations.report()
        # Where nothing compiles, the compiler or the kernel is to blame, and a repair must take effect.
        if self.broken() is None:
            for key, config in needed.items():
                self.results.write_compiled(step, problem_plan.problem, config, self._compiled[key], gpu=gpu)
        return {key: self._compiled[key] for key in needed}

    def broken(self) -> str | None:
        """Return the reason why no compilation of this kernel succeeded; None where any did."""
        if self.results.anything_compiles():
            return None
        with self.lock:
            return compiles_nowhere(self._compiled.values())

    def known_list(self, problem_plan: ProblemPlan) -> Listed | None:
        """Return the shortlist in the journal; None where it is missing."""
        return self.results.listed(problem_plan.problem, problem_plan.candidates, exhaustive=self.exhaustive)

    # Progress and failures ----------------------------------------------------------------------------------

    def report_compilations(self) -> None:
        """Show the number of ended compilations."""
        self._compilations.report()

    def begins(self, problem: Problem, done: int, total: int) -> None:
        """Show that a problem begins, with the numbers done and total."""
        self._progress.show(Measuring(kernel=self.name, problem=problem, done=done, total=total))

    def failed(self, step: str, problem: Problem, failure: Failure) -> None:
        """Count a failure once; a wrong config wins nowhere, nor do its twins in the problem's bucket.

        Each config is shown once for each stage, so that a config does not fill the screen.
        """
        place = (step, problem, failure.config)
        with self.lock:
            if place not in self._counted:
                self._counted.add(place)
                self.times.failures += 1
            first = next(iter(failure.message.splitlines()), "")
            self._reasons[problem, failure.config] = shortened(
                f"{failure.stage}: {first}", MESSAGE_CHARACTERS
            )
            if failure.stage == "verify":
                self.times.wrong |= {failure.config, *self._twins_of(problem, failure.config)}
            if (failure.config, failure.stage) not in self._shown:
                self._shown.add((failure.config, failure.stage))
                self._progress.show(CandidateFailed(kernel=self.name, problem=problem, failure=failure))

    def reason(self, problem: Problem, config: Config) -> str:
        """Return why a config has no time at a problem."""
        return self._reasons.get((problem, config), "it has no time")

    def _twins_of(self, problem: Problem, config: Config) -> set[Config]:
        """Return the twins of a config in a problem's bucket, without defaults, which are verified anyway."""
        leaders = self.twins.get(self.plan.kernel.tunable.bucket_of(problem), {})
        leader = leaders.get(config, config)
        twins = {leader, *(twin for twin in leaders if leaders[twin] == leader)}
        return twins - {problem_plan.default for problem_plan in self.plan.problems}

    def disown(self, step: Step, problem: Problem, reason: str, gpu: str) -> None:
        """Discard all results of a GPU."""
        self.results.write_disowned(step, problem, reason, gpu=gpu)
        self._progress.note(f"{self.name}: the results of {gpu} do not count: {reason}")

    def leave_out(self, step: Step, problem: Problem, reason: str, gpu: str) -> None:
        """Leave out a problem that cannot be opened, with all its times."""
        with self.lock:
            self.times.unopened[problem] = reason
            self.times.problems.pop(problem, None)
        if self.results.unopened(problem) != reason:
            self.results.write_unopened(step, problem, reason, gpu=gpu)
        self._progress.note(f"{self.name} {problem}: left out: {reason}")
