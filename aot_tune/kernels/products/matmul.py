"""Matrix product: kernel, host function and declaration; its search space is `dense_space`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs
from aot_tune.declare.declaration import Close
from aot_tune.kernels.host.arguments import check_apart, check_dtype, check_rank, check_shape, indexable
from aot_tune.kernels.host.padding import padded
from aot_tune.kernels.products import dense, split_k
from aot_tune.kernels.products.dense_space import (
    constants_of,
    default,
    grid,
    invariant,
    legal,
    space,
    tiles,
    work,
)
from aot_tune.tunable import Tunable
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem


@ct.kernel
def matmul_kernel(  # type: ignore[no-untyped-def]
    a, b, c, scratch,
    tile_m: ct.Constant[int], tile_n: ct.Constant[int], more: ct.Constant[int], tile_k: ct.Constant[int],
    swapped: ct.Constant[int], group: ct.Constant[int], peeled: ct.Constant[int],
    splits: ct.Constant[int], slices: ct.Constant[int],
):  # fmt: skip
    """Compute this block's tiles of C, accumulating in float32; `dense` explains the constants."""
    tile, order = (tile_m, tile_n, more, tile_k), (swapped, group, peeled)
    dense.compute(a, b, c, scratch, (), False, tile, order, (splits, slices))


def matmul(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply two matrices, accumulating in float32.

    If rows of `a` or `b` (columns, where those are contiguous) do not all start at a multiple of 16 bytes,
    the call makes a copy whose rows do.

    CUDA graphs: with up to 2048 rows, several blocks may share sums in memory that belongs to the stream. Run
    the same call once before it is captured (on the capturing stream, if there are several), and replay the
    graphs of one stream one after another.

    Args:
        a: (M, K), bfloat16 or float16, on a GPU; any strides.
        b: (K, N), of the dtype of `a`; any strides, so that it may be the ``weight.t()`` of a linear layer.
        out: (M, N), the result, of the dtype of `a`; it must share no memory with `a` or `b`. A new tensor is
            made if it is None.

    Returns:
        `out`, or the new tensor.

    Raises:
        LaunchError: An argument cannot be launched; the error names it and what to pass.
    """
    check_matmul(a, b, out=out)
    (m, k), n = a.shape, b.shape[1]
    written = torch.empty((m, n), dtype=a.dtype, device=a.device) if out is None else out
    if written.numel() == 0:
        return written
    if k == 0:
        return written.zero_()  # a sum of nothing
    a, b, counted = indexable("matmul", a=a, b=b, out=written)
    if out is not None:
        check_apart("matmul", "out", out, a=a, b=b)
    matmul_tunable.launch(padded(a), padded(b), counted, split_k.scratch(a, n))
    return written


def check_matmul(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> None:
    """Refuse shapes and dtypes that `matmul` does not take."""
    check_rank("matmul", "a", a, "M K")
    check_rank("matmul", "b", b, "K N")
    check_dtype("matmul", "a", a, torch.bfloat16, torch.float16)
    check_dtype("matmul", "b", b, a.dtype)
    (m, k), n = a.shape, b.shape[1]
    check_shape("matmul", "b", b, (k, n), f"a of {k} columns")
    if out is not None:
        check_shape("matmul", "out", out, (m, n), "the product")
        check_dtype("matmul", "out", out, a.dtype)


# The declaration --------------------------------------------------------------------------------


def _problem(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor
) -> Mapping[str, object]:
    return {"dtype": a.dtype, "M": a.shape[0], "N": b.shape[1], "K": a.shape[1]}


def _tiles(config: Config, problem: Problem) -> int:
    return tiles(config, problem.size("M"), problem.size("N"))


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    return grid(config, device, problem.size("M"), problem.size("N"))


def _args(
    config: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor
) -> tuple[Any, ...]:
    return a, b, out, scratch, *constants_of(config)


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    m, n, k, dtype = problem.size("M"), problem.size("N"), problem.size("K"), str(problem["dtype"])
    a = padded(inputs.randn((m, k), dtype, device, 2 * seed))
    b = inputs.randn((k, n), dtype, device, 2 * seed + 1, scale=k**-0.5)  # so that C is of the order of 1
    return a, padded(b), inputs.empty((m, n), dtype, device), split_k.scratch(a, n)


def _reference(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor
) -> dict[str, Close]:
    # One rounding to the output's dtype is half its eps. The absolute term is for the float32 sums, which the
    # matrix units truncate: 2^-23 of a running sum near 1, 1800 times for the largest K, is 2e-4. Leaving out
    # a step of tile_k would change results by 0.05.
    return {
        "out": Close(value=a.double() @ b.double(), rtol=torch.finfo(a.dtype).eps, atol=2e-3),
        "scratch": split_k.nothing_left(scratch),
    }


_BOTH = ("bfloat16", "float16")

_EVERY, _M = Pow2.edges(1, 16384), tuple(4**i for i in range(8))
"""Rows to sweep, 1 to 16384: every power of two for two layers, every second one for the others."""

_FEW, _HEAD = (1, 16, 64, 256, 1024, 4096), tuple(4**i for i in range(5))
"""Rows to sweep for layers whose neighbours are swept more closely, and for the heads of language models."""

matmul_tunable = Tunable(
    name="matmul",
    package=__package__,
    kernel=matmul_kernel,
    axes={"M": Pow2(), "N": Exact(), "K": Exact()},
    batch_axes=("M",),
    problem=_problem,
    search_space=space,
    legal=legal,
    invariant=invariant,
    default=default,
    grid_fn=_grid,
    args_fn=_args,
    tiles=_tiles,
    work=work,
    make_args=_make_args,
    reference=_reference,
    outputs=("out",),
    reset=("scratch",),
    typical=[
        {"dtype": "bfloat16", "M": _EVERY, "N": 6144, "K": 4096},  # Llama 3.1 8B, queries, keys and values
        {"dtype": "float16", "M": _M, "N": 6144, "K": 4096},  # and in float16
        {"dtype": "bfloat16", "M": _M, "N": 4096, "K": 4096},  # Llama 3.1 8B, attention output
        {"dtype": _BOTH, "M": _M, "N": 28672, "K": 4096},  # Llama 3.1 8B, gate and up
        {"dtype": "bfloat16", "M": _EVERY, "N": 4096, "K": 14336},  # Llama 3.1 8B, down
        {"dtype": "float16", "M": _M, "N": 4096, "K": 14336},  # and in float16
        {"dtype": "bfloat16", "M": _M, "N": 10240, "K": 8192},  # Llama 3.1 70B, queries, keys and values
        {"dtype": "bfloat16", "M": _M, "N": 8192, "K": 28672},  # Llama 3.1 70B, down
        {"dtype": "bfloat16", "M": _M, "N": 5120, "K": 25600},  # Qwen3 32B, down
        {"dtype": "bfloat16", "M": _M, "N": 5120, "K": 2048},  # Qwen3 30B-A3B, queries, keys and values
        {"dtype": "bfloat16", "M": _M, "N": 5120, "K": 2880},  # gpt-oss, queries, keys and values
        {"dtype": "bfloat16", "M": _M, "N": 2880, "K": 4096},  # gpt-oss, attention output
        {"dtype": "bfloat16", "M": _M, "N": 24576, "K": 1536},  # DeepSeek-V3, queries from their latent
        {"dtype": "bfloat16", "M": _M, "N": 7168, "K": 16384},  # DeepSeek-V3, attention output
        {"dtype": "bfloat16", "M": _HEAD, "N": 152064, "K": 3584},  # Qwen2.5 7B, lm_head
        {"dtype": "bfloat16", "M": _FEW, "N": 37888, "K": 3584},  # Qwen2.5 7B, gate and up
        {"dtype": "bfloat16", "M": _FEW, "N": 3584, "K": 18944},  # Qwen2.5 7B, down
        {"dtype": "bfloat16", "M": _FEW, "N": 1024, "K": 3072},  # Qwen3 0.6B, down
        {"dtype": "bfloat16", "M": _FEW, "N": 1024, "K": 8192},  # Llama 3.1 70B, keys or values alone
        {"dtype": "bfloat16", "M": _FEW, "N": 2048, "K": 1024},  # Qwen3 0.6B, queries
        {"dtype": "bfloat16", "M": _FEW, "N": 128, "K": 2048},  # Qwen3 30B-A3B, router
        {"dtype": "bfloat16", "M": (256, 1024, 4096), "N": 1280, "K": 3420},  # Qwen2.5-VL, vision, down
    ],
)
"""Declaration: ``matmul_tunable.launch(a, b, out, scratch)`` takes what `matmul` takes, and as
scratch zeros to work in."""
