"""Measure one kernel: candidates at edges, a portfolio, the portfolio everywhere. Writes no table.

1. *Candidates*: at each bucket's edge the configs of the shortlist are verified and timed once. Configs that
   may win are timed in the GPU's other states. Configs near the fastest are timed again, interleaved (the
   finals).
2. *Portfolio*: a few configs are chosen over all edges.
3. *Portfolio times*: at each edge and at each point inside its bucket the portfolio and the default are
   verified and timed, in the GPU's other states as well. At the edges the configs near the fastest are timed
   again, interleaved (the run-off). Then points are added, one per round in each bucket where the rule inside
   it is not yet good enough.

A config is near the fastest only if it is in every state of the GPU.

Each problem of a step is a task of its own, done by one GPU of the pool: only times of one GPU are compared.
Steps wait for all of their problems. The choices depend neither on the assignment of tasks to GPUs nor on the
number of GPUs: results are put into the order of the plan first.

Compilations run at the same time. A result in the journal is not measured again. When the table is known,
winners are verified once more in a fresh process, and the portfolio at declared sizes and at an odd size of
each bucket (`KernelSweep.table`). When a member of the portfolio is found wrong, the portfolio is chosen
again without it and missing times are measured, until all members pass.

A wrong result of a default is verified on another GPU. A GPU that is wrong alone leaves the sweep, and the
kernel's sweep starts again without its results.

A problem that cannot be opened in the worker is left out, with its reason, and the sweep continues. With a
time budget, the problems with the largest expected gain come first, and unreached problems are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from aot_tune.tables.table import Table
from aot_tune.tuner.choose.gpu_models import DefaultTwice, disagreements
from aot_tune.tuner.choose.times import ProblemTimes
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.measure.blame import Known
from aot_tune.tuner.measure.supervise import GpuLostError, ProblemFailedError
from aot_tune.tuner.measure.worker.backend import LAUNCHES
from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.plan.candidates import ProblemPlan, SweepPlan, plan_only
from aot_tune.tuner.sweep.budget import Budget, OutOfTimeError
from aot_tune.tuner.sweep.decision import Decision, to_recheck, to_verify
from aot_tune.tuner.sweep.gpus import GpuPool, GpuSlot, Task
from aot_tune.tuner.sweep.problem import ProblemPass
from aot_tune.tuner.sweep.progress import Progress
from aot_tune.tuner.sweep.results import Step, SweepResults
from aot_tune.tuner.sweep.state import KernelState, KernelTimes
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem


class _GpuDisowned(Exception):
    """The results of a GPU do not count any more: the steps start again."""


class KernelSweep:
    """Measures one kernel.

    Args:
        planned: The kernel's problems and their candidates.
        feed: Compiles the plan's jobs.
        gpu_pool: Measures the missing results on its GPUs.
        results: Holds the results of an earlier run and takes the new results.
        progress: Receives each event of the sweep.
        decision: Chooses the portfolio, the sizes inside buckets, and the table.
        exhaustive: Whether to measure every candidate.
        budget_s: Time for all steps, seconds; unlimited when None.
    """

    def __init__(
        self,
        planned: SweepPlan,
        feed: CompileFeed,
        gpu_pool: GpuPool,
        results: SweepResults,
        progress: Progress,
        decision: Decision,
        *,
        exhaustive: bool = False,
        budget_s: float | None = None,
    ) -> None:
        self._plan, self._gpu_pool, self._decision = planned, gpu_pool, decision
        self._edges = [problem_plan.problem for problem_plan in planned.problems]
        self._bucket_of = planned.kernel.tunable.bucket_of
        self._state = KernelState(planned, feed, results, progress, exhaustive=exhaustive)
        self._budget = Budget(planned, budget_s, self._state.lock)
        self._plans: dict[Problem, ProblemPlan] = {}
        """The plans of the portfolio's problems, in their order."""
        self._added: set[Problem] = set()
        """The problems of `_plans` without which their buckets are served too."""
        self._verified: dict[Problem, ProblemPlan] = {}
        """The plans of the problems at which the portfolio was verified and not timed."""
        self._wrong: set[Config] = set()
        self._begun = self._of = 0

    @property
    def times(self) -> KernelTimes:
        """The times so far."""
        return self._state.times

    def run(self) -> None:
        """Run all three steps.

        Raises:
            TuneError: The GPU is lost, the disk is full, or nothing can be compiled; finished results are
                kept.
        """
        while True:
            with suppress(_GpuDisowned):
                return self._run()

    def _run(self) -> None:
        self._plans, self._added, self._verified, self._begun = {}, set(), {}, 0
        self._state.times.wrong |= self._wrong
        self._of = 2 * len(self._edges) + sum(len(self._decision.first_sizes(edge)) for edge in self._edges)
        for problem_plan in self._plan.problems:
            for failure in problem_plan.refused:
                if failure.stage != "legal":
                    self._state.failed(failure.stage, problem_plan.problem, failure)
        plans = {problem_plan.problem: problem_plan for problem_plan in self._plan.problems}
        self._do("candidates", plans, lambda measuring, problem: measuring.candidates())
        self._drop_unreached(self._edges)
        self._choose_portfolio()

    def verify(self, table: Table, swept: Collection[Problem]) -> dict[Problem, list[Config]]:
        """Verify a table's portfolio and the defaults in the buckets that are not swept, without timing.

        Args:
            table: The table, whose entries have passed another check.
            swept: The buckets that are swept.

        Returns:
            The configs that failed by problem; where it cannot be opened, all that may run there.
        """
        state, kernel = self._state, self._plan.kernel
        kept = [entry for entry in table.entries if entry.bucket not in swept]
        sizes = [entry.bucket.replaced(**point.size) for entry in kept for point in entry.points]
        timed = KernelTimes(
            problems=dict.fromkeys([*(entry.bucket for entry in kept), *sizes], ProblemTimes())
        )
        problems = [*timed.problems, *to_verify(table, timed, kernel.tunable)]
        plans = {problem: plan_only(kernel, problem, table.portfolio) for problem in problems}
        while True:
            with suppress(_GpuDisowned):
                self._do(
                    "recheck",
                    plans,
                    lambda measuring, problem: measuring.recheck(plans[problem].candidates, launches=0),
                )
                break
        return {
            problem: [
                config
                for config in problem_plan.candidates
                if problem in state.times.unopened or state.results.recheck_failure(problem, config)
            ]
            for problem, problem_plan in plans.items()
        }

    def exclude(self, configs: Iterable[Config]) -> None:
        """Let configs that computed a wrong result before win nowhere."""
        self._wrong.update(configs)

    def table(self) -> Table:
        """Choose the table and verify its winners in a fresh process, until all of them pass.

        Raises:
            TuneError: As `Decision.table` and `run`.
        """
        while True:
            times = self._state.times
            times.faulty = self._faulty()
            table = self._decision.table(times)
            try:
                if self._recheck(table):
                    return table
                self._choose_portfolio()
            except _GpuDisowned:
                self.run()

    def broken(self) -> str | None:
        """Return the reason why no compilation of this kernel succeeded; None where any did."""
        return self._state.broken()

    def disagreements(self) -> list[str]:
        """List the pairs of GPUs whose times of the edges' defaults differ, one line each."""
        results, pairs = self._state.results, []
        for problem_plan in self._plan.problems:
            problem, default = problem_plan.problem, problem_plan.default
            gpus = results.owner("candidates", problem), results.owner("portfolio", problem)
            first = results.outcome("candidates", problem, default)
            second = results.outcome("portfolio", problem, default)
            if gpus[0] and gpus[1] and isinstance(first, Measurement) and isinstance(second, Measurement):
                pairs.append(DefaultTwice(gpus=(gpus[0], gpus[1]), times=(first, second)))
        return disagreements(pairs)

    # The portfolio ------------------------------------------------------------------------------------------

    def _choose_portfolio(self) -> None:
        """Choose the portfolio and time it everywhere; repeat until no member is found wrong."""
        times = self._state.times
        while True:
            times.faulty = self._faulty()
            times.portfolio = self._decision.portfolio(times)
            self._measure_portfolio()
            if not times.wrong.intersection(times.portfolio):
                return

    def _measure_portfolio(self) -> None:
        """Time the portfolio and the default at every edge that has times, and at sizes inside."""
        times = self._state.times
        edges = [edge for edge in self._edges if edge in times.problems]
        times.keep(edges)
        for edge in edges:
            times.add(edge, portfolio={}, portfolio_states={}, runoff={})
        inside = {edge: self._decision.first_sizes(edge) for edge in edges}
        problems = [problem for edge in edges for problem in (*inside[edge], edge)]
        problems = [problem for problem in dict.fromkeys(problems) if problem not in times.unopened]
        self._of += len(problems) if self._plans else 0  # the first time they are counted already
        self._plans, self._added = {}, set()
        self._measure_portfolio_at(problems)
        while added := self._sizes_to_add():
            self._of += len(added)
            self._added.update(added)
            self._measure_portfolio_at(added)

    def _sizes_to_add(self) -> list[Problem]:
        """Return the sizes to measure next, without sizes that were tried before."""
        times = self._state.times
        edges = [edge for edge in self._edges if edge in times.problems]
        sizes = self._decision.next_sizes(times, edges).values()
        return [size for size in sizes if size not in self._plans]

    def _measure_portfolio_at(self, problems: Iterable[Problem]) -> None:
        times = self._state.times
        members = [config for config in times.portfolio if config not in times.wrong]
        plans = {problem: plan_only(self._plan.kernel, problem, members) for problem in problems}
        self._plans.update(plans)
        edges = set(self._edges)
        self._do("portfolio", plans, lambda measuring, problem: measuring.portfolio(finals=problem in edges))
        self._drop_unreached([*self._edges, *self._plans])

    def _faulty(self) -> dict[Problem, str]:
        """Return the problems at which the default failed in the latest pass, each with the reason."""
        faulty, defaults = {}, self._defaults()
        for problem, known in self._state.times.problems.items():
            default, timed = defaults.get(problem), known.portfolio if self._plans else known.candidates
            if default is not None and (default not in timed or default in known.barred):
                faulty[problem] = self._state.reason(problem, default)
        for problem, plan in self._verified.items():
            if self._state.results.recheck_failure(problem, plan.default) is not None:
                faulty[problem] = self._state.reason(problem, plan.default)
        return faulty

    def _defaults(self) -> dict[Problem, Config]:
        """Return the default at each problem of the latest pass, where it may run."""
        plans = (*(self._plans.values() or self._plan.problems), *self._verified.values())
        return {plan.problem: plan.default for plan in plans if plan.default in plan.jobs}

    # The recheck --------------------------------------------------------------------------------------------

    def _recheck(self, table: Table) -> bool:
        """Verify a table's configs once more in a fresh process. A wrong config wins nowhere any more.

        Winners and defaults are verified at their edges, the portfolio and the default once at the sizes of
        `to_verify`. A config that fails in another way does not win at that problem, or in that size's
        bucket.

        Returns:
            Whether all passed.
        """
        times, results = self._state.times, self._state.results
        checks: dict[Problem, list[Config]] = {}
        for problem, config in to_recheck(table, times, self._defaults()):
            if problem not in times.unopened:
                checks.setdefault(problem, []).append(config)
        for problem in to_verify(table, times, self._plan.kernel.tunable):
            if problem not in times.unopened:
                barred = times.problems[self._bucket_of(problem)].barred
                members = [config for config in table.portfolio if config not in barred]
                self._verified[problem] = plan_only(self._plan.kernel, problem, members)
                checks[problem] = list(self._verified[problem].candidates)
        plans = {**self._plans, **self._verified}
        self._do(
            "recheck",
            {problem: plans[problem] for problem in checks},
            lambda measuring, problem: measuring.recheck(
                checks[problem], launches=0 if problem in self._verified else LAUNCHES
            ),
        )
        passed = True
        for problem, configs in checks.items():
            if problem in times.unopened:
                passed = False
                continue
            for failure in filter(None, (results.recheck_failure(problem, config) for config in configs)):
                passed = False
                for size in [problem] if problem in times.problems else self._measured_with(problem):
                    times.add(size, barred=times.problems[size].barred | {failure.config})
        return passed

    def _measured_with(self, problem: Problem) -> list[Problem]:
        """Return the measured problems of a problem's bucket."""
        bucket = self._bucket_of(problem)
        return [size for size in self._state.times.problems if self._bucket_of(size) == bucket]

    # Tasks --------------------------------------------------------------------------------------------------

    def _do(
        self,
        step: Step,
        plans: Mapping[Problem, ProblemPlan],
        work: Callable[[ProblemPass, Problem], None],
    ) -> None:
        """Do a step on several problems, with their compilations in the same order."""
        state, budget = self._state, self._budget
        priorities = {problem: budget.priority(problem_plan) for problem, problem_plan in plans.items()}
        order = sorted(plans, key=lambda problem: -priorities[problem])
        jobs = {problem: state.jobs(step, plans[problem]) for problem in order}
        state.submit(job for of_problem in jobs.values() for job in of_problem)

        def task(problem_plan: ProblemPlan) -> Task:
            missing = state.waits_for(jobs[problem_plan.problem])
            return Task(
                kernel=self._plan.kernel.declared,
                work=lambda slot: self._begin(step, problem_plan, slot, work),
                length=priorities[problem_plan.problem],
                owner=self._owner(step, problem_plan.problem),
                fresh=step == "recheck",
                ready=lambda: budget.is_late(step) or state.is_ready(missing),
            )

        self._gpu_pool.run([task(problem_plan) for problem_plan in plans.values()], state.report_compilations)
        for default in dict.fromkeys(self._defaults().values()):
            if default in state.times.wrong and (place := state.results.found_wrong(default)) is not None:
                self._ask_another_gpu(default, *place)

    def _owner(self, step: Step, problem: Problem) -> str | None:
        """Return the only GPU for a problem's task; None for any.

        An unfinished pass is its GPU's. The second pass over one edge of each GPU, the first in the plan, is
        the next GPU's, so that the times of all GPUs can be compared (`disagreements`).
        """
        if step == "recheck":
            return None
        first: dict[str, Problem] = {}
        for edge in self._edges if step == "portfolio" else ():
            if (gpu := self._state.results.owner("candidates", edge)) is not None:
                first.setdefault(gpu, edge)
        gpus = list(first)
        after = {first[gpu]: gpus[place - 1] for place, gpu in enumerate(gpus)}
        return self._state.results.owner(step, problem) or after.get(problem)

    def _ask_another_gpu(self, default: Config, step: Step, problem: Problem, gpu: str) -> None:
        """Verify a wrong default on another GPU, if any, and dismiss the first where it is right there.

        Raises:
            _GpuDisowned: The first GPU has left the sweep.
        """
        state, kernel = self._state, self._plan.kernel
        others = [slot.gpu for slot in self._gpu_pool.slots if slot.left_s is None and slot.gpu != gpu]
        right: list[str] = []

        def verify(slot: GpuSlot) -> None:
            plan = plan_only(kernel, problem, [default])
            with suppress(ProblemFailedError):
                if slot.gpu != gpu and ProblemPass(state, self._budget, plan, slot).is_right(step, default):
                    right.append(slot.gpu)
                    slot.fault_counts.replace(Known())

        def dismiss(slot: GpuSlot) -> None:
            if slot.gpu == gpu:
                raise GpuLostError(reason)

        self._gpu_pool.run([Task(kernel=kernel.declared, work=verify, owner=other) for other in others[:1]])
        if right:
            reason = (
                f"it computes the default ({default}) wrong at {problem}, and {right[0]} computes it right"
            )
            state.disown(step, problem, reason, gpu)
            self._gpu_pool.run([Task(kernel=kernel.declared, work=dismiss, owner=gpu)])
            state.restart()
            raise _GpuDisowned

    def _begin(
        self,
        step: Step,
        problem_plan: ProblemPlan,
        slot: GpuSlot,
        work: Callable[[ProblemPass, Problem], None],
    ) -> None:
        """Do a step on a problem; leave it out if it cannot be opened or no time is left."""
        state, problem = self._state, problem_plan.problem
        extra = problem in self._added
        if step != "recheck":
            with state.lock:
                state.begins(problem, self._begun, self._of)
                self._begun += 1
        try:
            work(ProblemPass(state, self._budget, problem_plan, slot, extra=extra), problem)
        except OutOfTimeError:
            if not extra:
                with state.lock:
                    state.times.unreached.add(self._bucket_of(problem))
        except ProblemFailedError as error:
            state.leave_out(step, problem, error.reason, slot.gpu)

    def _drop_unreached(self, order: Sequence[Problem]) -> None:
        """Put the problems into an order, and drop buckets that were not reached in time."""
        times = self._state.times
        times.keep(
            problem for problem in dict.fromkeys(order) if self._bucket_of(problem) not in times.unreached
        )
