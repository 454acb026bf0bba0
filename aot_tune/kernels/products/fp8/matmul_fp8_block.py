"""Product of two fp8 matrices with block scales: kernel, space and declaration. Its host is `matmul_fp8`.

DeepSeek-V3's scales: one for each token and 128 columns of A, one for each 128 x 128 elements of B. A product
over 128 columns is scaled in float32 and then added, so that sums never stay in the matrix unit (as in
DeepGEMM).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs
from aot_tune.declare.declaration import Close, Work
from aot_tune.kernels.products import product
from aot_tune.kernels.products.fp8 import fp8
from aot_tune.kernels.products.product_space import Rows
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact, Pow2, edge
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

BLOCK = 128
"""Columns of A that share a scale; rows and columns of B that share one."""


_LATENCY = 8
"""Latency hint of the loads, in the compiler's scale of 1 to 10: scale-latency (README). On an H200, a
tile of 64 x 128 ran 1.37 times as fast with 5 as without a hint, when its scales were still loaded and not
gathered."""


@ct.kernel
def matmul_fp8_block_kernel(  # type: ignore[no-untyped-def]
    a, b, scale_a, scale_b, c,
    tile_m: ct.Constant[int], tile_n: ct.Constant[int], group: ct.Constant[int],
):  # fmt: skip
    """Compute every `num_blocks`-th tile of C, accumulating in float32."""
    zero = ct.PaddingMode.ZERO
    tiles_m, tiles_n = ct.cdiv(a.shape[0], tile_m), ct.cdiv(b.shape[1], tile_n)
    swapped = tile_m < fp8.UNIT_ROWS
    nothing = product.turned(ct.zeros((tile_m, tile_n), ct.float32), swapped)
    for tile in range(ct.bid(0), tiles_m * tiles_n, ct.num_blocks(0)):
        m, n = product.order(tile, tiles_m, tiles_n, group)
        sums = nothing
        for step in range(ct.cdiv(a.shape[1], BLOCK)):
            x = ct.load(a, (m, step), (tile_m, BLOCK), padding_mode=zero, latency=_LATENCY)
            y = ct.load(b, (step, n), (BLOCK, tile_n), padding_mode=zero, latency=_LATENCY)
            scale = ct.load(scale_a, (m, step), (tile_m, 1), latency=_LATENCY)
            # One number that is gathered goes to registers; a load would use shared memory and a barrier.
            scale = scale * ct.gather(scale_b, (n * tile_n // BLOCK, step), check_bounds=False)
            part = product.multiply_add(x, product.turned(y, swapped), nothing, swapped, True)
            sums = sums + part * product.turned(scale, swapped)
        ct.store(c, (m, n), product.turned(sums.astype(c.dtype), swapped))


# The search space -------------------------------------------------------------------------------

# tile_m, tile_n, group, num_ctas, occupancy, num_worker_warps. The tiles are those that vLLM ships for this
# scaling on H200 (quantization/utils/configs/N=*,K=*,device_name=NVIDIA_H200,dtype=fp8_w8a8,
# block_shape=[128,128].json: 16 x 32 to 128 x 128, steps of 128) and those of NVIDIA's TileGym
# (ops/cutile/fp8_quantization_matmul.py). With two blocks a multiprocessor, one scales while the other
# multiplies.

_WARPGROUP: Rows = (
    ((16, 32), (64, 128), (8,), (1,), (1, 2), (4,)),
    ((64,), (32, 64, 128), (8,), (1,), (2,), (4,)),
    ((64,), (128,), (8,), (1,), (1,), (8,)),
    ((128,), (128,), (8, 16), (1,), (1,), (8,)),
    ((128,), (128,), (8, 16), (2,), (2,), (4,)),
    ((256,), (128,), (8, 16), (2,), (1,), (8,)),
    ((256,), (128,), (8,), (4,), (2,), (4,)),
)
"""sm90."""

_OTHERS: Rows = (
    ((16, 32), (64, 128), (8,), (1,), (1, 2), (4,)),
    ((64,), (64, 128), (8,), (1,), (1, 2), (4,)),
    ((128,), (64, 128), (8, 16), (1, 2), (1, 2), (4,)),
    ((256,), (128,), (8, 16), (2,), (1,), (4,)),
)
"""sm100 and later."""

_CONSTANTS = ("tile_m", "tile_n", "group")


@cache
def _space(arch: Arch) -> tuple[Config, ...]:
    rows = _WARPGROUP if arch.major == 9 else _OTHERS
    every = (fp8.config(_CONSTANTS, v[:3], *v[3:]) for row in rows for v in itertools.product(*row))
    return tuple(config for config in every if _does_not_fit(config, max(arch, Arch(9, 0))) is None)


def _default(arch: Arch, problem: Problem) -> Config:
    rows = edge(problem.size("M"))
    narrow = rows <= 64 or arch.major > 11
    return fp8.config(_CONSTANTS, (min(max(rows, 16), 64), 64 if narrow else 128, 8), 1, 2, 4)


@cache  # a choice asks for each config that it considers
def _does_not_fit(config: Config, arch: Arch) -> str | None:
    tile_n = int(config["tile_n"])
    if tile_n > BLOCK:
        return f"a tile of {tile_n} columns has several scales of B"
    stepped = Config(constants={**config.constants, "tile_k": BLOCK}, hints=config.hints)
    return fp8.does_not_fit(stepped, arch)


def _legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    return _does_not_fit(config, arch) or fp8.does_not_suit(config, problem) or True


# The declaration --------------------------------------------------------------------------------


def _problem(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.Tensor
) -> Mapping[str, object]:
    return {"dtype": out.dtype, "M": a.shape[0], "N": b.shape[1], "K": a.shape[1]}


def _work(config: Config, problem: Problem) -> Work:
    tile_m, tile_n = int(config["tile_m"]), int(config["tile_n"])
    return Work(
        steps=-(-problem.size("K") // BLOCK),
        flops=2.0 * tile_m * tile_n * BLOCK,
        load_bytes=float((tile_m + tile_n) * BLOCK),
        store_bytes=2.0 * tile_m * tile_n,
    )


def _args(config: Config, a: Any, b: Any, scale_a: Any, scale_b: Any, out: Any) -> tuple[Any, ...]:
    return a, b, scale_a, scale_b, out, int(config["tile_m"]), int(config["tile_n"]), int(config["group"])


_ALIGNED_SCALES = 4
"""Scales in 16 bytes, of which TMA needs strides to be multiples: with stride 1 along M, rows of `scale_a`
are padded to a multiple of this (as in DeepGEMM and torch._scaled_mm)."""


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    m, n, k = problem.size("M"), problem.size("N"), problem.size("K")
    blocks, unit = -(-k // BLOCK), k**-0.5  # so that C is of the order of 1
    a, b = fp8.aligned(m, k, device, 4 * seed), fp8.aligned(n, k, device, 4 * seed + 1)
    aligned_m = -(-m // _ALIGNED_SCALES) * _ALIGNED_SCALES
    scale_a = inputs.uniform((blocks, aligned_m), 0.5, 1.5, "float32", device, 4 * seed + 2).t()[:m]
    scale_b = inputs.uniform(
        (-(-n // BLOCK), blocks), 0.5 * unit, 1.5 * unit, "float32", device, 4 * seed + 3
    )
    return a, b.t(), scale_a, scale_b, inputs.empty((m, n), str(problem["dtype"]), device)


def _reference(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.Tensor
) -> Close:
    # One rounding to the output's dtype is half its eps. The absolute term is for what the matrix unit of
    # sm90 cuts off: 2^-13 of each of its terms, 1e-3 of C after all steps. Leaving out a step, or taking a
    # neighbour's scale, would change results by 0.09 or more.
    k, n = b.shape
    wide_a = a.double() * scale_a.double().repeat_interleave(BLOCK, 1)[:, :k]
    wide_b = (
        b.double() * scale_b.double().repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k].t()
    )
    return Close(value=wide_a @ wide_b, rtol=torch.finfo(out.dtype).eps, atol=5e-3)


_M = Pow2.edges(1, 16384)[::2]  # every other bucket: the others take their neighbour's

_FEW = (1, 16, 64, 256, 1024, 4096)
"""Rows to sweep for layers whose neighbours are swept more closely."""

matmul_fp8_block_tunable = Tunable(
    name="matmul_fp8_block",
    package=__package__,
    kernel=matmul_fp8_block_kernel,
    axes={"M": Pow2(), "N": Exact(), "K": Exact()},
    batch_axes=("M",),
    problem=_problem,
    search_space=lambda arch, problem: _space(arch),
    legal=_legal,
    default=_default,
    grid_fn=fp8.grid,
    args_fn=_args,
    tiles=fp8.tiles,
    work=_work,
    make_args=_make_args,
    reference=_reference,
    outputs=("out",),
    typical=[
        {"dtype": "bfloat16", "M": _M, "N": 2112, "K": 7168},  # DeepSeek-V3, into the latents
        {"dtype": "bfloat16", "M": _M, "N": 24576, "K": 1536},  # DeepSeek-V3, queries from their latent
        {"dtype": "bfloat16", "M": _M, "N": 32768, "K": 512},  # DeepSeek-V3, keys and values from theirs
        {"dtype": "bfloat16", "M": _M, "N": 7168, "K": 16384},  # DeepSeek-V3, attention output
        {"dtype": "bfloat16", "M": _M, "N": 4096, "K": 7168},  # DeepSeek-V3, shared expert's gate and up
        {"dtype": "bfloat16", "M": _M, "N": 7168, "K": 2048},  # DeepSeek-V3, shared expert's down
        {"dtype": "bfloat16", "M": _M, "N": 10240, "K": 5120},  # Qwen3 32B FP8, queries, keys and values
        {"dtype": "bfloat16", "M": _FEW, "N": 24576, "K": 4096},  # Qwen3 8B FP8, gate and up
        {"dtype": "bfloat16", "M": _FEW, "N": 4096, "K": 12288},  # Qwen3 8B FP8, down
        {"dtype": "bfloat16", "M": _FEW, "N": 5120, "K": 25600},  # Qwen3 32B FP8, down
        {"dtype": "bfloat16", "M": 320, "N": 32576, "K": 7168},  # N no multiple of 128
        {"dtype": "float16", "M": (1, 64, 4096), "N": 10240, "K": 5120},  # Qwen3 32B FP8, run in float16
    ],
)
"""Declaration: ``matmul_fp8_block_tunable.launch(a, b, scale_a, scale_b, out)`` takes block scales."""
