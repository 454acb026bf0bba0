"""A linear layer: kernel, host function and declaration; its search space is `dense_space`.

``activation(x @ weight.t() + bias)`` in one kernel, so that the product is written once and not read again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs, workspace
from aot_tune.declare.declaration import Close
from aot_tune.errors import LaunchError
from aot_tune.kernels import activations
from aot_tune.kernels.host.arguments import (
    LARGEST_INDEX,
    check_apart,
    check_dtype,
    check_rank,
    check_shape,
    indexable,
)
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
from aot_tune.kernels.rows.rows import as_rows
from aot_tune.tunable import Tunable
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem


@ct.kernel
def linear_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, bias, scratch, biased, activation: ct.Constant[int],
    tile_m: ct.Constant[int], tile_n: ct.Constant[int], more: ct.Constant[int], tile_k: ct.Constant[int],
    swapped: ct.Constant[int], group: ct.Constant[int], peeled: ct.Constant[int],
    splits: ct.Constant[int], slices: ct.Constant[int],
):  # fmt: skip
    """Compute this block's tiles of `out`, accumulating in float32; `dense` explains the constants."""
    tile, order = (tile_m, tile_n, more, tile_k), (swapped, group, peeled)
    dense.compute(x, weight, out, scratch, (bias, biased, activation), True, tile, order, (splits, slices))


# The host function ------------------------------------------------------------------------------

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that the arguments may have."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``activation(x @ weight.t() + bias)``, accumulating in float32 and rounding once.

    float32 is multiplied as tf32: the matrix units keep 10 bits of the mantissa of each factor (sm90 drops
    the others), so that a product has a relative error of 2^-9.

    If rows of `x` or `weight` do not all start at a multiple of 16 bytes, the call makes a copy whose rows
    do; a weight whose rows are padded, ``room[:, :K]``, saves the copy.

    CUDA graphs: with up to 2048 rows, several blocks may share sums in memory that belongs to the stream. Run
    the same call once before it is captured (on the capturing stream, if there are several), and replay the
    graphs of one stream one after another.

    Args:
        x: (..., K), bfloat16, float16 or float32, on a GPU; leading dimensions that ``view`` can flatten.
        weight: (N, K), of the dtype of `x`, as ``torch.nn.Linear`` stores it; any strides.
        bias: (N,), of the dtype of `x`; None adds none.
        activation: "relu", "silu", "gelu" or "gelu_tanh"; None for none.
        out: (..., N), the result, of the dtype of `x`; it must share no memory with the others. A new tensor
            is made if it is None.

    Returns:
        `out`, or the new tensor.

    Raises:
        LaunchError: An argument cannot be launched; the error names it and what to pass.
    """
    # A quick test of all arguments at once; the checks that name an argument run only if it fails.
    try:
        rows = x if x.dim() == 2 else _as_matrix("x", x)
        (m, k), (n, columns), (x_row, x_column) = rows.shape, weight.shape, rows.stride()
        row, column = weight.stride()
        dtype, device = x.dtype, x.device
        number = activations.NUMBERS["none" if activation is None else activation]
        fine = (
            columns == k > 0
            and dtype in _DTYPES
            and weight.dtype == dtype
            and weight.device == device
            and not (x.is_neg() or weight.is_neg())
            and max(m, n, k, x_row, x_column, row, column) <= LARGEST_INDEX
            and (bias is None or _fine_bias(bias, n, dtype, device))
        )
    except (AttributeError, IndexError, KeyError, LaunchError, TypeError, ValueError):
        fine = False
    if not fine:
        check_linear(x, weight, bias, activation=activation)
        rows, weight, bias = _counted(x, weight, bias)
    if out is None:
        written = torch.empty((m, n), dtype=dtype, device=device)
        out = written if x.dim() == 2 else written.view(*x.shape[:-1], n)
    else:
        written = _written_rows(out, x, rows, weight, bias)
    if m * n and not k:  # sums over nothing are 0
        bias = torch.zeros((), dtype=dtype, device=device) if bias is None else bias
        written.copy_(activations.reference(bias, activations.NAMES[number]))
    elif m * n:
        biased = bias is not None
        bias = _no_bias(dtype, device) if bias is None else bias
        scratch = split_k.scratch(rows, n)
        linear_tunable.launch(padded(rows), padded(weight), written, bias, scratch, biased, number)
    return out


def check_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> None:
    """Refuse shapes, dtypes and activations that `linear` does not take, with an error that names one.

    `linear` calls it only after a quick test of all arguments has failed.
    """
    check_dtype("linear", "x", x, *_DTYPES)
    check_rank("linear", "weight", weight, "N K")
    check_dtype("linear", "weight", weight, x.dtype)
    n, k = weight.shape
    if x.dim() == 0 or x.shape[-1] != k:
        raise LaunchError(
            f"linear: x has shape {tuple(x.shape)}; weight of shape {(n, k)} asks for (..., {k})"
        )
    if activation is not None:
        activations.check_activation("linear", activation, *activations.NAMES)
    if bias is not None:
        check_dtype("linear", "bias", bias, x.dtype)
        check_shape("linear", "bias", bias, (n,), f"weight of {n} rows")
    if out is not None:
        check_dtype("linear", "out", out, x.dtype)
        check_shape("linear", "out", out, (*x.shape[:-1], n), "the product")


def _counted(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the arguments with strides that a kernel can index with, `x` as rows."""
    rows = _as_matrix("x", x)
    if bias is None:
        rows, weight = indexable("linear", x=rows, weight=weight)
    else:
        rows, weight, bias = indexable("linear", x=rows, weight=weight, bias=bias)
    return rows, weight, bias


def _written_rows(
    out: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Check `out` against the other arguments, which are checked already, and return it as rows.

    `rows` are the rows of `x`.
    """
    m, n = rows.shape[0], weight.shape[0]
    fine = (
        isinstance(out, torch.Tensor)
        and out.shape == ((m, n) if x.dim() == 2 else (*x.shape[:-1], n))
        and out.dtype == x.dtype
        and out.device == x.device
    )
    if not fine:
        check_linear(x, weight, out=out)
    if not m * n:
        return out
    if bias is None:
        check_apart("linear", "out", out, x=x, weight=weight)
    else:
        check_apart("linear", "out", out, x=x, weight=weight, bias=bias)
    written = out if out.dim() == 2 else _as_matrix("out", out)
    if fine and written.stride() == (n, 1) and not written.is_neg():
        return written
    return indexable("linear", x=rows, out=written)[1]


def _as_matrix(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as (rows, columns); a vector is one row."""
    if tensor.dim() == 1:
        return tensor.unsqueeze(0)
    if tensor.shape[-1] == 0:
        return tensor.view(math.prod(tensor.shape[:-1]), 0)
    return as_rows("linear", name, tensor)


def _fine_bias(bias: torch.Tensor, n: int, dtype: torch.dtype, device: torch.device) -> bool:
    return (
        bias.shape == (n,)
        and bias.dtype == dtype
        and bias.device == device
        and bias.stride() == (1,)
        and not bias.is_neg()
    )


_NO_BIAS = 16
"""Elements of the placeholder for a bias: a multiple of 16, as most biases have."""


@cache
def _no_bias(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a placeholder for a bias, never read, with the signature of any aligned bias.

    It is cached: a tensor allocated during a capture would belong to torch.compile's graph pool.
    """
    return workspace(device, _NO_BIAS, 1).partials.view(dtype)[:_NO_BIAS]


# The declaration --------------------------------------------------------------------------------


def _problem(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor, scratch: torch.Tensor,
    biased: bool, activation: int,
) -> Mapping[str, object]:  # fmt: skip
    return {
        "dtype": x.dtype,
        "activation": activations.NAMES[activation],
        "M": x.shape[0],
        "N": weight.shape[0],
        "K": x.shape[1],
    }


def _tiles(config: Config, problem: Problem) -> int:
    return tiles(config, problem.size("M"), problem.size("N"))


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    return grid(config, device, problem.size("M"), problem.size("N"))


def _args(
    config: Config, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor,
    scratch: torch.Tensor, biased: bool, activation: int,
) -> tuple[Any, ...]:  # fmt: skip
    return x, weight, out, bias, scratch, biased, activation, *constants_of(config)


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    m, n, k, dtype = problem.size("M"), problem.size("N"), problem.size("K"), str(problem["dtype"])
    x = padded(inputs.randn((m, k), dtype, device, 3 * seed))
    weight = inputs.randn((n, k), dtype, device, 3 * seed + 1, scale=k**-0.5)  # so that sums are near 1
    # The sweep times seed 0, without a bias, and verifies odd seeds too, which have one.
    biased = seed % 2 == 1
    bias = inputs.randn((n,), dtype, device, 3 * seed + 2) if biased else _no_bias(x.dtype, x.device)
    number = activations.NUMBERS[str(problem["activation"])]
    out, scratch = inputs.empty((m, n), dtype, device), split_k.scratch(x, n)
    return x, padded(weight), out, bias, scratch, biased, number


def _reference(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor, scratch: torch.Tensor,
    biased: bool, number: int,
) -> dict[str, Close]:  # fmt: skip
    exact = x.double() @ weight.double().t()
    if biased:
        exact += bias.double()
    # One rounding to the output's dtype is half its eps. The absolute term is for the float32 sums, which the
    # matrix units truncate: 2^-23 of a running sum near 1, 1800 times for the largest K, is 2e-4. As tf32
    # each factor loses up to 2^-10, half of that on average: sums shrink by 2^-10 and scatter by 6e-4.
    # Leaving out a step of tile_k would change results by 0.05.
    tf32 = x.dtype == torch.float32
    rtol, atol = (2.0**-9, 5e-3) if tf32 else (torch.finfo(x.dtype).eps, 2e-3)
    value = activations.reference(exact, activations.NAMES[number])
    return {
        "out": Close(value=value, rtol=rtol, atol=atol),
        "scratch": split_k.nothing_left(scratch),
    }


# What to sweep ----------------------------------------------------------------------------------

_M, _MANY = tuple(4**i for i in range(7)), (256, 1024, 4096)
"""Rows to sweep, 1 to 4096, and those of an encoder. Sizes in between are at most a doubling from one."""

_FEW, _HEAD = (1, 16, 64, 256, 1024, 4096), tuple(4**i for i in range(5))
"""Rows to sweep for layers whose neighbours are swept more closely, and for the heads of language models."""


def _shapes(n: int, k: int, *, m: tuple[int, ...] = _M, **others: object) -> Mapping[str, object]:
    return {"dtype": "bfloat16", "activation": "none", "M": m, "N": n, "K": k, **others}


_TYPICAL = (
    _shapes(6144, 4096),  # Llama 3.1 8B and Qwen3 8B, queries, keys and values
    _shapes(4096, 4096),  # Llama 3.1 8B and Qwen3 8B, attention output
    _shapes(28672, 4096),  # Llama 3.1 8B, gate and up
    _shapes(4096, 14336),  # Llama 3.1 8B, down; Qwen3 8B's is near
    _shapes(10240, 8192),  # Llama 3.1 70B, queries, keys and values
    _shapes(8192, 8192),  # Llama 3.1 70B, attention output
    _shapes(8192, 28672),  # Llama 3.1 70B, down
    _shapes(10240, 5120),  # Qwen3 32B, queries, keys and values
    _shapes(51200, 5120),  # Qwen3 32B, gate and up
    _shapes(5120, 25600),  # Qwen3 32B, down
    _shapes(5120, 2880),  # gpt-oss, queries, keys and values
    _shapes(2880, 4096),  # gpt-oss, attention output
    _shapes(128256, 4096, m=_HEAD),  # Llama 3.1 8B, lm_head
    _shapes(37888, 3584, m=_FEW),  # Qwen2.5 7B, gate and up
    _shapes(4096, 1024, m=_FEW),  # Qwen3 0.6B, queries, keys and values
    _shapes(1024, 3072, m=_FEW),  # Qwen3 0.6B, down
    _shapes(128, 2048, m=_FEW),  # Qwen3 30B-A3B, router
    _shapes(256, 7168, m=_FEW),  # DeepSeek-V3, router
    _shapes(1024, 8192, m=_FEW),  # Llama 3.1 70B, keys or values alone
    _shapes(1024, 1024, m=_FEW),  # BERT large, attention output
    _shapes(151936, 1024, m=_HEAD),  # Qwen3 0.6B, lm_head
    _shapes(262208, 5376, m=(1, 16, 256)),  # Gemma 3 27B, lm_head
    _shapes(6144, 4096, m=(16, *_MANY), dtype="float16"),  # Llama 3.1 8B, run in float16 (AWQ, GPTQ)
    _shapes(4096, 4096, m=_MANY, dtype="float32"),
    _shapes(5120, 1280, m=_MANY, activation="gelu"),  # Whisper large v3, fc1
    _shapes(4304, 1152, m=_MANY, activation="gelu_tanh"),  # SigLIP so400m, fc1
    _shapes(16384, 4096, m=_MANY, activation="relu"),  # OPT 6.7B, fc1
    _shapes(3072, 3072, m=(1, *_MANY), activation="silu"),  # FLUX.1, embeddings of timesteps
)

linear_tunable = Tunable(
    name="linear",
    package=__package__,
    kernel=linear_kernel,
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
    typical=_TYPICAL,
)
"""Declaration: ``linear_tunable.launch(x, weight, out, bias, scratch, biased, activation)`` takes x
and out as (rows, columns), zeros as scratch and the activation by its number."""
