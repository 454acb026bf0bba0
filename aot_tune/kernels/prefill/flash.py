"""Tile code of attention for one tile of queries, and checks that both prefill kernels share.

Softmax is taken block by block of keys, with a running maximum and sum (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022), in base 2, so that the scale
and the change of base are one multiplication. Scores, sums and outputs are float32; the weights are rounded
to the dtype of `v` for their product, as in every published kernel. Weights below 2^-126 are flushed to zero,
and exp2 is the hardware's (2 ulp, PTX ISA, ex2.approx.ftz.f32): together under 1e-6 of a row's sum.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct
import torch

from aot_tune.errors import LaunchError
from aot_tune.kernels.host.arguments import check_window, number

_HIDDEN = -math.inf
_LOWEST = -3.4e38
"""Start of a row's maximum. It is finite, so that a row without keys so far subtracts no infinities."""

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2)


# The kernel's part ------------------------------------------------------------------------------


def attend(
    q: Any, k: Any, v: Any, out: Any, lse: Any, place: Any, m: Any, head: Any, q_len: Any, kv_len: Any,
    scale: Any, window: Any, tile_m: Any, tile_n: Any, head_dim: Any, causal: Any, windowed: Any,
) -> None:  # fmt: skip
    """Write the outputs and log-sum-exps of tile `m` of a head's queries.

    `place` precedes the token in an index of q, k, v and out: (batch,), or () for one sequence. The position
    of query i is that of key i + kv_len - q_len. The query sees the keys up to its position if `causal`, and
    at most `window` keys before it if `windowed`.
    """
    kv_head = head // (q.shape[-2] // k.shape[-2])
    queries = _rows(q, place, m, head, tile_m, head_dim, ct.PaddingMode.UNDETERMINED)
    first = m * tile_m + kv_len - q_len
    at = first + ct.arange(tile_m, dtype=ct.int32)[:, None]
    # Blocks [start, head_end) and [full_end, end) hold keys that some of the queries do not see.
    end, full_end = kv_len, kv_len // tile_n
    if causal:
        end, full_end = max(0, min(kv_len, first + tile_m)), max(0, first + 1) // tile_n
    end = ct.cdiv(end, tile_n)
    maximum = ct.full((tile_m, 1), _LOWEST, ct.float32)
    total = ct.zeros((tile_m, 1), ct.float32)
    acc = ct.zeros((tile_m, head_dim), ct.float32)
    start = 0
    scale = scale * _LOG2_E
    if windowed:
        head_end = min(end, ct.cdiv(max(0, first + tile_m - 1 - window), tile_n))
        for block in range(max(0, first - window) // tile_n, head_end):
            scores = _scores(queries, k, place, block, kv_head, tile_n, head_dim)
            scores = _masked(scores, block, at, kv_len, window, tile_n, causal, windowed)
            maximum, total, acc = _add(
                scores, v, place, block, kv_head, maximum, total, acc, scale, tile_n, head_dim
            )
        start = head_end
    for block in range(start, full_end):
        scores = _scores(queries, k, place, block, kv_head, tile_n, head_dim)
        maximum, total, acc = _add(
            scores, v, place, block, kv_head, maximum, total, acc, scale, tile_n, head_dim
        )
    for block in range(max(start, full_end), end):
        scores = _scores(queries, k, place, block, kv_head, tile_n, head_dim)
        scores = _masked(scores, block, at, kv_len, window, tile_n, causal, windowed)
        maximum, total, acc = _add(
            scores, v, place, block, kv_head, maximum, total, acc, scale, tile_n, head_dim
        )
    # A row that saw nothing has a sum of 0: its output is 0 and its log-sum-exp -inf.
    acc = acc * ct.where(total == 0.0, 0.0, 1.0 / total)
    box = ct.static_eval((1,) * (out.ndim - 3) + (tile_m, 1, head_dim))
    ct.store(out, place + (m, head, 0), acc.astype(out.dtype).reshape(box))  # noqa: RUF005 - cuTile has no *
    box = ct.static_eval((1,) * (lse.ndim - 1) + (tile_m,))
    ct.store(lse, place + (head, m), ((maximum + ct.log2(total)) * _LN_2).reshape(box))  # noqa: RUF005


def _rows(array: Any, place: Any, index: Any, head: Any, count: Any, head_dim: Any, padding: Any) -> Any:
    box = ct.static_eval((1,) * (array.ndim - 3) + (count, 1, head_dim))
    tile = ct.load(array, place + (index, head, 0), box, padding_mode=padding)  # noqa: RUF005
    return tile.reshape((count, head_dim))


def _scores(queries: Any, k: Any, place: Any, block: Any, head: Any, tile_n: Any, head_dim: Any) -> Any:
    keys = _rows(k, place, block, head, tile_n, head_dim, ct.PaddingMode.UNDETERMINED)
    return ct.mma(queries, keys.transpose(), ct.zeros((queries.shape[0], tile_n), ct.float32))


def _masked(
    scores: Any, block: Any, at: Any, kv_len: Any, window: Any, tile_n: Any, causal: Any, windowed: Any
) -> Any:
    keys = block * tile_n + ct.arange(tile_n, dtype=ct.int32)[None, :]
    # The position of no stored query is behind the last key, so `causal` keeps within kv_len too.
    seen = keys <= at if causal else keys < kv_len
    if windowed:
        seen = seen & (keys >= at - window)
    return ct.where(seen, scores, _HIDDEN)


def _add(
    scores: Any, v: Any, place: Any, block: Any, head: Any,
    maximum: Any, total: Any, acc: Any, scale: Any, tile_n: Any, head_dim: Any,
) -> Any:  # fmt: skip
    """Add one more block of keys to the running maximum, sum and output."""
    new = ct.maximum(maximum, ct.max(scores, axis=1, keepdims=True) * scale)
    weights = ct.exp2(scores * scale - new, flush_to_zero=True)
    fade = ct.exp2(maximum - new, flush_to_zero=True)
    total = total * fade + ct.sum(weights, axis=1, keepdims=True)
    # Zeros behind the last key: weights there are 0, and 0 times what memory holds might be NaN.
    values = _rows(v, place, block, head, tile_n, head_dim, ct.PaddingMode.ZERO)
    return new, total, ct.mma(weights.astype(v.dtype), values, acc * fade)


# What the host functions share ------------------------------------------------------------------


def check_heads(kernel: str, heads: int, kv_heads: int, head_dim: int) -> None:
    """Refuse head sizes that were not tuned, and numbers of heads that kv_heads does not divide."""
    if head_dim not in (64, 128):
        raise LaunchError(
            f"{kernel}: q has a head_dim of {head_dim}; pass 64 or 128 (torch.nn.functional.pad fills up; "
            "pass scale then, too)"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise LaunchError(f"{kernel}: q has {heads} heads and k {kv_heads}, which must divide those of q")


_LEAST_SCALE, _MOST_SCALE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""Bounds of a scale: smaller and larger numbers are 0 or infinite in a kernel."""


def scale_and_window(
    kernel: str, head_dim: int, scale: float | None, window: int | None, kv_len: int
) -> tuple[float, int | None]:
    """Check the scale and the window, and return them as a launch takes them.

    Returns:
        The scale, 1 / sqrt(head_dim) for None; and how many keys before its own a query sees, None for all.
    """
    if scale is None:
        scale = head_dim**-0.5
    else:
        scale = number(kernel, "scale", scale)
        if not _LEAST_SCALE <= scale <= _MOST_SCALE:
            raise LaunchError(
                f"{kernel}: scale is {scale}; pass a finite number above 0, as float32 holds it, or negate q"
            )
    check_window(kernel, window)
    return scale, window - 1 if window is not None and window < kv_len else None
