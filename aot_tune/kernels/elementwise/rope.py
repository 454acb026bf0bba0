"""Rotary position embedding in place: host function, search space and declaration.

A pair (a, b) of a head becomes (a cos - b sin, b cos + a sin) (Su et al., "RoFormer", 2021). Of the first
`rotary_dim` elements either i and i + rotary_dim / 2 are a pair (GPT-NeoX, Llama at Hugging Face) or 2 i and
2 i + 1 (GPT-J, Llama as Meta has it, DeepSeek). The other elements stay. The kernel is in `rope_tiles`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from aot_tune import inputs
from aot_tune.declare.declaration import Close
from aot_tune.errors import LaunchError
from aot_tune.kernels.elementwise.rope_tiles import rope_kernel
from aot_tune.kernels.host.arguments import (
    check_apart,
    check_dtype,
    check_flag,
    check_rank,
    check_shape,
    indexable,
)
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact, Pow2, edge
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

_MOST_PAIRS = 4096
"""Pairs of one head, at most: a block holds them in registers."""

_MOST_HEADS = 32767
"""Heads of queries, and heads of keys, at most: the grid's second dimension holds 65535 blocks."""


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys in place by the angles of their tokens, in float32, and round once.

    Args:
        q: (tokens, heads, head_dim), bfloat16, float16 or float32, on a GPU; any strides, so that it may be a
            view into a fused projection.
        k: (tokens, kv_heads, head_dim), of the dtype of `q`; it must share no memory with `q`.
        cos: (tokens, rotary_dim / 2), float32: the cosine of each pair's angle at each token's position. The
            first rotary_dim elements of a head are rotated.
        sin: (tokens, rotary_dim / 2), float32: the sine of the same angles.
        interleaved: Whether neighbours are a pair, as in GPT-J, in place of elements rotary_dim / 2 apart.

    Returns:
        `q` and `k`, changed.

    Raises:
        LaunchError: An argument cannot be launched; the error names it and what to pass.
    """
    check_rope(q, k, cos, sin, interleaved=interleaved)
    if q.shape[0]:
        counted = indexable("rope", q=q, k=k, cos=cos, sin=sin)
        check_apart("rope", "q", q, k=k, cos=cos, sin=sin)
        check_apart("rope", "k", k, cos=cos, sin=sin)
        rope_tunable.launch(*counted, interleaved)
    return q, k


def check_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> None:
    """Refuse shapes, dtypes and flags that `rope` does not take."""
    check_flag("rope", "interleaved", interleaved)
    check_rank("rope", "q", q, "tokens heads head_dim")
    check_rank("rope", "k", k, "tokens kv_heads head_dim")
    check_rank("rope", "cos", cos, "tokens rotary_dim/2")
    check_dtype("rope", "q", q, torch.bfloat16, torch.float16, torch.float32)
    check_dtype("rope", "k", k, q.dtype)
    (tokens, heads, head_dim), half, most = q.shape, cos.shape[1], min(q.shape[2] // 2, _MOST_PAIRS)
    if not 0 < half <= most:
        raise LaunchError(
            f"rope: cos has {half} columns; pass one for each pair to rotate, at most {most} for the "
            f"head_dim of q, {head_dim}"
        )
    check_shape("rope", "k", k, (tokens, k.shape[1], head_dim), "q")
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape("rope", name, table, (tokens, half), f"q of {tokens} tokens and cos of {half} columns")
        check_dtype("rope", name, table, torch.float32)
    for name, count in (("q", heads), ("k", k.shape[1])):
        if not 0 < count <= _MOST_HEADS:
            raise LaunchError(
                f"rope: {name} has {count} heads; pass 1 to {_MOST_HEADS}, {name}[:, first:last], at a time"
            )


# The declaration --------------------------------------------------------------------------------


def _problem(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> Mapping[str, object]:
    return {
        "dtype": q.dtype,
        "interleaved": interleaved,
        "tokens": q.shape[0],
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "head_dim": q.shape[2],
        "rotary_dim": 2 * cos.shape[1],
    }


_LEAST_ELEMENTS = 512
"""Elements, at least, of a tile that divides heads exactly where their number is not a power of two: 4 for
each thread. With fewer the larger, partly empty tile is better."""


def _tile_heads(config: Config, heads: int, rotary_dim: int) -> int:
    """Return a tile's heads: a power of two that divides the heads, if large enough, such as 8 of 40."""
    tile = min(edge(heads), int(config["tile_heads"]))
    exact = min(tile, heads & -heads)
    return exact if exact * edge(rotary_dim) >= _LEAST_ELEMENTS else tile


def _blocks(config: Config, problem: Problem) -> tuple[int, int]:
    """Return tokens, and blocks of each token: one where one tile holds all heads of queries, one of keys."""
    each = (problem.size("heads"), problem.size("kv_heads"))
    tiles = [-(-heads // _tile_heads(config, heads, problem.size("rotary_dim"))) for heads in each]
    return problem.size("tokens"), 1 if tiles == [1, 1] else sum(tiles)


def _tiles(config: Config, problem: Problem) -> int:
    return math.prod(_blocks(config, problem))


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    return _blocks(config, problem)


def _args(
    config: Config, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[Any, ...]:
    heads, kv_heads, half = q.shape[1], k.shape[1], cos.shape[1]
    width = edge(half)
    tile, kv_tile = (_tile_heads(config, n, 2 * half) for n in (heads, kv_heads))
    together = heads <= tile and kv_heads <= kv_tile
    inside, kv_inside = (width == half and n % size == 0 for n, size in ((heads, tile), (kv_heads, kv_tile)))
    sizes = (half, width, tile, inside, kv_tile, kv_inside, together)
    return q, k, cos, sin, interleaved, *sizes


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    tokens, head_dim, dtype = problem.size("tokens"), problem.size("head_dim"), str(problem["dtype"])
    q = inputs.randn((tokens, problem.size("heads"), head_dim), dtype, device, 2 * seed)
    k = inputs.randn((tokens, problem.size("kv_heads"), head_dim), dtype, device, 2 * seed + 1)
    half = problem.size("rotary_dim") // 2
    pairs = torch.arange(half, dtype=torch.float32, device=device)
    frequencies = torch.exp2(pairs * (-_LOG2_THETA / half))
    # Each seed places the tokens elsewhere in the sequence, so that the angles differ too.
    positions = torch.arange(tokens, dtype=torch.float32, device=device) + 17 * seed
    angles = positions[:, None] * frequencies[None, :]
    return q, k, angles.cos(), angles.sin(), problem["interleaved"]


_LOG2_THETA = 18.93
"""Binary logarithm of the base of the angles, 500000, as in Llama 3.1."""


def _reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> dict[str, Close]:
    # One rounding to the dtype is half its eps. Where a cos and b sin cancel, float32 leaves an error of
    # about 1e-6 for normally distributed inputs: the absolute term.
    return {
        name: Close(
            value=_rotated(x, cos, sin, interleaved), rtol=max(torch.finfo(x.dtype).eps, 1e-5), atol=1e-5
        )
        for name, x in (("q", q), ("k", k))
    }


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = cos.shape[1]
    sizes, two = ((half, 2), 3) if interleaved else ((2, half), 2)
    result = x.double()
    a, b = result[:, :, : 2 * half].reshape(*x.shape[:2], *sizes).unbind(two)
    cos, sin = cos.double()[:, None, :], sin.double()[:, None, :]
    result[:, :, : 2 * half] = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=two).flatten(2)
    return result


_TILES = (2048, 4096, 8192)
"""Elements of a tile, 8 to 64 a thread. 8192 hold all heads of most models; NVIDIA's TileGym
(ops/cutile/rope.py) has only tiles that do."""

_OCCUPANCIES = (1, 4, 8)
"""Occupancies to search: occupancy-code (README)."""


@cache
def _config(tile: int, rotary_dim: int, warps: int, occupancy: int = 1) -> Config:
    heads = max(1, tile // edge(rotary_dim))
    return Config(constants={"tile_heads": heads}, hints={"occupancy": occupancy, "num_worker_warps": warps})


def _space(arch: Arch, problem: Problem) -> list[Config]:
    return [
        _config(tile, problem.size("rotary_dim"), warps, occupancy)
        for tile in _TILES
        for warps in (4, 8)
        for occupancy in _OCCUPANCIES
    ]


def _legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    heads, rotary_dim = int(config["tile_heads"]), problem.size("rotary_dim")
    if heads > 1 and heads * edge(rotary_dim) > _TILES[-1]:
        return f"{heads} heads of {rotary_dim} elements to rotate exceed the {_TILES[-1]} elements of a block"
    return True


_TOKENS = tuple(4**i for i in range(8))
"""Tokens to sweep, 1 to 16384. Sizes in between are at most one doubling from one of these."""

_FEW_TOKENS = (4, 64, 1024, 16384)
"""Tokens to sweep for heads whose neighbours are swept more closely."""


def _shapes(
    *, heads: int, kv_heads: int, head_dim: int = 128, rotary_dim: int = 0, interleaved: bool = False,
    dtype: str = "bfloat16", tokens: tuple[int, ...] = _TOKENS,
) -> dict[str, object]:  # fmt: skip
    """Return a model's problems; a rotary_dim of 0 is all of head_dim."""
    return {
        "dtype": dtype, "interleaved": interleaved, "tokens": tokens, "heads": heads, "kv_heads": kv_heads,
        "head_dim": head_dim, "rotary_dim": rotary_dim or head_dim,
    }  # fmt: skip


rope_tunable = Tunable(
    name="rope",
    package=__package__,
    kernel=rope_kernel,
    axes={"tokens": Pow2(), **dict.fromkeys(("heads", "kv_heads", "head_dim", "rotary_dim"), Exact())},
    batch_axes=("tokens",),
    problem=_problem,
    search_space=_space,
    legal=_legal,
    default=lambda arch, problem: _config(4096, problem.size("rotary_dim"), 4),
    grid_fn=_grid,
    args_fn=_args,
    tiles=_tiles,
    make_args=_make_args,
    reference=_reference,
    outputs=(),
    inplace=("q", "k"),
    typical=[
        _shapes(heads=32, kv_heads=8),  # Llama 3.1 8B, Qwen3 8B
        _shapes(heads=64, kv_heads=8),  # Llama 3.1 70B, Qwen3 32B
        _shapes(heads=40, kv_heads=8),  # Qwen3 14B
        _shapes(heads=32, kv_heads=4),  # Qwen3 30B-A3B
        _shapes(heads=64, kv_heads=4),  # Qwen3 235B-A22B
        _shapes(heads=64, kv_heads=8, head_dim=64),  # gpt-oss 20b and 120b
        _shapes(heads=32, kv_heads=8, dtype="float16"),  # Llama 3.1 8B, run in float16 (AWQ, GPTQ)
        _shapes(heads=16, kv_heads=2, head_dim=256, rotary_dim=64),  # Qwen3-Next 80B-A3B
        _shapes(heads=32, kv_heads=8, interleaved=True),  # Llama 3.1 8B as Meta ships it
        _shapes(heads=128, kv_heads=1, head_dim=64, interleaved=True),  # DeepSeek-V3, latent attention
        _shapes(heads=32, kv_heads=2, rotary_dim=64, interleaved=True),  # GLM-4 9B
        _shapes(heads=28, kv_heads=4, tokens=_FEW_TOKENS),  # Qwen2.5 7B
        _shapes(heads=16, kv_heads=8, tokens=_FEW_TOKENS),  # Qwen3 0.6B
        _shapes(heads=24, kv_heads=8, tokens=_FEW_TOKENS),  # Llama 3.2 3B
        _shapes(heads=12, kv_heads=2, tokens=_FEW_TOKENS),  # Qwen2.5 1.5B
        _shapes(heads=32, kv_heads=8, head_dim=64, tokens=_FEW_TOKENS),  # Llama 3.2 1B
        _shapes(heads=14, kv_heads=2, head_dim=64, tokens=_FEW_TOKENS),  # Qwen2.5 0.5B
        _shapes(heads=32, kv_heads=32, tokens=_FEW_TOKENS),  # Llama 2 7B
        _shapes(heads=8, kv_heads=1, tokens=_FEW_TOKENS),  # Llama 3.1 70B, a rank of eight
        _shapes(heads=16, kv_heads=16, head_dim=80, tokens=_FEW_TOKENS),  # Qwen2.5-VL, vision
        _shapes(heads=16, kv_heads=8, head_dim=256, tokens=_FEW_TOKENS),  # Gemma 3 12B
    ],
)
"""Declaration: ``rope_tunable.launch(q, k, cos, sin, interleaved)`` takes what `rope` takes."""
