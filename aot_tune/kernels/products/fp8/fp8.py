"""Limits of an arch and layouts that both fp8 products share. Knows no scale."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from aot_tune import inputs
from aot_tune.errors import LaunchError
from aot_tune.kernels.host.arguments import PLAIN_TENSORS, address
from aot_tune.kernels.host.padding import ROW_BYTES, padded_copy, padded_width
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

Rows = Sequence[tuple[tuple[int, ...], ...]]
"""Rows of values for the constants in order, then for num_ctas, occupancy and num_worker_warps; a row stands
for all combinations."""

COMPILERS_WARPS = 4
"""The num_worker_warps that the compiler takes where a config names none."""

_REGISTER_SUMS = 64 * 128 // 4
"""Sums that a warp holds in registers without spilling; it holds them twice, those of the last 128 columns
and those of all."""

_TENSOR_MEMORY_SUMS = 128 * 512
"""Sums in the tensor memory of a multiprocessor: 128 lanes of 512 columns (PTX ISA, tcgen05)."""


@cache  # every unseen shape asks for its default
def config(
    names: tuple[str, ...], values: tuple[int, ...], num_ctas: int, occupancy: int, warps: int
) -> Config:
    """A config of these constants and hints."""
    hints = {"num_ctas": num_ctas, "occupancy": occupancy}
    if warps != COMPILERS_WARPS:
        hints["num_worker_warps"] = warps
    return Config(constants=dict(zip(names, values, strict=True)), hints=hints)


def hints_of(config: Config) -> tuple[int, int, int]:
    """num_ctas, occupancy and num_worker_warps of a config, which a caller's own may leave out."""
    hints = config.hints
    return (
        hints.get("num_ctas", 1),
        hints.get("occupancy", 1),
        hints.get("num_worker_warps", COMPILERS_WARPS),
    )


def has_tensor_memory(arch: Arch) -> bool:
    """Whether sums have a memory of their own."""
    return arch.major in (10, 11)


def does_not_fit(config: Config, arch: Arch, tile_m: int, tile_n: int, tile_k: int) -> str | None:
    """Why an arch cannot hold a config, or None."""
    if arch < Arch(9, 0):
        return f"cuTile has fp8 from sm90 on, not for {arch}; convert both to bfloat16 and call matmul"
    num_ctas, occupancy, warps = hints_of(config)
    sums = tile_m * tile_n // num_ctas
    if has_tensor_memory(arch):
        if sums * occupancy > _TENSOR_MEMORY_SUMS:
            return f"{occupancy} tiles of {tile_m} x {tile_n} over {num_ctas} blocks overflow tensor memory"
    elif sums > _REGISTER_SUMS * warps:
        return (
            f"a tile of {tile_m} x {tile_n} over {num_ctas} blocks of {warps} warps overflows the registers"
        )
    # Two steps must fit: with one, each load is waited for. Blocks that share a tile split its long side.
    stage = (max(tile_m, tile_n) // num_ctas + min(tile_m, tile_n)) * tile_k
    available = Device.reference(arch).shared_memory_per_sm
    if 2 * stage * occupancy > available:
        return f"{occupancy} blocks of 2 x {stage} bytes overflow {available} of shared memory"
    return None


def does_not_suit(config: Config, problem: Problem) -> str | None:
    """Why a config wastes work on a problem's bucket, or None."""
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
    """Tiles of a product."""
    return -(-problem.size("M") // int(config["tile_m"])) * -(-problem.size("N") // int(config["tile_n"]))


def grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    """A grid of as many blocks as the GPU runs at once, but not more than there are tiles."""
    num_ctas, occupancy, _ = hints_of(config)
    return (max(1, min(device.sm_count * occupancy // num_ctas, tiles(config, problem))),)


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
    """Random float8_e4m3fn of shape (rows, k), its rows padded as `laid_out` needs them."""
    padded = -(-k // ROW_BYTES) * ROW_BYTES
    return inputs.randn((rows, padded), "float8_e4m3fn", device, seed)[:, :k]
