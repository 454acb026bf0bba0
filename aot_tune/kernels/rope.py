"""Rotary position embedding in place: kernel, host function, declaration. Knows nothing of tuning or tables.

The rotate-half form of Llama and its kin (Su et al., "RoFormer", 2021): elements i and i + head_dim / 2 of a
head are a pair, and the pair (a, b) becomes (a cos - b sin, b cos + a sin).
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
from aot_tune.kernels.arguments import check_apart, check_dtype, check_rank, check_shape, check_sizes
from aot_tune.problem import Problem
from aot_tune.tunable import Close, Tunable

_MOST_ELEMENTS = 32768
"""A block holds all heads of a token in registers: this many are 256 a thread; more would only spill."""


def _rotate(x: Any, token: Any, heads: Any, half: Any, cos: Any, sin: Any) -> None:
    # Both halves are read before either is written: the kernel works in place. Plain loads, as in rms_norm.
    zero = ct.PaddingMode.ZERO
    low = ct.load(x, (token, 0, 0), (1, heads, half), padding_mode=zero, allow_tma=False).astype(ct.float32)
    high = ct.load(x, (token, 0, 1), (1, heads, half), padding_mode=zero, allow_tma=False).astype(ct.float32)
    ct.store(x, (token, 0, 0), (low * cos - high * sin).astype(x.dtype), allow_tma=False)
    ct.store(x, (token, 0, 1), (high * cos + low * sin).astype(x.dtype), allow_tma=False)


@ct.kernel
def rope_kernel(  # type: ignore[no-untyped-def]
    q, k, cos, sin, tile_heads: ct.Constant[int], tile_kv_heads: ct.Constant[int], half: ct.Constant[int]
):
    """Rotate all heads of one token a block."""
    token = ct.bid(0)
    token_cos = ct.load(cos, (token, 0), (1, half), allow_tma=False).reshape((1, 1, half))
    token_sin = ct.load(sin, (token, 0), (1, half), allow_tma=False).reshape((1, 1, half))
    _rotate(q, token, tile_heads, half, token_cos, token_sin)
    _rotate(k, token, tile_kv_heads, half, token_cos, token_sin)


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys in place by their tokens' angles.

    Computes in float32 and rounds once.

    Args:
        q: (tokens, heads, head_dim), bfloat16, float16 or float32, on a GPU; any strides, so that a view into
            a fused projection will do. head_dim is twice a power of two.
        k: (tokens, kv_heads, head_dim), of the dtype of `q`, apart from it in memory.
        cos: (tokens, head_dim / 2), float32: the cosine of each pair's angle at each token's position.
        sin: (tokens, head_dim / 2), float32.

    Returns:
        `q` and `k`, changed.

    Raises:
        LaunchError: An argument cannot be launched; it names the argument and what to pass.
    """
    check_rank("rope", "q", q, "tokens heads head_dim")
    check_rank("rope", "k", k, "tokens kv_heads head_dim")
    check_dtype("rope", "q", q, torch.bfloat16, torch.float16, torch.float32)
    check_dtype("rope", "k", k, q.dtype)
    tokens, heads, head_dim = q.shape
    half = head_dim // 2
    if head_dim < 2 or edge(half) * 2 != head_dim:
        raise LaunchError(f"rope: q has a head_dim of {head_dim}; it must be twice a power of two")
    check_shape("rope", "k", k, (tokens, k.shape[1], head_dim), "q")
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape("rope", name, table, (tokens, half), f"q of {tokens} tokens and a head_dim of {head_dim}")
        check_dtype("rope", name, table, torch.float32)
    for name, count in (("q", heads), ("k", k.shape[1])):
        if not 0 < count * head_dim <= _MOST_ELEMENTS:
            raise LaunchError(
                f"rope: {name} has {count} heads of {head_dim}; a block holds all heads of a token, 1 to "
                f"{_MOST_ELEMENTS // head_dim} of them: pass {name}[:, first:last], some at a time"
            )
    if tokens == 0:
        return q, k
    check_sizes("rope", q=q, k=k, cos=cos, sin=sin)
    check_apart("rope", "q", q, k=k, cos=cos, sin=sin)
    check_apart("rope", "k", k, cos=cos, sin=sin)
    rope_tunable.launch(q, k, cos, sin)
    return q, k


# The declaration --------------------------------------------------------------------------------


def _problem(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Mapping[str, object]:
    return {
        "dtype": q.dtype,
        "tokens": q.shape[0],
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "head_dim": q.shape[2],
    }


def _tiles(config: Config, problem: Problem) -> int:
    return problem.size("tokens")


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    return (problem.size("tokens"),)


def _args(
    config: Config, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[Any, ...]:
    return q, k, cos, sin, edge(q.shape[1]), edge(k.shape[1]), q.shape[2] // 2


def _legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    return Device.reference(arch).refusal(config.hints.get("occupancy", 1)) or True


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    tokens, head_dim, dtype = problem.size("tokens"), problem.size("head_dim"), str(problem["dtype"])
    q = inputs.randn((tokens, problem.size("heads"), head_dim), dtype, device, 2 * seed)
    k = inputs.randn((tokens, problem.size("kv_heads"), head_dim), dtype, device, 2 * seed + 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
    frequencies = torch.exp2(pairs * (-2 * _LOG2_THETA / head_dim))
    # Another seed stands for another place in the sequence, so that the angles differ too.
    positions = torch.arange(tokens, dtype=torch.float32, device=device) + 17 * seed
    angles = positions[:, None] * frequencies[None, :]
    return q, k, angles.cos(), angles.sin()


_LOG2_THETA = 18.93
"""Base of the angles, 500000, as Llama 3.1 has it."""


def _reference(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> dict[str, Close]:
    # One rounding to the dtype is half its eps. Where a cos and b sin cancel, float32 leaves an error of 1e-6
    # or so for normally distributed inputs: the absolute term.
    return {
        name: Close(value=_rotated(x, cos, sin), rtol=max(torch.finfo(x.dtype).eps, 1e-5), atol=1e-5)
        for name, x in (("q", q), ("k", k))
    }


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.double().chunk(2, dim=2)
    cos, sin = cos.double()[:, None, :], sin.double()[:, None, :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=2)


_SPACE = tuple(Config(hints={"occupancy": n}) for n in (1, 2, 4, 8, 16, 32))
"""All that the hint takes, by doubling. The sweep measures once what compiles to the same code."""


def _shapes(*, heads: int, kv_heads: int, head_dim: int = 128, dtype: str = "bfloat16") -> dict[str, object]:
    tokens = Pow2.edges(1, 16384)
    return {"dtype": dtype, "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}


rope_tunable = Tunable(
    name="rope",
    package=__package__,
    kernel=rope_kernel,
    axes={"tokens": Pow2(), "heads": Exact(), "kv_heads": Exact(), "head_dim": Exact()},
    problem=_problem,
    search_space=lambda arch, problem: _SPACE,
    legal=_legal,
    default=lambda arch, problem: _SPACE[1],  # an occupancy of 2, which spills on no arch
    grid_fn=_grid,
    args_fn=_args,
    tiles=_tiles,
    make_args=_make_args,
    reference=_reference,
    inplace=("q", "k"),
    typical=[
        _shapes(heads=32, kv_heads=8),  # Llama 3.1 8B, Qwen3 8B
        _shapes(heads=64, kv_heads=8),  # Llama 3.1 70B, Qwen3 32B
        _shapes(heads=40, kv_heads=8),  # Qwen3 14B
        _shapes(heads=32, kv_heads=4),  # Qwen3 30B-A3B
        _shapes(heads=64, kv_heads=4),  # Qwen3 235B-A22B
        _shapes(heads=64, kv_heads=8, head_dim=64),  # gpt-oss 20b and 120b
        _shapes(heads=32, kv_heads=8, dtype="float16"),  # Llama 3.1 8B, run in float16 (AWQ, GPTQ)
    ],
)
"""The declaration; ``rope_tunable.launch(q, k, cos, sin)`` takes the shapes that `rope` takes."""
