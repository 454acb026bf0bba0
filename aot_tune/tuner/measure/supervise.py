"""Keep a measuring worker alive: start it, prove the GPU with a canary, open a problem, replace it.

Runs in the tuner's own process, which never creates a CUDA context. Does not know what a trial is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aot_tune.errors import DeclarationError, TuneError, UsageError
from aot_tune.tuner.outcome import Outcome
from aot_tune.tuner.process.worker import START_SECONDS, RemoteError, Worker, WorkerDied, WorkerTimeout
from aot_tune.values.problem import Problem

_WRONG_FROM_THE_START = {"DeclarationError": DeclarationError, "UsageError": UsageError}
"""Errors of the child that a fresh child would meet as well. They are raised here under their own type."""


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
    """Longest silence while one config is verified and timed, seconds. A search measures for 5 s at most; the
    rest is for a compilation where no cubin was given."""

    recoveries: int = 3
    """Number of workers in a row that may fail before they run a trial; then the sweep stops."""

    patience_s: float = 60.0
    """Longest wait for throttling or another process to end, in the whole life of one worker, seconds."""


class GpuLostError(TuneError):
    """The GPU is lost: several fresh workers in a row could not use it.

    Attributes:
        outcomes: What the request under way had measured before.
    """

    def __init__(self, message: str, outcomes: Sequence[Outcome] = ()) -> None:
        super().__init__(message)
        self.outcomes = tuple(outcomes)


class ProblemFailedError(TuneError):
    """A problem's arguments cannot be made, although the GPU works.

    Attributes:
        problem: The problem.
        reason: What happens when they are made.
    """

    def __init__(self, problem: Problem, reason: str) -> None:
        super().__init__(f"{problem}: {reason}")
        self.problem, self.reason = problem, reason


class OutOfMemory(Exception):
    """A problem's arguments and references do not fit into the memory of an empty GPU."""


class Supervisor:
    """Provides a worker whose GPU works.

    Args:
        init: The keyword arguments of `aot_tune.tuner.measure.worker.runner.TrialRunner`.
        limits: Time limits.
        on_event: Receives one line with the reason when a worker is replaced.
    """

    def __init__(self, init: Mapping[str, object], limits: Limits, on_event: Callable[[str], None]) -> None:
        self._init = {**init, "patience_s": limits.patience_s}
        self._limits = limits
        self._on_event = on_event
        self._worker: Worker | None = None
        self._open: tuple[Problem, tuple[int, ...]] | None = None
        self._failures: list[str] = []
        self.unused = False
        """Whether the current worker has run no trial yet."""

    def ready(self, problem: Problem | None = None, seeds: Sequence[int] = ()) -> Worker:
        """Return a worker that passed the canary when it started, with the problem open in it.

        Raises:
            GpuLostError: `Limits.recoveries` workers in a row failed before that.
            OutOfMemory: The problem does not fit into a fresh worker either.
            DeclarationError: A function of the declaration raises or contradicts the declaration.
        """
        while True:
            try:
                worker = self._worker or self._started()
                return worker if problem is None else self._opened(worker, problem, tuple(seeds))
            except RemoteError as error:
                if error.kind in _WRONG_FROM_THE_START:
                    raise _WRONG_FROM_THE_START[error.kind](error.message) from error
                self.discard(str(error))
            except (WorkerDied, WorkerTimeout) as error:
                self.discard(str(error))

    def _started(self) -> Worker:
        worker = self._worker = Worker("aot_tune.tuner.measure.worker.runner:TrialRunner", self._init)
        self._open, self.unused = None, True
        worker.wait_ready(self._limits.start_s)
        worker.request("canary", {}, self._limits.canary_s)
        return worker

    def _opened(self, worker: Worker, problem: Problem, seeds: tuple[int, ...]) -> Worker:
        if self._open == (problem, seeds):
            return worker
        while True:
            fresh, self._open = self._open is None, None
            short = worker.request("open", {"problem": problem, "seeds": seeds}, self._limits.open_s)
            if short is None:
                self._open = (problem, seeds)
                return worker
            self.replace(f"out of memory for {problem}")
            if fresh:
                raise OutOfMemory(short)
            worker = self._started()

    def ask(self, method: str) -> Any:
        """Send a request that runs no trial to a ready worker, and return its answer."""
        return self.ready().request(method, {}, self._limits.canary_s)

    def worked(self) -> None:
        """Note that a trial ran: earlier failures to start do not count any more."""
        self._failures.clear()

    def replace(self, reason: str) -> None:
        """Kill the worker; the next call of `ready` starts another."""
        if self._worker is not None:
            self._on_event(f"worker replaced: {reason}")
        self.close()

    def discard(self, reason: str) -> None:
        """`replace` a worker that broke while no trial was running.

        Raises:
            GpuLostError: It was the last of `Limits.recoveries` in a row.
        """
        self.replace(reason)
        self._failures.append(reason)
        if len(self._failures) >= self._limits.recoveries:
            raise GpuLostError(
                f"{len(self._failures)} fresh workers in a row could not use the GPU: "
                f"{'; '.join(self._failures)}. "
                "All results so far are kept; check the GPU (nvidia-smi), then give the same command to go on"
            )

    def close(self) -> None:
        """Kill the worker, if there is one."""
        if self._worker is not None:
            self._worker.kill()
        self._worker = self._open = None
