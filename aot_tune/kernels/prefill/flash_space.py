"""Tiles of the prefill attention kernels: search space, default, legality. Pure: imports no kernel."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache

from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Axis, Exact, Pow2, edge
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

_Rows = Sequence[tuple[tuple[int, ...], ...]]
"""Values of tile_m, tile_n, num_worker_warps, num_ctas and occupancy; a row stands for all combinations.

Seeded from NVIDIA's TileGym (ops/cutile/attention.py and attention_varlen.py), its cutile-python
(samples/AttentionFMHA.py), Triton's tutorial (06-fused-attention.py), and FlashAttention-3's tiles for sm90
(hopper/tile_size.h): 128 queries over two warp groups.
"""

_WARPGROUP: _Rows = (
    # One warp group, two blocks a multiprocessor: one computes while the other ends.
    ((64,), (64, 128), (4,), (1,), (2,)),
    ((128,), (64,), (4, 8), (1,), (2,)),
    # Two warp groups: the softmax of one runs at the same time as the products of the other.
    ((128,), (128,), (8,), (1,), (1,)),
    ((256,), (64,), (8,), (1,), (1,)),
    ((256,), (128,), (8,), (2,), (1,)),
)
"""sm90: the configs within a tenth of the best on some shape on an H200, out of about thirty."""

_TENSOR_MEMORY: _Rows = (
    ((64,), (64,), (4,), (1,), (2, 4)),
    ((64,), (128,), (4,), (1,), (2,)),
    ((128,), (64, 128), (4, 8), (1,), (1, 2)),
    ((256,), (64, 128), (4, 8), (1, 2), (1,)),
)
"""sm100 to sm110: sums and scores are in tensor memory."""

_WARP: _Rows = (
    ((64,), (32, 64, 128), (4,), (1,), (1, 2)),
    ((128,), (32, 64, 128), (8,), (1,), (1,)),
    ((128,), (32, 64), (4,), (1,), (1, 2)),
    ((128,), (32, 64), (4,), (2,), (1,)),
)
"""sm80 to sm89, sm120 and later: the matrix units read registers, a warp at a time."""


def _rows_of(arch: Arch) -> _Rows:
    return {9: _WARPGROUP, 10: _TENSOR_MEMORY, 11: _TENSOR_MEMORY}.get(arch.major, _WARP)


@cache
def _config(tile_m: int, tile_n: int, warps: int, num_ctas: int, occupancy: int) -> Config:
    return Config(
        constants={"tile_m": tile_m, "tile_n": tile_n},
        hints={"num_ctas": num_ctas, "occupancy": occupancy, "num_worker_warps": warps},
    )


@cache
def _space(arch: Arch, head_dim: int) -> tuple[Config, ...]:
    every = (_config(*values) for row in _rows_of(arch) for values in itertools.product(*row))
    return tuple(config for config in every if _does_not_fit(config, arch, head_dim) is None)


def space(arch: Arch, problem: Problem) -> tuple[Config, ...]:
    """`Tunable.search_space` of the attention kernels."""
    return _space(arch, problem.size("head_dim"))


def default(arch: Arch, problem: Problem) -> Config:
    """`Tunable.default` of the attention kernels."""
    if arch >= Arch(12, 0):
        return _config(64, 64, 4, 1, 1)  # the largest that does not spill there
    window = window_of(problem)
    narrow = window is not None and window < 128
    if _rows_of(arch) is _WARPGROUP:
        return _config(128, 64, 8, 1, 2) if narrow else _config(64, 128, 4, 1, 2)
    small = narrow or problem.size("tokens") <= 64
    return _config(64, 64, 4, 1, 2) if small and _rows_of(arch) is not _WARP else _config(128, 128, 8, 1, 1)


def legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    """`Tunable.legal` of the attention kernels."""
    return _does_not_fit(config, arch, problem.size("head_dim")) or _does_not_suit(config, problem) or True


_MOST_REGISTERS = 232
"""Values that a computing thread holds, at most, where other warps load: prefill-registers (README)."""

_ITEM_BYTES = 2  # bfloat16 and float16

_ALWAYS = 128
"""Tiles of this many queries count as suitable for every problem, so that every default does."""


def _does_not_fit(config: Config, arch: Arch, head_dim: int) -> str | None:
    """Return why an arch cannot hold a config, or None."""
    tile_m, tile_n = tiles_of(config)
    num_ctas, occupancy = config.hints.get("num_ctas", 1), config.hints.get("occupancy", 1)
    if num_ctas > 1 and arch < Arch(9, 0):
        return f"{arch} has no clusters of blocks; num_ctas must be 1"
    # Sums and scores, and the weights, each of half the size of a score.
    held = (
        tile_m
        // num_ctas
        * (head_dim + tile_n + tile_n // 2)
        // (32 * config.hints.get("num_worker_warps", 4))
    )
    if _rows_of(arch) is not _TENSOR_MEMORY and held > _MOST_REGISTERS:
        return f"a tile of {tile_m} x {tile_n} holds {held} values a thread, which overflows the registers"
    shared = (tile_m // num_ctas + 2 * tile_n) * head_dim * _ITEM_BYTES
    available = Device.reference(arch).shared_memory_per_sm
    if shared * occupancy > available:
        return f"{occupancy} blocks of {shared} bytes overflow {available} of shared memory"
    return None


def _does_not_suit(config: Config, problem: Problem) -> str | None:
    """Return why a config wastes work on a problem's bucket, or None; the default never does."""
    tile_m, tokens = tiles_of(config)[0], edge(problem.size("tokens"))
    if tile_m > max(_ALWAYS, tokens):
        return f"a tile of {tile_m} queries is more than half empty for up to {tokens}"
    return None


def tiles_of(config: Config) -> tuple[int, int]:
    """Return tile_m and tile_n of a config."""
    return int(config["tile_m"]), int(config["tile_n"])


def tiles(config: Config, problem: Problem) -> int:
    """`Tunable.tiles` of the attention kernels."""
    each = -(-problem.size("tokens") // tiles_of(config)[0])
    return each * problem.size("heads") * problem.size("batch")


def grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    """`Tunable.grid_fn` of the attention kernels."""
    return (tiles(config, problem),)


def shapes(
    batch: int,
    tokens: tuple[int, ...],
    heads: int,
    kv_heads: int,
    *,
    head_dim: int = 128,
    mask: str = "causal",
    dtype: str = "bfloat16",
) -> dict[str, object]:
    """Return the typical problems of a model."""
    return {
        "dtype": dtype, "mask": mask, "batch": batch, "tokens": tokens,
        "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
    }  # fmt: skip


AXES: Mapping[str, Axis] = {
    "batch": Pow2(),
    "tokens": Pow2(),
    "heads": Exact(),
    "kv_heads": Exact(),
    "head_dim": Exact(),
}
"""`Tunable.axes` of the attention kernels; `tokens` are the queries of a sequence, or of the longest one.

The number of keys is no axis: a part of a prompt that sees earlier parts takes longer, but its number of
queries decides which tiles suit it.
"""


def mask(causal: bool, window: int | None) -> str:
    """Return a problem's "mask", by the keys that are seen: ``causal``, ``full`` or ``causal_127``."""
    return ("causal" if causal else "full") + ("" if window is None else f"_{window}")


def causal_of(problem: Problem) -> bool:
    """Whether a problem's mask is causal."""
    return str(problem["mask"]).startswith("causal")


def window_of(problem: Problem) -> int | None:
    """Return a problem's window, None for none."""
    _, _, window = str(problem["mask"]).partition("_")
    return int(window) if window else None
