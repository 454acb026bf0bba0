"""Layer norm: host function, search space and declaration; its kernel is in `layer_norm_tiles`.

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

    Computes in float32, the variance about the mean, and rounds once (Ba, Kiros and Hinton, 2016).

    Args:
        x: (..., cols), bfloat16, float16 or float32, on a GPU; at most 32768 columns, and leading dimensions
            that ``view`` can flatten.
        weight: (cols,), of the dtype of `x`.
        bias: (cols,), of the dtype of `x`; None adds none.
        eps: Added to the variance.
        out: The result, of the shape and dtype of `x`; it must share no memory with the others. A new tensor
            is made if it is None.

    Returns:
        `out`, or the new tensor.

    Raises:
        LaunchError: An argument cannot be launched; the error names it and what to pass.
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
    """Refuse arguments that `layer_norm` does not take; return `eps` as a launch takes it."""
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
"""Parts of a row that would fit one part; a block then takes this many times the rows. 16384 rows of 1024
columns take 19 us in four parts and 23 us in one (H200)."""


def _widths(cols: int, num_worker_warps: int) -> tuple[int, ...]:
    """Return candidates for the columns of a part.

    The first gives each thread of a row a load of 16 bytes; the second is the widest without empty places.
    """
    tile = 256 * num_worker_warps
    exact = exact_width(cols, tile)
    if exact == cols:
        exact = max(cols // _PARTS, 1)
    widths = (max(min(edge(cols), tile), edge(cols) // 16), exact)
    return tuple(width for width in dict.fromkeys(widths) if part_refusal(width, cols) is None)


@cache
def _space(cols: int) -> tuple[Config, ...]:
    # Triton's tutorial (python/tutorials/05-layer-norm.py) gives a block one row, and a warp for every 256
    # columns, up to 8. cuTile takes 4 warps or 8: four-warps (README).
    kinds = [*((False, warps) for warps in (8, 16, 24, 32)), *((True, warps) for warps in (8, 16))]
    return tuple(
        _config(width, persistent, resident // warps, warps)
        for warps in (4, 8)
        for width in _widths(cols, warps)
        for persistent, resident in kinds
    )


def _default(arch: Arch, problem: Problem) -> Config:
    """Choose blocks of 8 warps, as many a multiprocessor as do not spill for any dtype."""
    width = next(iter(_widths(problem.size("cols"), 8)), 0)
    configs = (_config(width, False, occupancy, 8) for occupancy in (4, 2, 1) if width)
    found = next((c for c in configs if refusal(c, arch, _elements(c, problem)) is None), None)
    if found is None:
        raise too_wide(problem.size("cols"))
    return found


_AHEAD = 2
"""Parts of weight and bias that are loaded ahead of their use, where a thread has few registers."""


def _waits(config: Config) -> bool:
    """Whether a block loads weight and bias late and waits for them, while other blocks of its SM work.

    So it does where a multiprocessor runs many threads: each has few registers, too few for all of both.
    """
    return not config["persistent"] and threads(config) * config.hints.get("occupancy", 1) > _MANY_THREADS


_MANY_THREADS = 512
"""Threads of a multiprocessor above which a block loads only part of weight and bias ahead."""


def _height(config: Config) -> int:
    """Return a block's rows: as many as give each thread one load of 16 bytes a part, for 16-bit dtypes."""
    return max(1, 8 * threads(config) // int(config["width"]))


def _elements(config: Config, problem: Problem) -> int:
    """Count the elements of its rows that a block holds, empty places included."""
    return _height(config) * int(config["width"]) * -(-problem.size("cols") // int(config["width"]))


def _legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    cols, width = problem.size("cols"), int(config["width"])
    held = _elements(config, problem)
    if config["persistent"]:  # weight and bias take as many registers as the rows do
        held *= 3
    elif arch == Arch(9, 0) and problem["dtype"] == "bfloat16" and _waits(config) and _height(config) == 1:
        # packed-halves (README): two elements of 16 bits share a register; 4/5 is on the safe side.
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
    # A last block of fewer rows begins earlier; bounds are checked only if all rows are fewer than a block's.
    count, inside = parts(1 if x.shape[0] >= height else height, width, *x.shape)
    ahead = _AHEAD if _waits(config) else count
    return x, weight, shift, out, eps, height, width, count, inside, has_bias, config["persistent"], ahead


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    rows, cols, dtype = problem.size("rows"), problem.size("cols"), str(problem["dtype"])
    # The mean is as large as the deviation, so that a variance taken about 0 would show.
    x = inputs.randn((rows, cols), dtype, device, 3 * seed) + 1
    weight = inputs.randn((cols,), dtype, device, 3 * seed + 1, scale=0.1) + 1  # trained weights are near 1
    bias = inputs.randn((cols,), dtype, device, 3 * seed + 2) if problem["bias"] else None
    return x, weight, bias, inputs.empty((rows, cols), dtype, device), 1e-5


def _reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, eps: float
) -> Close:
    exact = torch.nn.functional.layer_norm(
        x.double(), x.shape[1:], weight.double(), None if bias is None else bias.double(), eps
    )
    # One rounding to the output's dtype is half its eps. The absolute term is for elements that cancel with
    # the mean or the bias: float32 leaves an error of about 1e-6 for numbers up to ten.
    return Close(value=exact, rtol=max(torch.finfo(x.dtype).eps, 1e-5), atol=1e-5)


_ROWS = Pow2.edges(1, 16384)[::2]
"""Rows to sweep: every other edge. A bucket between two of them is one doubling away."""

_FEW_ROWS = (4, 64, 1024, 16384)
"""Rows to sweep for columns whose neighbours are swept more closely."""

_HEADS = (64, 4096, 65536)
"""Rows of a norm of each head."""

layer_norm_tunable = Tunable(
    name="layer_norm",
    package=__package__,
    kernel=layer_norm_kernel,
    axes={"rows": Pow2(), "cols": Exact()},
    batch_axes=("rows",),
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
        {"dtype": "bfloat16", "bias": True, "rows": _HEADS, "cols": 88},  # the heads of HunyuanDiT
        {"dtype": "bfloat16", "bias": True, "rows": _FEW_ROWS, "cols": 384},  # MiniLM, ViT-S
        {"dtype": "bfloat16", "bias": True, "rows": _FEW_ROWS, "cols": 512},  # CLIP ViT-B, text
        {"dtype": "bfloat16", "bias": True, "rows": _FEW_ROWS, "cols": 2048},  # OPT 1.3B
        {"dtype": "bfloat16", "bias": True, "rows": _FEW_ROWS, "cols": 4096},  # OPT 6.7B, GPT-J
        {"dtype": "bfloat16", "bias": False, "rows": _HEADS, "cols": 160},  # the heads of StableLM 2 12B
        {"dtype": "bfloat16", "bias": False, "rows": _FEW_ROWS, "cols": 2048},  # OLMo 1B's width
        {"dtype": "bfloat16", "bias": False, "rows": _FEW_ROWS, "cols": 12288},  # Command R+, Command A
    ],
)
"""Declaration: ``layer_norm_tunable.launch(x, weight, bias, out, eps)`` takes (rows, cols) x and out."""
