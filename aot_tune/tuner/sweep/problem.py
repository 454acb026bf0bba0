"""Measure one problem on one GPU: what the journal holds is not measured again. Chooses nothing.

The edge of a bucket has three passes: its candidates, the portfolio, and the recheck of what wins there. A
size inside a bucket has the second alone. All times of a pass come from one GPU: where another GPU began it,
and it is not complete, it is measured anew.
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
from aot_tune.tuner.compile.job import Compiled
from aot_tune.tuner.measure.request import Finals, Measure, Recheck, Reported, Request, TimeInState
from aot_tune.tuner.outcome import STRIKES, Failure, Measurement
from aot_tune.tuner.plan.candidates import ProblemPlan
from aot_tune.tuner.plan.model import least_us
from aot_tune.tuner.plan.shortlist import shortlist
from aot_tune.tuner.sweep.budget import Budget
from aot_tune.tuner.sweep.crew import Seat
from aot_tune.tuner.sweep.results import Listed, Pass, Step
from aot_tune.tuner.sweep.state import KernelState
from aot_tune.values.config import Config

_Run = dict[Config, Measurement]

_STATES: Mapping[Pass, Step] = {"candidates": "candidate states", "portfolio": "portfolio states"}
_FINALS: Mapping[Pass, Step] = {"candidates": "candidate finals", "portfolio": "portfolio finals"}


class ProblemPass:
    """A GPU's pass over a problem. Its times go to the kernel's state.

    Args:
        state: What all tasks of the kernel's sweep share.
        budget: Says when it is too late.
        each: The problem and its configs.
        seat: The GPU.
        extra: Whether the problem's bucket is served without it, too.
    """

    def __init__(
        self, state: KernelState, budget: Budget, each: ProblemPlan, seat: Seat, *, extra: bool = False
    ) -> None:
        self._state, self._budget, self._each, self._seat = state, budget, each, seat
        self._problem, self._results, self._extra = each.problem, state.results, extra

    # The three passes ---------------------------------------------------------------------------------------

    def candidates(self) -> None:
        """Time the shortlist at an edge."""
        each, listed = self._each, self._listed()
        keep = [each.default, *([each.incumbent] if each.incumbent else [])]
        times, states, finals = self._timed("candidates", listed.configs, keep)
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
            finals: Whether to time those near the fastest again, interleaved: at edges.
        """
        # Also members that another problem has just found wrong: which one comes first is chance.
        times, states, runoff = self._timed(
            "portfolio", self._each.candidates, [self._each.default], finals=finals
        )
        self._state.times.add(self._problem, portfolio=times, portfolio_states=states, runoff=runoff)

    def recheck(self, winners: Iterable[Config]) -> None:
        """Verify winners again."""
        for config in winners:
            if not self._results.is_rechecked(self._problem, config):
                request = Recheck(self._problem, self._cubins("recheck", [config]))
                with self._spending("recheck", verifying=True):
                    outcomes = self._seat.session.answer(request)
                    found = next((one for one in outcomes if isinstance(one, Failure)), None)
                    self._results.write_recheck(self._problem, config, found, gpu=self._seat.gpu)
            failure = self._results.recheck_failure(self._problem, config)
            if failure is not None:
                self._state.failed("recheck", self._problem, failure)

    # Their parts --------------------------------------------------------------------------------------------

    def _listed(self) -> Listed:
        """The candidates to measure. Where the journal has them, the others are not compiled again."""
        each, state = self._each, self._state
        known = state.known_list(each)
        if known is not None:
            return known
        self._budget.check("candidates", each, extra=self._extra)
        compiled = state.compiled("candidates", each, each.candidates, self._seat.gpu, self._seat.check)
        with state.lock:
            chosen = shortlist(state.plan.kernel, each, compiled, exhaustive=state.exhaustive)
        for failure in chosen.failures:
            state.failed("compile", self._problem, failure)
        listed = Listed(configs=chosen.configs, twins=chosen.twins)
        if state.broken() is None:
            self._results.write_listed(
                self._problem, each.candidates, listed, exhaustive=state.exhaustive, gpu=self._seat.gpu
            )
        return listed

    def _timed(
        self, of: Pass, configs: Sequence[Config], keep: Sequence[Config], *, finals: bool = True
    ) -> tuple[_Run, dict[State, _Run], _Run]:
        """Verify and time configs; time those that may win in other states, and those near the fastest again.

        Returns:
            The first times, those in the GPU's other states, and those of the finals. A config that fails in
            a state has no time at all.
        """

        def contend(times: _Run) -> dict[State, list[Config]]:
            chosen = contenders(times, keep, most=MOST_CONTENDERS if of == "candidates" else None)
            return dict.fromkeys(other_states(times), chosen) if chosen else {}

        def near(times: _Run, states: StateTimes) -> list[Config]:
            return finalists(in_worst_state(times, states), keep) if finals else []

        if self._results.owner(of, self._problem) not in (None, self._seat.gpu):
            there = self._times(of, configs)
            asked = contend(there)
            states = {state: self._times(_STATES[of], asked[state], state) for state in asked}
            if (
                self._lacks(of, configs)
                or any(self._lacks(_STATES[of], asked[state], state) for state in asked)
                or self._lacks(_FINALS[of], near(_in_all(there, states, asked), states))
            ):
                self._seat.strikes.forget(self._problem)
                self._results.release(of, self._problem)
        times = self._measured(of, configs)
        asked = contend(times)
        states = {state: self._in_state(_STATES[of], asked[state], state) for state in asked}
        times = _in_all(times, states, asked)
        best = near(times, states)
        return times, states, self._raced(_FINALS[of], best) if best else {}

    def _measured(self, step: Step, configs: Sequence[Config]) -> _Run:
        """The times of a step."""
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
            self._ask(step, Measure(self._problem, cubins, known=known, least_us=least))
        return self._times(step, configs)

    def _in_state(self, step: Step, configs: Sequence[Config], state: State) -> _Run:
        """The times in one of the GPU's states."""
        missing = self._missing(step, configs, state)
        if missing:
            cubins = self._cubins(step, missing)
            self._ask(step, TimeInState(self._problem, cubins, state=state), state)
        return self._times(step, configs, state)

    def _raced(self, step: Step, configs: Sequence[Config]) -> _Run:
        """The times of finals. Rounds that the journal holds are not timed again."""
        results, problem = self._results, self._problem
        if self._missing(step, configs):
            left = [c for c in configs if not isinstance(results.outcome(step, problem, c), Failure)]
            taken = {config: results.rounds(step, problem, config) for config in left}
            self._ask(step, Finals(problem, self._cubins(step, left), taken=taken))
        return self._times(step, configs)

    # The journal and the GPU --------------------------------------------------------------------------------

    def _times(self, step: Step, configs: Iterable[Config], state: State | None = None) -> _Run:
        outcomes = {c: self._results.outcome(step, self._problem, c, state) for c in configs}
        return {config: one for config, one in outcomes.items() if isinstance(one, Measurement)}

    def _lacks(self, step: Step, configs: Iterable[Config], state: State | None = None) -> bool:
        return any(self._results.outcome(step, self._problem, c, state) is None for c in configs)

    def _missing(self, step: Step, configs: Iterable[Config], state: State | None = None) -> list[Config]:
        """The configs without an outcome. Faults and wrong results in the journal count as if made here."""
        missing = []
        for config in configs:
            outcome = self._results.outcome(step, self._problem, config, state)
            if outcome is None:
                missing.append(config)
            elif isinstance(outcome, Failure):
                if outcome.stage in STRIKES or outcome.stage == "verify":
                    self._seat.strikes.remember(self._problem, config, outcome.stage)
                self._state.failed(step, self._problem, outcome)
        return missing

    def _cubins(self, step: Step, configs: Sequence[Config]) -> dict[Config, Path | None]:
        """The configs' cubins; None for one that did not compile."""
        each, seat = self._each, self._seat
        results = self._state.compiled(step, each, configs, seat.gpu, seat.check)
        found: dict[Config, Path | None] = {}
        for config in configs:
            result = results[each.jobs[config].key]
            found[config] = result.path if isinstance(result, Compiled) else None
        return found

    def _ask(self, step: Step, request: Request, state: State | None = None) -> None:
        """Have the GPU answer a request. Each outcome is in the journal before it is shown."""

        def keep(reported: Reported) -> None:
            outcome = reported.outcome
            self._results.write(
                step, self._problem, outcome, reported.number, gpu=self._seat.gpu, state=state
            )
            if isinstance(outcome, Failure):
                self._state.failed(step, self._problem, outcome)

        with self._spending(step):
            self._seat.session.answer(request, keep)

    @contextmanager
    def _spending(self, step: Step, *, verifying: bool = False) -> Iterator[None]:
        """Write down the time that a request took and the GPU's state around it."""
        seat, session = self._seat, self._seat.session
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
            self._problem,
            measure_s=seconds - verify_s,
            verify_s=verify_s,
            conditions=[{name: one[name] for name in ("before", "after")} for one in states],
            gpu=seat.gpu,
            start_s=start_s,
            open_s=spent.open_s,
            waited_s=waited_s,
            idle_s=idle_s,
        )


def _in_all(times: _Run, states: StateTimes, asked: Mapping[State, Sequence[Config]]) -> _Run:
    """The times without those of configs that failed in a state of the GPU."""
    failed = {config for state, configs in asked.items() for config in configs if config not in states[state]}
    return {config: time for config, time in times.items() if config not in failed}
