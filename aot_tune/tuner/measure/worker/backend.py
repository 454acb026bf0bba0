"""The protocol of a worker's backend, and the messages that a worker sends. Knows no GPU library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
"""Launches after a winner's second check, and after a wrong result's, each compared with the verified output:
a kernel that is wrong in 2 % of its launches is found with a probability of 98 %."""

TIMING = "L2 read"
"""The name of the way in which samples are taken: the L2 cache is filled by reading. It is one of a journal's
conditions, so that a journal of times taken in another way is not resumed."""


@message
@dataclass(frozen=True, kw_only=True)
class Trial:
    """One config to run on the open problem."""

    config: Config
    """The candidate."""

    cubin: Path | None = None
    """Its cubin, compiled beforehand for this problem. Without one, or with another problem's, cuTile
    compiles."""

    launches: int = 0
    """Further launches after the verification, each compared with the verified output."""


@message
@dataclass(frozen=True, kw_only=True)
class Running:
    """Progress: a config starts, and is to blame for what happens from here on."""

    config: Config
    """The candidate that starts."""


@message
@dataclass(frozen=True, kw_only=True)
class Done:
    """Progress: a config has an outcome, and the context is alive."""

    outcome: Outcome | None
    """A measurement or a failure; None where the config was only verified, and is right. A provisional time
    is followed by another message when its rivals are timed."""

    verify_s: float = 0.0
    """Time spent verifying, seconds."""


@message
@dataclass(frozen=True, kw_only=True)
class Poisoned:
    """Progress: a config left a dead context, or wrote where it must not; this process sends nothing more."""

    config: Config | None
    """The candidate that ran; None where it is one of those that took turns, and it is not known which."""

    stage: Stage
    """``fault`` for a dead context, ``verify`` for memory that no argument covers."""

    message: str
    """The driver's message, or what changed."""


for _kind in (Measurement, Failure, GpuState, Device):
    message(_kind)


class Backend(Protocol):
    """A kernel on a GPU, made with the arguments that `turn_to` takes.

    Every call but `healthy` and `stage` may raise, hang, or kill the process.

    `verify`, `again`, `check` and `damage` raise a DeclarationError where the kernel changes an argument that
    the declaration does not name.

    `aot_tune.tuner.measure.worker.gpu.GpuBackend` is the real one; the tests script another.
    """

    def turn_to(self, **arguments: Any) -> None:
        """Close what is open, and measure another kernel from here on; raise where this process cannot."""

    def device(self) -> Device:
        """The GPU as grids are computed for it."""

    def state(self) -> GpuState:
        """The present clocks, and the reasons why they are not higher."""

    def disturbance(self) -> str | None:
        """Throttling or another process on the GPU, which spoils samples taken now; None without either."""

    def canary(self) -> None:
        """Run a computation whose result is known; raise unless it is right."""

    def open(self, problem: Problem, seeds: Sequence[int]) -> None:
        """Close what is open, then make this problem's arguments and references, one set for each seed."""

    def verify(self, trial: Trial) -> str | None:
        """Launch once per seed on poisoned outputs and compare; return what is wrong, or None."""

    def again(self, trial: Trial, number: int) -> str | None:
        """Launch a verified config once more, as launch `number` from 0; return what is wrong, or None.

        The output is compared with that of the verification, and with the reference where their bits differ.
        """

    def time(self, trial: Trial) -> Measurement:
        """Time a config on the first seed's arguments, restoring before each launch those that it changes."""

    def check(self) -> str | None:
        """Compare what the last launch of `time` wrote; return what is wrong, or None."""

    def damage(self) -> str | None:
        """What changed of the expected values, saved copies and inputs; None when nothing did."""

    def busy(self, seconds: float) -> None:
        """Let the GPU multiply large matrices for that many seconds, as a server's GPU does."""

    def sample(self, trial: Trial, state: State) -> float:
        """Time one launch of a config that was verified, the GPU being in this state; return microseconds.

        What brings the GPU into the state happens before the launch and is not timed.
        """

    def healthy(self) -> bool:
        """Whether the GPU's context is alive."""

    def stage(self, error: Exception) -> Stage:
        """The stage at which a config failed that raised this error."""
