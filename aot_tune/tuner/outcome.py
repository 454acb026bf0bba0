"""What became of a candidate: a measurement or a failure, both as data. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aot_tune.values.config import Config

Stage = Literal["legal", "compile", "resources", "launch", "verify", "timeout", "fault", "memory", "timing"]
"""Where a candidate failed: refused by a rule, by the compiler, for what the compiler reports (spills, shared
memory), raised at launch, computed a wrong result, hung, poisoned the GPU's context, ran out of memory, gave
no usable time."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A candidate's time."""

    config: Config
    """The candidate."""

    mean_us: float
    """Mean over samples, or the median of such means over rounds, microseconds."""

    error_margin_us: float
    """Half of the 95 % confidence interval, microseconds."""

    num_samples: int
    """Samples behind it, over all rounds."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a candidate has no time."""

    config: Config
    """The candidate."""

    stage: Stage
    """Where it failed."""

    message: str
    """What the compiler, the driver or the check said."""


Outcome = Measurement | Failure
