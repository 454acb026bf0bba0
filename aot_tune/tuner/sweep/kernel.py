"""Measure one kernel: candidates at edges, a portfolio, the portfolio everywhere. Writes no table.

1. *Candidates*: at each bucket's edge the configs of the shortlist are verified and timed once; those that
   may win are timed in the GPU's other states; those near the fastest are timed again, interleaved (the
   finals).
2. *Portfolio*: a few configs are chosen over all edges.
3. *Portfolio times*: at each edge and at each point inside its bucket the portfolio and the default are
   verified and timed, in the GPU's other states as well; at the edges those near the fastest are timed again,
   interleaved (the run-off). Then points are added, one a round in each bucket where the rule inside it is
   not yet good enough.

A config that is fast in one state of the GPU and slow in another is near the fastest only if it is in both.

Each problem of a step is a task of its own, which one GPU of the crew does: what is compared was timed on one
card. Steps wait for all of their problems. What is chosen does not depend on which GPU did what, nor on their
number: results are put into the order of the plan before anything is chosen from them.

Compilations go on meanwhile. A result that the journal holds is not measured again. Winners are verified once
more in a fresh process when the table is known (`KernelSweep.recheck`). When a member of the portfolio is
found wrong, the portfolio is chosen again without it and what is new is measured, until no member falls.

A problem that cannot be opened in the worker is left out, with its reason, and the others go on. Where time
is limited, the problems that are worth most come first, and those that are not reached are left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Literal

from aot_tune.declare.discovery import FoundKernel
from aot_tune.tables.states import State
from aot_tune.tuner.choose.states import (
    MOST_CONTENDERS,
    StateTimes,
    contenders,
    in_worst_state,
    states_beside,
)
from aot_tune.tuner.choose.times import as_of_first_run, finalists
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job import Compiled, CompileJob, CompileResult, compiles_nowhere
from aot_tune.tuner.measure.request import Finals, Measure, OnOutcome, Recheck, Reported, TimeInState
from aot_tune.tuner.measure.supervise import ProblemFailedError
from aot_tune.tuner.outcome import STRIKES, Failure, Measurement, Outcome
from aot_tune.tuner.plan.candidates import DeviceKernel, ProblemPlan, SweepPlan, plan_only
from aot_tune.tuner.plan.model import least_us, predict_us
from aot_tune.tuner.plan.shortlist import MOST_CANDIDATES, predictions, shortlist
from aot_tune.tuner.sweep.cards import DefaultTwice, disagreements
from aot_tune.tuner.sweep.crew import Crew, Seat, Task
from aot_tune.tuner.sweep.progress import CandidateFailed, CompileReporter, Measuring, Progress
from aot_tune.tuner.sweep.results import Listed, Step, SweepResults
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

LONG_US = 2000.0
"""A problem of this time takes twice as long to sweep as one of no size, microseconds: at any size each
config is loaded, compared and timed in a few dozen launches."""

_PART_OF_TIME: Mapping[Step, float] = {"candidates": 0.5, "portfolio": 0.85}
"""The parts of a limited time after which a step begins with no further problem. The portfolio with the sizes
inside takes about as long as the candidates; the rest is for the last problems and for verifying the winners.
"""

Times = dict[Problem, Mapping[Config, Measurement]]
_Run = dict[Config, Measurement]


@dataclass(kw_only=True)
class KernelTimes:
    """All times that were measured of one kernel."""

    candidates: Times = field(default_factory=dict)
    """At each edge, every candidate's time; a finalist's from the finals."""

    portfolio: tuple[Config, ...] = ()
    """The configs chosen to serve every problem."""

    portfolio_times: Times = field(default_factory=dict)
    """At each edge and each point inside, the times of the portfolio and the default, taken together."""

    candidate_states: dict[Problem, StateTimes] = field(default_factory=dict)
    """At each edge, the times of the candidates that may win in the GPU's other states."""

    portfolio_states: dict[Problem, StateTimes] = field(default_factory=dict)
    """At each edge and each point inside, the times of the portfolio and the default in the other states."""

    runoffs: Times = field(default_factory=dict)
    """At each edge, the times of the default and of the configs near the fastest, timed again,
    interleaved."""

    wrong: set[Config] = field(default_factory=set)
    """Configs that computed a wrong result anywhere: they win nowhere."""

    barred: dict[Problem, set[Config]] = field(default_factory=dict)
    """Winners that failed in another way when they were verified again: they do not win at that problem."""

    unreached: set[Problem] = field(default_factory=set)
    """Edges that time did not suffice for; they have no times."""

    unopened: dict[Problem, str] = field(default_factory=dict)
    """Problems that could not be opened, each with the reason; they have no times."""

    failures: int = 0
    """Number of candidates that failed on a problem. Those that a rule refuses do not count."""

    def least_lost(self, member: Config, edges: Iterable[Problem]) -> Problem | None:
        """The edge where a config loses least to the fastest there; None where it has a time at none of them.

        A member of the portfolio that wins no entry is verified again there.
        """
        lost = {
            edge: times[member].mean_us / min(time.mean_us for time in times.values())
            for edge in edges
            if member in (times := self.portfolio_times.get(edge, {}))
            and member not in self.barred.get(edge, ())
        }
        return min(lost, key=lost.__getitem__) if lost else None


class _OutOfTime(Exception):
    """There is no time for what is missing of a problem."""


class KernelSweep:
    """Measures one kernel.

    Args:
        planned: The kernel's problems and their candidates.
        feed: Compiles the plan's jobs, which are submitted to it here.
        crew: Measures on its GPUs what is missing.
        results: Holds the results of an earlier run and takes the new ones.
        progress: Receives each event of the sweep.
        portfolio: Chooses the portfolio from the times at the edges.
        first_sizes: The sizes to measure first inside a bucket, given its edge.
        next_sizes: The size to measure next inside each of these buckets, by edge; none where there are
            enough.
        exhaustive: Measure every candidate.
        budget_s: Time for all steps, seconds; unlimited when None.
    """

    def __init__(
        self,
        planned: SweepPlan,
        feed: CompileFeed,
        crew: Crew,
        results: SweepResults,
        progress: Progress,
        *,
        portfolio: Callable[[KernelTimes], tuple[Config, ...]],
        first_sizes: Callable[[Problem], list[Problem]],
        next_sizes: Callable[[KernelTimes, Collection[Problem]], Mapping[Problem, Problem]],
        exhaustive: bool = False,
        budget_s: float | None = None,
    ) -> None:
        self._budget_s, self._started = budget_s, monotonic()
        self._plan = planned
        self._feed = feed
        self._crew = crew
        self._lock = threading.RLock()
        """Held where state is changed that several tasks share, and where the declaration's functions run."""
        self._results = results
        self._progress = progress
        self._portfolio = portfolio
        self._first_sizes = first_sizes
        self._next_sizes = next_sizes
        self._exhaustive = exhaustive
        self._swept = KernelTimes()
        self._plans: dict[Problem, ProblemPlan] = {}
        self._added: set[Problem] = set()
        self._worths: dict[Problem, float] = {}
        self._compiled: dict[str, CompileResult] = {}
        self._told: set[tuple[Config, str]] = set()
        self._failed: set[tuple[str, Problem, Config]] = set()
        self._steps = 0
        self._begun = 0
        self._compilations = CompileReporter(feed.counts, planned.kernel.tunable.name, progress)

    def run(self) -> KernelTimes:
        """Do all three steps.

        Raises:
            TuneError: The GPU is lost, the disk is full, or nothing can be compiled; finished results are
                kept.
        """
        edges = [each.problem for each in self._plan.problems]
        self._steps = 2 * len(edges) + sum(len(self._first_sizes(edge)) for edge in edges)
        for each in self._plan.problems:
            for failure in each.refused:
                if failure.stage != "legal":
                    self._report_failure(failure.stage, each.problem, failure)
        self._do(
            "candidates",
            {each.problem: each for each in self._plan.problems},
            lambda each, seat: self._measure_candidates(each, seat),
        )
        self._swept.candidates = _ordered(self._swept.candidates, edges)
        self._drop_unreached()
        self.choose_portfolio()
        return self._swept

    @property
    def swept(self) -> KernelTimes:
        """What was measured so far."""
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
        swept = self._swept
        asked: dict[Problem, list[Config]] = {}
        for problem, config in winners:
            if problem not in swept.unopened:
                asked.setdefault(problem, []).append(config)
        self._verify(asked)
        passed = True
        for problem, configs in asked.items():
            if problem in swept.unopened:
                passed = False
                continue
            for failure in filter(None, (self._results.recheck_failure(problem, one) for one in configs)):
                passed = False
                if failure.stage == "verify":
                    swept.wrong.add(failure.config)
                else:
                    swept.barred.setdefault(problem, set()).add(failure.config)
        return passed

    def _verify(self, asked: Mapping[Problem, Sequence[Config]]) -> None:
        def verify(each: ProblemPlan, seat: Seat) -> None:
            for config in asked[each.problem]:
                self._recheck(each, config, seat)

        self._do("recheck", {problem: self._plans[problem] for problem in asked}, verify)

    def broken(self) -> str | None:
        """The reason why no compilation of this kernel succeeded; None where one did."""
        if self._results.anything_compiles():
            return None
        with self._lock:
            return compiles_nowhere(self._compiled.values())

    def disagreements(self) -> list[str]:
        """A line for each two GPUs that disagree on the defaults at the edges."""
        results, found = self._results, []
        for each in self._plan.problems:
            problem, default = each.problem, each.default
            first, second = results.owner("candidates", problem), results.owner("portfolio", problem)
            one = results.outcome("candidates", problem, default)
            other = results.outcome("portfolio", problem, default)
            if first and second and isinstance(one, Measurement) and isinstance(other, Measurement):
                found.append(DefaultTwice(gpus=(first, second), times=(one, other)))
        return disagreements(found)

    # The steps ----------------------------------------------------------------------------------------------

    def _do(
        self,
        step: Step,
        plans: Mapping[Problem, ProblemPlan],
        work: Callable[[ProblemPlan, Seat], None],
    ) -> None:
        """Have the crew do a step on several problems, the longest first, and their compilations likewise."""
        lengths = {
            problem: _length(self._plan.kernel, each) if self._budget_s is None else self._worth(each)
            for problem, each in plans.items()
        }
        order = sorted(plans, key=lambda problem: -lengths[problem])
        jobs = {problem: self._jobs(step, plans[problem]) for problem in order}
        self._submit(job for those in jobs.values() for job in those)

        def task(each: ProblemPlan) -> Task:
            def begin(seat: Seat) -> None:
                with self._opening(step, each.problem, seat):
                    if step != "recheck":
                        self._report_step(each.problem)
                    try:
                        work(each, seat)
                    except _OutOfTime:
                        if each.problem not in self._added:  # the bucket is served without it
                            with self._lock:
                                edge = self._plan.kernel.tunable.bucket_of(each.problem)
                                self._swept.unreached.add(edge)

            keys = {job.key for job in jobs[each.problem]} - self._compiled.keys()
            return Task(
                kernel=self._plan.kernel.found,
                work=begin,
                length=lengths[each.problem],
                owner=None if step == "recheck" else self._results.owner(step, each.problem),
                fresh=step == "recheck",
                ready=lambda: self._is_late(step) or self._feed.ready(keys),
            )

        self._crew.run([task(each) for each in plans.values()], self._compilations.report)

    def _jobs(self, step: Step, each: ProblemPlan) -> list[CompileJob]:
        """The compilations that a step needs of a problem."""
        known = self._known_list(each) if step == "candidates" else None
        if known is None:
            return list(each.jobs.values())
        left = (c for c in known.configs if self._results.outcome(step, each.problem, c) is None)
        return [each.jobs[config] for config in left]

    def _worth(self, each: ProblemPlan) -> float:
        """How much faster than its edge's default the model's best config is: it says what tuning may gain.

        All problems of an edge are worth the same, so that they come together.
        """
        kernel = self._plan.kernel
        edge = kernel.tunable.bucket_of(each.problem)
        if edge not in self._worths:
            plan = next(one for one in self._plan.problems if one.problem == edge)
            times = predictions(kernel, plan, plan.candidates, {})
            self._worths[edge] = times[plan.default] / min(times.values()) if plan.default in times else 1.0
        return self._worths[edge]

    def _is_late(self, step: Step) -> bool:
        """Whether no problem of a step may begin any more, so that the later steps end in time."""
        part = _PART_OF_TIME.get(step)
        if self._budget_s is None or part is None:
            return False
        return monotonic() - self._started > part * self._budget_s

    def _check_time(self, step: Step, each: ProblemPlan) -> None:
        """Raise where it is too late for what is missing; the edge that is worth most is always measured.

        Raises:
            _OutOfTime: It is.
        """
        if self._is_late(step):
            with self._lock:
                first = max(self._plan.problems, key=self._worth).problem
                if each.problem in self._added or self._plan.kernel.tunable.bucket_of(each.problem) != first:
                    raise _OutOfTime

    def _drop_unreached(self) -> None:
        """Leave out the edges that time did not suffice for, with the sizes inside."""
        swept, bucket_of = self._swept, self._plan.kernel.tunable.bucket_of
        for times in (swept.candidates, swept.portfolio_times, swept.runoffs):
            for problem in [one for one in times if bucket_of(one) in swept.unreached]:
                del times[problem]

    def _report_step(self, problem: Problem) -> None:
        with self._lock:
            name = self._plan.kernel.tunable.name
            self._progress.show(Measuring(kernel=name, problem=problem, done=self._begun, total=self._steps))
            self._begun += 1

    def _measure_candidates(self, each: ProblemPlan, seat: Seat) -> None:
        listed = self._listed(each, seat)
        keep = [each.default, *([each.incumbent] if each.incumbent else [])]
        times, states, finals = self._timed("candidates", each, listed.configs, seat, keep=keep)
        times.update(as_of_first_run(times, finals))
        # Configs that launch the same code the same way take the same time: one measurement counts for both.
        for twin, leader in listed.twins.items():
            for known in (times, *states.values()):
                if leader in known:
                    known[twin] = replace(known[leader], config=twin)
        self._swept.candidates[each.problem] = times
        self._swept.candidate_states[each.problem] = states

    def _listed(self, each: ProblemPlan, seat: Seat) -> Listed:
        """The candidates to measure. Where the journal has them, the others are not compiled again."""
        known = self._known_list(each)
        if known is not None:
            return known
        self._check_time("candidates", each)
        compiled = self._wait("candidates", each, each.candidates, seat)
        with self._lock:
            chosen = shortlist(self._plan.kernel, each, compiled, exhaustive=self._exhaustive)
        for failure in chosen.failures:
            self._report_failure("compile", each.problem, failure)
        listed = Listed(configs=chosen.configs, twins=chosen.twins)
        if self.broken() is None:
            self._results.write_listed(
                each.problem, each.candidates, listed, exhaustive=self._exhaustive, gpu=seat.gpu
            )
        return listed

    def _known_list(self, each: ProblemPlan) -> Listed | None:
        """The list in the journal, unless a compilation is done again that may change it."""
        if any(self._results.is_redone(job.key) for job in each.jobs.values()):
            return None
        return self._results.listed(each.problem, each.candidates, exhaustive=self._exhaustive)

    def _measure_portfolios(self) -> None:
        """Time the portfolio and the default at every edge that has times, and at the points inside."""
        swept = self._swept
        swept.portfolio_times, swept.portfolio_states, swept.runoffs = {}, {}, {}
        problems = {
            problem: edge
            for edge in swept.candidates
            for problem in (*self._first_sizes(edge), edge)
            if problem not in swept.unopened
        }
        self._steps += len(problems) if self._plans else 0  # the first time they are counted already
        self._plans, self._added = {}, set()
        self._measure_portfolio_at(problems)
        while added := self._to_add():
            self._steps += len(added)
            self._added.update(added)
            self._measure_portfolio_at(added)

    def _to_add(self) -> dict[Problem, Problem]:
        """The sizes to measure next, each with its edge."""
        found = self._next_sizes(self._swept, self._swept.candidates)
        # A size that was tried and has no time, as it could not be opened or reached, is not tried again.
        return {size: edge for edge, size in found.items() if size not in self._plans}

    def _measure_portfolio_at(self, problems: Mapping[Problem, Problem]) -> None:
        """Time the portfolio at problems, each given with the edge of its bucket."""
        swept = self._swept
        members = [config for config in swept.portfolio if config not in swept.wrong]
        plans = {problem: plan_only(self._plan.kernel, problem, members) for problem in problems}
        self._plans.update(plans)
        self._do(
            "portfolio",
            plans,
            lambda each, seat: self._measure_portfolio(
                each, seat, finals=problems[each.problem] == each.problem
            ),
        )
        swept.portfolio_times = _ordered(swept.portfolio_times, self._plans)
        swept.runoffs = _ordered(swept.runoffs, self._plans)
        self._drop_unreached()

    def _measure_portfolio(self, each: ProblemPlan, seat: Seat, *, finals: bool) -> None:
        # Also those that another problem has just found wrong: which one comes first is chance.
        members = each.candidates
        times, states, runoff = self._timed(
            "portfolio", each, members, seat, keep=[each.default], finals=finals
        )
        self._swept.portfolio_times[each.problem] = times
        self._swept.portfolio_states[each.problem] = states
        if finals:
            self._swept.runoffs[each.problem] = runoff

    def _recheck(self, each: ProblemPlan, config: Config, seat: Seat) -> None:
        """Verify a winner again, unless the journal holds the result."""
        problem = each.problem
        if not self._results.is_rechecked(problem, config):
            session, cubins = seat.session, self._cubins("recheck", each, [config], seat)
            with self._spending("recheck", problem, seat, verifying=True):
                outcomes = session.answer(Recheck(problem, cubins))
                found = next((one for one in outcomes if isinstance(one, Failure)), None)
                self._results.write_recheck(problem, config, found, gpu=seat.gpu)
        failure = self._results.recheck_failure(problem, config)
        if failure is not None:
            self._report_failure("recheck", problem, failure)

    # One problem --------------------------------------------------------------------------------------------

    @contextmanager
    def _opening(self, step: Step, problem: Problem, seat: Seat) -> Iterator[None]:
        """Leave a problem out that cannot be opened, with all its times."""
        swept = self._swept
        try:
            yield
        except ProblemFailedError as error:
            with self._lock:
                swept.unopened[problem] = error.reason
                for times in (swept.candidates, swept.portfolio_times, swept.runoffs):
                    times.pop(problem, None)
                for states in (swept.candidate_states, swept.portfolio_states):
                    states.pop(problem, None)
            if self._results.unopened(problem) != error.reason:
                self._results.write_unopened(step, problem, error.reason, gpu=seat.gpu)
            self._progress.note(f"{self._plan.kernel.tunable.name} {problem}: left out: {error.reason}")

    def _timed(
        self,
        step: Literal["candidates", "portfolio"],
        each: ProblemPlan,
        configs: Sequence[Config],
        seat: Seat,
        *,
        keep: Sequence[Config],
        finals: bool = True,
    ) -> tuple[_Run, dict[State, _Run], _Run]:
        """Verify and time configs; time those that may win in other states, and those near the fastest again.

        Returns:
            The first times, those in the GPU's other states, and those of the finals. A config that fails in
            a state has no time at all.
        """
        problem, results = each.problem, self._results
        states_step: Step = "candidate states" if step == "candidates" else "portfolio states"
        final_step: Step = "candidate finals" if step == "candidates" else "portfolio finals"

        def lacks(step: Step, configs: Iterable[Config], state: State | None = None) -> bool:
            return any(results.outcome(step, problem, config, state) is None for config in configs)

        def contend(times: _Run) -> dict[State, list[Config]]:
            chosen = contenders(times, keep, most=MOST_CONTENDERS if step == "candidates" else None)
            return dict.fromkeys(states_beside(times), chosen) if chosen else {}

        def near(times: _Run, states: StateTimes) -> list[Config]:
            return finalists(in_worst_state(times, states), keep) if finals else []

        if results.owner(step, problem) not in (None, seat.gpu):
            there = self._times(step, problem, configs)
            asked = contend(there)
            states = {state: self._times(states_step, problem, asked[state], state) for state in asked}
            if (
                lacks(step, configs)
                or any(lacks(states_step, asked[state], state) for state in asked)
                or lacks(final_step, near(_in_all(there, states, asked), states))
            ):
                seat.strikes.forget(problem)
                results.release(step, problem)
        times = self._measured(step, each, configs, seat)
        asked = contend(times)
        states = {state: self._in_state(state, states_step, each, asked[state], seat) for state in asked}
        times = _in_all(times, states, asked)
        best = near(times, states)
        return times, states, self._raced(final_step, each, best, seat) if best else {}

    def _measured(
        self, step: Step, each: ProblemPlan, configs: Sequence[Config], seat: Seat
    ) -> dict[Config, Measurement]:
        """The times of a step. What the journal holds is not measured again."""
        problem, results = each.problem, self._results
        missing = self._missing(step, problem, configs, seat)
        if missing:
            known = self._times(step, problem, configs)
            for config in missing:
                if (time := results.provisional(step, problem, config)) is not None:
                    known[config] = time
            session = seat.session
            self._check_time(step, each)
            cubins = self._cubins(step, each, missing, seat)
            kernel = self._plan.kernel
            with self._lock:
                least = least_us((kernel.launched(problem, config) for config in missing), kernel.device)
            with self._spending(step, problem, seat):
                outcomes = session.answer(
                    Measure(problem, cubins, known=known, least_us=least), self._keeping(step, problem, seat)
                )
            self._settle(step, problem, outcomes, seat)
        return self._times(step, problem, configs)

    def _in_state(
        self, state: State, step: Step, each: ProblemPlan, configs: Sequence[Config], seat: Seat
    ) -> _Run:
        """The times in one of the GPU's states. What the journal holds is not measured again."""
        problem = each.problem
        missing = self._missing(step, problem, configs, seat, state)
        if missing:
            cubins = self._cubins(step, each, missing, seat)
            with self._spending(step, problem, seat):
                outcomes = seat.session.answer(
                    TimeInState(problem, cubins, state=state), self._keeping(step, problem, seat, state)
                )
            self._settle(step, problem, outcomes, seat, state)
        return self._times(step, problem, configs, state)

    def _raced(
        self, step: Step, each: ProblemPlan, configs: Sequence[Config], seat: Seat
    ) -> dict[Config, Measurement]:
        """The times of finals. Rounds that the journal holds are not timed again."""
        problem, results = each.problem, self._results
        if self._missing(step, problem, configs, seat):
            left = [c for c in configs if not isinstance(results.outcome(step, problem, c), Failure)]
            session, cubins = seat.session, self._cubins(step, each, left, seat)
            with self._spending(step, problem, seat):
                taken = {config: results.rounds(step, problem, config) for config in left}
                outcomes = session.answer(
                    Finals(problem, cubins, taken=taken), self._keeping(step, problem, seat)
                )
            self._settle(step, problem, outcomes, seat)
        return self._times(step, problem, configs)

    def _missing(
        self,
        step: Step,
        problem: Problem,
        configs: Sequence[Config],
        seat: Seat,
        state: State | None = None,
    ) -> list[Config]:
        """The configs without an outcome. Faults and wrong results in the journal count as if made here."""
        missing = []
        for config in configs:
            outcome = self._results.outcome(step, problem, config, state)
            if outcome is None:
                missing.append(config)
            elif isinstance(outcome, Failure):
                if outcome.stage in STRIKES or outcome.stage == "verify":
                    seat.strikes.remember(problem, config, outcome.stage)
                self._note_failure(step, problem, outcome)
        return missing

    def _keeping(self, step: Step, problem: Problem, seat: Seat, state: State | None = None) -> OnOutcome:
        """Keeps each outcome of a request, then shows it."""

        def keep(reported: Reported) -> None:
            outcome = reported.outcome
            self._results.write(step, problem, outcome, reported.number, gpu=seat.gpu, state=state)
            if isinstance(outcome, Failure):
                self._note_failure(step, problem, outcome)

        return keep

    def _settle(
        self,
        step: Step,
        problem: Problem,
        outcomes: Iterable[Outcome],
        seat: Seat,
        state: State | None = None,
    ) -> None:
        """Keep the outcomes of an answer that were not reported before, such as a median of rounds."""
        keep = self._keeping(step, problem, seat, state)
        for outcome in outcomes:
            there = self._results.outcome(step, problem, outcome.config, state)
            if there != outcome and not (isinstance(there, Failure) and isinstance(outcome, Failure)):
                keep(Reported(outcome=outcome))

    def _times(
        self, step: Step, problem: Problem, configs: Sequence[Config], state: State | None = None
    ) -> _Run:
        outcomes = {config: self._results.outcome(step, problem, config, state) for config in configs}
        return {config: one for config, one in outcomes.items() if isinstance(one, Measurement)}

    @contextmanager
    def _spending(
        self, step: Step, problem: Problem, seat: Seat, *, verifying: bool = False
    ) -> Iterator[None]:
        """Write down the time that a request took and the GPU's state around it."""
        session = seat.session
        waited_s, idle_s = seat.rested()
        started, before = monotonic(), session.spent
        yield
        after = session.spent
        spent = after.since(before)
        seconds = max(0.0, monotonic() - started - spent.start_s - spent.open_s)
        verify_s = min(seconds, seconds if verifying else spent.verify_s)
        start_s, seat.told_start_s = after.start_s - seat.told_start_s, after.start_s
        states = (one.as_record() for one in spent.conditions)
        self._results.write_spent(
            step,
            problem,
            measure_s=seconds - verify_s,
            verify_s=verify_s,
            conditions=[{name: one[name] for name in ("before", "after")} for one in states],
            gpu=seat.gpu,
            start_s=start_s,
            open_s=spent.open_s,
            waited_s=waited_s,
            idle_s=idle_s,
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
                with self._lock:
                    self._compiled[job.key] = failure
        self._feed.submit(wanted)

    def _wait(
        self, step: Step, each: ProblemPlan, configs: Iterable[Config], seat: Seat
    ) -> Mapping[str, CompileResult]:
        asked = {each.jobs[config].key: config for config in configs}
        missing = asked.keys() - self._compiled.keys()
        if missing:
            self._submit(each.jobs[asked[key]] for key in missing)
            missing -= self._compiled.keys()
            found = self._feed.wait(missing, seat.check)
            with self._lock:
                self._compiled.update(found)
                self._compilations.report()
        # Where nothing compiles, the compiler or the kernel is to blame, and a repair must be seen.
        if self.broken() is None:
            for key, config in asked.items():
                self._results.write_compiled(step, each.problem, config, self._compiled[key], gpu=seat.gpu)
        return {key: self._compiled[key] for key in asked}

    def _cubins(
        self, step: Step, each: ProblemPlan, configs: Sequence[Config], seat: Seat
    ) -> dict[Config, Path | None]:
        results = self._wait(step, each, configs, seat)
        found: dict[Config, Path | None] = {}
        for config in configs:
            result = results[each.jobs[config].key]
            found[config] = result.path if isinstance(result, Compiled) else None
        return found

    # Failures -----------------------------------------------------------------------------------------------

    def _note_failure(self, step: Step, problem: Problem, failure: Failure) -> None:
        self._report_failure(step, problem, failure)
        if failure.stage == "verify":
            with self._lock:
                self._swept.wrong.add(failure.config)

    def _report_failure(self, step: str, problem: Problem, failure: Failure) -> None:
        """Count a failure once, and show each config once per stage: else one config may fill the screen."""
        place = (step, problem, failure.config)
        with self._lock:
            if place not in self._failed:
                self._failed.add(place)
                self._swept.failures += 1
            if (failure.config, failure.stage) not in self._told:
                self._told.add((failure.config, failure.stage))
                name = self._plan.kernel.tunable.name
                self._progress.show(CandidateFailed(kernel=name, problem=problem, failure=failure))


def length(kernel: DeviceKernel, problem: Problem, default: Config, configs: int) -> float:
    """How long a problem takes beside others: by its configs and the time of its default by the model."""
    us = predict_us(kernel.launched(problem, default), kernel.device, None, None)
    return min(configs, MOST_CANDIDATES) * (1.0 + us / LONG_US)


def _length(kernel: DeviceKernel, each: ProblemPlan) -> float:
    return length(kernel, each.problem, each.default, len(each.candidates))


def length_of_kernel(found: FoundKernel, arch: Arch, buckets: Iterable[Problem]) -> float:
    """How long a kernel's sweep takes beside others; 0 for one that cannot be planned, as its turn tells."""
    try:
        kernel = DeviceKernel(found, arch)
        return sum(
            length(kernel, bucket, kernel.default(bucket), len(found.tunable.space(arch, bucket)))
            for bucket in buckets
        )
    except Exception:  # functions of the declaration may raise anything
        return 0.0


def _ordered(times: Times, order: Iterable[Problem]) -> Times:
    """The same times in an order that does not depend on which GPU was the first."""
    return {problem: times[problem] for problem in order if problem in times}


def _in_all(times: _Run, states: StateTimes, asked: Mapping[State, Sequence[Config]]) -> _Run:
    """The times without those of configs that failed in a state of the GPU."""
    failed = {config for state, configs in asked.items() for config in configs if config not in states[state]}
    return {config: time for config, time in times.items() if config not in failed}
