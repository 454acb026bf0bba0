"""Rivals of the attention kernels: the back ends of torch's scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from aot_tune.bench.kernels.contest import Call
from aot_tune.bench.kernels.rivals import paged_read
from aot_tune.bench.kernels.standard import Rival, Standard
from aot_tune.bench.kernels.standing import COPY, LARGE_BYTES, Demand
from aot_tune.declare.discovery import FoundKernel
from aot_tune.values.problem import Problem

_T = torch.Tensor

FLASH, CUDNN = "SDPA flash", "SDPA cuDNN"

# The functions take a kernel's launch arguments; of prefill kernels a window without the own place, or None.


def _sdpa(backend: SDPBackend) -> Rival:
    def rival(q: _T, k: _T, v: _T, out: _T, lse: _T, scale: float, causal: bool, window: int | None) -> Call:
        if window is not None:  # the public function has no window; the flash back end's own operator has
            if backend is not SDPBackend.FLASH_ATTENTION:
                raise NotImplementedError("it takes no window")
            return _flash(q, k, v, None, None, q.shape[1], k.shape[1], scale, causal, window)
        queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))

        def call() -> _T:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    queries, keys, values, is_causal=causal, scale=scale, enable_gqa=True
                )

        return call

    return rival


def _flash(
    q: _T, k: _T, v: _T, starts_q: _T | None, starts_k: _T | None, most_q: int, most_k: int,
    scale: float, causal: bool, window: int | None,
) -> Call:  # fmt: skip
    sides = {} if window is None else {"window_size_left": window, "window_size_right": 0 if causal else -1}
    return lambda: torch.ops.aten._flash_attention_forward(
        q, k, v, starts_q, starts_k, most_q, most_k, 0.0, causal, False, scale=scale, **sides
    )


def _packed(
    q: _T, k: _T, v: _T, out: _T, lse: _T, starts_q: _T, starts_k: _T, most_q: int,
    scale: float, causal: bool, window: int | None,
) -> Call:  # fmt: skip
    most_k = int(starts_k.diff().max())
    return _flash(q, k, v, starts_q, starts_k, most_q, most_k, scale, causal, window)


def _gathered(
    q: _T, k_cache: _T, v_cache: _T, block_table: _T, seq_lens: _T, out: _T, lse: _T,
    scratch: _T, scale: float, window: int,
) -> Call:  # fmt: skip
    """Make PyTorch's flash kernel on packed keys, gathered before, because it has no pages."""
    rows, lengths = block_table.long(), seq_lens.tolist()
    k, v = (
        torch.cat([cache[pages].flatten(0, 1)[:length] for pages, length in zip(rows, lengths, strict=True)])
        for cache in (k_cache, v_cache)
    )
    starts_q = torch.arange(len(lengths) + 1, dtype=torch.int32, device=q.device)
    starts_k = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    before = window - 1 if window < max(lengths) else None  # the own place counts here
    return _flash(q, k, v, starts_q, starts_k, 1, max(lengths), scale, True, before)


# The work ---------------------------------------------------------------------------------------


def seen(queries: int, keys: int, *, causal: bool, window: int | None) -> int:
    """Count the (query, key) pairs that a sequence's mask leaves; the last query is at the last key."""
    if not causal:
        return queries * keys
    most = keys if window is None else min(window + 1, keys)
    growing = max(0, min(queries, most - (keys - queries)))  # the first queries see more one by one
    return (queries - growing) * most + sum(range(keys - queries + 1, keys - queries + 1 + growing))


def _flops(problem: Problem, q: _T, k: _T, v: _T, out: _T, lse: _T, scale: float, *mask: Any) -> float:
    causal, window = mask
    batch, queries, heads, head_dim = q.shape
    return 4.0 * batch * heads * head_dim * seen(queries, k.shape[1], causal=causal, window=window)


def _packed_flops(
    problem: Problem, q: _T, k: _T, v: _T, out: _T, lse: _T, starts_q: _T, starts_k: _T, most_q: int,
    scale: float, causal: bool, window: int | None,
) -> float:  # fmt: skip
    lengths = zip(starts_q.diff().tolist(), starts_k.diff().tolist(), strict=True)
    pairs = sum(seen(queries, keys, causal=causal, window=window) for queries, keys in lengths)
    return 4.0 * pairs * q.shape[1] * q.shape[2]


def _decode_moved(
    problem: Problem, q: _T, k_cache: _T, v_cache: _T, block_table: _T, seq_lens: _T, out: _T, lse: _T,
    scratch: _T, scale: float, window: int,
) -> float:  # fmt: skip
    """Count the bytes of the keys and values inside the window, of the queries and of the outputs."""
    keys = int(seq_lens.clamp(max=window).sum())
    return float(2 * keys * k_cache[0, 0].nbytes + q.nbytes + out.nbytes + lse.nbytes)


# By kernel --------------------------------------------------------------------------------------

_PREFILL = (
    Demand(
        text="at least 0.75 of the best SDPA back end in the geometric mean", over=(FLASH, CUDNN), mean=0.75
    ),
)

STANDARDS = {
    "attention": Standard(
        rivals={FLASH: _sdpa(SDPBackend.FLASH_ATTENTION), CUDNN: _sdpa(SDPBackend.CUDNN_ATTENTION)},
        demands=_PREFILL,
        flops=_flops,
    ),
    "attention_decode": Standard(
        rivals={FLASH: _gathered},
        demands=(
            Demand(
                text="at least 80 % of the bandwidth of a copy, from 64 MiB of keys and values",
                over=(COPY,),
                worst=0.8,
                where=lambda shape: shape.bytes >= LARGE_BYTES,
            ),
        ),
        moved=_decode_moved,
        reads=True,
        floor=FoundKernel(module=paged_read.__name__, tunable=paged_read.paged_read_tunable),
    ),
    "attention_varlen": Standard(rivals={FLASH: _packed}, demands=_PREFILL, flops=_packed_flops),
}
"""Kernel name to its standard."""
