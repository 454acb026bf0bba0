"""Matrix product C[M, N] = A[M, K] B[K, N]: kernel, host function, declaration. Knows nothing of tuning or tables.

Persistent blocks that take tiles of C in an order that keeps L2 warm: `group` rows of tiles at a time, down its rows
before along them (the grouped order of Triton's matrix multiplication tutorial).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs
from aot_tune.arch import Arch
from aot_tune.bucket import Exact, Pow2, edge
from aot_tune.config import Config
from aot_tune.device import Device
from aot_tune.kernels.arguments import check_apart, check_dtype, check_rank, check_shape, check_sizes
from aot_tune.problem import Problem
from aot_tune.tunable import Close, Tunable, Work


@ct.kernel
def matmul_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    c,
    tile_m: ct.Constant[int],
    tile_n: ct.Constant[int],
    tile_k: ct.Constant[int],
    group: ct.Constant[int],
):
    """Compute every `num_blocks`-th tile of C, accumulating in float32."""
    zero = ct.PaddingMode.ZERO
    tiles_m, tiles_n = ct.cdiv(a.shape[0], tile_m), ct.cdiv(b.shape[1], tile_n)
    steps = ct.cdiv(a.shape[1], tile_k)
    for tile in range(ct.bid(0), tiles_m * tiles_n, ct.num_blocks(0)):
        first = tile // (group * tiles_n) * group
        rows = min(tiles_m - first, group)
        place = tile % (group * tiles_n)
        m, n = first + place % rows, place // rows
        # The first step stands before the loop. Begun from zeros inside it, the compiler folds "step 0 starts from
        # zero" into the loop: on sm_90 it then chooses every accumulator anew at each step, or waits for each product
        # before the next, in 77 of 108 configs. Written so, 80 of 108 pipeline and the other 24 spill by their size.
        acc = ct.mma(
            ct.load(a, (m, 0), (tile_m, tile_k), padding_mode=zero),
            ct.load(b, (0, n), (tile_k, tile_n), padding_mode=zero),
            ct.zeros((tile_m, tile_n), ct.float32),
        )
        for step in range(1, steps):
            acc = ct.mma(
                ct.load(a, (m, step), (tile_m, tile_k), padding_mode=zero),
                ct.load(b, (step, n), (tile_k, tile_n), padding_mode=zero),
                acc,
            )
        ct.store(c, (m, n), acc.astype(c.dtype))


def matmul(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply two matrices, accumulating in float32.

    Args:
        a: (M, K), bfloat16 or float16, on a GPU; any strides.
        b: (K, N), of the dtype of `a`; any strides, so that ``weight.t()`` of a linear layer will do.
        out: (M, N), where to write, of the dtype of `a`, apart from both in memory; a new tensor without it.

    Returns:
        `out`, or the new tensor.

    Raises:
        LaunchError: An argument cannot be launched; it names the argument and what to pass.
    """
    check_rank("matmul", "a", a, "M K")
    check_rank("matmul", "b", b, "K N")
    check_dtype("matmul", "a", a, torch.bfloat16, torch.float16)
    check_dtype("matmul", "b", b, a.dtype)
    (m, k), n = a.shape, b.shape[1]
    check_shape("matmul", "b", b, (k, n), f"a of {k} columns")
    if out is None:
        out = torch.empty((m, n), dtype=a.dtype, device=a.device)
    check_shape("matmul", "out", out, (m, n), "the product")
    check_dtype("matmul", "out", out, a.dtype)
    if out.numel() == 0:
        return out
    if k == 0:
        return out.zero_()  # a sum of nothing
    check_sizes("matmul", a=a, b=b, out=out)
    check_apart("matmul", out, a=a, b=b)
    matmul_tunable.launch(a, b, out)
    return out


# The search space ---------------------------------------------------------------------------------------------------

_Rows = Sequence[tuple[tuple[int, ...], ...]]
"""Each row the values of tile_m, tile_n, tile_k, group, num_ctas and occupancy; it stands for their product."""

_WARPGROUP: _Rows = (
    # A token or a few: only the weights' bytes count, so narrow tiles, to give every multiprocessor one, and deep steps.
    ((16,), (32, 64, 128), (128, 256), (8,), (1,), (1, 2)),
    ((32,), (64, 128), (128,), (8,), (1,), (1, 2)),
    ((64,), (32, 64), (128, 256), (8,), (1,), (1, 2)),
    # Tens of tokens to hundreds.
    ((64,), (64, 128), (64,), (8,), (1,), (1, 2)),
    ((64,), (128,), (128,), (8,), (1, 2), (1, 2)),
    ((64,), (256,), (64, 128), (8,), (1, 2), (1,)),
    ((128,), (64,), (64, 128), (8,), (1,), (1, 2)),
    # Prompts: the largest accumulators that stay in registers; two blocks share one tile or one multiprocessor.
    ((128,), (128,), (64, 128), (8, 16), (1, 2), (1, 2)),
    ((128,), (256,), (64, 128), (8, 16), (2,), (1,)),
    ((256,), (128,), (64, 128), (8, 16), (1, 2), (1,)),
    ((256,), (128,), (64,), (8, 16), (2,), (2,)),
    ((256,), (64,), (64, 128), (8,), (1,), (1,)),
)
"""sm90: 64 rows are the least that its matrix unit takes, fewer run on the older warp-wide one."""

_TENSOR_MEMORY: _Rows = (
    ((16,), (32, 64, 128), (128, 256), (8,), (1,), (1, 2)),
    ((32,), (64, 128), (128,), (8,), (1,), (1, 2)),
    ((64,), (64, 128), (64, 128), (8,), (1,), (1, 2)),
    ((64,), (128, 256), (128,), (8,), (2,), (1,)),
    ((128,), (64,), (64, 128), (8,), (1,), (1, 2)),
    ((128,), (128, 256), (64, 128), (8, 16), (1, 2), (1, 2)),
    ((256,), (128, 256), (64, 128), (8, 16), (1, 2), (1,)),
)
"""sm100 to sm110: accumulators have a memory of their own, twice what registers would hold."""

_WARP: _Rows = (
    ((16,), (32, 64, 128), (64, 128), (8,), (1,), (1, 2)),
    ((32,), (64, 128), (64, 128), (8,), (1,), (1, 2)),
    ((64,), (64,), (64, 128), (8,), (1,), (1, 2)),
    ((64,), (128, 256), (32, 64), (8,), (1,), (1, 2)),
    ((128,), (64,), (32, 64), (8,), (1,), (1, 2)),
    ((128,), (128,), (32, 64), (8, 16), (1, 2), (1, 2)),
    ((128,), (256,), (32, 64), (8, 16), (2,), (1,)),
    ((256,), (64,), (32, 64), (8,), (1,), (1, 2)),
    ((256,), (128,), (32, 64), (8, 16), (2,), (1,)),
)
"""sm80 to sm89, sm120 and later: matrix units fed from registers, a warp at a time."""


def _rows(arch: Arch) -> _Rows:
    if arch.major == 9:
        return _WARPGROUP
    return _TENSOR_MEMORY if arch.major in (10, 11) else _WARP


def _config(tile_m: int, tile_n: int, tile_k: int, group: int, num_ctas: int, occupancy: int) -> Config:
    return Config(
        constants={"tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k, "group": group},
        hints={"num_ctas": num_ctas, "occupancy": occupancy},
    )


def _search_space(arch: Arch, problem: Problem) -> list[Config]:
    every = (_config(*values) for row in _rows(arch) for values in itertools.product(*row))
    return [config for config in every if _too_much(config, arch) is None]


def _default(arch: Arch, problem: Problem) -> Config:
    tile = (64, 64, 128) if problem.size("M") <= 64 else (128, 128, 64)
    if _rows(arch) is _WARP:
        # Two blocks hide each other's waits, and at an occupancy of 1 the compiler spills.
        return _config(*(tile if tile[0] == 64 else (128, 128, 32)), 8, 1, 1 if _small(arch) and tile[0] == 64 else 2)
    return _config(*tile, 8, 1, 1)


def _small(arch: Arch) -> bool:
    """Whether a multiprocessor has about 100 KiB of shared memory instead of 160 or more."""
    return Device.reference(arch).shared_memory_per_sm < 160 * 1024
