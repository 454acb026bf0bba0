"""Layer norm: host function, search space, declaration. Knows nothing of tuning or tables.

``out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`` over the last dimension (Ba, Kiros and
Hinton, "Layer Normalization", 2016).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from aot_tune import inputs
from aot_tune.declare.declaration import Close
from aot_tune.kernels.host.arguments import check_apart, check_dtype, check_shape, indexable, number
from aot_tune.kernels.norms.layer_norm_tiles import layer_norm_kernel
from aot_tune.kernels.rows.rows import (
    as_rows,
    at_once,
    check_normed,
    exact_width,
    part_refusal,
    parts,
    refusal,
    threads,
    too_wide,
)
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact, Pow2, edge
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise the last dimension of `x` to mean 0 and variance 1, scale it by `weight` and add `bias`.

    Computes in float32, the variance about the mean, and rounds once.

    Args:
        x: (..., cols), bfloat16, float16 or float32, on a GPU; at most 32768 columns, and leading dimensions
            that ``view`` can flatten.
        weight: (cols,), of the dtype of `x`.
        bias: (cols,), of the dtype of `x`; none is added without it.
        eps: Added to the variance.
        out: Where to write, of the shape and dtype of `x`, apart from it in memory; a new tensor without it.

    Returns:
        `out`, or the new tensor.

    Raises:
        LaunchError: An argument cannot be launched; it names the argument and what to pass.
    """
    eps = check_layer_norm(x, weight, bias, eps, out=out)
    written = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if x.numel() == 0:
        return written
    read = {"x": x, "weight": weight} if bias is None else {"x": x, "weight": weight, "bias": bias}
    flat_x, flat_out = as_rows("layer_norm", "x", x), as_rows("layer_norm", "out", written)
    flat_x, *_, flat_out = indexable("layer_norm", **{**read, "x": flat_x, "out": flat_out})
    if out is not None:
        check_apart("layer_norm", "out", out, **read)
    layer_norm_tunable.launch(flat_x, weight, bias, flat_out, eps)
    return written


def check_layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
) -> float:
    """Refuse shapes, dtypes and numbers that `layer_norm` does not take; return a launch's eps."""
    check_normed("layer_norm", x, weight)
    if bias is not None:
        check_shape("layer_norm", "bias", bias, tuple(weight.shape), f"x of {x.shape[-1]} columns")
        check_dtype("layer_norm", "bias", bias, x.dtype)
    if out is not None:
        check_shape("layer_norm", "out", out, tuple(x.shape), "x")
        check_dtype("layer_norm", "out", out, x.dtype)
    return number("layer_norm", "eps", eps)


# The search space -------------------------------------------------------------------------------


@cache
def _config(width: int, persistent: bool, occupancy: int, num_worker_warps: int) -> Config:
    return Config(
        constants={"width": width, "persistent": persistent},
        hints={"occupancy": occupancy, "num_worker_warps": num_worker_warps},
    )


_PARTS = 4
"""Of a row that would be one alone: a block takes as many times the rows. 16384 rows of 1024 columns take 19
us so, and 23 in one part each (H200)."""


def _widths(cols: int, num_worker_warps: int) -> tuple[int, ...]:
    """Columns of a part: a load of 16 bytes for each thread of one row; and as many as leave none empty."""
    tile = 256 * num_worker_warps
    exact = exact_width(cols, tile)
    if exact == cols:
        exact = max(cols // _PARTS, 1)
    widths = (max(min(edge(cols), tile), edge(cols) // 16), exact)
    return tuple(width for width in dict.fromkeys(widths) if part_refusal(width, cols) is None)


@cache
def _space(cols: int) -> tuple[Config, ...]:
    # Triton's tutorial (python/tutorials/05-layer-norm.py) gives a block one row, and a warp for every 256
    # columns, up to 8. cuTile takes 4 warps or 8.
    kinds = [*((False, warps) for warps in (8, 16, 24, 32)), *((True, warps) for warps in (8, 16))]
    return tuple(
        _config(width, persistent, resident // warps, warps)
        for warps in (4, 8)
        for width in _widths(cols, warps)
        for persistent, resident in kinds
    )


def _default(arch: Arch, problem: Problem) -> Config:
    """The most blocks of 8 warps that do not spill, whatever the dtype."""
    width = next(iter(_widths(problem.size("cols"), 8)), 0)
    configs = (_config(width, False, occupancy, 8) for occupancy in (4, 2, 1) if width)
    found = next((c for c in configs if refusal(c, arch, _elements(c, problem)) is None), None)
    if found is None:
        raise too_wide(problem.size("cols"))
    return found


_AHEAD = 2
"""Parts of weight and bias that are loaded before they are needed, where registers are few."""


def _waits(config: Config) -> bool:
    """Whether there are so many blocks a multiprocessor that one may wait for weight and bias: others work.

    They have few registers each, and need none for all of weight and bias.
    """
    return not config["persistent"] and threads(config) * config.hints.get("occupancy", 1) > _MANY_THREADS


_MANY_THREADS = 512


def _height(config: Config) -> int:
    """Rows of a block, so that each thread has one load of 16 bytes a part."""
    return max(1, 8 * threads(config) // int(config["width"]))


def _elements(config: Config, problem: Problem) -> int:
    """That a block holds of its rows."""
    return _height(config) * int(config["width"]) * -(-problem.size("cols") // int(config["width"]))


def _legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    cols, width = problem.size("cols"), int(config["width"])
    held = _elements(config, problem)
    if config["persistent"]:  # weight and bias take as many registers as the rows do
        held *= 3
    elif arch == Arch(9, 0) and problem["dtype"] == "bfloat16" and _waits(config) and _height(config) == 1:
        # Two of 16 bits share a register. With so many none of 68 configs was seen to spill (tileiras 13.4).
        held = held * 4 // 5
    return part_refusal(width, cols) or refusal(config, arch, held) or True


# The declaration --------------------------------------------------------------------------------


def _problem(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, eps: float
) -> Mapping[str, object]:
    return {"dtype": x.dtype, "bias": bias is not None, "rows": x.shape[0], "cols": x.shape[1]}


def _tiles(config: Config, problem: Problem) -> int:
    return -(-problem.size("rows") // _height(config))


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    blocks = _tiles(config, problem)
    return (min(blocks, at_once(config, device)) if config["persistent"] else blocks,)


def _args(
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
) -> tuple[Any, ...]:
    has_bias, shift = bias is not None, 0 if bias is None else bias
    height, width = _height(config), int(config["width"])
    # A last block of fewer rows begins earlier; fewer than one block takes are checked.
    count, inside = parts(1 if x.shape[0] >= height else height, width, *x.shape)
    ahead = _AHEAD if _waits(config) else count
    return x, weight, shift, out, eps, height, width, count, inside, has_bias, config["persistent"], ahead


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    rows, cols, dtype = problem.size("rows"), problem.size("cols"), str(problem["dtype"])
    # A mean as large as the deviation: a variance taken about 0 would show.
    x = inputs.randn((rows, cols), dtype, device, 3 * seed) + 1
    weight = inputs.randn((cols,), dtype, device, 3 * seed + 1, scale=0.1) + 1  # trained weights lie around 1
    bias = inputs.randn((cols,), dtype, device, 3 * seed + 2) if problem["bias"] else None
    return x, weight, bias, inputs.empty((rows, cols), dtype, device), 1e-5


def _reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, eps: float
) -> Close:
    exact = torch.nn.functional.layer_norm(
        x.double(), x.shape[1:], weight.double(), None if bias is None else bias.double(), eps
    )
    # One rounding to the output's dtype is half its eps. The absolute term is for where the mean or the bias
    # cancels: float32 leaves 1e-6 or so of numbers up to ten.
    return Close(value=exact, rtol=max(torch.finfo(x.dtype).eps, 1e-5), atol=1e-5)


_ROWS = Pow2.edges(1, 16384)[::2]
"""Every other edge: the buckets between are one doubling away, near enough to be served by these."""

layer_norm_tunable = Tunable(
    name="layer_norm",
    package=__package__,
    kernel=layer_norm_kernel,
    axes={"rows": Pow2(), "cols": Exact()},
    problem=_problem,
    search_space=lambda arch, problem: _space(problem.size("cols")),
    legal=_legal,
    default=_default,
    grid_fn=_grid,
    args_fn=_args,
    tiles=_tiles,
    make_args=_make_args,
    reference=_reference,
    outputs=("out",),
    typical=[
        {"dtype": "bfloat16", "bias": True, "rows": _ROWS, "cols": 768},  # BERT base, GPT-2, ViT-B
        {"dtype": "float16", "bias": True, "rows": _ROWS, "cols": 1024},  # BERT large, BGE, in float16
        {"dtype": "bfloat16", "bias": True, "rows": _ROWS, "cols": 1152},  # SigLIP So400m
        {"dtype": "float16", "bias": True, "rows": _ROWS, "cols": 1280},  # Whisper large, in float16
        {"dtype": "bfloat16", "bias": True, "rows": _ROWS, "cols": 4544},  # Falcon 7B
        {"dtype": "bfloat16", "bias": True, "rows": _ROWS, "cols": 6144},  # GPT-NeoX 20B, StarCoder2 15B
        {"dtype": "bfloat16", "bias": False, "rows": _ROWS, "cols": 8192},  # Command R
        {"dtype": "bfloat16", "bias": True, "rows": _ROWS, "cols": 14336},  # BLOOM
    ],
)
"""The declaration; ``layer_norm_tunable.launch(x, weight, bias, out, eps)``, x and out as (rows, cols)."""
