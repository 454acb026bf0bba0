"""`attention_decode` for the tests of every kernel."""

from __future__ import annotations

from typing import Any

import torch

from aot_tune.kernels.decode import attention_decode
from tests.support.batches import Args, Batch, cut_rows
from tests.support.kernel_case import (
    HALVES,
    MADE,
    OURS,
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
    plain = cut_rows((0, 3, 4), (5, 6))

    def of(args: Args, first: int, last: int) -> tuple[Any, ...]:
        q, k, v, pages, lengths, out, lse, _, *rest = plain.of(args, first, last)
        width = max(-(-int(lengths.max()) // k.shape[1]), 1)  # as wide as its longest sequence needs
        scratch = attention_decode._scratch(q, k.shape[2])
        return q, k, v, pages[:, :width].contiguous(), lengths.clone(), out, lse, scratch, *rest

    return Batch(of, plain.results)


def _calls() -> list[Call]:
    cache, pages = normal(5, 16, 2, 64), torch.tensor([[0, 3], [4, 1]], dtype=torch.int32)
    return attending("attention_decode", normal(2, 8, 64), cache, cache.neg(), pages, pages[0] + 17)


def _refused() -> list[tuple[str, Call]]:
    cache, pages = normal(5, 16, 2, 64), torch.zeros((2, 2), dtype=torch.int32)
    args = normal(2, 8, 64), cache, cache, pages, pages[0, :1]
    return [("seq_lens has shape", Call("attention_decode", "default", args))]


CASE = KernelCase(
    dtypes=HALVES,
    sizes=sizes_of(
        "windowed batch context heads kv_heads head_dim page_size",
        aligned=(False, 16, 512, 8, 2, 128, 16),
        ragged=(False, 3, 1000, 8, 1, 128, 16),
        of_odd_sizes=(True, 5, 100, 24, 3, 64, 32),
        of_size_1=(False, 1, 1, 1, 1, 64, 16),
    ),
    batch=_batch(),
    large=[
        problem(
            dtype="bfloat16",
            windowed=windowed,
            batch=batch,
            context=context,
            heads=32,
            kv_heads=8,
            head_dim=128,
            page_size=16,
        )
        for batch, context, windowed in ((37, 3000, False), (300, 500, False), (9, 128, True))
    ],
    calls=_calls,
    refused=_refused,
    small=lambda: Small(
        args={
            "q": half(1, 4, 64),
            "k_cache": half(1, 16, 1, 64),
            "v_cache": half(1, 16, 1, 64),
            "block_table": ints(0)[None],
            "seq_lens": ints(7),
            "out": half(1, 4, 64),
        },
        unused=("q", "k_cache", "v_cache", "block_table", "out"),
    ),
    kept={"lse": MADE, "scratch": OURS},
)
