"""The outcome of a candidate: a measurement or a failure. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aot_tune.values.config import Config

Stage = Literal["legal", "compile", "resources", "launch", "verify", "timeout", "fault", "memory", "timing"]
"""The stage at which a candidate failed, in this order: a rule refuses it (``legal``); the compiler refuses
it; it spills or needs too much shared memory (``resources``); the launch raises; its result is wrong
(``verify``); it hangs (``timeout``); it poisons the GPU's context or crashes the worker (``fault``); the
GPU's memory is full; it gives no usable time (``timing``)."""

COUNTED_STAGES: frozenset[Stage] = frozenset({"fault", "timeout"})
"""Stages that count towards excluding a config, which is then not run again for its kernel. Each failure at
them costs two workers and, for a hang, two time limits, on every problem anew. ``memory`` does not count: it
depends on the problem's size and not only on the config."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The time of a candidate."""

    config: Config
    """The candidate."""

    mean_us: float
    """Mean over the samples, or the median of the means of several rounds, microseconds."""

    error_margin_us: float
    """Half of the 95 % confidence interval, microseconds."""

    num_samples: int
    """Number of samples, over all rounds."""

    provisional: bool = False
    """Whether the time was taken alone and will be taken again, in turn with its rivals."""

    disturbed: str | None = None
    """The disturbance that spoilt its samples until the patience ended, in words; None without any."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The reason why a candidate has no time."""

    config: Config
    """The candidate."""

    stage: Stage
    """The stage at which it failed."""

    message: str
    """The message of the compiler, the driver or the check."""


Outcome = Measurement | Failure
