"""Keep a measuring worker alive: start it, run the canary, open a problem, replace it.

Runs in the tuner's own process, which never creates a CUDA context. Handles no trials.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aot_tune.errors import DeclarationError, TuneError, UsageError
from aot_tune.tuner.process.worker import START_SECONDS, RemoteError, Worker, WorkerDied, WorkerTimeout
from aot_tune.values.problem import Problem

_TARGET = "aot_tune.tuner.measure.worker.runner:TrialRunner"
"""The object in a worker, ``package.module:Class``."""

_WRONG_FROM_THE_START = {"DeclarationError": DeclarationError, "UsageError": UsageError}
"""Errors of the child that a fresh child would raise as well, on every problem; raised here with their own
type. An `aot_tune.errors.ArgumentsError` is none of them."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Time limits of a worker, and the number of attempts to replace it."""

    start_s: float = START_SECONDS
    """Longest start of a worker, seconds."""

    canary_s: float = 30.0
    """Longest run of the canary, seconds."""

    open_s: float = 120.0
    """Longest time for making a problem's arguments and references, seconds."""

    config_s: float = 30.0
    """Longest silence while one config is verified and timed, seconds. A search measures for 5 s at most, a
    compilation without a given cubin takes the rest."""

    least_s: float = 5.0
    """Least limit on a silence that is derived from the problem's other configs, seconds. The first launch
    in a fresh worker loads the config's module and torch's own, which took up to 2 s on a busy host."""

    recoveries: int = 3
    """Number of workers in a row that may fail to start or to pass the canary before the GPU is lost. As many
    may fail on one problem before they run a trial; then the problem fails."""

    pause_s: float = 3.0
    """Pause before another try of a problem that did not fit into a fresh worker's memory, seconds. The
    memory of a killed process is not free at once."""

    patience_s: float = 60.0
    """Longest total wait of one worker for throttling or another process to end, seconds."""


class GpuLostError(TuneError):
    """The GPU is lost: several fresh workers in a row could not use it."""


class MeasuringStopped(Exception):
    """Another thread stopped the measurement (`Supervisor.interrupt`); nothing is to blame."""


class ProblemFailedError(TuneError):
    """A problem's arguments cannot be made, although the GPU passes its canaries.

    Attributes:
        problem: The problem.
        reason: What happened, in words.
    """

    def __init__(self, problem: Problem, reason: str) -> None:
        self.problem, self.reason = problem, reason
        super().__init__(
            f"{problem} cannot be measured, while the GPU works: {reason}. Check make_args and reference "
            "for this problem, or leave it out"
        )


class Supervisor:
    """Provides a worker whose GPU works.

    Args:
        init: The keyword arguments of `aot_tune.tuner.measure.worker.runner.TrialRunner`.
        limits: Time limits.
        on_event: Receives one line with the reason when a worker is replaced.
        environment: Variables to set in the workers.
    """

    def __init__(
        self,
        init: Mapping[str, object],
        limits: Limits,
        on_event: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._init = {**init, "patience_s": limits.patience_s}
        self._environment = dict(environment or {})
        self._stopped = False
        self._limits = limits
        self._on_event = on_event
        self._worker: Worker | None = None
        self._turned = True
        """Whether the worker was started for the present kernel or has turned to it."""
        self._open: tuple[Problem, tuple[int, ...]] | None = None
        self._lost: list[str] = []
        """Reasons why workers in a row failed to start or to pass the canary."""
        self._broken: list[str] = []
        """Reasons why workers in a row broke on a problem before they ran a trial."""
        self._broken_on: Problem | None = None
        self.start_s = self.open_s = 0.0
        """Time spent so far on starts of workers and on making problems' arguments, seconds."""
        self.unused = False
        """Whether the current worker has run no trial yet."""

    def ready(self, problem: Problem | None = None, seeds: Sequence[int] = ()) -> Worker:
        """Return a worker that passed the canary when it started, with the problem open in it.

        Raises:
            GpuLostError: `Limits.recoveries` workers in a row failed to start or to pass the canary.
            ProblemFailedError: As many passed it, but the problem could not be opened in them.
            DeclarationError: A function of the declaration contradicts the declaration.
            MeasuringStopped: `interrupt` was called.
        """
        while True:
            self.check()
            worker = self._worker or self._started()
            if not self._turned and not self._turns(worker):
                continue
            if problem is None or self._open == (problem, tuple(seeds)):
                return worker
            used, self._open = self._open is not None or not self.unused, None
            began = time.monotonic()
            try:
                short = worker.request("open", {"problem": problem, "seeds": seeds}, self._limits.open_s)
            except (RemoteError, WorkerDied, WorkerTimeout) as error:
                _raise_if_wrong_from_the_start(error)
                self.discard(problem, str(error))
                continue
            finally:
                self.open_s += time.monotonic() - began
            if short is None:
                self._open = (problem, tuple(seeds))
                return worker
            if used:  # earlier allocations took the memory
                self.replace(f"out of memory for {problem}")
                continue
            self.discard(problem, short)
            time.sleep(self._limits.pause_s)

    def turn_to(self, arguments: Mapping[str, object]) -> None:
        """Measure another kernel from here on, in the same process where that can be.

        Args:
            arguments: The keyword arguments of its backend.
        """
        if arguments != self._init["arguments"]:
            self._init = {**self._init, "arguments": dict(arguments)}
            self._turned = self._worker is None
        self._open = self._broken_on = None

    def _turns(self, worker: Worker) -> bool:
        """Turn a worker to the present kernel; replace it where it cannot."""
        began = time.monotonic()
        try:
            worker.request("turn_to", {"arguments": self._init["arguments"]}, self._limits.start_s)
        except (RemoteError, WorkerDied, WorkerTimeout) as error:
            self.replace(f"it cannot go on with another kernel: {error}")
            return False
        finally:
            self.start_s += time.monotonic() - began
        self._turned = True
        return True

    def _started(self) -> Worker:
        """Start workers until one passes the canary."""
        while True:
            self.check()
            began = time.monotonic()
            worker = self._worker = Worker(_TARGET, self._init, environment=self._environment)
            self._open, self.unused, self._turned = None, True, True
            try:
                worker.wait_ready(self._limits.start_s)
                worker.request("canary", {}, self._limits.canary_s)
            except (RemoteError, WorkerDied, WorkerTimeout) as error:
                _raise_if_wrong_from_the_start(error)
                self.replace(str(error))
                self._lost.append(str(error))
                if len(self._lost) >= self._limits.recoveries:
                    raise GpuLostError(
                        f"{len(self._lost)} fresh workers in a row could not use the GPU: "
                        f"{'; '.join(self._lost)}. All results so far are kept; check the GPU (nvidia-smi), "
                        "then run the same command again to continue"
                    ) from error
            else:
                self._lost.clear()
                return worker
            finally:
                self.start_s += time.monotonic() - began

    def interrupt(self) -> None:
        """Stop the worker; called from another thread, repeatedly until this one has ended.

        Once is not enough, because a worker may be started at this moment.
        """
        self._stopped = True
        if (worker := self._worker) is not None:
            worker.interrupt()

    def check(self) -> None:
        """Raise if the supervisor was stopped.

        Raises:
            MeasuringStopped: `interrupt` was called: a worker that died is not to blame, nor is its config.
        """
        if self._stopped:
            raise MeasuringStopped

    def ask(self, method: str) -> Any:
        """Send a ready worker a request without trials, and return its answer."""
        return self.ready().request(method, {}, self._limits.canary_s)

    def worked(self) -> None:
        """Note that a trial ran: earlier failures on its problem do not count any more."""
        self._broken.clear()

    def replace(self, reason: str) -> None:
        """Kill the worker; the next call of `ready` starts another."""
        if self._worker is not None:
            self._on_event(f"worker replaced: {reason}")
        self._kill()

    def discard(self, problem: Problem, reason: str) -> None:
        """`replace` a worker that broke on a problem while no trial was running.

        Raises:
            ProblemFailedError: It was the last of `Limits.recoveries` in a row, and the next passes the
                canary.
            GpuLostError: The next workers fail the canary.
        """
        self.replace(f"{problem}: {reason}")
        if problem != self._broken_on:
            self._broken_on, self._broken = problem, []
        self._broken.append(reason)
        if len(self._broken) >= self._limits.recoveries:
            self._broken.clear()
            self.ready()  # the canary decides whether the GPU or the problem is to blame
            raise ProblemFailedError(problem, reason)

    def close(self) -> None:
        """Kill the worker."""
        self._kill()

    def _kill(self) -> None:
        if self._worker is not None:
            self._worker.kill()
        self._worker = self._open = None


def _raise_if_wrong_from_the_start(error: TuneError) -> None:
    if isinstance(error, RemoteError) and error.kind in _WRONG_FROM_THE_START:
        raise _WRONG_FROM_THE_START[error.kind](error.message) from error
