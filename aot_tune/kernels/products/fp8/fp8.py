"""Limits of an arch and layouts that both fp8 products share. Uses no scales."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from aot_tune import inputs
from aot_tune.errors import LaunchError
from aot_tune.kernels.host.arguments import PLAIN_TENSORS, address
from aot_tune.kernels.host.padding import ROW_BYTES, padded_copy, padded_width
from aot_tune.kernels.products.product_space import (
    MatrixUnit,
    hints_of,
    matrix_unit,
    overflow,
    persistent_grid,
    tile_of,
)
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import edge
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

UNIT_ROWS = 64
"""Rows that the matrix units of sm90 and sm100 take, at least. On sm90 fewer rows run on the older unit, as
16-bit floats after a conversion of each element. So tiles of fewer tokens are swapped: see
`product.multiply_add`."""

# What fits --------------------------------------------------------------------------------------

COMPILERS_WARPS = 4
"""num_worker_warps that the compiler takes where a config names none."""

_REGISTER_SUMS = 64 * 128 // 4
"""Sums that a warp holds in registers without spilling; it holds them twice, those of the last 128 columns
and those of all."""


@cache  # every unseen shape asks for its default
def config(
    names: tuple[str, ...], values: tuple[int, ...], num_ctas: int, occupancy: int, warps: int
) -> Config:
    """Make a config of these constants and hints."""
    hints = {"num_ctas": num_ctas, "occupancy": occupancy}
    if warps != COMPILERS_WARPS:
        hints["num_worker_warps"] = warps
    return Config(constants=dict(zip(names, values, strict=True)), hints=hints)


def does_not_fit(config: Config, arch: Arch) -> str | None:
    """Return why an arch cannot hold a config with the constants tile_m, tile_n and tile_k, or None."""
    if arch < Arch(9, 0):
        return f"cuTile has fp8 from sm90 on, not for {arch}; convert both to bfloat16 and call matmul"
    (tile_m, tile_n, _), (num_ctas, _) = tile_of(config), hints_of(config)
    warps = config.hints.get("num_worker_warps", COMPILERS_WARPS)
    in_registers = matrix_unit(arch) is not MatrixUnit.TENSOR_MEMORY
    if in_registers and tile_m * tile_n // num_ctas > _REGISTER_SUMS * warps:
        return (
            f"a tile of {tile_m} x {tile_n} over {num_ctas} blocks of {warps} warps overflows the registers"
        )
    return overflow(config, arch, item_bytes=1)


def does_not_suit(config: Config, problem: Problem) -> str | None:
    """Return why a config wastes work on a problem's bucket, or None."""
    tile_m, group = int(config["tile_m"]), int(config["group"])
    rows = edge(problem.size("M"))
    if tile_m > max(UNIT_ROWS, 2 * rows):  # tiles of UNIT_ROWS suit every batch
        return f"a tile of {tile_m} rows is more than half empty for up to {rows}"
    if tile_m < UNIT_ROWS and rows > 2 * tile_m:
        return f"tiles of {tile_m} rows read B more than twice for up to {rows} rows"
    if group > 8 and -(-rows // tile_m) <= 8:
        return f"group {group} orders the tiles of up to {rows} rows as group 8 does"
    return None


def tiles(config: Config, problem: Problem) -> int:
    """Count the tiles of a product."""
    return -(-problem.size("M") // int(config["tile_m"])) * -(-problem.size("N") // int(config["tile_n"]))


def grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    """Return a grid of as many blocks as the GPU runs at once, but not more than there are tiles."""
    return persistent_grid(config, device, tiles(config, problem))


# Arguments --------------------------------------------------------------------------------------


def laid_out(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both factors in a layout that TMA can load: themselves, or copies whose rows are padded.

    Strides along dimensions of size 1, which are never used, are made to fit without a copy.

    Raises:
        LaunchError: The matrix units cannot read a factor in its layout; torch._scaled_mm refuses it too.
    """
    if not _is_laid_out(a, *a.stride()):
        a = _made("a", a, "(M, K)")
    if not _is_laid_out(b, *reversed(b.stride())):
        b = _made("b", b.t(), "(K, N), the t() of a contiguous (N, K) weight,").t()
    return a, b


def _is_laid_out(tensor: torch.Tensor, across: int, along: int) -> bool:
    return along == 1 and (across | address(tensor)) % ROW_BYTES == 0


def _made(name: str, rows: torch.Tensor, wanted: str) -> torch.Tensor:
    """Return (rows, K) in a layout that TMA can load."""
    (across, along), (count, k) = rows.stride(), rows.shape
    if k != 1 and along != 1:
        raise LaunchError(f"matmul_fp8: {name} has stride {along} along K; pass {wanted} with stride 1 there")
    if count == 1:
        across = padded_width(rows)
    if (across | address(rows)) % ROW_BYTES == 0:
        return rows.as_strided(rows.shape, (across, 1))
    return padded_copy(rows) if type(rows) in PLAIN_TENSORS else rows


def aligned(rows: int, k: int, device: Any, seed: int) -> torch.Tensor:
    """Draw random float8_e4m3fn of shape (rows, k), its rows padded as `laid_out` needs them."""
    padded = -(-k // ROW_BYTES) * ROW_BYTES
    return inputs.randn((rows, padded), "float8_e4m3fn", device, seed)[:, :k]
