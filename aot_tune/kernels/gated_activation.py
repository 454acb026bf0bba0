"""A feed-forward layer's activation and gate: kernel, host function, declaration. Knows nothing of tables.

``out = activation(gate) * up``: SwiGLU with a SiLU, GeGLU with a GELU (Shazeer, "GLU Variants Improve
Transformer", 2020). Gate and up are the halves of one tensor, as the fused projection before leaves them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs
from aot_tune.bucket import Exact, Pow2, edge
from aot_tune.config import Config
from aot_tune.device import Device
from aot_tune.errors import LaunchError
from aot_tune.kernels import activations
from aot_tune.kernels.arguments import check_apart, check_dtype, check_shape, indexable
from aot_tune.kernels.rows import as_rows, load_part, store_part
from aot_tune.problem import Problem
from aot_tune.tunable import Close, Tunable

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

_MOST_COLUMNS = 65535 * 256
"""The grid's second dimension holds 65535 blocks, each of at least 256 columns."""


@ct.kernel
def gated_activation_kernel(  # type: ignore[no-untyped-def]
    x, out, activation: ct.Constant[int], tile: ct.Constant[int], width: ct.Constant[int]
):
    """Compute `tile` elements a block: `width` columns of one row or more."""
    height, (rows, cols) = tile // width, out.shape
    row, col = ct.bid(0), ct.bid(1)
    # A load whose bounds are checked is issued after the one before it, behind a branch (tileiras 13.4).
    if rows - row * height >= height and cols - col * width >= width:
        _compute(x, out, (row, col), (height, width), activation, True)
    else:
        _compute(x, out, (row, col), (height, width), activation, False)


def _compute(x: Any, out: Any, place: Any, shape: Any, activation: Any, inside: Any) -> None:
    # The last of a row's gate tiles may reach into up: no result depends on it.
    cols, anything = out.shape[1], ct.PaddingMode.UNDETERMINED
    gate = load_part(x, place, shape, inside, anything).astype(ct.float32)
    up = load_part(x.slice(1, cols, x.shape[1]), place, shape, inside, anything).astype(ct.float32)
    gated = activations.apply(gate, activation) * up
    store_part(out, place, gated.astype(out.dtype), inside)


def gated_activation(
    x: torch.Tensor, *, activation: str = "silu", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Apply an activation to the first half of the last dimension of `x` and multiply it with the second.

    Computes in float32 and rounds once.

    Args:
        x: (..., 2 * cols), bfloat16, float16 or float32, on a GPU: the gate's columns before up's, as vLLM's
            ``silu_and_mul`` takes them. The leading dimensions are such that ``view`` can flatten them.
        activation: "silu" (SwiGLU), "gelu" (GeGLU, by erf) or "gelu_tanh" (GeGLU, by tanh, as Gemma has it).
        out: (..., cols), where to write, of the dtype of `x`, apart from it in memory; a new tensor without
            it.

    Returns:
        `out`, or the new tensor.

    Raises:
        LaunchError: An argument cannot be launched; it names the argument and what to pass.
    """
    check_dtype("gated_activation", "x", x, torch.bfloat16, torch.float16, torch.float32)
    activations.check_activation("gated_activation", activation, *ACTIVATIONS)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise LaunchError(
            f"gated_activation: x has shape {tuple(x.shape)}; its last size must be even: the columns of the "
            "gate, then as many of up"
        )
    if x.shape[-1] // 2 > _MOST_COLUMNS:
        raise LaunchError(
            f"gated_activation: x has shape {tuple(x.shape)}; pass it in several calls, or with more rows: "
            f"gate and up may have {_MOST_COLUMNS} columns each"
        )
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    check_shape("gated_activation", "out", out, shape, f"x of shape {tuple(x.shape)}")
    check_dtype("gated_activation", "out", out, x.dtype)
    if out.numel() == 0:
        return out
    flat_x, flat_out = as_rows("gated_activation", "x", x), as_rows("gated_activation", "out", out)
    counted = indexable("gated_activation", x=flat_x, out=flat_out)
    check_apart("gated_activation", "out", out, x=x)
    gated_activation_tunable.launch(*counted, activations.NUMBERS[activation])
    return out


# The declaration --------------------------------------------------------------------------------

_TILES = {4: (1024, 2048, 4096), 8: (2048, 4096, 8192)}
"""Elements of a block, by num_worker_warps: each thread has 16 bytes of gate and of up at a time, 1 to 4
times. NVIDIA's TileGym searches occupancies too (ops/cutile/silu_and_mul.py); here they change no code."""

_LEAST_WIDTH = 256
"""Columns of a tile that are a stretch of memory long enough, where the row has as many."""


def _config(tile: int, warps: int) -> Config:
    return Config(constants={"tile": tile}, hints={"num_worker_warps": warps})


_SPACE = tuple(_config(tile, warps) for warps, tiles in _TILES.items() for tile in tiles)


def _problem(x: torch.Tensor, out: torch.Tensor, activation: int) -> Mapping[str, object]:
    rows, cols = out.shape
    return {"dtype": x.dtype, "activation": activations.NAMES[activation], "rows": rows, "cols": cols}


def _width(config: Config, cols: int) -> int:
    """Columns of a block's tile: of those that divide the row the most, if that is wide enough."""
    return min(int(config["tile"]), edge(cols), max(cols & -cols, _LEAST_WIDTH))


def _tiles(config: Config, problem: Problem) -> int:
    return math.prod(_blocks(config, problem))


def _blocks(config: Config, problem: Problem) -> tuple[int, int]:
    width = _width(config, problem.size("cols"))
    height = int(config["tile"]) // width
    return -(-problem.size("rows") // height), -(-problem.size("cols") // width)


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    return _blocks(config, problem)


def _args(config: Config, x: torch.Tensor, out: torch.Tensor, activation: int) -> tuple[Any, ...]:
    return x, out, activation, int(config["tile"]), _width(config, out.shape[1])


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    rows, cols, dtype = problem.size("rows"), problem.size("cols"), str(problem["dtype"])
    x = inputs.randn((rows, 2 * cols), dtype, device, seed)
    return x, inputs.empty((rows, cols), dtype, device), activations.NUMBERS[str(problem["activation"])]


def _reference(x: torch.Tensor, out: torch.Tensor, activation: int) -> Close:
    gate, up = x.chunk(2, dim=1)
    # One rounding to the output's dtype is half its eps; float32 and its approximations before are good to
    # 5e-6. The absolute term is for float16's subnormal numbers.
    value = activations.reference(gate, activations.NAMES[activation]).mul_(up)
    return Close(value=value, rtol=max(torch.finfo(x.dtype).eps, 1e-5), atol=1e-6)


_ROWS = tuple(4**i for i in range(8))
"""1 to 16384. Sizes in between are at most one doubling from one of these, and take its config."""


def _sizes(
    *cols: int, activation: str = "silu", dtype: str = "bfloat16", rows: tuple[int, ...] = _ROWS
) -> dict[str, object]:
    return {"dtype": dtype, "activation": activation, "rows": rows, "cols": cols}


gated_activation_tunable = Tunable(
    name="gated_activation",
    package=__package__,
    kernel=gated_activation_kernel,
    axes={"rows": Pow2(), "cols": Exact()},
    problem=_problem,
    search_space=lambda arch, problem: _SPACE,
    default=lambda arch, problem: _SPACE[0],
    grid_fn=_grid,
    args_fn=_args,
    tiles=_tiles,
    make_args=_make_args,
    reference=_reference,
    outputs=("out",),
    typical=[
        _sizes(768, 2048),  # the experts of Qwen3 30B-A3B and of DeepSeek-V3
        _sizes(12288, 25600),  # Qwen3 8B and 32B
        _sizes(14336, 28672),  # Llama 3.1 8B and 70B
        _sizes(14336, dtype="float16"),  # Llama 3.1 8B, run in float16 (AWQ, GPTQ)
        _sizes(14336, 21504, activation="gelu_tanh"),  # Gemma 2 9B, Gemma 3 27B
        _sizes(2624, activation="gelu", rows=_ROWS[4:]),  # ModernBERT large, which never decodes
    ],
)
"""The declaration; ``gated_activation_tunable.launch(x, out, activation)`` takes x and out as rows."""
