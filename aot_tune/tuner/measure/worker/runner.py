"""Run trials in the worker process and report each before it starts, so that the parent knows whom to blame.

Knows no GPU library: a `Backend` launches and times.

Long kernels bring a GPU to its power cap, which it may exceed for milliseconds after a pause: of kernels
timed one after another the first would be 10 % too fast (H200). So the long kernels near the fastest are
timed launch by launch, in turn, and large products keep the GPU busy before each launch, as a server does.
The winner depends on it: an fp8 tile of 128 x 128 was 1.5 % faster than one of 64 x 128 after pauses and 4 %
slower under load.

A time that no clock can give (zero, negative, not finite) is discarded, and so are samples taken while the
GPU was throttled or shared. Both are measured again, a bounded number of times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module

from aot_tune.errors import DeclarationError
from aot_tune.tuner.measure.rounds import RESOLUTION_US, from_samples, in_turn, usable
from aot_tune.tuner.measure.worker.backend import Backend, Done, Poisoned, Running, Trial
from aot_tune.tuner.measure.worker.gpu_state import GpuState
from aot_tune.tuner.outcome import Failure, Measurement, Outcome
from aot_tune.tuner.process.worker import Report
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from aot_tune.values.text import error_in_words

TRIES = 3
"""How often one config is timed at most when its times are unusable or uncertain."""

WIDE = 0.05
"""A config is timed again when its error margin is above this fraction of its mean; one bad sample of five is
enough for that."""

LONG_US = 200.0
"""Kernels of this time or more, in microseconds, count as long. The times of shorter ones stay within 1 %
from run to run (H200), and timing them in turn separates them less well: a table of small products made that
way was 2 % slower."""

NEAR = 1.25
"""Long kernels are timed in turn if they take at most this many times as long as the fastest; the others have
lost."""

SAMPLES = 8
"""Launches of each config in one round of turns."""

BUSY_FIRST_S = 0.1
"""Seconds of large products before a round of turns. An H200 may exceed its power cap for some 50 ms after a
pause."""

BUSY_BETWEEN_S = 0.001
"""Seconds of large products before each launch of a round of turns."""

PAUSE_SECONDS = 0.5
"""Seconds of waiting before spoilt samples are taken again."""

PATIENCE_SECONDS = 60.0
"""Most seconds of such waiting in the life of one worker. Afterwards spoilt samples are kept and reported as
disturbed: an idle process of somebody else may stay on the GPU all day."""


_Run = Callable[[Trial], "tuple[Outcome | None, str | None]"]
"""Runs a trial; returns its outcome (None: only checked, and right) and what disturbed its samples, if
anything."""


class _ContextDead(Exception):
    """Nothing more can be run in this process."""


class TrialRunner:
    """The object that lives in a measuring worker; its public methods are the requests.

    Args:
        report: Sends `Running`, `Done` and `Poisoned` to the parent.
        backend: ``package.module:Class`` of a `Backend`.
        arguments: The backend's keyword arguments.
        patience_s: Seconds to wait, in all, for disturbances to end.
    """

    def __init__(
        self,
        report: Report,
        *,
        backend: str,
        arguments: Mapping[str, object],
        patience_s: float = PATIENCE_SECONDS,
    ) -> None:
        module, _, name = backend.partition(":")
        self._backend: Backend = getattr(import_module(module), name)(**arguments)
        self._report = report
        self._patience_s = patience_s
        self._verify_s = 0.0
        self._timed_alone: dict[Config, Measurement] = {}
        """The first time of each config on the open problem, taken one config after another and not in
        turn."""

    def canary(self) -> None:
        """Run a computation whose result is known; raise unless it is right."""
        self._backend.canary()

    def device(self) -> Device:
        """The GPU as grids are computed for it."""
        return self._backend.device()

    def state(self) -> GpuState:
        """The present clocks, and the reasons why they are not higher."""
        return self._backend.state()

    def open(self, problem: Problem, seeds: Sequence[int]) -> str | None:
        """Make a problem's arguments and references.

        Returns:
            None, or a message where the GPU's memory is too small.
        """
        self._timed_alone.clear()
        try:
            self._backend.open(problem, seeds)
        except DeclarationError:
            raise
        except Exception as error:
            if self._backend.stage(error) != "memory":
                raise
            return f"arguments and reference: {error_in_words(error)}"
        return None

    def measure(self, trials: Sequence[Trial]) -> tuple[GpuState, GpuState]:
        """Verify and time each config; time long ones near the fastest in turn.

        Returns:
            The GPU's state before and after.
        """
        before = self._backend.state()
        with suppress(_ContextDead):
            held = self._run_each(trials, self._verify_and_time, hold_from=LONG_US)
            fastest = self._fastest(trials)
            near = [trial for trial, _ in held if self._timed_alone[trial.config].mean_us <= NEAR * fastest]
            self._report_held(held, self._in_turn(near) if fastest >= LONG_US else {})
        return before, self._backend.state()

    def time(self, trials: Sequence[Trial]) -> tuple[GpuState, GpuState]:
        """Time each config for one round of the finals, in turn if even the fastest is long.

        Returns:
            The GPU's state before and after.
        """
        before = self._backend.state()
        with suppress(_ContextDead):
            known = all(trial.config in self._timed_alone for trial in trials)
            if known and self._fastest(trials) >= LONG_US:
                held = [(trial, Done(outcome=self._timed_alone[trial.config])) for trial in trials]
            else:
                held = self._run_each(trials, self._time, hold_from=LONG_US)
            long = [trial for trial, _ in held] if self._fastest(trials) >= LONG_US else []
            self._report_held(held, self._in_turn(long))
        return before, self._backend.state()

    def check(self, trials: Sequence[Trial]) -> None:
        """Verify each config without timing it."""
        with suppress(_ContextDead):
            self._run_each(trials, lambda trial: (self._verify(trial), None))

    def _fastest(self, trials: Sequence[Trial]) -> float:
        """The shortest time of these trials, microseconds; infinite where none was timed."""
        times = (self._timed_alone.get(trial.config) for trial in trials)
        return min((one.mean_us for one in times if one is not None), default=math.inf)

    def _run_each(
        self, trials: Sequence[Trial], run: _Run, *, hold_from: float = math.inf
    ) -> list[tuple[Trial, Done]]:
        """Run each trial and report its outcome, but return those with times of `hold_from` us or more."""
        held: list[tuple[Trial, Done]] = []
        for trial in trials:
            self._report(Running(config=trial.config))
            self._verify_s = 0.0
            outcome, disturbance = self._guarded(trial, run)
            done = Done(outcome=outcome, disturbance=disturbance, verify_s=self._verify_s)
            if isinstance(outcome, Measurement):
                self._timed_alone.setdefault(trial.config, outcome)
            if isinstance(outcome, Measurement) and outcome.mean_us >= hold_from:
                held.append((trial, done))
            else:
                self._report(done)
        return held

    def _in_turn(self, trials: Sequence[Trial]) -> dict[Trial, tuple[Outcome, str | None]]:
        """Time trials launch by launch, in turn.

        Returns:
            The outcome of each trial, and what disturbed any of the turns.
        """
        taken: dict[Trial, list[float]] = {trial: [] for trial in trials}
        failed: dict[Trial, Outcome] = {}
        disturbance: str | None = None
        if trials:
            self._backend.busy(BUSY_FIRST_S)
        for number in range(SAMPLES):
            left = [trial for trial in trials if trial not in failed]
            if not left:
                break  # a wait for a disturbance to end would report nothing, and look like a hang
            outcomes, disturbed_by = self._one_turn(left, number)
            disturbance = disturbance or disturbed_by
            for trial, outcome in outcomes.items():
                if isinstance(outcome, Measurement):
                    taken[trial].append(outcome.mean_us)
                elif outcome is not None:
                    failed[trial] = outcome
        return {
            trial: (failed.get(trial) or from_samples(trial.config, us), disturbance)
            for trial, us in taken.items()
        }

    def _one_turn(
        self, trials: Sequence[Trial], number: int
    ) -> tuple[dict[Trial, Outcome | None], str | None]:
        """Launch each trial once, and all again while something disturbs them and the patience lasts.

        Returns:
            The outcome of each trial, and what disturbed the last turn.
        """
        while True:
            outcomes = {trial: self._sample(trial) for trial in in_turn(trials, number)}
            disturbance = self._backend.disturbance()  # not between launches, where the GPU would rest
            if not (disturbance and self._wait()):
                return outcomes, disturbance

    def _report_held(
        self, held: Sequence[tuple[Trial, Done]], turns: Mapping[Trial, tuple[Outcome, str | None]]
    ) -> None:
        """Report the held results, failures first: a failure may make the parent retry the whole group."""
        failures: list[tuple[Trial, Done]] = []
        times: list[tuple[Trial, Done]] = []
        for trial, done in held:
            if trial in turns:
                outcome, disturbance = turns[trial]
                done = replace(done, outcome=outcome, disturbance=disturbance)
            kind = times if isinstance(done.outcome, Measurement) else failures
            kind.append((trial, done))
        for trial, done in (*failures, *times):
            self._report(Running(config=trial.config))
            self._report(done)

    def _guarded(self, trial: Trial, run: _Run) -> tuple[Outcome | None, str | None]:
        """Run a trial; an exception becomes a failure of its stage.

        Raises:
            _ContextDead: The trial left a dead context, and that is reported.
        """
        disturbance = None
        try:
            outcome, disturbance = run(trial)
        except DeclarationError:
            raise
        except Exception as error:
            stage = self._backend.stage(error)
            if stage == "fault":
                self._report(Poisoned(config=trial.config, message=error_in_words(error)))
                raise _ContextDead from error
            outcome = Failure(config=trial.config, stage=stage, message=error_in_words(error))
        # A launch is asynchronous: a fault may show only now. The next trial must not be blamed for it.
        if not self._backend.healthy():
            self._report(
                Poisoned(config=trial.config, message="the GPU's context is dead after this config ran")
            )
            raise _ContextDead
        return outcome, disturbance

    def _verify(self, trial: Trial) -> Failure | None:
        began = time.monotonic()
        wrong = self._backend.verify(trial)
        self._verify_s = time.monotonic() - began
        return None if wrong is None else Failure(config=trial.config, stage="verify", message=wrong)

    def _verify_and_time(self, trial: Trial) -> tuple[Outcome, str | None]:
        failure = self._verify(trial)
        return (failure, None) if failure else self._time(trial)

    def _time(self, trial: Trial) -> tuple[Outcome, str | None]:
        """Time a config until the result is usable, `TRIES` times at most.

        A try that something disturbed does not count while there is patience to wait for its end.
        """
        best: Measurement | None = None
        refused: list[str] = []
        tries = 0
        while tries < TRIES:
            self._report(Running(config=trial.config))  # measuring again, or waiting, is not hanging
            taken = self._backend.time(trial)
            disturbance = self._backend.disturbance()
            if disturbance and self._wait():
                continue
            tries += 1
            if not usable(taken):
                refused.append(f"{taken.mean_us:g} us ± {taken.error_margin_us:g}")
                continue
            if best is None or taken.error_margin_us < best.error_margin_us:
                best = taken
            if disturbance or best.error_margin_us <= max(WIDE * best.mean_us, RESOLUTION_US):
                return best, disturbance
        if best is not None:
            return best, None
        return _untimed(trial, refused), None

    def _sample(self, trial: Trial) -> Outcome | None:
        """The time of one launch, or a failure."""
        self._report(Running(config=trial.config))

        def sample(trial: Trial) -> tuple[Outcome | None, str | None]:
            refused: list[str] = []
            for _ in range(TRIES):
                self._backend.busy(BUSY_BETWEEN_S)
                us = self._backend.sample(trial)
                one = Measurement(config=trial.config, mean_us=us, error_margin_us=0.0, num_samples=1)
                if usable(one):
                    return one, None
                refused.append(f"{us:g} us")
            return _untimed(trial, refused), None

        outcome, _ = self._guarded(trial, sample)
        return outcome

    def _wait(self) -> bool:
        """Wait for a disturbance to end; return False when the patience is used up."""
        if self._patience_s <= 0:
            return False
        self._patience_s -= PAUSE_SECONDS
        time.sleep(min(PAUSE_SECONDS, max(self._patience_s, 0.0)))
        return True


def _untimed(trial: Trial, refused: Sequence[str]) -> Failure:
    message = f"no usable time in {TRIES} tries: {', '.join(refused)}"
    return Failure(config=trial.config, stage="timing", message=message)
