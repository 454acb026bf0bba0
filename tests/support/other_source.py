"""The kernel `other`, with another grid where ``FAKE_SOURCE`` is set: as of an older checkout."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from aot_tune.declare.discovery import FoundKernel
from tests.support import samples

MODULE = "tests.support.other_source"


def _grid(config: object, device: object, problem: object) -> tuple[int, ...]:
    return 1, 1


other = dataclasses.replace(
    samples.scale,
    name="other",
    grid_fn=_grid if "FAKE_SOURCE" in os.environ else samples.scale.grid_fn,
)


def other_in(folder: Path) -> FoundKernel:
    """The declaration with its tables in `folder`."""
    return FoundKernel(module=MODULE, tunable=dataclasses.replace(other, tables=folder))
