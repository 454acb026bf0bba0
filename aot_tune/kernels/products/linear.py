"""A linear layer: kernel, host function, declaration. Knows nothing of tuning or tables.

``activation(x @ weight.t() + bias)`` in one kernel, so that the product is written once and never read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs, workspace
from aot_tune.declare.declaration import Close
from aot_tune.errors import LaunchError
from aot_tune.kernels import activations
from aot_tune.kernels.host.arguments import LARGEST_INDEX
from aot_tune.kernels.host.padding import padded
from aot_tune.kernels.products import product, split_k
from aot_tune.kernels.products.dense_space import constants_of, default, grid, legal, space, tiles, work
from aot_tune.kernels.products.linear_arguments import DTYPES, as_matrix, check_linear, counted, written_rows
from aot_tune.tunable import Tunable
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem


@ct.kernel
def linear_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, bias, scratch, biased, activation: ct.Constant[int],
    tile_m: ct.Constant[int], tile_n: ct.Constant[int], more_n: ct.Constant[int], tile_k: ct.Constant[int],
    swapped: ct.Constant[int], group: ct.Constant[int], peeled: ct.Constant[int],
    splits: ct.Constant[int], slices: ct.Constant[int],
):  # fmt: skip
    """Compute every `num_blocks`-th tile of `out`, accumulating in float32; constants as in `product`.

    Of several `splits` each block takes a share of a tile's sums, or adds up one of its `slices`.
    """
    tiles_m, tiles_n = ct.cdiv(x.shape[0], tile_m), ct.cdiv(weight.shape[0], tile_n + more_n)
    if splits > 1:
        parts, shape = tiles_m * tiles_n * splits, (tile_m, tile_n, tile_k)
        if ct.bid(0) < parts:
            m, n = product.place(ct.bid(0) // splits, x.shape[0], tile_m, tiles_n, group)
            sums = split_k.part_of_sum(x, weight, m, n, ct.bid(0) % splits, splits, shape, True, swapped)
            split_k.leave(scratch, ct.bid(0), sums)
        else:
            tile, at = (ct.bid(0) - parts) // slices, (ct.bid(0) - parts) % slices
            m, n = product.place(tile, x.shape[0], tile_m, tiles_n, group)
            sums = split_k.slice_of_sum(scratch, tile, at, splits, slices, shape, swapped)
            m, n, spacing = split_k.index_of_slice(m, n, at, slices, shape[:2], swapped)
            _finish(out, bias, biased, activation, m, n, sums, spacing, swapped)
    else:
        for tile in range(ct.bid(0), tiles_m * tiles_n, ct.num_blocks(0)):
            m, n = product.place(tile, x.shape[0], tile_m, tiles_n, group)
            if more_n:
                wide, narrow = product.two_sums(x, weight, m, n, tile_m, tile_n, more_n, tile_k, True)
                first, more = product.first_and_more(n, tile_n, more_n)
                _finish(out, bias, biased, activation, m, first, wide, more_n, False)
                _finish(out, bias, biased, activation, m, more, narrow, more_n, False)
            else:
                sums = product.one_sum(x, weight, m, n, tile_m, tile_n, tile_k, True, swapped, peeled)
                _finish(out, bias, biased, activation, m, n, sums, tile_n, swapped)


def _finish(
    out: Any, bias: Any, biased: Any, activation: Any, m: Any, n: Any, sums: Any, spacing: Any, swapped: Any
) -> None:
    """Add the bias, activate and store sums whose first column is `n` * `spacing`."""
    width = sums.shape[0] if swapped else sums.shape[1]
    row = ct.zeros((width,), ct.float32)
    if biased:  # around the row alone: a branch around the sums costs their registers twice
        row = bias.tiled_view((width,), traversal_steps=(spacing,)).load((n,)).astype(ct.float32)
    sums = activations.apply(sums + product.turned(row.reshape((1, width)), swapped), activation)
    product.store(out, m, n, product.turned(sums.astype(out.dtype), swapped), spacing)


# The host function ------------------------------------------------------------------------------


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``activation(x @ weight.t() + bias)``, accumulating in float32 and rounding once.

    float32 is multiplied as tf32: of each factor's mantissa the matrix units keep 10 bits (sm90 drops the
    others), so that a product is good to 2^-9.
    Where rows of `x` or `weight` do not all start at a multiple of 16 bytes, a copy whose rows do is made for
    the call; a weight whose rows are padded to that, ``room[:, :K]``, saves it.

    Several blocks may share the sums of up to 256 rows, in memory of the stream: run the same call once
    before it is captured into a CUDA graph, on the stream that captures where there are several, and replay
    the graphs of one stream one after another.

    Args:
        x: (..., K), bfloat16, float16 or float32, on a GPU; leading dimensions that ``view`` can flatten.
        weight: (N, K), of the dtype of `x`, as ``torch.nn.Linear`` stores it; any strides.
        bias: (N,), of the dtype of `x`.
        activation: "relu", "silu", "gelu" or "gelu_tanh"; None for none.
        out: (..., N), where to write, of the dtype of `x`, apart from all others in memory; a new tensor
            without it.

    Returns:
        `out`, or the new tensor.

    Raises:
        LaunchError: An argument cannot be launched; it names the argument and what to pass.
    """
    try:
        rows = x if x.dim() == 2 else as_matrix("x", x)
        (m, k), (n, columns), (x_row, x_column) = rows.shape, weight.shape, rows.stride()
        row, column = weight.stride()
        dtype, device = x.dtype, x.device
        number = activations.NUMBERS["none" if activation is None else activation]
        fine = (
            columns == k > 0
            and dtype in DTYPES
            and weight.dtype == dtype
            and weight.device == device
            and not (x.is_neg() or weight.is_neg())
            and m | n | k | x_row | x_column | row | column <= LARGEST_INDEX  # none of them is negative
            and (bias is None or _fine_bias(bias, n, dtype, device))
        )
    except (AttributeError, IndexError, KeyError, LaunchError, TypeError, ValueError):
        fine = False
    if not fine:
        check_linear(x, weight, bias, activation=activation)
        rows, weight, bias = counted(x, weight, bias)
    if out is None:
        written = torch.empty((m, n), dtype=dtype, device=device)
        out = written if x.dim() == 2 else written.view(*x.shape[:-1], n)
    else:
        written = written_rows(out, x, rows, weight, bias)
    if m * n and not k:  # sums of nothing
        bias = torch.zeros((), dtype=dtype, device=device) if bias is None else bias
        written.copy_(activations.reference(bias, activations.NAMES[number]))
    elif m * n:
        biased = bias is not None
        bias = _no_bias(dtype, device) if bias is None else bias
        scratch = split_k.scratch(rows, n)
        linear_tunable.launch(padded(rows), padded(weight), written, bias, scratch, biased, number)
    return out


def _fine_bias(bias: torch.Tensor, n: int, dtype: torch.dtype, device: torch.device) -> bool:
    return (
        bias.shape == (n,)
        and bias.dtype == dtype
        and bias.device == device
        and bias.stride() == (1,)
        and not bias.is_neg()
    )


_NO_BIAS = 16
"""Elements, a multiple of 16 as those of most biases."""


@cache
def _no_bias(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is passed in place of a bias and never read; its signature is that of any aligned one.

    Kept, so of memory that torch.compile's CUDA graphs do not take for theirs, as a new tensor's would be.
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
    # The sweep times seed 0 and verifies others too: those with a bias.
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
    # each factor loses up to 2^-10, half of that in the mean: sums shrink by 2^-10 and scatter by 6e-4.
    # A step of tile_k left out would show as 0.05.
    tf32 = x.dtype == torch.float32
    rtol, atol = (2.0**-9, 5e-3) if tf32 else (torch.finfo(x.dtype).eps, 2e-3)
    value = activations.reference(exact, activations.NAMES[number])
    return {
        "out": Close(value=value, rtol=rtol, atol=atol),
        "scratch": split_k.nothing_left(scratch),
    }


# What to sweep ----------------------------------------------------------------------------------

_M, _MANY = tuple(4**i for i in range(7)), (256, 1024, 4096)
"""1 to 4096, and of them those of an encoder. Sizes in between are at most a doubling from one of these."""


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
    problem=_problem,
    search_space=space,
    legal=legal,
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
"""The declaration; ``linear_tunable.launch(x, weight, out, bias, scratch, biased, activation)`` takes x and
out as (rows, columns), zeros to work in, the activation by its number."""
