"""Runs trials one after another in the worker process, and says before each which it is. Knows no GPU.

Kernels that take long bring a GPU to its power cap, which it may exceed for milliseconds after a pause: timed
one after another, the first would be 10 % too fast (H200). So those of them that come near the fastest are
timed launch by launch, in turn, on a GPU that large products keep busy, as a server's is. Which is faster
hangs on it: a tile of 128 x 128 of fp8 was 1.5 % ahead of 64 x 128 after pauses, 4 % behind it under load.

A time that no clock can give (zero, negative, not finite) is discarded, as are samples taken while the GPU
was throttled or shared; both are taken again, a bounded number of times.
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

TRIES = 3
"""Times one config is timed when what comes out cannot be used."""

WIDE = 0.05
"""An error margin above this fraction of the mean is worth another try: one bad sample of five makes it."""

LONG_US = 200.0
"""From here on a kernel takes long. The times of shorter ones stay within 1 % from run to run (H200), and in
turn they are told apart less well: a table of small products so made was 2 % slower."""

NEAR = 1.25
"""Times the fastest, which of those that take long are timed in turn; others have lost."""

SAMPLES = 8
"""Launches of each in turn, in a round."""

BUSY_FIRST_S, BUSY_BETWEEN_S = 0.1, 0.001
"""Seconds of large products before a round and before each of its launches. An H200 may exceed its power
cap for some 50 ms after a pause."""

PAUSE_SECONDS = 0.5
"""Wait before samples that were spoilt are taken again."""

PATIENCE_SECONDS = 60.0
"""Wait of this kind in the life of one worker. Afterwards spoilt samples are kept and said to be so:
somebody's idle process may sit on the GPU all day."""


_Run = Callable[[Trial], tuple[Outcome | None, "str | None"]]


class _ContextDead(Exception):
    """Nothing more can be run in this process."""


class Bench:
    """What lives in a measuring worker.

    Args:
        report: Sends `Running`, `Done` and `Poisoned`.
        backend: ``package.module:Class`` of a `Backend`.
        arguments: Its keyword arguments.
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
        self._alone: dict[Config, Measurement] = {}
        """Of the open problem: what was timed, one after another, for the first time."""

    def canary(self) -> None:
        """Run something known to be good."""
        self._backend.canary()

    def device(self) -> Device:
        """What grids are computed for."""
        return self._backend.device()

    def state(self) -> GpuState:
        """Clocks and their reasons, now."""
        return self._backend.state()

    def open(self, problem: Problem, seeds: Sequence[int]) -> str | None:
        """Make a problem's arguments and references. Why not, where memory is short; else None."""
        self._alone.clear()
        try:
            self._backend.open(problem, seeds)
        except DeclarationError:
            raise
        except Exception as error:
            if self._backend.stage(error) != "memory":
                raise
            return f"arguments and reference: {_words(error)}"
        return None

    def measure(self, trials: Sequence[Trial]) -> tuple[GpuState, GpuState]:
        """Verify and time each, in turn those that take long and lead; the state before and after."""
        before = self._backend.state()
        with suppress(_ContextDead):
            held = self._each(trials, self._verified, hold_from=LONG_US)
            fastest = self._fastest(trials)
            near = [trial for trial, _ in held if self._alone[trial.config].mean_us <= NEAR * fastest]
            self._tell(held, self._in_turn(near) if fastest >= LONG_US else {})
        return before, self._backend.state()

    def time(self, trials: Sequence[Trial]) -> tuple[GpuState, GpuState]:
        """One round: time each, in turn if the fastest takes long; the state before and after."""
        before = self._backend.state()
        with suppress(_ContextDead):
            if all(trial.config in self._alone for trial in trials) and self._fastest(trials) >= LONG_US:
                held = [(trial, Done(outcome=self._alone[trial.config])) for trial in trials]
            else:
                held = self._each(trials, self._timed, hold_from=LONG_US)
            long = [trial for trial, _ in held] if self._fastest(trials) >= LONG_US else []
            self._tell(held, self._in_turn(long))
        return before, self._backend.state()

    def _fastest(self, trials: Sequence[Trial]) -> float:
        """Microseconds of the fastest of trials that were timed; infinite where none was."""
        times = (self._alone.get(trial.config) for trial in trials)
        return min((one.mean_us for one in times if one is not None), default=math.inf)

    def check(self, trials: Sequence[Trial]) -> None:
        """Verify each, without timing."""
        with suppress(_ContextDead):
            self._each(trials, lambda trial: (self._wrong(trial), None))

    def _each(
        self, trials: Sequence[Trial], run: _Run, *, hold_from: float = math.inf
    ) -> list[tuple[Trial, Done]]:
        """Run each and report what comes of it; times of `hold_from` us and more are returned instead."""
        held: list[tuple[Trial, Done]] = []
        for trial in trials:
            self._report(Running(config=trial.config))
            self._verify_s = 0.0
            outcome, disturbance = self._guarded(trial, run)
            done = Done(outcome=outcome, disturbance=disturbance, verify_s=self._verify_s)
            if isinstance(outcome, Measurement):
                self._alone.setdefault(trial.config, outcome)
            if isinstance(outcome, Measurement) and outcome.mean_us >= hold_from:
                held.append((trial, done))
            else:
                self._report(done)
        return held

    def _in_turn(self, trials: Sequence[Trial]) -> dict[Trial, tuple[Outcome, str | None]]:
        """Time them launch by launch, in turn; what comes of each, and what disturbed them."""
        taken: dict[Trial, list[float]] = {trial: [] for trial in trials}
        failed: dict[Trial, Outcome] = {}
        disturbance: str | None = None
        if trials:
            self._backend.busy(BUSY_FIRST_S)
        for number in range(SAMPLES):
            while left := [trial for trial in trials if trial not in failed]:
                samples = {trial: self._sampled(trial) for trial in in_turn(left, number)}
                found = self._backend.disturbance()  # not between launches, where the GPU would rest
                if not (found and self._wait()):
                    disturbance = disturbance or found
                    break
            else:
                break  # nobody to wait with: a silent wait would look like one that hangs
            for trial, outcome in samples.items():
                if isinstance(outcome, Measurement):
                    taken[trial].append(outcome.mean_us)
                elif outcome is not None:
                    failed[trial] = outcome
        return {
            trial: (failed.get(trial) or from_samples(trial.config, us), disturbance)
            for trial, us in taken.items()
        }

    def _tell(
        self, held: Sequence[tuple[Trial, Done]], turns: Mapping[Trial, tuple[Outcome, str | None]]
    ) -> None:
        """Report all that was held back, failures first: one that is tried again is so together with all."""
        told = [
            replace(done, outcome=outcome, disturbance=disturbance)
            for trial, done in held
            for outcome, disturbance in [turns.get(trial, (done.outcome, done.disturbance))]
        ]
        for (trial, _), done in sorted(
            zip(held, told, strict=True), key=lambda one: isinstance(one[1].outcome, Measurement)
        ):
            self._report(Running(config=trial.config))
            self._report(done)

    def _guarded(self, trial: Trial, run: _Run) -> tuple[Outcome | None, str | None]:
        """What comes of a trial, and what disturbed it.

        Raises:
            _ContextDead: It left a dead context; that is reported.
        """
        disturbance = None
        try:
            outcome, disturbance = run(trial)
        except DeclarationError:
            raise
        except Exception as error:
            stage = self._backend.stage(error)
            if stage == "fault":
                self._report(Poisoned(config=trial.config, message=_words(error)))
                raise _ContextDead from error
            outcome = Failure(config=trial.config, stage=stage, message=_words(error))
        # A launch is asynchronous: a fault may show only now. It must not be held against the next.
        if not self._backend.healthy():
            self._report(
                Poisoned(config=trial.config, message="the GPU's context is dead after this config ran")
            )
            raise _ContextDead
        return outcome, disturbance

    def _wrong(self, trial: Trial) -> Failure | None:
        began = time.monotonic()
        wrong = self._backend.verify(trial)
        self._verify_s = time.monotonic() - began
        return None if wrong is None else Failure(config=trial.config, stage="verify", message=wrong)

    def _verified(self, trial: Trial) -> tuple[Outcome, str | None]:
        failure = self._wrong(trial)
        return (failure, None) if failure else self._timed(trial)

    def _timed(self, trial: Trial) -> tuple[Outcome, str | None]:
        """Time until the result can be used, at most `TRIES` times beside waits for a disturbance to end."""
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

    def _sampled(self, trial: Trial) -> Outcome | None:
        """One launch's time, or a failure."""
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
        """Wait for a disturbance to end; False once that was done for long enough."""
        if self._patience_s <= 0:
            return False
        self._patience_s -= PAUSE_SECONDS
        time.sleep(min(PAUSE_SECONDS, max(self._patience_s, 0.0)))
        return True


def _untimed(trial: Trial, refused: Sequence[str]) -> Failure:
    message = f"no usable time in {TRIES} tries: {', '.join(refused)}"
    return Failure(config=trial.config, stage="timing", message=message)


def _words(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
