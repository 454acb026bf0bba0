"""The protocol of a worker's backend, and the messages that a worker sends. Knows no GPU library."""

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
"""The seeds of a sweep's arguments. Verifying uses all of them, timing the first."""

RECHECK_SEEDS = (2, 3)
"""The seeds of a winner's second check, in a fresh process."""

TIMING = "L2 read"
"""The name of the way in which samples are taken: the L2 cache is filled by reading. It is one of a journal's
conditions, so that a journal of times taken in another way is not resumed."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One config to run on the open problem."""

    config: Config
    """The candidate."""

    cubin: Path | None = None
    """Its cubin, compiled beforehand for this problem. Without one, or with another problem's, cuTile
    compiles."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """Progress: a config starts, and is to blame for what happens from here on."""

    config: Config
    """The candidate that starts."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """Progress: a config has an outcome, and the context is alive."""

    outcome: Outcome | None
    """A measurement or a failure; None where the config was only verified, and is right."""

    disturbance: str | None = None
    """The disturbance that spoilt the samples and outlasted the patience; None when they are clean."""

    verify_s: float = 0.0
    """Time spent verifying, seconds."""


@dataclass(frozen=True, kw_only=True)
class Poisoned:
    """Progress: a config left a dead context; this process sends nothing more."""

    config: Config
    """The candidate that ran."""

    message: str
    """The driver's message."""


class Backend(Protocol):
    """A kernel on a GPU. Every call but `healthy` and `stage` may raise, hang, or kill the process.

    `aot_tune.tuner.measure.worker.gpu.GpuBackend` is the real one; the tests script another.
    """

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

    def time(self, trial: Trial) -> Measurement:
        """Time a config on the first seed's arguments, restoring before each launch those that it changes."""

    def busy(self, seconds: float) -> None:
        """Let the GPU multiply large matrices for that many seconds, as a server's GPU does."""

    def sample(self, trial: Trial) -> float:
        """Time one launch of a config that was timed before, on the same arguments; return microseconds."""

    def healthy(self) -> bool:
        """Whether the GPU's context is alive."""

    def stage(self, error: Exception) -> Stage:
        """The stage at which a config failed that raised this error."""
