"""`attention_varlen` for the tests of every kernel."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tests.support.batches import Args, Batch
from tests.support.kernel_case import (
    HALVES,
    MADE,
    Call,
    KernelCase,
    Small,
    attending,
    half,
    ints,
    normal,
    problem,
    sizes_of,
)


def _batch() -> Batch:
    def of(args: Args, first: int, last: int) -> tuple[Any, ...]:
        q, k, v, _, lse, starts_q, starts_k, _, *rest = args
        queries, keys = (starts[first : last + 1].tolist() for starts in (starts_q, starts_k))
        q, k, v = (tensor[spans[0] : spans[-1]] for tensor, spans in ((q, queries), (k, keys), (v, keys)))
        longest = max(after - before for before, after in itertools.pairwise(queries))
        lse = lse[:, queries[0] : queries[-1]]
        starts = (made[first : last + 1] - made[first] for made in (starts_q, starts_k))
        return q, k, v, torch.empty_like(q), torch.empty_like(lse), *starts, longest, *rest

    def results(args: Args, first: int, last: int) -> list[torch.Tensor]:
        span = slice(int(args[5][first]), int(args[5][last]))
        return [args[3][span], args[4][:, span]]

    return Batch(of, results)


def _calls() -> list[Call]:
    q, kv, sequences = normal(6, 4, 64), normal(6, 2, 64), ints(0, 2, 2, 6)
    return attending("attention_varlen", q, kv, kv.neg(), sequences, sequences, 4, 4, causal=False)


def _refused() -> list[tuple[str, Call]]:
    q, starts = normal(6, 4, 64), ints(0, 0, 0)
    return [("max_seqlen_k is -1", Call("attention_varlen", "default", (q, q, q, starts, starts, 4, -1)))]


CASE = KernelCase(
    dtypes=HALVES,
    sizes=sizes_of(
        "mask batch tokens heads kv_heads head_dim",
        aligned=("causal", 2, 256, 8, 2, 128),
        ragged=("causal_127", 3, 200, 4, 4, 64),
        of_odd_sizes=("full", 5, 77, 3, 1, 64),
        of_size_1=("causal", 1, 1, 1, 1, 64),
    ),
    batch=_batch(),
    large=[
        problem(
            dtype="bfloat16",
            mask="causal",
            batch=batch,
            tokens=tokens,
            heads=32,
            kv_heads=8,
            head_dim=128,
        )
        for batch, tokens in ((21, 600), (5, 3000))
    ],
    calls=_calls,
    refused=_refused,
    small=lambda: Small(
        args={
            "q": half(1, 4, 64),
            "k": half(1, 2, 64),
            "v": half(1, 2, 64),
            "out": half(1, 4, 64),
            "cu_seqlens_q": ints(0, 1),
            "cu_seqlens_k": ints(0, 1),
        },
        numbers={"max_seqlen_q": 1, "max_seqlen_k": 1},
        unused=("q", "k", "v", "out"),
    ),
    kept={"lse": MADE},
)
