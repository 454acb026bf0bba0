"""A library in the style of split-KV decode: one kernel is searched, another launched without a search.

What the first one computes is asked of the compiler when the module is imported, as FlashInfer's decode does.
"""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile.tune import exhaustive_search

SPACE = [SimpleNamespace(TILE=32), SimpleNamespace(TILE=64)]


def _compiler_is_new() -> bool:
    try:
        from cuda.tile._bytecode.version import BytecodeVersion
        from cuda.tile._compile import _get_max_supported_bytecode_version

        newest: Any = _get_max_supported_bytecode_version(tempfile.gettempdir())
        return bool(newest >= BytecodeVersion.V_13_2)
    except Exception:
        return False


IS_NEW = _compiler_is_new()


@ct.kernel
def partial_kernel(x, parts, TILE: ct.Constant[int]):
    place = ct.bid(0)
    tile = ct.astype(ct.load(x, index=(place,), shape=(TILE,)), ct.float32)
    if IS_NEW:
        tile = tile * 1.0
    ct.store(parts, index=(place,), tile=ct.sum(tile, axis=0, keepdims=True))


@ct.kernel(occupancy=2)
def reduce_kernel(parts, out):
    ct.store(out, index=(0,), tile=ct.sum(ct.load(parts, index=(0,), shape=(64,)), axis=0, keepdims=True))


def total(x: Any) -> Any:
    """Sum a vector of at most 2048 elements."""
    n, parts = x.shape[0], torch.zeros(64, dtype=torch.float32, device=x.device)
    result = exhaustive_search(
        SPACE, 0, lambda c: (-(-n // c.TILE),), partial_kernel, lambda c: (x, parts, c.TILE), quiet=True
    )
    tile = result.best.config.TILE
    ct.launch(0, (-(-n // tile),), partial_kernel, (x, parts, tile))
    return reduce(parts)


def reduce(parts: Any) -> Any:
    """Sum partial sums."""
    out = torch.empty(1, dtype=torch.float32, device=parts.device)
    ct.launch(0, (1,), reduce_kernel, (parts, out))
    return out
