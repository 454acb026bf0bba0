"""Softmax over the last dimension: kernel, host function, declaration. Knows nothing of tuning or tables."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs
from aot_tune.arch import Arch
from aot_tune.bucket import Exact, Pow2, edge
from aot_tune.config import Config
from aot_tune.device import Device
from aot_tune.errors import LaunchError
from aot_tune.kernels.arguments import check_apart, check_dtype, check_shape, indexable
from aot_tune.kernels.online_softmax import exponential, maximum_and_sum
from aot_tune.kernels.rows import (
    MOST_ELEMENTS,
    as_rows,
    at_once,
    load_part,
    load_parts,
    part_refusal,
    parts,
    refusal,
    store_part,
    threads,
)
from aot_tune.problem import Problem
from aot_tune.tunable import Close, Tunable


@ct.kernel
def softmax_kernel(  # type: ignore[no-untyped-def]
    x, out,
    height: ct.Constant[int], width: ct.Constant[int], parts: ct.Constant[int], inside: ct.Constant[int],
    chunked: ct.Constant[bool], persistent: ct.Constant[bool],
    lanes: ct.Constant[int], vector: ct.Constant[int],
):  # fmt: skip
    """Hold `height` rows a block in `parts` of `width`; or read a row twice, `width` columns at a time.

    Persistent blocks take rows until none is left: so few are under way that L2 may hold them between both
    readings. The compiler puts barriers between the stores of such a loop.
    """
    shape = width, parts, inside, lanes, vector
    if persistent:
        for row in range(ct.bid(0), x.shape[0], ct.num_blocks(0)):
            _in_chunks(x, out, row, shape)
    elif chunked:
        _in_chunks(x, out, ct.bid(0), shape)
    else:
        block = ct.bid(0)
        rows = load_parts(x, (block,), (height, width), parts, inside, ct.PaddingMode.NEG_INF)
        tops, exponentials = rows[0].astype(ct.float32), ()
        for part in ct.static_iter(range(1, parts)):
            tops = ct.maximum(tops, rows[part].astype(ct.float32))
        top, total = ct.max(tops, axis=1, keepdims=True), ct.zeros((height, width), ct.float32)
        for part in ct.static_iter(range(parts)):
            exponentials = (*exponentials, exponential(rows[part].astype(ct.float32) - top))  # type: ignore[assignment]  # grows while compiling
            total = total + exponentials[part]
        # The sum is 1 or more, or NaN: none of what the exact division provides for.
        total = ct.sum(total, axis=1, keepdims=True)
        share = ct.truediv(1.0, total, rounding_mode=ct.RoundingMode.APPROX)
        for part in ct.static_iter(range(parts)):
            store_part(out, (block, part), (exponentials[part] * share).astype(out.dtype), part < inside)


def _in_chunks(x: Any, out: Any, row: Any, shape: Any) -> None:
    width, parts, inside, lanes, vector = shape
    top, total = maximum_and_sum(x, row, width, inside < parts, lanes, vector)
    share, chunks = 1.0 / total, x.shape[1] // width
    for chunk in range(chunks):
        _write_shares(x, out, (row, chunk), width, top, share, True)
    if inside < parts:
        _write_shares(x, out, (row, chunks), width, top, share, False)


def _write_shares(x: Any, out: Any, index: Any, width: Any, top: Any, share: Any, inside: Any) -> None:
    part = load_part(x, index, (1, width), inside, ct.PaddingMode.NEG_INF).astype(ct.float32)
    store_part(out, index, (exponential(part - top) * share).astype(out.dtype), inside)


def softmax(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Exponentials of the last dimension of `x`, divided by their sum.

    Computes in float32, less the row's maximum, and rounds once; what is below 1.2e-38 becomes 0. A row that
    is all -inf, or holds NaN or inf, becomes NaN, as torch's does.

    Args:
        x: (..., cols), bfloat16, float16 or float32, on a GPU; leading dimensions that ``view`` can flatten.
        out: Where to write, of the shape and dtype of `x`, apart from it in memory; a new tensor without it.

    Returns:
        `out`, or the new tensor.

    Raises:
        LaunchError: An argument cannot be launched; it names the argument and what to pass.
    """
    check_dtype("softmax", "x", x, torch.bfloat16, torch.float16, torch.float32)
    if x.dim() == 0:
        raise LaunchError("softmax: x has shape (); pass one dimension or more")
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    check_shape("softmax", "out", out, tuple(x.shape), "x")
    check_dtype("softmax", "out", out, x.dtype)
    if x.numel() == 0:
        return out
    flat_x, flat_out = as_rows("softmax", "x", x), as_rows("softmax", "out", out)
    counted = indexable("softmax", x=flat_x, out=flat_out)
    check_apart("softmax", "out", out, x=x)
    softmax_tunable.launch(*counted)
    return out


# The search space -------------------------------------------------------------------------------


@cache
def _config(
    height: int,
    width: int,
    num_worker_warps: int,
    occupancy: int,
    num_ctas: int = 1,
    *,
    chunked: bool = False,
    persistent: bool = False,
) -> Config:
    return Config(
        constants={"height": height, "width": width, "chunked": chunked, "persistent": persistent},
        hints={"num_ctas": num_ctas, "occupancy": occupancy, "num_worker_warps": num_worker_warps},
    )


_CLUSTER = 4
"""Most blocks that share a row: of 8 each was still given a fourth to hold (sm_90, tileiras 13.4)."""

_BLOCKS = ((4, 2), (4, 4), (4, 8), (8, 1), (8, 2), (8, 4))
"""Warps, and blocks of a multiprocessor, that hold rows."""

_CHUNKS = (
    # NVIDIA's TileGym (src/tilegym/ops/cutile/softmax.py) reads 8192 columns at a time, at an occupancy of 4.
    # A cluster a row is for few rows, or for more of a row in L2 when it is read again.
    *(
        _config(1, *values, chunked=True)
        for values in ((2048, 4, 8), (4096, 4, 8), (8192, 8, 2), (8192, 8, 4), (16384, 8, 1, 2))
    ),
    *(_config(1, 32768, 8, occupancy, _CLUSTER, chunked=True) for occupancy in (1, 2)),
    *(
        _config(1, *values, chunked=True, persistent=True)
        for values in ((8192, 8, 1), (8192, 8, 2), (16384, 8, 1), (16384, 8, 2, 2), (32768, 8, 2, _CLUSTER))
    ),
)
"""For rows that no block holds; 16 to 64 columns a thread."""


@cache
def _space(cols: int) -> tuple[Config, ...]:
    width = edge(cols)
    if width <= 1024:  # one part, of several rows
        tiles = itertools.product((1024, 4096), _BLOCKS)
        return tuple(_config(tile // width, width, *block) for tile, block in tiles)
    clusters = () if width < 16384 else itertools.product((4, 8), (1, 2), (2, _CLUSTER))
    held = tuple(
        _config(1, max(256 * warps * ctas, width // 16), warps, occupancy, ctas)
        for warps, occupancy, ctas in (*((*block, 1) for block in _BLOCKS), *clusters)
    )
    return held if width <= MOST_ELEMENTS else (*_CHUNKS, *held)


def _default(arch: Arch, problem: Problem) -> Config:
    """The most blocks that spill on no arch."""
    width = edge(problem.size("cols"))
    if width > MOST_ELEMENTS:
        return _config(1, 8192, 8, 2, chunked=True)
    if width <= 4096:
        return _config(max(1, 1024 // width), min(width, 1024), 4, 4)
    return _config(1, 2048, 8, 4 if width <= 8192 else 2 if width <= 16384 else 1)


def _legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    cols, height, width = problem.size("cols"), int(config["height"]), int(config["width"])
    if config["chunked"]:
        return refusal(config, arch, width) or True
    return part_refusal(width, cols) or refusal(config, arch, height * width * -(-cols // width)) or True


# The declaration --------------------------------------------------------------------------------


def _problem(x: torch.Tensor, out: torch.Tensor) -> Mapping[str, object]:
    return {"dtype": x.dtype, "rows": x.shape[0], "cols": x.shape[1]}


def _tiles(config: Config, problem: Problem) -> int:
    return -(-problem.size("rows") // int(config["height"]))


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    blocks = _tiles(config, problem)
    return (min(blocks, at_once(config, device)) if config["persistent"] else blocks,)


def _args(config: Config, x: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
    height, width = int(config["height"]), int(config["width"])
    tile = (height, width, *parts(height, width, *x.shape))
    lanes, vector = threads(config), 16 // x.element_size()
    return x, out, *tile, config["chunked"], config["persistent"], lanes, vector


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    rows, cols, dtype = problem.size("rows"), problem.size("cols"), str(problem["dtype"])
    x = inputs.randn((rows, cols), dtype, device, seed, scale=3)  # as logits are spread
    return x, inputs.empty((rows, cols), dtype, device)


def _reference(x: torch.Tensor, out: torch.Tensor) -> Close:
    # One rounding to the output's dtype is half its eps. Before it the float32 exponent, 40 at most here, is
    # off by 40 / 2^24 = 2e-6, and so is its exponential. The absolute term is for float16's subnormals.
    return Close(value=torch.softmax(x.double(), dim=1), rtol=max(torch.finfo(x.dtype).eps, 1e-5), atol=1e-7)


_ROWS = Pow2.edges(1, 16384)[::2]
"""Every other edge: the buckets between are one doubling away, near enough to be served by these."""

softmax_tunable = Tunable(
    name="softmax",
    package=__package__,
    kernel=softmax_kernel,
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
        {"dtype": "float32", "rows": _ROWS, "cols": 8},  # Mixtral, router
        {"dtype": ("bfloat16", "float32"), "rows": _ROWS, "cols": 128},  # Qwen3-MoE and gpt-oss 120b, router
        {"dtype": "float32", "rows": _ROWS, "cols": 256},  # DeepSeek-V3's count of experts
        {"dtype": "bfloat16", "rows": Pow2.edges(64, 65536)[::2], "cols": (2048, 8192)},  # attention scores
        {"dtype": "float32", "rows": Pow2.edges(1, 1024)[::2], "cols": 32000},  # Mixtral, sampling
        {"dtype": "float32", "rows": Pow2.edges(1, 1024)[::2], "cols": 128256},  # Llama 3.1, sampling
        {"dtype": "float32", "rows": Pow2.edges(1, 1024)[::2], "cols": 262144},  # Gemma 3, sampling
    ],
)
"""The declaration; ``softmax_tunable.launch(x, out)`` takes both as (rows, cols)."""
