"""A launch's grid on one GPU, checked. Knows no table."""

from __future__ import annotations

from aot_tune.declare.declaration import Declaration
from aot_tune.errors import LaunchError
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

_MOST_BLOCKS = (2**24 - 1, 2**16 - 1, 2**16 - 1)
"""Blocks along a grid's dimensions: cuTile tells a block its place in 24 bits (cuda-tile 1.7), CUDA in 16."""


def checked_grid(tunable: Declaration, config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    """What `grid_fn` of a declaration gives.

    Raises:
        LaunchError: It is no grid, or the config cannot run on this very GPU.
    """
    grid = tunable.grid(config, device, problem)
    if not 1 <= len(grid) <= 3 or not all(isinstance(blocks, int) and blocks > 0 for blocks in grid):
        raise LaunchError(
            f"{tunable.name}: grid_fn gives {grid!r} for {problem} with {config}; "
            "return one to three counts of blocks, ints of 1 or more"
        )
    if any(blocks > most for blocks, most in zip(grid, _MOST_BLOCKS, strict=False)):
        raise LaunchError(
            f"{tunable.name}: {problem} with {config} takes a grid of {grid}, and {_MOST_BLOCKS} blocks can "
            "be launched at most; pass fewer rows or sequences a call"
        )
    return grid


def unfit(tunable: Declaration, config: Config, device: Device, problem: Problem) -> str | None:
    """Why a config cannot run on this very GPU, or None."""
    try:
        checked_grid(tunable, config, device, problem)
    except LaunchError as error:
        return str(error)
    return None
