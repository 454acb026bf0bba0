"""The sample kernel `scale`, with another grid where ``FAKE_SOURCE`` is set: as of an older checkout."""

from __future__ import annotations

import dataclasses
import os

from tests.support import samples

MODULE = "tests.support.other_source"


def _grid(config: object, device: object, problem: object) -> tuple[int, ...]:
    return 1, 1


scale = dataclasses.replace(
    samples.scale, grid_fn=_grid if "FAKE_SOURCE" in os.environ else samples.scale.grid_fn
)
