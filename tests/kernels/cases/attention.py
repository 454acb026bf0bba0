"""`attention` for the tests of every kernel."""

from __future__ import annotations

from tests.support.batches import cut_rows
from tests.support.kernel_case import (
    HALVES,
    MADE,
    Call,
    KernelCase,
    Small,
    attending,
    half,
    normal,
    problem,
    sizes_of,
)


def _calls() -> list[Call]:
    q, kv = normal(1, 6, 4, 64), normal(1, 6, 2, 64)
    return attending("attention", q, kv, kv.neg(), window=3)


def _refused() -> list[tuple[str, Call]]:
    q = normal(1, 6, 4, 64)
    return [
        ("a head_dim of 96", Call("attention", "default", (normal(1, 6, 4, 96),) * 3)),
        ("window is 0", Call("attention", "lse", (q, q, q), {"window": 0})),
        ("scale is nan", Call("attention", "lse_out", (q, q, q), {"scale": float("nan"), "out": q.clone()})),
    ]


CASE = KernelCase(
    dtypes=HALVES,
    sizes=sizes_of(
        "mask batch tokens heads kv_heads head_dim",
        aligned=("causal", 2, 256, 8, 2, 128),
        ragged=("causal_127", 3, 200, 4, 4, 64),
        of_odd_sizes=("full", 3, 77, 3, 1, 64),
        of_size_1=("causal", 1, 1, 1, 1, 64),
    ),
    batch=cut_rows((0, 1, 2), (3, 4)),
    large=[
        problem(
            dtype="bfloat16",
            mask=mask,
            batch=batch,
            tokens=tokens,
            heads=32,
            kv_heads=8,
            head_dim=head_dim,
        )
        for mask, batch, tokens, head_dim in (("causal", 9, 700, 128), ("causal_127", 5, 300, 64))
    ],
    calls=_calls,
    refused=_refused,
    small=lambda: Small(
        args={
            "q": half(1, 3, 4, 64),
            "k": half(1, 5, 2, 64),
            "v": half(1, 5, 2, 64),
            "out": half(1, 3, 4, 64),
        },
        unused=("q", "k", "v", "out"),
    ),
    kept={"lse": MADE},
)
