"""`matmul` for the tests of every kernel."""

from __future__ import annotations

from aot_tune.kernels.products import split_k
from tests.support.batches import cut_rows, made_anew
from tests.support.kernel_case import (
    HALVES,
    OURS,
    Call,
    KernelCase,
    Small,
    half,
    normal,
    problem,
    returning,
    sizes_of,
)

CASE = KernelCase(
    dtypes=HALVES,
    sizes=sizes_of(
        "M N K",
        aligned=(128, 256, 128),
        ragged=(50, 248, 72),
        of_odd_sizes=(133, 77, 51),
        of_size_1=(1, 1, 1),
        of_a_long_sum=(33, 77, 8201),
    ),
    batch=made_anew(cut_rows((0,), (2,)), 3, lambda args: split_k.scratch(args[0], args[1].shape[1])),
    large=[
        problem(dtype="bfloat16", M=1337, N=4096, K=14336),
        problem(dtype="float16", M=300, N=6144, K=4096),
    ],
    calls=lambda: returning("matmul", normal(5, 32), normal(24, 32).t(), out=normal(5, 24)),
    refused=lambda: [
        ("a of 5 columns asks for", Call("matmul", "default", (normal(4, 5), normal(7, 8)))),
        (
            "the product asks for",
            Call("matmul", "out", (normal(4, 8), normal(8, 5)), {"out": normal(3, 3)}),
        ),
    ],
    small=lambda: Small(args={"a": half(1, 16), "b": half(16, 8), "out": half(1, 8)}, unused=("a", "out")),
    kept={"scratch": OURS},
)
