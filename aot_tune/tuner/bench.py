"""Runs trials one after another in the worker process, and says before each which it is. Knows no GPU.

A time that no clock can give (zero, negative, not finite) is discarded, as are samples taken while the GPU
was throttled or shared; both are taken again, a bounded number of times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from aot_tune.device import Device
from aot_tune.errors import DeclarationError
from aot_tune.problem import Problem
from aot_tune.tuner.backend import Backend, Done, Poisoned, Running, Trial
from aot_tune.tuner.gpu_state import GpuState
from aot_tune.tuner.outcome import Failure, Measurement, Outcome
from aot_tune.tuner.rounds import RESOLUTION_US, usable
from aot_tune.tuner.worker import Report

TRIES = 3
"""Times one config is timed when what comes out cannot be used."""

WIDE = 0.05
"""An error margin above this fraction of the mean is worth another try: one bad sample of five makes it."""

PAUSE_SECONDS = 0.5
"""Wait before samples that were spoilt are taken again."""

PATIENCE_SECONDS = 60.0
"""Wait of this kind in the life of one worker. Afterwards spoilt samples are kept and said to be so:
somebody's idle process may sit on the GPU all day."""


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
        """Verify and time each; the state before and after."""
        before = self._backend.state()
        self._each(trials, self._verified)
        return before, self._backend.state()

    def time(self, trials: Sequence[Trial]) -> tuple[GpuState, GpuState]:
        """One round: time each; the state before and after."""
        before = self._backend.state()
        self._each(trials, self._timed)
        return before, self._backend.state()

    def check(self, trials: Sequence[Trial]) -> None:
        """Verify each, without timing."""
        self._each(trials, lambda trial: (self._wrong(trial), None))

    def _each(
        self, trials: Sequence[Trial], run: Callable[[Trial], tuple[Outcome | None, str | None]]
    ) -> None:
        for trial in trials:
            self._report(Running(config=trial.config))
            self._verify_s = 0.0
            try:
                outcome, disturbance = run(trial)
            except DeclarationError:
                raise
            except Exception as error:
                stage, disturbance = self._backend.stage(error), None
                if stage == "fault":
                    self._report(Poisoned(config=trial.config, message=_words(error)))
                    return
                outcome = Failure(config=trial.config, stage=stage, message=_words(error))
            # A launch is asynchronous: a fault may show only now. It must not be held against the next.
            if not self._backend.healthy():
                self._report(
                    Poisoned(config=trial.config, message="the GPU's context is dead after this config ran")
                )
                return
            self._report(Done(outcome=outcome, disturbance=disturbance, verify_s=self._verify_s))

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
            if disturbance and self._patience_s > 0:
                self._patience_s -= PAUSE_SECONDS
                time.sleep(min(PAUSE_SECONDS, max(self._patience_s, 0.0)))
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
        message = f"no usable time in {TRIES} tries: {', '.join(refused)}"
        return Failure(config=trial.config, stage="timing", message=message), None


def _words(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
