"""Root-mean-square norm: kernel, host function and declaration; its search space is `rms_norm_space`.

``out = x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang and Sennrich, "Root Mean Square
Layer Normalization", 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs
from aot_tune.declare.declaration import Close
from aot_tune.kernels.host.arguments import check_apart, check_dtype, check_shape, indexable, number
from aot_tune.kernels.norms.rms_norm_space import SPACE, cut, default, legal
from aot_tune.kernels.rows.rows import as_rows, check_normed, load_parts, store_part
from aot_tune.tunable import Tunable
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem


@ct.kernel
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, eps,
    height: ct.Constant[int], width: ct.Constant[int], parts: ct.Constant[int], inside: ct.Constant[int],
):  # fmt: skip
    """Normalise `height` whole rows a block, held in registers as `parts` tiles of `width` columns.

    The first `inside` parts need no check of their bounds.
    """
    block, zero = ct.bid(0), ct.PaddingMode.ZERO
    # The weight is loaded first, and not where it is used: so few rows wait for memory once and not twice.
    scales = load_parts(weight, (), (width,), parts, inside, zero)
    rows = load_parts(x, (block,), (height, width), parts, inside, zero)
    squares = ct.zeros((height, width), ct.float32)
    for part in ct.static_iter(range(parts)):
        row = rows[part].astype(ct.float32)
        squares = squares + row * row
    norm = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / x.shape[1] + eps)
    for part in ct.static_iter(range(parts)):
        normed = rows[part].astype(ct.float32) * norm * scales[part].astype(ct.float32)
        store_part(out, (block, part), normed.astype(out.dtype), part < inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalise the last dimension of `x` by its root mean square and scale it by `weight`.

    Computes in float32 and rounds once (Zhang and Sennrich, 2019).

    Args:
        x: (..., cols), bfloat16, float16 or float32, on a GPU; at most 32768 columns, and leading
            dimensions that ``view`` can flatten.
        weight: (cols,), of the dtype of `x`.
        eps: Added to the mean of the squares.
        out: The result, of the shape and dtype of `x`; it must share no memory with `x` or `weight`. A new
            tensor is made if it is None.

    Returns:
        `out`, or the new tensor.

    Raises:
        LaunchError: An argument cannot be launched; the error names it and what to pass.
    """
    eps = check_rms_norm(x, weight, eps, out=out)
    written = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if x.numel() == 0:
        return written
    flat_x, flat_out = as_rows("rms_norm", "x", x), as_rows("rms_norm", "out", written)
    counted = indexable("rms_norm", x=flat_x, weight=weight, out=flat_out)
    if out is not None:
        check_apart("rms_norm", "out", out, x=x, weight=weight)
    rms_norm_tunable.launch(*counted, eps)
    return written


def check_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, out: torch.Tensor | None = None
) -> float:
    """Refuse shapes, dtypes and numbers that `rms_norm` does not take; return `eps` as a launch takes it."""
    check_normed("rms_norm", x, weight)
    if out is not None:
        check_shape("rms_norm", "out", out, tuple(x.shape), "x")
        check_dtype("rms_norm", "out", out, x.dtype)
    return number("rms_norm", "eps", eps)


# The declaration --------------------------------------------------------------------------------


def _problem(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> Mapping[str, object]:
    return {"dtype": x.dtype, "rows": x.shape[0], "cols": x.shape[1]}


def _tiles(config: Config, problem: Problem) -> int:
    return -(-problem.size("rows") // cut(config, problem.size("rows"), problem.size("cols"))[0])


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    return (_tiles(config, problem),)


def _args(
    config: Config, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> tuple[Any, ...]:
    return x, weight, out, eps, *cut(config, *x.shape)


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    rows, cols, dtype = problem.size("rows"), problem.size("cols"), str(problem["dtype"])
    x = inputs.randn((rows, cols), dtype, device, 3 * seed)
    weight = inputs.randn((cols,), dtype, device, 3 * seed + 1, scale=0.1) + 1  # trained weights are near 1
    return x, weight, inputs.empty((rows, cols), dtype, device), 1e-6


def _reference(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> Close:
    exact = x.double()
    exact = exact * torch.rsqrt(exact.square().mean(dim=1, keepdim=True) + eps) * weight.double()
    # One rounding to the output's dtype is half its eps; the float32 arithmetic before has a relative error
    # of about 1e-6. The absolute term is for float16's subnormal numbers.
    return Close(value=exact, rtol=max(torch.finfo(x.dtype).eps, 1e-5), atol=1e-6)


_ROWS = tuple(4**i for i in range(8))
"""Rows to sweep, 1 to 16384. Sizes in between are at most one doubling from one of these."""

_HEADS = tuple(4**i for i in range(3, 11))
"""Rows of a norm of each of 64 heads: the tokens of `_ROWS` times 64."""

_FEW_ROWS = (4, 64, 1024, 16384)
"""Rows to sweep for columns whose neighbours are swept more closely."""

_FEW_HEADS = (64, 4096, 65536)
"""Rows of a norm of each head, for columns whose neighbours are swept more closely."""

rms_norm_tunable = Tunable(
    name="rms_norm",
    package=__package__,
    kernel=rms_norm_kernel,
    axes={"rows": Pow2(), "cols": Exact()},
    batch_axes=("rows",),
    problem=_problem,
    search_space=SPACE,
    legal=legal,
    default=default,
    grid_fn=_grid,
    args_fn=_args,
    tiles=_tiles,
    make_args=_make_args,
    reference=_reference,
    outputs=("out",),
    typical=[
        {"dtype": "bfloat16", "rows": _HEADS, "cols": 128},  # the heads of Qwen3
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 2048},  # Qwen3 30B-A3B
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 2560},  # Qwen3 4B
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 2880},  # gpt-oss 20b and 120b
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 4096},  # Llama 3.1 8B, Qwen3 8B and 235B-A22B
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 5120},  # Qwen3 14B and 32B
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 7168},  # DeepSeek-V3
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 8192},  # Llama 3.1 70B
        {"dtype": "float16", "rows": _ROWS, "cols": 4096},  # Llama 3.1 8B, run in float16 (AWQ, GPTQ)
        {"dtype": "float16", "rows": _ROWS, "cols": 8192},  # Llama 3.1 70B, run in float16
        {"dtype": "bfloat16", "rows": _FEW_ROWS, "cols": 64},  # the heads of Llama 3.2 1B, of vision models
        {"dtype": "bfloat16", "rows": _FEW_HEADS, "cols": 96},  # the heads of Lumina-Image 2.0
        {"dtype": "bfloat16", "rows": _FEW_ROWS, "cols": 256},  # the heads of Gemma 3
        {"dtype": "bfloat16", "rows": _FEW_ROWS, "cols": 896},  # Qwen2.5 0.5B
        {"dtype": "bfloat16", "rows": _FEW_ROWS, "cols": 1024},  # Qwen3 0.6B
        {"dtype": "bfloat16", "rows": _FEW_ROWS, "cols": 1280},  # Qwen2.5-VL, vision
        {"dtype": "bfloat16", "rows": _FEW_ROWS, "cols": 1536},  # Qwen2.5 1.5B
        {"dtype": "bfloat16", "rows": _FEW_ROWS, "cols": 3072},  # Llama 3.2 3B
        {"dtype": "bfloat16", "rows": _FEW_ROWS, "cols": 3584},  # Qwen2.5 7B
        {"dtype": "bfloat16", "rows": _FEW_ROWS, "cols": 16384},  # Llama 3.1 405B
    ],
)
"""Declaration: ``rms_norm_tunable.launch(x, weight, out, eps)`` takes x and out as (rows, cols)."""
