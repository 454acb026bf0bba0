"""Reference of attention in float64, some queries at a time, and the tolerances of a kernel."""

from __future__ import annotations

import math

import torch

from aot_tune.declare.declaration import Close

_MOST_SCORES = 2**27
"""Scores that the reference holds at a time, at most: 1 GiB of float64."""


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of one sequence in float64: q (q_len, heads, head_dim) to out and lse (heads, q_len).

    Either length may be 0; a query that sees no key gets 0 and a log-sum-exp of -inf.
    """
    (q_len, heads, head_dim), (kv_len, kv_heads) = q.shape, k.shape[:2]
    k, v = k.double().permute(1, 2, 0), v.double().transpose(0, 1)
    out = torch.empty((q_len, heads, head_dim), dtype=torch.float64, device=q.device)
    lse = torch.empty((heads, q_len), dtype=torch.float64, device=q.device)
    keys = torch.arange(kv_len, device=q.device)
    step = max(1, _MOST_SCORES // max(1, heads * kv_len))
    for first in range(0, q_len, step):
        part = q[first : first + step].double()
        count = part.shape[0]
        rows = heads // kv_heads * count  # not -1, which is ambiguous where there are no keys
        grouped = part.transpose(0, 1).reshape(kv_heads, rows, head_dim)
        scores = (grouped @ k).mul_(scale).view(heads, count, kv_len)
        at = torch.arange(first, first + count, device=q.device)[:, None] + (kv_len - q_len)
        if causal:
            scores.masked_fill_(keys > at, -math.inf)
        if window is not None:
            scores.masked_fill_(keys < at - window, -math.inf)
        sums = scores.logsumexp(2)
        lse[:, first : first + count] = sums
        weights = scores.sub_(sums.masked_fill(sums == -math.inf, 0)[..., None]).exp_()
        found = weights.view(kv_heads, rows, kv_len) @ v
        out[first : first + count] = found.view(heads, count, head_dim).transpose(0, 1)
    return out, lse


def close(out: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype) -> dict[str, Close]:
    """Return the tolerances of a kernel's results, for values with a standard deviation of 1."""
    # Weights and outputs are each rounded once, by up to half an eps. Where values cancel, the error of the
    # weights remains: half an eps of the largest |value|, about 5. Leaving out a block changes results by
    # about 1, since with QUERY_SCALE a few keys hold most of a row's weight. Sums are taken before rounding:
    # lse has float32's error, most of it from the truncated sums of the matrix units (1e-5 of the largest
    # score, about 40).
    eps = torch.finfo(dtype).eps
    return {
        "out": Close(value=out, rtol=eps, atol=3 * eps),
        "lse": Close(value=lse, rtol=1e-5, atol=5e-4),
    }


QUERY_SCALE = 3.0
"""Standard deviation of the queries that `make_args` draws: the scores then have one of 3, as in trained
models."""
