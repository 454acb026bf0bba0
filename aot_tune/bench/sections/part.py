"""Request and result of a section of the bench. Values only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Request:
    """A section's request: what it measures, and how thoroughly. Each section reads the fields it needs."""

    kernels: tuple[str, ...] = ()
    """`inside`, `regret`, `declared`: the kernels to measure, `replay`: the operations; all of them where it
    is empty. `scaling`: the kernels to sweep; `scaling.KERNELS` where it is empty."""

    modules: tuple[str, ...] = ()
    """`declared`: the modules whose kernels are swept."""

    sizes: int = 44
    """`inside`: sizes of each kernel."""

    problems: int = 200
    """`regret`: problems of each kernel, `scaling`: buckets of each, at most."""

    journal: str = "build/regret.jsonl"
    """`regret`: the file of all samples; a later call continues it."""

    look_ups: int = 500_000
    """`lookups`: look-ups of each kernel."""

    repeats: int = 5
    """`serving`: fresh processes of each quick scenario."""

    limit_s: float = math.inf
    """`inside`, `replay` and `declared`: seconds after which no further kernel begins; `regret`: no further
    problem."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Figures of a section, or of an independent part of it."""

    name: str
    """Name of the part, unique within its section."""

    figures: Mapping[str, Any]
    """JSON values."""

    kernels: tuple[str, ...] = ()
    """Shipped kernels whose source or tables the figures depend on."""
