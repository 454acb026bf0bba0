"""The protocol of a worker's backend, and a worker's messages. Imports no GPU library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from aot_tune.tables.states import State
from aot_tune.tuner.measure.worker.gpu_state import GpuState
from aot_tune.tuner.outcome import Failure, Measurement, Outcome, Stage
from aot_tune.tuner.process.codec import message
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

SEEDS = (0, 1)
"""The seeds of a sweep's arguments. Verifying uses all of them, timing the first."""

RECHECK_SEEDS = (2, 3)
"""The seeds of a winner's second check, in a fresh process."""

LAUNCHES = 200
"""Launches after the second check of a winner or of a wrong result, each compared with the verified output.
A kernel that is wrong in 2 % of its launches is detected with a probability of 98 %."""

TIMING = "L2 read"
"""Name of the way of timing: the L2 cache is filled by reading. It is one of a journal's conditions, so that
a journal of times taken in another way is not resumed."""


@message
@dataclass(frozen=True, kw_only=True)
class Trial:
    """One config to run on the open problem."""

    config: Config
    """The candidate."""

    cubin: Path | None = None
    """Its cubin, compiled beforehand for this problem. Without it, or with another problem's cubin, cuTile
    compiles."""

    launches: int = 0
    """Further launches after the verification, each compared with the verified output."""


@message
@dataclass(frozen=True, kw_only=True)
class Running:
    """Progress: a config starts, and is to blame for faults from here on."""

    config: Config
    """The candidate that starts."""


@message
@dataclass(frozen=True, kw_only=True)
class Done:
    """Progress: a config has an outcome, and the context is alive."""

    outcome: Outcome | None
    """A measurement or a failure; None where the config was only verified and is correct. A provisional time
    is followed by another message when its rivals are timed."""

    verify_s: float = 0.0
    """Time spent verifying, seconds."""


@message
@dataclass(frozen=True, kw_only=True)
class Poisoned:
    """Progress: a config left a dead context or wrote out of bounds; this process sends nothing more."""

    config: Config | None
    """The candidate that ran; None where several took turns, and the culprit is unknown."""

    stage: Stage
    """``fault`` for a dead context, ``verify`` for memory that no argument covers."""

    message: str
    """The driver's message, or the changed memory."""


@message
@dataclass(frozen=True, kw_only=True)
class Counters:
    """The GPU's counters of one launch."""

    values: Mapping[str, float] = field(default_factory=dict)
    """Value of each metric, by CUPTI's name."""

    passes: int = 0
    """Number of times that the kernel ran for them."""

    refusal: str = ""
    """The reason why none could be read; empty where they were."""


for _kind in (Measurement, Failure, GpuState, Device):
    message(_kind)


class Backend(Protocol):
    """A kernel on a GPU; the constructor takes the arguments of `turn_to`.

    Every call but `healthy` and `stage` may raise, hang, or kill the process.

    `verify`, `again`, `check` and `damage` raise a DeclarationError where the kernel changes an argument that
    the declaration does not name.

    `aot_tune.tuner.measure.worker.gpu.GpuBackend` is the real one; the tests script another.
    """

    def turn_to(self, **arguments: Any) -> None:
        """Close the open problem and measure another kernel; raise where this process cannot."""

    def device(self) -> Device:
        """Return the GPU as grids are computed for it."""

    def state(self) -> GpuState:
        """Return the present clocks, and the reasons why they are not higher."""

    def disturbance(self) -> str | None:
        """Return what spoils samples now: throttling or another process on the GPU; None without either."""

    def canary(self) -> None:
        """Run a computation whose result is known; raise unless it is right."""

    def open(self, problem: Problem, seeds: Sequence[int]) -> None:
        """Close the open problem, then make this problem's arguments and references for each seed."""

    def verify(self, trial: Trial) -> str | None:
        """Launch once per seed on poisoned outputs and compare; return what is wrong, or None."""

    def again(self, trial: Trial, number: int) -> str | None:
        """Launch a verified config once more, as launch `number` from 0; return what is wrong, or None.

        The output is compared with the verified output, and with the reference where their bits differ.
        """

    def time(self, trial: Trial) -> Measurement:
        """Time a config on the first seed's arguments, restoring changed arguments before each launch."""

    def prepare(self) -> None:
        """Poison the outputs before a `sample` whose output `check` compares."""

    def check(self) -> str | None:
        """Compare what the last `time` or `sample` wrote; return what is wrong, or None."""

    def damage(self) -> str | None:
        """Return which expected value, saved copy or input changed; None when none did."""

    def busy(self, seconds: float) -> None:
        """Let the GPU multiply large matrices for that many seconds, as a server's GPU does."""

    def sample(self, trial: Trial, state: State) -> float:
        """Time one launch of a verified config in a state of the GPU; return microseconds.

        The GPU is brought into the state before the launch, which is not timed.
        """

    def counters(self, trial: Trial) -> Counters:
        """Read the GPU's counters of one launch of a verified config, with the L2 cache read before."""

    def healthy(self) -> bool:
        """Return whether the GPU's context is alive."""

    def stage(self, error: Exception) -> Stage:
        """Return the stage at which a config failed with this error."""
