"""What a worker asks of the machine it measures on, and the messages it sends. Knows no GPU library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aot_tune.tuner.measure.worker.gpu_state import GpuState
from aot_tune.tuner.outcome import Measurement, Outcome, Stage
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

SEEDS = (0, 1)
"""The seeds of a sweep's arguments; the first one's are timed."""

RECHECK_SEEDS = (2, 3)
"""The seeds of a winner's second check, in a fresh process."""

TIMING = "L2 read"
"""How samples are taken. Another name makes a journal of the old way one that cannot be resumed."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One config to run on the open problem."""

    config: Config
    """The candidate."""

    cubin: Path | None = None
    """Its cubin, compiled beforehand for this problem; None, or another's, lets cuTile compile."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """Progress: from here on, this config is to blame."""

    config: Config
    """The candidate that starts."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """Progress: a config's outcome, the context still alive."""

    outcome: Outcome | None
    """A measurement or a failure; None where the config was only checked, and is right."""

    disturbance: str | None = None
    """What spoilt the samples and went on for longer than was waited; None when they are clean."""

    verify_s: float = 0.0
    """Seconds of it spent verifying."""


@dataclass(frozen=True, kw_only=True)
class Poisoned:
    """Progress: a config left a dead context; nothing more comes from this process."""

    config: Config
    """The candidate that did it."""

    message: str
    """What the driver said."""


class Backend(Protocol):
    """A kernel on a GPU. Every call but `healthy` and `stage` may raise, hang, or kill the process.

    `aot_tune.tuner.measure.worker.gpu.GpuBackend` is the real one; the tests script another.
    """

    def device(self) -> Device:
        """What grids are computed for."""

    def state(self) -> GpuState:
        """Clocks and their reasons, now."""

    def disturbance(self) -> str | None:
        """What spoils samples taken now: throttling, or another process computing on the GPU."""

    def canary(self) -> None:
        """Run something known to be good; raises unless the answer is right."""

    def open(self, problem: Problem, seeds: Sequence[int]) -> None:
        """Close what is open, then make this problem's arguments and references, one set for each seed."""

    def verify(self, trial: Trial) -> str | None:
        """Launch once per seed on poisoned outputs and compare. What is wrong, or None."""

    def time(self, trial: Trial) -> Measurement:
        """Time it on the first seed's arguments, fresh ones for each launch where the kernel changes them."""

    def busy(self, seconds: float) -> None:
        """Let the GPU multiply large matrices for so long, as a server's does."""

    def sample(self, trial: Trial) -> float:
        """Microseconds of one launch of what was timed before, on the same arguments."""

    def healthy(self) -> bool:
        """Whether the GPU's context is alive."""

    def stage(self, error: Exception) -> Stage:
        """Where a config failed that raised this."""
