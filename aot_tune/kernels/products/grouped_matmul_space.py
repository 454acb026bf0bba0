"""Search space of grouped_matmul: tiles, and how a block finds its expert. Pure: imports no kernel."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from aot_tune.kernels.products.product_space import (
    MatrixUnit,
    Rows,
    config_of,
    fitting,
    hints_of,
    matrix_unit,
    overflow,
    tile_of,
    waste,
)
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import edge
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

ITEM_BYTES = 2  # bfloat16 and float16

# Seeded from vLLM's tables for fused_moe on the H200 (fused_moe/configs, E=8,N=7168 and E=128,N=1024): 16 to
# 64 rows by 64 or 128 columns in steps of 64 to 256 where experts have few rows, 128 x 256 where they have
# many; from PyTorch's grid for its grouped product (torch/_inductor/kernel/mm_grouped.py); and from what
# matmul was tuned to on the H200.
_SPACES: Mapping[MatrixUnit, Rows] = {
    MatrixUnit.WARPGROUP: (
        ((16,), (64,), (128,), (1,), (1, 2)),
        ((16,), (64,), (256,), (1,), (1,)),
        ((16,), (128,), (64, 128), (1,), (1,)),
        ((32,), (64,), (128,), (1,), (1,)),
        ((32,), (128,), (64, 128), (1,), (1,)),
        ((64,), (64,), (128,), (1,), (1, 2)),
        ((64,), (128,), (64, 128), (1,), (1,)),
        ((128,), (64,), (64, 128), (1,), (1,)),
        ((128,), (128,), (64, 128), (1,), (1,)),
        ((256,), (128,), (64,), (2,), (1,)),
        ((128,), (256,), (64,), (2,), (1,)),
    ),
    MatrixUnit.TENSOR_MEMORY: (
        ((16, 32), (64, 128), (128,), (1,), (1,)),
        ((64,), (64, 128), (128,), (1,), (1,)),
        ((128,), (128, 256), (64,), (1, 2), (1,)),
        ((256,), (128, 256), (64,), (1, 2), (1,)),
    ),
    MatrixUnit.WARP: (
        ((16, 32), (64, 128), (64,), (1,), (1, 2)),
        ((64,), (64, 128), (64,), (1,), (1, 2)),
        ((128,), (64,), (32, 64), (1,), (1, 2)),
        ((128,), (128,), (32,), (1,), (1, 2)),
        ((128,), (128,), (32,), (2,), (1,)),
    ),
}

_WALK_ROWS = 128
"""Rows of a tile, at least, with which a walk is tried: with fewer rows, a search wins."""


def with_search(tile: Config, search: bool) -> Config:
    """Make the config of a tile in which blocks find their expert by a search, or else by a walk."""
    return Config(constants={**tile.constants, "search": search}, hints=tile.hints)


@cache
def space(arch: Arch) -> tuple[Config, ...]:
    """Return every config for an arch."""
    every = (
        with_search(tile, search)
        for tile in fitting(_SPACES, arch, item_bytes=ITEM_BYTES)
        for search in ((True, False) if tile_of(tile)[0] >= _WALK_ROWS else (True,))
    )
    return tuple(config for config in every if _does_not_find(config) is None)


@cache
def default(arch: Arch, problem: Problem) -> Config:
    """Choose a config by the average number of rows of an expert."""
    rows = _average_rows(problem)
    if matrix_unit(arch) is MatrixUnit.WARP:
        return with_search(config_of(64, 64, 64, num_ctas=1, occupancy=2), search=True)
    tile = (16, 64, 128) if rows <= 16 else (64, 64, 128) if rows <= 64 else (128, 128, 64)
    return with_search(config_of(*tile, num_ctas=1, occupancy=1), search=rows <= 128)


def legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    """Whether an arch holds a config and the average expert does not waste it, or why not."""
    refusal = overflow(config, arch, item_bytes=ITEM_BYTES) or _does_not_find(config)
    return refusal or waste(config, _average_rows(problem)) or True


def _does_not_find(config: Config) -> str | None:
    """Return why blocks with a config would find wrong experts, or None."""
    if config["search"] and hints_of(config)[0] > 1:  # clustered-search (README)
        return (
            "blocks that share a tile also share out the search, and miss experts; walk, or set num_ctas to 1"
        )
    return None


def _average_rows(problem: Problem) -> int:
    """Return an expert's rows at the edge of the problem's bucket, if all experts had the same number."""
    return -(-edge(problem.size("tokens")) // problem.size("experts"))
