"""Measure one problem on one GPU, except results in the journal. Chooses nothing.

The edge of a bucket has three passes: its candidates, the portfolio, and the recheck of its winners. A size
inside a bucket has only the second pass. All times of a pass come from one GPU: an incomplete pass of another
GPU is measured again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic

from aot_tune.tables.states import State
from aot_tune.tuner.choose.states import (
    MOST_CONTENDERS,
    StateTimes,
    contenders,
    in_worst_state,
    other_states,
)
from aot_tune.tuner.choose.times import as_of_first_run, finalists
from aot_tune.tuner.compile.job import Compiled, is_transient
from aot_tune.tuner.measure.request import Finals, Measure, Recheck, Reported, Request, TimeInState
from aot_tune.tuner.measure.worker.backend import RECHECK_SEEDS, SEEDS
from aot_tune.tuner.outcome import COUNTED_STAGES, Failure, Measurement
from aot_tune.tuner.plan.candidates import ProblemPlan
from aot_tune.tuner.plan.model import least_us
from aot_tune.tuner.plan.shortlist import shortlist
from aot_tune.tuner.sweep.budget import Budget
from aot_tune.tuner.sweep.gpus import GpuSlot
from aot_tune.tuner.sweep.results import Listed, Pass, Step
from aot_tune.tuner.sweep.state import KernelState
from aot_tune.values.config import Config

_Run = dict[Config, Measurement]

_STATES: Mapping[Pass, Step] = {"candidates": "candidate states", "portfolio": "portfolio states"}
_FINALS: Mapping[Pass, Step] = {"candidates": "candidate finals", "portfolio": "portfolio finals"}


class ProblemPass:
    """A GPU's pass over a problem. Its times go to the kernel's state.

    Args:
        state: The shared state of the kernel's sweep.
        budget: Decides when it is too late.
        problem_plan: The problem and its configs.
        slot: The GPU.
        extra: Whether the problem's bucket is served without it, too.
        seeds: The seeds of the arguments.
    """

    def __init__(
        self,
        state: KernelState,
        budget: Budget,
        problem_plan: ProblemPlan,
        slot: GpuSlot,
        *,
        extra: bool = False,
        seeds: tuple[int, int] = SEEDS,
    ) -> None:
        self._seeds = seeds
        self._state, self._budget, self._each, self._slot = state, budget, problem_plan, slot
        self._problem, self._results, self._extra = problem_plan.problem, state.results, extra

    # The three passes ---------------------------------------------------------------------------------------

    def candidates(self) -> None:
        """Time the shortlist at an edge."""
        listed = self._listed()
        self._state.twins[self._problem] = listed.twins
        times, states, finals = self._timed("candidates", listed.configs)
        times.update(as_of_first_run(times, finals))
        # Configs that launch the same code the same way take the same time: one measurement counts for both.
        for twin, leader in listed.twins.items():
            for known in (times, *states.values()):
                if leader in known:
                    known[twin] = replace(known[leader], config=twin)
        self._state.times.add(self._problem, candidates=times, candidate_states=states)

    def portfolio(self, *, finals: bool) -> None:
        """Time the portfolio and the default.

        Args:
            finals: Whether to time the configs near the fastest again, interleaved: at edges.
        """
        # Also members that another problem has just found wrong: the order of problems is chance.
        times, states, runoff = self._timed("portfolio", self._each.candidates, finals=finals)
        self._state.times.add(self._problem, portfolio=times, portfolio_states=states, runoff=runoff)

    def recheck(self, configs: Iterable[Config], launches: int) -> None:
        """Verify configs again.

        Args:
            configs: The configs.
            launches: Launches of each after its verification.
        """
        for config in configs:
            if not self._results.is_rechecked(self._problem, config):
                request = Recheck(self._problem, self._cubins("recheck", [config]), launches=launches)
                with self._spending("recheck", verifying=True):
                    outcomes = self._slot.session.answer(request)
                    failed = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
                    self._results.write_recheck(self._problem, config, failed, gpu=self._slot.gpu)
            failure = self._results.recheck_failure(self._problem, config)
            if failure is not None:
                self._state.failed("recheck", self._problem, failure)

    def is_right(self, step: Step, config: Config) -> bool:
        """Verify a config on the seeds of a step, in a fresh process and many times; write no result."""
        seeds = RECHECK_SEEDS if step == "recheck" else SEEDS
        request = Recheck(self._problem, self._cubins(step, [config]), seeds=seeds)
        return not self._slot.session.answer(request)

    # Parts of the passes ------------------------------------------------------------------------------------

    def _listed(self) -> Listed:
        """Return the candidates to measure, from the journal or after compiling all."""
        problem_plan, state = self._each, self._state
        known = state.known_list(problem_plan)
        if known is not None:
            return known
        self._budget.check("candidates", problem_plan, extra=self._extra)
        compiled = state.compiled(
            "candidates", problem_plan, problem_plan.candidates, self._slot.gpu, self._slot.check
        )
        with state.lock:
            chosen = shortlist(state.plan.kernel, problem_plan, compiled, exhaustive=state.exhaustive)
        for failure in chosen.failures:
            state.failed("compile", self._problem, failure)
        listed = Listed(configs=chosen.configs, twins=chosen.twins)
        # Where compilations are done again after a stop, so is the list.
        if state.broken() is None and not any(map(is_transient, compiled.values())):
            self._results.write_listed(
                self._problem,
                problem_plan.candidates,
                listed,
                exhaustive=state.exhaustive,
                gpu=self._slot.gpu,
            )
        return listed

    def _timed(
        self, of: Pass, configs: Sequence[Config], *, finals: bool = True
    ) -> tuple[_Run, dict[State, _Run], _Run]:
        """Verify and time configs; time contenders in other states and finalists again.

        The default and the incumbent are among both, however slow they are.

        Returns:
            The first times, the times in the GPU's other states, and the times of the finals. A config that
            fails in a state has no time at all.
        """
        keep = [self._each.default, *([self._each.incumbent] if self._each.incumbent else [])]

        def contend(times: _Run) -> dict[State, list[Config]]:
            chosen = contenders(times, keep, most=MOST_CONTENDERS if of == "candidates" else None)
            return dict.fromkeys(other_states(times), chosen) if chosen else {}

        def near(times: _Run, states: StateTimes) -> list[Config]:
            return finalists(in_worst_state(times, states), keep) if finals else []

        if self._results.owner(of, self._problem) not in (None, self._slot.gpu):
            theirs = self._times(of, configs)
            contending = contend(theirs)
            states = {state: self._times(_STATES[of], contending[state], state) for state in contending}
            if (
                self._lacks(of, configs)
                or any(self._lacks(_STATES[of], contending[state], state) for state in contending)
                or self._lacks(_FINALS[of], near(_in_all(theirs, states, contending), states))
            ):
                self._slot.fault_counts.forget(self._problem)
                self._results.release(of, self._problem)
        times = self._measured(of, configs)
        contending = contend(times)
        states = {state: self._in_state(_STATES[of], contending[state], state) for state in contending}
        times = _in_all(times, states, contending)
        best = near(times, states)
        return times, states, self._raced(_FINALS[of], best) if best else {}

    def _measured(self, step: Step, configs: Sequence[Config]) -> _Run:
        """Measure a step's missing configs; return the step's times."""
        missing = self._missing(step, configs)
        if missing:
            known = self._times(step, configs)
            for config in missing:
                if (time := self._results.provisional(step, self._problem, config)) is not None:
                    known[config] = time
            self._budget.check(step, self._each, extra=self._extra)
            cubins = self._cubins(step, missing)
            kernel = self._state.plan.kernel
            with self._state.lock:
                launched = [kernel.launched(self._problem, config) for config in missing]
                least = least_us(launched, kernel.device)
            self._ask(step, Measure(self._problem, cubins, seeds=self._seeds, known=known, least_us=least))
        return self._times(step, configs)

    def _in_state(self, step: Step, configs: Sequence[Config], state: State) -> _Run:
        """Time missing configs in a state of the GPU; return the times in the state."""
        missing = self._missing(step, configs, state)
        if missing:
            cubins = self._cubins(step, missing)
            self._ask(step, TimeInState(self._problem, cubins, seeds=self._seeds, state=state), state)
        return self._times(step, configs, state)

    def _raced(self, step: Step, configs: Sequence[Config]) -> _Run:
        """Run the finals from the journal's last round on; return their times."""
        results, problem = self._results, self._problem
        if self._missing(step, configs):
            left = [c for c in configs if not isinstance(results.outcome(step, problem, c), Failure)]
            taken = {config: results.rounds(step, problem, config) for config in left}
            self._ask(step, Finals(problem, self._cubins(step, left), seeds=self._seeds, taken=taken))
        return self._times(step, configs)

    # The journal and the GPU --------------------------------------------------------------------------------

    def _times(self, step: Step, configs: Iterable[Config], state: State | None = None) -> _Run:
        outcomes = {c: self._results.outcome(step, self._problem, c, state) for c in configs}
        return {config: time for config, time in outcomes.items() if isinstance(time, Measurement)}

    def _lacks(self, step: Step, configs: Iterable[Config], state: State | None = None) -> bool:
        return any(self._results.outcome(step, self._problem, c, state) is None for c in configs)

    def _missing(self, step: Step, configs: Iterable[Config], state: State | None = None) -> list[Config]:
        """Return the configs without an outcome, and count the faults and wrong results in the journal."""
        missing = []
        for config in configs:
            outcome = self._results.outcome(step, self._problem, config, state)
            if outcome is None:
                missing.append(config)
            elif isinstance(outcome, Failure):
                if outcome.stage in COUNTED_STAGES or outcome.stage == "verify":
                    self._slot.fault_counts.remember(self._problem, config, outcome.stage)
                self._state.failed(step, self._problem, outcome)
        return missing

    def _cubins(self, step: Step, configs: Sequence[Config]) -> dict[Config, Path | None]:
        """Return the configs' cubins; None where a config did not compile."""
        problem_plan, slot = self._each, self._slot
        results = self._state.compiled(step, problem_plan, configs, slot.gpu, slot.check)
        cubins: dict[Config, Path | None] = {}
        for config in configs:
            result = results[problem_plan.jobs[config].key]
            cubins[config] = result.path if isinstance(result, Compiled) else None
        return cubins

    def _ask(self, step: Step, request: Request, state: State | None = None) -> None:
        """Send the GPU a request. Each outcome is in the journal before it is shown."""

        def keep(reported: Reported) -> None:
            outcome = reported.outcome
            self._results.write(
                step, self._problem, outcome, reported.number, gpu=self._slot.gpu, state=state
            )
            if isinstance(outcome, Failure):
                self._state.failed(step, self._problem, outcome)

        with self._spending(step):
            self._slot.session.answer(request, keep)

    @contextmanager
    def _spending(self, step: Step, *, verifying: bool = False) -> Iterator[None]:
        """Record a request's time and the GPU's states before and after."""
        slot, session = self._slot, self._slot.session
        waited_s, idle_s = slot.rested()
        started, before = monotonic(), session.spent
        yield
        after = session.spent
        spent = after.since(before)
        seconds = max(0.0, monotonic() - started - spent.start_s - spent.open_s)
        verify_s = min(seconds, seconds if verifying else spent.verify_s)
        start_s, slot.recorded_start_s = after.start_s - slot.recorded_start_s, after.start_s
        self._results.write_spent(
            step,
            self._problem,
            measure_s=seconds - verify_s,
            verify_s=verify_s,
            conditions=[conditions.as_record() for conditions in spent.conditions],
            gpu=slot.gpu,
            start_s=start_s,
            open_s=spent.open_s,
            waited_s=waited_s,
            idle_s=idle_s,
        )


def _in_all(times: _Run, states: StateTimes, contending: Mapping[State, Sequence[Config]]) -> _Run:
    """Return the times of the configs that failed in no state of the GPU."""
    failed = {
        config for state, configs in contending.items() for config in configs if config not in states[state]
    }
    return {config: time for config, time in times.items() if config not in failed}
