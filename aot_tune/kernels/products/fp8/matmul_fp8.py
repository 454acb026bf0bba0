"""Product of two fp8 matrices: the host function; kernel, search space and declaration for tensor scales.

Block scales have a kernel of their own, in `matmul_fp8_block`.
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
from aot_tune.errors import LaunchError
from aot_tune.kernels.host.arguments import check_apart, check_dtype, check_rank, check_shape, indexable
from aot_tune.kernels.products import product
from aot_tune.kernels.products.fp8 import fp8
from aot_tune.kernels.products.fp8.matmul_fp8_block import BLOCK, matmul_fp8_block_tunable
from aot_tune.kernels.products.product_space import MatrixUnit, Rows, matrix_unit, tile_of, wrongly_peeled
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact, Pow2, edge
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem


@ct.kernel
def matmul_fp8_kernel(  # type: ignore[no-untyped-def]
    a, b, scale_a, scale_b, c,
    tile_m: ct.Constant[int], tile_n: ct.Constant[int], tile_k: ct.Constant[int], group: ct.Constant[int],
    peeled: ct.Constant[int],
):  # fmt: skip
    """Compute every `num_blocks`-th tile of C, accumulating in float32; `peeled` as in `product.one_sum`."""
    tiles_m, tiles_n = ct.cdiv(a.shape[0], tile_m), ct.cdiv(b.shape[1], tile_n)
    swapped = tile_m < fp8.UNIT_ROWS
    scale = ct.load(scale_a, (0,), (1,)) * ct.load(scale_b, (0,), (1,))
    for tile in range(ct.bid(0), tiles_m * tiles_n, ct.num_blocks(0)):
        m, n = product.place(tile, a.shape[0], tile_m, tiles_n, group)
        sums = product.one_sum(a, b, m, n, tile_m, tile_n, tile_k, False, swapped, peeled) * scale
        product.store(c, m, n, product.turned(sums.astype(c.dtype), swapped), tile_n)


def matmul_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply two scaled fp8 matrices, accumulating in float32; from sm90 on.

    Scales are factors: the true value of an element is ``a * scale_a``. They are of one of two kinds:

    - tensor scales: `scale_a` and `scale_b` have one element each;
    - block scales as DeepSeek-V3 ships them: `scale_a` of shape (M, ceil(K / 128)), one for a token and 128
      columns, and `scale_b` of shape (ceil(N / 128), ceil(K / 128)), one for 128 x 128 elements of a weight.
      `scale_b` has the layout of the checkpoint (``weight_scale_inv``), its rows along N, although `b` is
      transposed.

    On sm90 the hardware keeps 14 bits of the sums over 128 columns, which are then added in float32. The
    error of a result is up to 1e-3 of a typical element of C, plus its rounding (as torch._scaled_mm with
    ``use_fast_accum=False``).

    Args:
        a: (M, K), float8_e4m3fn, on a GPU; stride 1 along K. If the other stride or the address is not a
            multiple of 16, the call makes a copy with padded rows.
        b: (K, N), float8_e4m3fn, as ``weight.t()`` of a contiguous (N, K) weight lies; strides as for `a`.
            A weight whose rows are padded, ``room[:, :K].t()``, saves the copy.
        scale_a: float32, see above; any strides. Block scales are read fastest with stride 1 along M and the
            other a multiple of 4, as torch._scaled_mm and DeepGEMM take them.
        scale_b: float32, see above; any strides.
        out_dtype: bfloat16 or float16; the dtype of the result if `out` is None.
        out: (M, N), the result, bfloat16 or float16; it must share no memory with the others. A new tensor is
            made if it is None.

    Returns:
        `out`, or the new tensor.

    Raises:
        LaunchError: An argument cannot be launched; the error names it and what to pass.
    """
    check_matmul_fp8(a, b, scale_a, scale_b, out_dtype=out_dtype, out=out)
    (m, k), n = a.shape, b.shape[1]
    result = torch.empty((m, n), dtype=out_dtype, device=a.device) if out is None else out
    if result.numel() == 0:
        return result
    if k == 0:
        return result.zero_()  # a sum of nothing
    a, b, scale_a, scale_b, written = indexable(
        "matmul_fp8", a=a, b=b, scale_a=scale_a, scale_b=scale_b, out=result
    )
    if out is not None:
        check_apart("matmul_fp8", "out", out, a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    a, b = fp8.laid_out(a, b)
    if scale_a.numel() == 1 and scale_b.numel() == 1:
        matmul_fp8_tunable.launch(a, b, scale_a.view(1), scale_b.view(1), written)
    else:
        matmul_fp8_block_tunable.launch(a, b, scale_a, scale_b, written)
    return result


def check_matmul_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> None:
    """Refuse shapes and dtypes that `matmul_fp8` does not take."""
    check_rank("matmul_fp8", "a", a, "M K")
    check_rank("matmul_fp8", "b", b, "K N")
    check_dtype("matmul_fp8", "a", a, torch.float8_e4m3fn)
    check_dtype("matmul_fp8", "b", b, torch.float8_e4m3fn)
    check_dtype("matmul_fp8", "scale_a", scale_a, torch.float32)
    check_dtype("matmul_fp8", "scale_b", scale_b, torch.float32)
    (m, k), n = a.shape, b.shape[1]
    check_shape("matmul_fp8", "b", b, (k, n), f"a of {k} columns")
    if out is None:
        if out_dtype not in _OUT:
            raise LaunchError(f"matmul_fp8: out_dtype is {out_dtype}; pass torch.bfloat16 or torch.float16")
    else:
        check_shape("matmul_fp8", "out", out, (m, n), "the product")
        check_dtype("matmul_fp8", "out", out, *_OUT)
    if m * n * k and scale_a.numel() * scale_b.numel() != 1:
        blocks = -(-k // BLOCK)
        check_shape("matmul_fp8", "scale_a", scale_a, (m, blocks), f"a of {m} x {k}, in blocks of 128,")
        check_shape(
            "matmul_fp8", "scale_b", scale_b, (-(-n // BLOCK), blocks), f"b of {k} x {n}, in blocks of 128,"
        )


_OUT = (torch.bfloat16, torch.float16)

# The search space -------------------------------------------------------------------------------

# tile_m, tile_n, tile_k, group, peeled, num_ctas, occupancy, num_worker_warps. The tiles of vLLM's CUTLASS
# kernels for sm90 (csrc/quantization/w8a8/cutlass/c3x/scaled_mm_sm90_fp8_dispatch.cuh: 16 x 64 x 256 and
# 64 x 64 x 256 for few tokens, 64 x 128 x 128, 128 x 128 x 128, clusters of two), and those around them.

_WARPGROUP: Rows = (
    ((16, 32), (64, 128), (128, 256), (8,), (0,), (1,), (1, 2), (4,)),
    ((64,), (64,), (128, 256), (8,), (0,), (1,), (2,), (4,)),
    ((64,), (128,), (128,), (8,), (0,), (1,), (1, 2), (4,)),
    ((64,), (128,), (256,), (8,), (0,), (1,), (2,), (4,)),
    ((128,), (64,), (128,), (8,), (0,), (1,), (2,), (4,)),
    ((128,), (128,), (128,), (8, 16), (0,), (1,), (1,), (8,)),
    ((128,), (128,), (128,), (8,), (0,), (2,), (2,), (4,)),
    ((256,), (128,), (128,), (8, 16), (0,), (2,), (1,), (8,)),
)
"""sm90. Eight warps are two groups: one adds in float32 while the other multiplies. Peeled, on an H200, they
are 3 to 5 % slower, and two blocks of 64 x 128 on a multiprocessor 10 to 30 %."""

_TENSOR_MEMORY: Rows = (
    ((16, 32), (64, 128), (128, 256), (8,), (1,), (1,), (1, 2), (4,)),
    ((64,), (64, 128), (128, 256), (8,), (1,), (1,), (1,), (4,)),
    ((128,), (128, 256), (128,), (8, 16), (1,), (1, 2), (1,), (4,)),
    ((128,), (128,), (256,), (8,), (1,), (1,), (1,), (4,)),
    ((256,), (128, 256), (128,), (8, 16), (1,), (1, 2), (1,), (4,)),
)
"""sm100 to sm110."""

_WARP: Rows = (
    ((16, 32), (64, 128), (128,), (8,), (1,), (1,), (1, 2), (4,)),
    ((64,), (64, 128), (64, 128), (8,), (1,), (1,), (1, 2), (4,)),
    ((128,), (64,), (64, 128), (8, 16), (1,), (1,), (1,), (4,)),
    ((128,), (128,), (64, 128), (8, 16), (1,), (2,), (1,), (4,)),
)
"""sm120 and later: matrix units fed from registers."""

_CONSTANTS = ("tile_m", "tile_n", "tile_k", "group", "peeled")


def _rows(arch: Arch) -> Rows:
    if matrix_unit(arch) is MatrixUnit.TENSOR_MEMORY:
        return _TENSOR_MEMORY
    return _WARP if arch.major > 11 else _WARPGROUP


@cache
def _space(arch: Arch) -> tuple[Config, ...]:
    every = (fp8.config(_CONSTANTS, v[:5], *v[5:]) for row in _rows(arch) for v in itertools.product(*row))
    return tuple(config for config in every if fp8.does_not_fit(config, max(arch, Arch(9, 0))) is None)


def _default(arch: Arch, problem: Problem) -> Config:
    rows = edge(problem.size("M"))
    if rows > 64 and _rows(arch) is _WARPGROUP:
        return fp8.config(_CONSTANTS, (128, 128, 128, 8, 0), 1, 1, 8)
    tile_m = min(max(rows, 16), 64)
    tile_n = 64 if tile_m < 64 or arch.major > 11 else 128
    peeled = 0 if _rows(arch) is _WARPGROUP else 1
    occupancy = 1 if _rows(arch) is _TENSOR_MEMORY else 2
    return fp8.config(_CONSTANTS, (tile_m, tile_n, 128, 8, peeled), 1, occupancy, 4)


def _legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    refusal = wrongly_peeled(config) or fp8.does_not_fit(config, arch)
    return refusal or fp8.does_not_suit(config, problem) or True


# The declaration --------------------------------------------------------------------------------


def _problem(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.Tensor
) -> Mapping[str, object]:
    return {"dtype": out.dtype, "M": a.shape[0], "N": b.shape[1], "K": a.shape[1]}


def _work(config: Config, problem: Problem) -> Work:
    tile_m, tile_n, tile_k = tile_of(config)
    return Work(
        steps=-(-problem.size("K") // tile_k),
        flops=2.0 * tile_m * tile_n * tile_k,
        load_bytes=float((tile_m + tile_n) * tile_k),
        store_bytes=2.0 * tile_m * tile_n,
    )


def _args(config: Config, a: Any, b: Any, scale_a: Any, scale_b: Any, out: Any) -> tuple[Any, ...]:
    return a, b, scale_a, scale_b, out, *tile_of(config), int(config["group"]), int(config["peeled"])


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    m, n, k = problem.size("M"), problem.size("N"), problem.size("K")
    a, b = fp8.aligned(m, k, device, 4 * seed), fp8.aligned(n, k, device, 4 * seed + 1)
    unit = k**-0.5  # so that C is of the order of 1
    scale_a = inputs.uniform((1,), 0.5, 1.5, "float32", device, 4 * seed + 2)
    scale_b = inputs.uniform((1,), 0.5 * unit, 1.5 * unit, "float32", device, 4 * seed + 3)
    return a, b.t(), scale_a, scale_b, inputs.empty((m, n), str(problem["dtype"]), device)


def _reference(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.Tensor
) -> Close:
    # One rounding to the output's dtype is half its eps. The absolute term is for what the matrix unit of
    # sm90 cuts off: 2^-13 of each of its terms, 1e-3 of C after all steps. Leaving out a step would change
    # results by 0.04 or more; keeping all sums in the unit, as with `use_fast_acc`, by 1e-2 for a large K.
    value = a.double() @ b.double() * (scale_a.double() * scale_b.double())
    return Close(value=value, rtol=torch.finfo(out.dtype).eps, atol=5e-3)


_M = Pow2.edges(1, 16384)[::2]  # every other bucket: the others take their neighbour's

_FEW = (1, 16, 64, 256, 1024, 4096)
"""Rows to sweep for layers whose neighbours are swept more closely."""

matmul_fp8_tunable = Tunable(
    name="matmul_fp8",
    package=__package__,
    kernel=matmul_fp8_kernel,
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
        {"dtype": "bfloat16", "M": _M, "N": 6144, "K": 4096},  # Llama 3.1 8B FP8, queries, keys and values
        {"dtype": "bfloat16", "M": _M, "N": 28672, "K": 4096},  # Llama 3.1 8B FP8, gate and up
        {"dtype": "bfloat16", "M": _M, "N": 4096, "K": 14336},  # Llama 3.1 8B FP8, down
        {"dtype": "bfloat16", "M": _M, "N": 10240, "K": 8192},  # Llama 3.1 70B FP8, queries, keys and values
        {"dtype": "bfloat16", "M": _M, "N": 8192, "K": 8192},  # Llama 3.1 70B FP8, attention output
        {"dtype": "bfloat16", "M": _M, "N": 8192, "K": 28672},  # Llama 3.1 70B FP8, down
        {"dtype": "bfloat16", "M": _FEW, "N": 57344, "K": 8192},  # Llama 3.1 70B FP8, gate and up
        {"dtype": "bfloat16", "M": 320, "N": 32576, "K": 7168},  # N no multiple of 128
        {"dtype": "float16", "M": (1, 64, 4096), "N": 6144, "K": 4096},  # Llama 3.1 8B FP8, run in float16
    ],
)
"""Declaration: ``matmul_fp8_tunable.launch(a, b, scale_a, scale_b, out)`` takes scales of shape (1,)."""
