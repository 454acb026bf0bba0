"""Requests to a measuring session and their answers. Values only; starts no process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from aot_tune.declare.discovery import FoundKernel
from aot_tune.tables.states import State
from aot_tune.tuner.measure.blame import FaultCounts
from aot_tune.tuner.measure.worker.backend import LAUNCHES, RECHECK_SEEDS, SEEDS
from aot_tune.tuner.measure.worker.gpu_state import GpuState
from aot_tune.tuner.outcome import Measurement, Outcome
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

Cubins = Mapping[Config, "Path | None"]
"""The configs to run, each with its cubin for the problem; with None cuTile compiles in the worker."""


@dataclass(frozen=True)
class Request:
    """Asks for the outcomes of some configs on one problem."""

    problem: Problem
    """The problem."""

    configs: Cubins
    """The configs."""

    seeds: tuple[int, int] = field(default=SEEDS, kw_only=True)
    """The seeds of the arguments: all are verified, the first is timed."""


@dataclass(frozen=True)
class Measure(Request):
    """Verify and time each config once.

    Each time is reported twice: as provisional when it was taken, and as final when the rival configs were
    timed. Long configs are timed in turn for the final time. The answer has one outcome for each config, in
    their order.
    """

    known: Mapping[Config, Measurement] = field(default_factory=dict, kw_only=True)
    """Provisional times of an earlier run, whose configs are not verified and timed alone again. Times of
    configs outside `configs` serve for comparison only."""

    least_us: float = field(default=0.0, kw_only=True)
    """The least time in which this GPU can solve the problem, microseconds. A shorter time is taken again; a
    config with shorter times only fails at the stage ``timing``."""


@dataclass(frozen=True)
class Finals(Request):
    """Time verified configs again, interleaved in rounds, until their order is outside the noise or tied.

    The answer has for each finalist its median over the rounds, which is reported last, or its failure in one
    of them. There are at most `aot_tune.tuner.measure.rounds.MOST_ROUNDS` rounds;
    `aot_tune.tuner.measure.rounds.settled` decides when fewer suffice.
    """

    taken: Mapping[Config, Sequence[Measurement]] = field(default_factory=dict, kw_only=True)
    """The rounds of an earlier run by config, from the first on. Missing rounds are timed, and the result is
    that of a run without interruption."""


@dataclass(frozen=True)
class TimeInState(Request):
    """Time verified configs in one of the GPU's states, launch by launch, in turn.

    The answer has one outcome for each config, in their order.
    """

    state: State = field(kw_only=True)
    """The state."""


@dataclass(frozen=True)
class Recheck(Request):
    """Verify winners again, on other seeds and many times, in a fresh process.

    Rechecks that follow one another share that process. Request them together, because a start takes
    seconds. The answer has a failure for each config that fails. Only the stage ``verify`` means that the
    config is wrong.
    """

    seeds: tuple[int, int] = field(default=RECHECK_SEEDS, kw_only=True)
    """The seeds of the arguments; none was timed."""

    launches: int = field(default=LAUNCHES, kw_only=True)
    """Launches of each config after its verification; fewer where launches take long
    (`aot_tune.tuner.measure.worker.runner.LAUNCHES_SECONDS`)."""


@dataclass(frozen=True, kw_only=True)
class Reported:
    """An outcome of a request that is still being answered."""

    outcome: Outcome
    """The outcome."""

    number: int | None = None
    """The round of finals, from 0; None for the median over all rounds, and elsewhere."""


OnOutcome = Callable[[Reported], None]
"""Receives each outcome of a request as soon as it is final or, where it is provisional, as it is taken."""


def ignore(reported: Reported) -> None:
    """Receive an outcome and do nothing with it."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions of one request to a worker, for the journal."""

    before: GpuState
    """The GPU's state at the start of the request."""

    after: GpuState
    """The GPU's state at its end."""

    def as_record(self) -> dict[str, object]:
        """Return the conditions as plain values for a journal."""
        return {"before": self.before.as_record(), "after": self.after.as_record()}


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Time spent on a session's requests, with their conditions."""

    verify_s: float = 0.0
    """Time of verifying, seconds."""

    start_s: float = 0.0
    """Time of starting workers, seconds."""

    open_s: float = 0.0
    """Time of making problems' arguments and references, seconds."""

    conditions: tuple[Conditions, ...] = ()
    """The conditions of each request that a worker answered, in order."""

    def __add__(self, later: Spent) -> Spent:
        return Spent(
            verify_s=self.verify_s + later.verify_s,
            start_s=self.start_s + later.start_s,
            open_s=self.open_s + later.open_s,
            conditions=self.conditions + later.conditions,
        )

    def since(self, before: Spent) -> Spent:
        """Return the time spent after `before`, an earlier value of the same session."""
        return Spent(
            verify_s=self.verify_s - before.verify_s,
            start_s=self.start_s - before.start_s,
            open_s=self.open_s - before.open_s,
            conditions=self.conditions[len(before.conditions) :],
        )


class Session(Protocol):
    """Measures on one GPU, for one thread.

    `aot_tune.tuner.measure.session.MeasureSession` uses a GPU of this machine,
    `aot_tune.tuner.ray.session.RemoteSession` a GPU of another.
    """

    @property
    def spent(self) -> Spent:
        """Time spent on all requests so far."""

    def identity(self) -> dict[str, str]:
        """Return the conditions under which times compare: GPU, driver, compiler, way of timing."""

    def device(self) -> Device:
        """Return the GPU as grids are computed for it; starts the worker."""

    def turn_to(self, kernel: FoundKernel, fault_counts: FaultCounts) -> None:
        """Measure another kernel from here on.

        Args:
            kernel: The kernel.
            fault_counts: The faults of its configs, which the sessions of several GPUs share.
        """

    def answer(self, request: Request, on_outcome: OnOutcome = ...) -> list[Outcome]:
        """Execute a request; its class states what the answer holds.

        Args:
            request: The request.
            on_outcome: Receives each outcome while the request is being answered.

        Raises:
            GpuLostError: The GPU does not come back.
            ProblemFailedError: The problem's arguments cannot be made.
            DeclarationError: The declaration is wrong, for example because the kernel changes an argument
                that it does not name.
            MeasuringStopped: `interrupt` was called.
        """

    def interrupt(self) -> None:
        """End the measurement; called from another thread until the measuring thread has ended."""

    def close(self) -> None:
        """End the worker and release the GPU."""
