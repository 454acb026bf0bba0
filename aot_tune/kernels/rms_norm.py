"""Root-mean-square norm: kernel, host function, declaration. Knows nothing of tuning or tables.

``out = x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang and Sennrich, "Root Mean Square
Layer Normalization", 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs
from aot_tune.arch import Arch
from aot_tune.bucket import Exact, Pow2, edge
from aot_tune.config import Config
from aot_tune.device import Device
from aot_tune.errors import LaunchError
from aot_tune.kernels.arguments import check_apart, check_dtype, check_shape, check_sizes
from aot_tune.problem import Problem
from aot_tune.tunable import Close, Tunable

MOST_COLUMNS = 32768
"""A block holds its rows in registers: this many columns are 256 elements a thread; more would only spill."""

_TILE_ELEMENTS = 1024
"""Rows shorter than this share a block: eight elements, one 16-byte load, for each of its 128 threads."""


@ct.kernel
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, eps, tile_rows: ct.Constant[int], tile_cols: ct.Constant[int]
):
    """Normalise `tile_rows` whole rows a block."""
    block = ct.bid(0)
    # Plain loads: a row is read once, straight to registers, 16 bytes at a time. Through TMA it would come in
    # boxes of 256 elements by way of shared memory, and the compiler spills at an occupancy of 8.
    rows = ct.load(x, (block, 0), (tile_rows, tile_cols), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    scale = ct.load(weight, (0,), (tile_cols,), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    rows = rows.astype(ct.float32)
    mean = ct.sum(rows * rows, axis=1, keepdims=True) / x.shape[1]
    normed = rows * ct.rsqrt(mean + eps) * scale.astype(ct.float32)
    ct.store(out, (block, 0), normed.astype(out.dtype), allow_tma=False)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalise the last dimension of `x` by its root mean square and scale it by `weight`.

    Computes in float32 and rounds once.

    Args:
        x: (..., cols), bfloat16, float16 or float32, on a GPU; at most `MOST_COLUMNS` columns, and leading
            dimensions that ``view`` can flatten.
        weight: (cols,), of the dtype of `x`.
        eps: Added to the mean of the squares.
        out: Where to write, of the shape and dtype of `x`, apart from it in memory; a new tensor without it.

    Returns:
        `out`, or the new tensor.

    Raises:
        LaunchError: An argument cannot be launched; it names the argument and what to pass.
    """
    check_dtype("rms_norm", "x", x, torch.bfloat16, torch.float16, torch.float32)
    cols = x.shape[-1] if x.dim() else 0
    if not 0 < cols <= MOST_COLUMNS:
        raise LaunchError(f"rms_norm: x has shape {tuple(x.shape)}; its last size may be 1 to {MOST_COLUMNS}")
    check_shape("rms_norm", "weight", weight, (cols,), f"x of {cols} columns")
    check_dtype("rms_norm", "weight", weight, x.dtype)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    check_shape("rms_norm", "out", out, tuple(x.shape), "x")
    check_dtype("rms_norm", "out", out, x.dtype)
    if x.numel() == 0:
        return out
    flat_x, flat_out = _rows("x", x), _rows("out", out)
    check_sizes("rms_norm", x=flat_x, weight=weight, out=flat_out)
    check_apart("rms_norm", "out", out, x=x, weight=weight)
    rms_norm_tunable.launch(flat_x, weight, flat_out, eps)
    return out


def _rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 2:
        return tensor
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError as error:
        raise LaunchError(
            f"rms_norm: {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be viewed "
            f"as rows; call {name}.contiguous() first"
        ) from error


# The declaration --------------------------------------------------------------------------------


def _problem(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> Mapping[str, object]:
    return {"dtype": x.dtype, "rows": x.shape[0], "cols": x.shape[1]}


def _tile(cols: int) -> tuple[int, int]:
    """Rows and columns of a block's tile."""
    tile_cols = edge(cols)
    return max(1, _TILE_ELEMENTS // tile_cols), tile_cols


def _tiles(config: Config, problem: Problem) -> int:
    return -(-problem.size("rows") // _tile(problem.size("cols"))[0])


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    return (_tiles(config, problem),)


def _args(
    config: Config, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> tuple[Any, ...]:
    return x, weight, out, eps, *_tile(x.shape[1])


def _legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    return Device.reference(arch).refusal(config.hints.get("occupancy", 1)) or True


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    rows, cols, dtype = problem.size("rows"), problem.size("cols"), str(problem["dtype"])
    x = inputs.randn((rows, cols), dtype, device, 3 * seed)
    weight = inputs.randn((cols,), dtype, device, 3 * seed + 1, scale=0.1) + 1  # trained weights lie around 1
    return x, weight, inputs.empty((rows, cols), dtype, device), 1e-6


def _reference(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> Close:
    exact = x.double()
    exact = exact * torch.rsqrt(exact.square().mean(dim=1, keepdim=True) + eps) * weight.double()
    # One rounding to the output's dtype is half its eps; the float32 arithmetic before it is good to 1e-6 or
    # so. The absolute term is for float16's subnormal numbers.
    return Close(value=exact, rtol=max(torch.finfo(x.dtype).eps, 1e-5), atol=1e-6)


_SPACE = tuple(Config(hints={"occupancy": n}) for n in (1, 2, 4, 8, 16, 32))
"""All that the hint takes, by doubling. The sweep measures once what compiles to the same code."""

_DEFAULT = _SPACE[1]
"""An occupancy of 2, the largest that spills on no arch for up to 8192 columns."""

_ROWS = Pow2.edges(1, 16384)

rms_norm_tunable = Tunable(
    name="rms_norm",
    package=__package__,
    kernel=rms_norm_kernel,
    axes={"rows": Pow2(), "cols": Exact()},
    problem=_problem,
    search_space=lambda arch, problem: _SPACE,
    legal=_legal,
    default=lambda arch, problem: _DEFAULT,
    grid_fn=_grid,
    args_fn=_args,
    tiles=_tiles,
    make_args=_make_args,
    reference=_reference,
    outputs=("out",),
    typical=[
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 2048},  # Qwen3 30B-A3B
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 2560},  # Qwen3 4B
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 2880},  # gpt-oss 20b and 120b
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 4096},  # Llama 3.1 8B, Qwen3 8B and 235B-A22B
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 5120},  # Qwen3 14B and 32B
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 7168},  # DeepSeek-V3
        {"dtype": "bfloat16", "rows": _ROWS, "cols": 8192},  # Llama 3.1 70B
        {"dtype": "float16", "rows": _ROWS, "cols": 4096},  # Llama 3.1 8B, run in float16 (AWQ, GPTQ)
        {"dtype": "float16", "rows": _ROWS, "cols": 8192},  # Llama 3.1 70B, run in float16
    ],
)
"""The declaration; ``rms_norm_tunable.launch(x, weight, out, eps)`` takes x and out as (rows, cols)."""
