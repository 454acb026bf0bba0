"""The search space of the dense products, matmul and linear: tiles, which operand gives the rows, hints.

Tiles of 64 rows and more are those of Triton's tutorial (03-matrix-multiplication.py), of CUTLASS's kernels
for sm90 (128 x 256 x 64 by eight warps, alone or two that share a tile) and those between them that measured
best on the H200: 160 and 192 columns. Tiles of 16 and 32 rows are for the few tokens of a decoding step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache

from aot_tune.arch import Arch
from aot_tune.bucket import edge
from aot_tune.config import Config
from aot_tune.inputs import named_dtype
from aot_tune.kernels.product_space import MatrixUnit, Rows, matrix_unit, overflow, waste
from aot_tune.problem import Problem

# Values of tile_m, tile_n, more_n, tile_k, swapped, num_ctas, occupancy and num_worker_warps.
_SPACE: Mapping[MatrixUnit, Rows] = {
    MatrixUnit.WARPGROUP: (
        # A few tokens: only the weight's bytes count. Narrow tiles give every multiprocessor one.
        ((16,), (64,), (0,), (128,), (0,), (1,), (1,), (4,)),
        ((16,), (64,), (0,), (128,), (1,), (1,), (1, 2), (4,)),
        ((16,), (64,), (0,), (256,), (1,), (1,), (1,), (4,)),
        ((16,), (128,), (0,), (64,), (1,), (1,), (2,), (4,)),
        ((16,), (128,), (0,), (128,), (1,), (1,), (1,), (4,)),
        ((16,), (256,), (0,), (64,), (1,), (1,), (1,), (4,)),
        ((32,), (64,), (0,), (128, 256), (1,), (1,), (1,), (4,)),
        ((32,), (128,), (0,), (128,), (1,), (1,), (1,), (4,)),
        ((64,), (64,), (0,), (128,), (0,), (1,), (1,), (4,)),
        # Tens of tokens to hundreds. 256 tokens by 10240 features are 80 tiles of 128 x 256, 160 of 128 x 128
        # and 128 of 128 x 160, for 132 multiprocessors.
        ((64,), (128,), (0, 32, 64), (64,), (0,), (1,), (1,), (4,)),
        ((64,), (256,), (0,), (64,), (0,), (1,), (1,), (4,)),
        ((128,), (64,), (0, 32), (64,), (0,), (1,), (1,), (4,)),
        ((128,), (64,), (0,), (128,), (0,), (1,), (1,), (4,)),
        ((256,), (64,), (0,), (64,), (0,), (1,), (1,), (8,)),
        # Prompts: the most sums that stay in registers.
        ((128,), (128,), (0,), (64,), (0,), (1,), (1, 2), (4,)),
        ((128,), (128,), (0,), (64,), (0,), (1,), (1,), (8,)),
        ((128,), (128,), (32, 64), (64,), (0,), (1,), (1,), (8,)),
        ((128,), (256,), (0,), (64,), (0,), (1,), (1,), (8,)),
        ((256,), (128,), (0,), (64,), (0,), (2,), (1,), (4,)),
        ((256,), (128,), (64,), (64,), (0,), (2,), (1,), (8,)),
        ((256,), (256,), (0,), (64,), (0,), (2,), (1,), (8,)),
    ),
    MatrixUnit.TENSOR_MEMORY: (
        ((16,), (64,), (0,), (128, 256), (1,), (1,), (1,), (4,)),
        ((16, 32), (64, 128), (0,), (128,), (0, 1), (1,), (1,), (4,)),
        ((64,), (64,), (0,), (128,), (0,), (1,), (1,), (4,)),
        ((64,), (128,), (0, 64), (64, 128), (0,), (1,), (1,), (4,)),
        ((64,), (128, 256), (0,), (128,), (0,), (2,), (1,), (4,)),
        ((128,), (64,), (0,), (128,), (0,), (1,), (1,), (4,)),
        ((128,), (128, 256), (0, 64), (64,), (0,), (1,), (1,), (4,)),
        ((128,), (128, 256), (0,), (64,), (0,), (2,), (1,), (4,)),
        ((256,), (128, 256), (0,), (64,), (0,), (1, 2), (1,), (4,)),
        ((256,), (256,), (0,), (64,), (0,), (4,), (1,), (4,)),
    ),
    MatrixUnit.WARP: (
        ((16,), (32, 64), (0,), (64, 128), (0,), (1,), (1,), (4,)),
        ((32,), (64, 128), (0,), (64,), (0,), (1,), (1,), (4,)),
        ((64,), (64,), (0,), (32, 64), (0,), (1,), (2,), (4,)),
        ((64,), (128,), (0,), (32, 64), (0,), (1,), (1, 2), (4,)),
        ((128,), (64,), (0,), (32, 64), (0,), (1,), (1, 2), (4,)),
        ((128,), (128,), (0,), (32,), (0,), (1,), (1, 2), (4, 8)),
        ((128,), (128,), (0,), (64,), (0,), (1,), (1,), (4, 8)),
        ((128,), (256,), (0,), (32,), (0,), (1,), (1,), (8,)),
        ((128,), (256,), (0,), (32,), (0,), (2,), (1,), (4,)),
        ((256,), (128,), (0,), (32,), (0,), (1,), (1,), (8,)),
    ),
}


@cache  # a default is asked for at each unseen shape
def config_of(
    tile_m: int,
    tile_n: int,
    more_n: int,
    tile_k: int,
    swapped: int,
    num_ctas: int,
    occupancy: int,
    warps: int,
) -> Config:
    """A config of these constants and hints, the constants as `product` has them."""
    constants = {"tile_m": tile_m, "tile_n": tile_n, "more_n": more_n, "tile_k": tile_k, "swapped": swapped}
    return Config(
        constants=constants,
        hints={"num_ctas": num_ctas, "occupancy": occupancy, "num_worker_warps": warps},
    )


def constants_of(config: Config) -> tuple[int, ...]:
    """What a kernel is launched with, in its order."""
    return tuple(int(config[name]) for name in ("tile_m", "tile_n", "more_n", "tile_k", "swapped"))


def tiles(config: Config, rows: int, columns: int) -> int:
    """Tiles of a product of so many rows and columns."""
    tile_m, tile_n, more_n, _, _ = constants_of(config)
    return -(-rows // tile_m) * -(-columns // (tile_n + more_n))


def space(arch: Arch, problem: Problem) -> Sequence[Config]:
    """All configs whose tiles fit an arch at the problem's dtype."""
    return _fitting(arch, item_bytes(problem))


@cache
def _fitting(arch: Arch, size: int) -> tuple[Config, ...]:
    rows = [values for row in _SPACE[matrix_unit(arch)] for values in itertools.product(*row)]
    # As many bytes a step as of two-byte elements.
    every = dict.fromkeys(config_of(*v[:3], v[3] * 2 // size, *v[4:]) for v in rows)
    return tuple(config for config in every if overflow(config, arch, item_bytes=size) is None)


def default(arch: Arch, problem: Problem) -> Config:
    """The config of untuned problems."""
    rows, wide = problem.size("M"), item_bytes(problem) > 2
    if matrix_unit(arch) is MatrixUnit.WARP:
        # Two blocks hide each other's waits; told to expect one, the compiler spills on sm80.
        tile = (64, 64, 32) if wide else (64, 128, 64) if rows <= 64 else (128, 128, 32)
        return _plain(*tile, occupancy=2)
    if rows <= 16:
        return _plain(16, 64, 64 if wide else 128, swapped=1)
    if rows <= 64:
        return _plain(64, 64, 64 if wide else 128)
    return _plain(128, 128, 32 if wide else 64)


def _plain(tile_m: int, tile_n: int, tile_k: int, *, swapped: int = 0, occupancy: int = 1) -> Config:
    return config_of(tile_m, tile_n, 0, tile_k, swapped, num_ctas=1, occupancy=occupancy, warps=4)


def legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    """Whether a config may run a problem, or why not; the same for all sizes of a bucket."""
    _, tile_n, more_n, _, swapped = constants_of(config)
    if more_n and (tile_n % more_n or swapped):
        return f"{more_n} more columns must divide the {tile_n} beside them, which give no rows then"
    refusal = overflow(config, arch, item_bytes=item_bytes(problem))
    return refusal or waste(config, edge(problem.size("M"))) or True


def item_bytes(problem: Problem) -> int:
    """Bytes of an element."""
    return named_dtype(str(problem["dtype"])).itemsize
