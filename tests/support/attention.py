"""Problems of attention that a CPU gets through, for tests of its kernel and of its reference."""

from __future__ import annotations

from aot_tune.values.problem import Problem
from tests.support.agree import problem


def shape(
    tokens: int,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 64,
    mask: str = "causal",
    dtype: str = "bfloat16",
) -> Problem:
    """A small causal problem, but for what is named."""
    return problem(
        dtype=dtype, mask=mask, batch=batch, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim
    )  # fmt: skip
