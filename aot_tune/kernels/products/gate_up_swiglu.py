"""Gated projection of a SwiGLU layer: kernel, host function, search space and declaration.

``out = silu(x gate^T) * (x up^T)`` (Shazeer, "GLU Variants Improve Transformer", 2020): both products and the
activation in one kernel, so that the products are neither written nor read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs
from aot_tune.declare.declaration import Close, Work
from aot_tune.errors import LaunchError
from aot_tune.kernels.activations import silu
from aot_tune.kernels.host.arguments import check_apart, check_dtype, check_rank, check_shape, indexable
from aot_tune.kernels.host.padding import padded
from aot_tune.kernels.products import product
from aot_tune.kernels.products.product_space import (
    MatrixUnit,
    Rows,
    config_of,
    fitting,
    matrix_unit,
    overflow,
    persistent_grid,
    tile_of,
    waste,
    work_of,
)
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact, Pow2, edge
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

_GROUP = 8
"""Rows of tiles that are taken together, down before along, to keep L2 warm: nearly every matmul is tuned to
this number."""


@ct.kernel
def gate_up_swiglu_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, tile_m: ct.Constant[int], tile_n: ct.Constant[int], tile_k: ct.Constant[int]
):
    """Compute every `num_blocks`-th tile, accumulating in float32; `weight` is (2, N, K), gate and up."""
    tiles_m, tiles_n = ct.cdiv(x.shape[0], tile_m), ct.cdiv(weight.shape[1], tile_n)
    for tile in range(ct.bid(0), tiles_m * tiles_n, ct.num_blocks(0)):
        m, n = product.place(tile, x.shape[0], tile_m, tiles_n, _GROUP)
        # Sums are kept transposed, with the weights as the left factor: their 64 columns fill the matrix unit
        # of sm90, where few tokens would run on the older unit of single warps, and one instruction reads 128
        # tokens. The first step is before the loop: zero-start (README).
        nothing = ct.zeros((tile_n, tile_m), ct.float32)
        gate, up = _multiply_add(x, weight, m, n, 0, tile_m, tile_n, tile_k, nothing, nothing)
        for step in range(1, ct.cdiv(x.shape[1], tile_k)):
            gate, up = _multiply_add(x, weight, m, n, step, tile_m, tile_n, tile_k, gate, up)
        product.store(out, m, n, (silu(gate) * up).astype(out.dtype).transpose(), tile_n)


def _multiply_add(
    x: Any, weight: Any, m: Any, n: Any, step: Any, tile_m: Any, tile_n: Any, tile_k: Any, gate: Any, up: Any
) -> Any:
    """Add the `step`-th products to the sums of a tile, both transposed; its first row is `m`."""
    zero = ct.PaddingMode.ZERO
    # Transposed once, for both: with one transpose each, as by `product.multiply_add`, sm120 has other code.
    tokens = product.rows_from(x, m, step, tile_m, tile_k).transpose()
    of_gate = ct.load(weight, (0, n, step), (1, tile_n, tile_k), padding_mode=zero)
    of_up = ct.load(weight, (1, n, step), (1, tile_n, tile_k), padding_mode=zero)
    gate = ct.mma(of_gate.reshape((tile_n, tile_k)), tokens, gate)
    return gate, ct.mma(of_up.reshape((tile_n, tile_k)), tokens, up)


def gate_up_swiglu(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Project `x` by the gate and by the up matrix, and return silu of the first product times the second.

    Accumulates and activates in float32 and rounds once (Shazeer, 2020). If rows of `x` or `weight` do not
    all start at a multiple of 16 bytes, the call makes a copy whose rows do.

    Args:
        x: (tokens, K), bfloat16 or float16, on a GPU; any strides.
        weight: (2 N, K), of the dtype of `x`: the N rows of the gate, then those of up, as vLLM and SGLang
            merge them (``gate_up_proj``). Strides are below 2^31 elements, and so is the distance from gate
            to up: N rows of a contiguous weight have fewer than 2^31 elements.
        out: (tokens, N), the result, of the dtype of `x`; it must share no memory with `x` or `weight`. A new
            tensor is made if it is None.

    Returns:
        `out`, or the new tensor.

    Raises:
        LaunchError: An argument cannot be launched; the error names it and what to pass.
    """
    check_gate_up_swiglu(x, weight, out=out)
    (tokens, k), n = x.shape, weight.shape[0] // 2
    written = torch.empty((tokens, n), dtype=x.dtype, device=x.device) if out is None else out
    if written.numel() == 0:
        return written
    if k == 0:
        return written.zero_()  # sums of nothing
    rows, both, counted = indexable("gate_up_swiglu", x=x, weight=weight.view(2, n, k), out=written)
    if out is not None:
        check_apart("gate_up_swiglu", "out", out, x=x, weight=weight)
    gate_up_swiglu_tunable.launch(padded(rows), padded(both), counted)
    return written


def check_gate_up_swiglu(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> None:
    """Refuse shapes and dtypes that `gate_up_swiglu` does not take."""
    check_rank("gate_up_swiglu", "x", x, "tokens K")
    check_rank("gate_up_swiglu", "weight", weight, "2N K")
    check_dtype("gate_up_swiglu", "x", x, torch.bfloat16, torch.float16)
    check_dtype("gate_up_swiglu", "weight", weight, x.dtype)
    (tokens, k), merged = x.shape, weight.shape[0]
    if merged % 2:
        raise LaunchError(
            f"gate_up_swiglu: weight has {merged} rows; pass as many rows of up as of the gate, "
            "torch.cat((gate, up))"
        )
    check_shape("gate_up_swiglu", "weight", weight, (merged, k), f"x of {k} columns")
    if out is not None:
        check_shape("gate_up_swiglu", "out", out, (tokens, merged // 2), "the product")
        check_dtype("gate_up_swiglu", "out", out, x.dtype)


# The search space -------------------------------------------------------------------------------

_ITEM_BYTES = 2  # bfloat16 and float16

# tile_n counts columns of `out`: a block computes twice as many. Seeded from NVIDIA's TileGym, fused linear
# and gated activation (src/tilegym/ops/cutile/linear_gluact_linear.py): 128 x 128 x 64 with two blocks from
# sm100 on, smaller tiles before; and from what matmul is tuned to on the H200.
_SPACES: Mapping[MatrixUnit, Rows] = {
    MatrixUnit.WARPGROUP: (
        ((16,), (64,), (128,), (1,), (1, 2)),
        ((16,), (64,), (256,), (1,), (1,)),
        ((16,), (128,), (64, 128), (1,), (1,)),
        ((32,), (64,), (128,), (1,), (1, 2)),
        ((32,), (128,), (64,), (1,), (1,)),
        ((64,), (64,), (64,), (1,), (1, 2)),
        ((64,), (64,), (128,), (1,), (1,)),
        ((64,), (128,), (64,), (1,), (1,)),
        ((128,), (64,), (64,), (1,), (1, 2)),
        ((128,), (64,), (128,), (1,), (1,)),
        ((128,), (128,), (64,), (2,), (1,)),
        ((256,), (64,), (64, 128), (2,), (1,)),
    ),
    MatrixUnit.TENSOR_MEMORY: (
        ((16, 32), (64, 128), (128,), (1,), (1,)),
        ((64,), (64, 128), (64, 128), (1,), (1,)),
        ((128,), (64, 128), (64,), (1, 2), (1,)),
        ((256,), (64, 128), (64,), (1, 2), (1,)),
        ((256,), (64,), (128,), (2,), (1,)),
    ),
    MatrixUnit.WARP: (
        ((16, 32), (32, 64), (64,), (1,), (1, 2)),
        ((64,), (32, 64), (64,), (1,), (1, 2)),
        ((128,), (32, 64), (32,), (1,), (1, 2)),
        ((128,), (64,), (64,), (1,), (1,)),
        ((128,), (64,), (32,), (2,), (1,)),
    ),
}


@cache
def _space(arch: Arch) -> tuple[Config, ...]:
    return fitting(_SPACES, arch, item_bytes=_ITEM_BYTES, products=2)


def _default(arch: Arch, problem: Problem) -> Config:
    tokens = problem.size("tokens")
    if matrix_unit(arch) is MatrixUnit.WARP:
        return config_of(64, 64, 64, num_ctas=1, occupancy=2)  # larger tiles spill: sm80-spill (README)
    tile_m, tile_k = (16, 128) if tokens <= 16 else (64, 64) if tokens <= 64 else (128, 64)
    return config_of(tile_m, 64, tile_k, num_ctas=1, occupancy=1)


def _legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    refusal = overflow(config, arch, item_bytes=_ITEM_BYTES, products=2)
    return refusal or waste(config, edge(problem.size("tokens"))) or True


def _problem(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Mapping[str, object]:
    return {"dtype": x.dtype, "tokens": x.shape[0], "N": weight.shape[1], "K": x.shape[1]}


def _tiles(config: Config, problem: Problem) -> int:
    tile_m, tile_n, _ = tile_of(config)
    return -(-problem.size("tokens") // tile_m) * -(-problem.size("N") // tile_n)


def _work(config: Config, problem: Problem) -> Work:
    return work_of(config, problem.size("K"), item_bytes=_ITEM_BYTES, products=2)


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    return persistent_grid(config, device, _tiles(config, problem))


def _args(config: Config, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
    return x, weight, out, *tile_of(config)


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    tokens, n, k = problem.size("tokens"), problem.size("N"), problem.size("K")
    dtype = str(problem["dtype"])
    x = padded(inputs.randn((tokens, k), dtype, device, 2 * seed))
    weight = inputs.randn(
        (2, n, k), dtype, device, 2 * seed + 1, scale=k**-0.5
    )  # so that products are near 1
    return x, padded(weight), inputs.empty((tokens, n), dtype, device)


def _reference(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Close:
    exact = x.double()
    gate, up = (exact @ matrix.double().t() for matrix in weight)
    # One rounding to the output's dtype is half its eps. The products have an error of 2e-4 (see the
    # reference of matmul); each is multiplied by the other, up to 5 for normal inputs, and the slope of silu
    # is 1.1.
    return Close(value=torch.nn.functional.silu(gate) * up, rtol=torch.finfo(x.dtype).eps, atol=4e-3)


_TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
"""Tokens to sweep."""

_FEW_TOKENS = (1, 16, 64, 256, 1024, 4096)
"""Tokens to sweep for layers whose neighbours are swept more closely."""


def _shapes(
    n: int, k: int, dtype: str = "bfloat16", *, tokens: tuple[int, ...] = _TOKENS
) -> dict[str, object]:
    return {"dtype": dtype, "tokens": tokens, "N": n, "K": k}


gate_up_swiglu_tunable = Tunable(
    name="gate_up_swiglu",
    package=__package__,
    kernel=gate_up_swiglu_kernel,
    axes={"tokens": Pow2(), "N": Exact(), "K": Exact()},
    batch_axes=("tokens",),
    problem=_problem,
    search_space=lambda arch, problem: _space(arch),
    legal=_legal,
    default=_default,
    grid_fn=_grid,
    args_fn=_args,
    tiles=_tiles,
    work=_work,
    make_args=_make_args,
    reference=_reference,
    outputs=("out",),
    typical=[
        _shapes(14336, 4096),  # Llama 3.1 8B
        _shapes(28672, 8192),  # Llama 3.1 70B
        _shapes(12288, 4096),  # Qwen3 8B
        _shapes(25600, 5120),  # Qwen3 32B
        _shapes(14336, 4096, "float16"),  # Llama 3.1 8B, run in float16
        _shapes(3072, 1024, tokens=_FEW_TOKENS),  # Qwen3 0.6B
        _shapes(2048, 7168, tokens=_FEW_TOKENS),  # DeepSeek-V3, shared expert
    ],
)
"""Declaration: ``gate_up_swiglu_tunable.launch(x, weight, out)`` takes weight as (2, N, K)."""
