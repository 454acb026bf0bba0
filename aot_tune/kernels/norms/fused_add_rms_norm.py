"""Residual sum and its root-mean-square norm, in place: kernel, host function and declaration.

``residual += x; x = residual / sqrt(mean(residual^2) + eps) * weight`` over the last dimension: the step
before each attention and feed-forward layer, with the arguments of vLLM's ``fused_add_rms_norm``. The search
space is `rms_norm_space`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs
from aot_tune.declare.declaration import Close
from aot_tune.kernels.host.arguments import check_apart, check_dtype, check_shape, indexable, number
from aot_tune.kernels.norms.rms_norm_space import (
    LEAST_COLUMNS_IN_PLACE,
    SPACE,
    cut,
    default_in_place,
    legal_in_place,
)
from aot_tune.kernels.rows.rows import as_rows, check_normed, load_part, load_parts, store_part
from aot_tune.tunable import Tunable
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem


@ct.kernel
def fused_add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, eps,
    height: ct.Constant[int], width: ct.Constant[int], parts: ct.Constant[int], inside: ct.Constant[int],
):  # fmt: skip
    """Add and normalise `height` whole rows a block, held in registers as `parts` tiles of `width` columns.

    The first `inside` parts need no check of their bounds.
    """
    block, zero, sums = ct.bid(0), ct.PaddingMode.ZERO, ()
    # Everything is read before anything is written, the weight first, as in rms_norm.
    scales = load_parts(weight, (), (width,), parts, inside, zero)
    for part in ct.static_iter(range(parts)):
        added = load_part(x, (block, part), (height, width), part < inside, zero)
        to = load_part(residual, (block, part), (height, width), part < inside, zero)
        total = added.astype(ct.float32) + to.astype(ct.float32)
        sums = (*sums, total.astype(residual.dtype))  # type: ignore[assignment]  # grows while compiling
    squares = ct.zeros((height, width), ct.float32)
    for part in ct.static_iter(range(parts)):
        store_part(residual, (block, part), sums[part], part < inside)
        total = sums[part].astype(ct.float32)
        squares = squares + total * total
    norm = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / x.shape[1] + eps)
    for part in ct.static_iter(range(parts)):
        normed = sums[part].astype(ct.float32) * norm * scales[part].astype(ct.float32)
        store_part(x, (block, part), normed.astype(x.dtype), part < inside)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `x` to `residual`, and write the sum's root-mean-square norm, scaled by `weight`, to `x`.

    The sum is added in float32 and rounded once. The norm is that of the rounded sum, as in vLLM, computed in
    float32 and rounded once.

    Args:
        x: (..., cols), bfloat16, float16 or float32, on a GPU; at most 32768 columns, and leading
            dimensions that ``view`` can flatten. It is overwritten by the normalised sum.
        residual: Of the shape and dtype of `x`, with which it must share no memory. It is overwritten by the
            sum.
        weight: (cols,), of the dtype of `x`.
        eps: Added to the mean of the squares.

    Returns:
        `x` and `residual`, changed.

    Raises:
        LaunchError: An argument cannot be launched; the error names it and what to pass.
    """
    eps = check_fused_add_rms_norm(x, residual, weight, eps)
    if x.numel() == 0:
        return x, residual
    flat_x = as_rows("fused_add_rms_norm", "x", x)
    flat_residual = as_rows("fused_add_rms_norm", "residual", residual)
    counted = indexable("fused_add_rms_norm", x=flat_x, residual=flat_residual, weight=weight)
    check_apart("fused_add_rms_norm", "x", x, residual=residual, weight=weight)
    check_apart("fused_add_rms_norm", "residual", residual, weight=weight)
    if x.shape[-1] < LEAST_COLUMNS_IN_PLACE:  # too rare to read the table of rms_norm at import
        from aot_tune.kernels.norms.rms_norm import rms_norm

        total = x + residual
        rms_norm(total, weight, eps, out=x)
        residual.copy_(total)
    else:
        fused_add_rms_norm_tunable.launch(*counted, eps)
    return x, residual


def check_fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> float:
    """Refuse arguments that `fused_add_rms_norm` does not take; return `eps` as a launch takes it."""
    check_normed("fused_add_rms_norm", x, weight)
    check_dtype("fused_add_rms_norm", "residual", residual, x.dtype)
    check_shape("fused_add_rms_norm", "residual", residual, tuple(x.shape), "x")
    return number("fused_add_rms_norm", "eps", eps)


# The declaration --------------------------------------------------------------------------------


def _problem(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Mapping[str, object]:
    return {"dtype": x.dtype, "rows": x.shape[0], "cols": x.shape[1]}


def _tiles(config: Config, problem: Problem) -> int:
    return -(-problem.size("rows") // cut(config, problem.size("rows"), problem.size("cols"))[0])


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    return (_tiles(config, problem),)


def _args(
    config: Config, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[Any, ...]:
    return x, residual, weight, eps, *cut(config, *x.shape)


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    rows, cols, dtype = problem.size("rows"), problem.size("cols"), str(problem["dtype"])
    x = inputs.randn((rows, cols), dtype, device, 3 * seed)
    residual = inputs.randn((rows, cols), dtype, device, 3 * seed + 1)
    weight = inputs.randn((cols,), dtype, device, 3 * seed + 2, scale=0.1) + 1  # trained weights are near 1
    return x, residual, weight, 1e-6


def _reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> dict[str, Close]:
    # One rounding to the output's dtype is half its eps; the float32 arithmetic before has a relative error
    # of about 1e-6. The absolute terms are for float16's subnormal numbers.
    close = torch.finfo(x.dtype).eps
    total = (x + residual).double()  # rounded to the dtype, once, as the kernel does
    norm = torch.rsqrt(total.square().mean(dim=1, keepdim=True) + eps)
    return {
        "x": Close(value=total * norm * weight.double(), rtol=max(close, 1e-5), atol=1e-6),
        "residual": Close(value=x.double() + residual.double(), rtol=close, atol=1e-7),
    }


_ROWS = tuple(4**i for i in range(8))
"""Rows to sweep, 1 to 16384. Sizes in between are at most one doubling from one of these."""

_FEW_ROWS = (4, 64, 1024, 16384)
"""Rows to sweep for columns whose neighbours are swept more closely."""

fused_add_rms_norm_tunable = Tunable(
    name="fused_add_rms_norm",
    package=__package__,
    kernel=fused_add_rms_norm_kernel,
    axes={"rows": Pow2(), "cols": Exact()},
    batch_axes=("rows",),
    problem=_problem,
    search_space=SPACE,
    legal=legal_in_place,
    default=default_in_place,
    grid_fn=_grid,
    args_fn=_args,
    tiles=_tiles,
    make_args=_make_args,
    reference=_reference,
    outputs=(),
    inplace=("x", "residual"),
    typical=[
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 2048},  # Qwen3 30B-A3B
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 2880},  # gpt-oss 20b and 120b
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 4096},  # Llama 3.1 8B, Qwen3 8B and 235B-A22B
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 5120},  # Qwen3 14B and 32B
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 7168},  # DeepSeek-V3
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 8192},  # Llama 3.1 70B
        {"dtype": "float16", "rows": _ROWS, "cols": 4096},  # Llama 3.1 8B, run in float16 (AWQ, GPTQ)
        {"dtype": "bfloat16", "rows": _FEW_ROWS, "cols": 1024},  # Qwen3 0.6B
        {"dtype": "bfloat16", "rows": _FEW_ROWS, "cols": 1536},  # Qwen2.5 1.5B
        {"dtype": "bfloat16", "rows": _FEW_ROWS, "cols": 3584},  # Qwen2.5 7B
        {"dtype": "bfloat16", "rows": _FEW_ROWS, "cols": 5376},  # Gemma 3 27B
    ],
)
"""Declaration: ``fused_add_rms_norm_tunable.launch(x, residual, weight, eps)`` takes x
and residual as (rows, cols), with at least `LEAST_COLUMNS_IN_PLACE` columns; for fewer, `fused_add_rms_norm`
runs a sum and an `rms_norm`."""
