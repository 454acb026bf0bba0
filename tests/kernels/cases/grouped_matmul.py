"""`grouped_matmul` for the tests of every kernel."""

from __future__ import annotations

from typing import Any

from tests.support.batches import Args, Batch, cut_rows
from tests.support.kernel_case import (
    HALVES,
    Call,
    KernelCase,
    Small,
    half,
    ints,
    normal,
    problem,
    returning,
    sizes_of,
)


def _batch() -> Batch:
    plain = cut_rows((0,), (3,))

    def of(args: Args, first: int, last: int) -> tuple[Any, ...]:
        a, b, offsets, out = plain.of(args, first, last)
        return a, b, offsets.clamp(first, last) - first, out

    return Batch(of, plain.results)


CASE = KernelCase(
    dtypes=HALVES,
    sizes=sizes_of(
        "tokens experts N K",
        aligned=(128, 8, 256, 128),
        ragged=(50, 5, 248, 72),
        of_odd_sizes=(33, 3, 77, 51),
        of_size_1=(1, 1, 1, 1),
    ),
    batch=_batch(),
    large=[problem(dtype="bfloat16", tokens=900, experts=experts, N=4096, K=1536) for experts in (8, 128)],
    calls=lambda: returning(
        "grouped_matmul", normal(6, 16), normal(3, 16, 24), ints(2, 2, 6), out=normal(6, 24)
    ),
    refused=lambda: [
        ("b of 3 experts", Call("grouped_matmul", "default", (normal(6, 16), normal(3, 16, 24), ints(0, 0))))
    ],
    small=lambda: Small(
        args={"a": half(1, 16), "b": half(1, 16, 8), "offsets": ints(1), "out": half(1, 8)},
        unused=("a", "b", "out"),
    ),
)
