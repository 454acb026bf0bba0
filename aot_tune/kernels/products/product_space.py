"""Search spaces of matrix products: configs of tiles, and the limits of an arch. Pure: imports no kernel.

A config here has the constants tile_m, tile_n, tile_k and maybe more and swapped (see `product`), and the
hints num_ctas and occupancy.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache

from aot_tune.declare.declaration import Work
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device

Rows = Sequence[tuple[tuple[int, ...], ...]]
"""Rows of values for the constants and hints of a config, in order; a row stands for all combinations."""


class MatrixUnit(Enum):
    """Where the matrix unit of an arch reads its operands and writes its sums."""

    WARP = "operands and sums in registers, a warp at a time"
    WARPGROUP = "operands in shared memory, sums in registers; 64 rows or more, fewer run as WARP"
    TENSOR_MEMORY = "operands in shared memory, sums in a memory of their own"


def matrix_unit(arch: Arch) -> MatrixUnit:
    """Choose the unit of sm90, of sm100 to sm110, or of all others."""
    by_major = {9: MatrixUnit.WARPGROUP, 10: MatrixUnit.TENSOR_MEMORY, 11: MatrixUnit.TENSOR_MEMORY}
    return by_major.get(arch.major, MatrixUnit.WARP)


@cache  # every unseen shape asks for its default
def config_of(tile_m: int, tile_n: int, tile_k: int, num_ctas: int, occupancy: int) -> Config:
    """Make the config of these constants and hints, in the order of `fitting`'s rows."""
    return Config(
        constants={"tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k},
        hints={"num_ctas": num_ctas, "occupancy": occupancy},
    )


def fitting(
    spaces: Mapping[MatrixUnit, Rows], arch: Arch, *, item_bytes: int, products: int = 1
) -> tuple[Config, ...]:
    """Return the configs of the arch's rows that `overflow` does not refuse; arguments as for `overflow`."""
    rows = spaces[matrix_unit(arch)]
    every = (config_of(*values) for row in rows for values in itertools.product(*row))
    return tuple(c for c in every if overflow(c, arch, item_bytes=item_bytes, products=products) is None)


def tile_of(config: Config) -> tuple[int, int, int]:
    """Return tile_m, tile_n and tile_k of a config."""
    return int(config["tile_m"]), int(config["tile_n"]), int(config["tile_k"])


def hints_of(config: Config) -> tuple[int, int]:
    """Return num_ctas and occupancy of a config; a caller's own config may leave them out."""
    return config.hints.get("num_ctas", 1), config.hints.get("occupancy", 1)


def persistent_grid(config: Config, device: Device, tiles: int) -> tuple[int]:
    """Return a grid of as many blocks as the GPU runs at once, but not more than there are tiles."""
    num_ctas, occupancy = hints_of(config)
    return (max(1, min(device.sm_count * occupancy // num_ctas, tiles)),)


def wrongly_peeled(config: Config) -> str | None:
    """Return why `peeled` (see `product.one_sum` and `dense`) would skip or repeat steps, or None."""
    if config["peeled"] in (0, 1):
        return None
    return f"peeled is {config['peeled']}; it must be 1, for the first step before the loop, or 0"


_REGISTER_SUMS = 64 * 64
"""Float32 sums that a warp holds in registers, at most: product-registers (README)."""

_TENSOR_MEMORY_SUMS = 128 * 512
"""Float32 sums in the tensor memory of a multiprocessor: 128 lanes of 512 columns (PTX ISA, tcgen05)."""


@cache  # a choice asks for each config that it considers
def overflow(config: Config, arch: Arch, *, item_bytes: int, products: int = 1) -> str | None:
    """Return why an arch cannot hold the tile of a config, or None.

    Args:
        config: The config.
        arch: The arch.
        item_bytes: Bytes of an element of the operands.
        products: Number of tiles of tile_n columns that a block computes at the same time.
    """
    tile_k, (num_ctas, occupancy) = int(config["tile_k"]), hints_of(config)
    tile_m, tile_n = extent(config, products)
    if num_ctas > 1 and arch < Arch(9, 0):
        return f"{arch} has no clusters of blocks; num_ctas must be 1"
    sums = tile_m * tile_n // num_ctas
    if matrix_unit(arch) is MatrixUnit.TENSOR_MEMORY:
        if sums * occupancy > _TENSOR_MEMORY_SUMS:
            return f"{occupancy} tiles of {tile_m} x {tile_n} over {num_ctas} blocks overflow tensor memory"
    elif sums > _REGISTER_SUMS * config.hints.get("num_worker_warps", 4):
        return f"a tile of {tile_m} x {tile_n} over {num_ctas} blocks overflows the registers"
    # Two steps must fit: with one, each load is waited for. Blocks that share a tile split its longer side.
    stage = (max(tile_m, tile_n) // num_ctas + min(tile_m, tile_n)) * tile_k * item_bytes
    available = Device.reference(arch).shared_memory_per_sm
    if 2 * stage * occupancy > available:
        return f"{occupancy} blocks of 2 x {stage} bytes overflow {available} of shared memory"
    return None


_ALWAYS_ROWS = 64
"""Tiles of this many rows count as suitable for every problem, so that every default does."""


def waste(config: Config, rows: int) -> str | None:
    """Return why a config wastes work on a product of up to `rows` rows, or None."""
    tile_m, _ = extent(config)
    if tile_m > max(_ALWAYS_ROWS, 2 * rows):
        return f"a tile of {tile_m} rows is more than half empty for {rows}"
    if tile_m < _ALWAYS_ROWS and rows > 4 * tile_m:
        return f"tiles of {tile_m} rows read the weights more than four times for {rows} rows"
    return None


def work_of(config: Config, k: int, *, item_bytes: int, products: int = 1) -> Work:
    """Return the work of one tile with sums over `k`; the other arguments as for `overflow`."""
    tile_k, (tile_m, columns) = int(config["tile_k"]), extent(config, products)
    return Work(
        steps=-(-k // tile_k),
        flops=2.0 * tile_m * columns * tile_k,
        load_bytes=float((tile_m + columns) * tile_k * item_bytes),
        store_bytes=float(tile_m * columns // products * item_bytes),
    )


def extent(config: Config, products: int = 1) -> tuple[int, int]:
    """Return rows and columns of the sums that a block holds, for all its products together."""
    tile_m, tile_n, _ = tile_of(config)
    more = int(config.constants.get("more", 0))
    if config.constants.get("swapped"):
        return tile_m + more, products * tile_n
    return tile_m, products * (tile_n + more)
