"""`gate_up_swiglu` for the tests of every kernel."""

from __future__ import annotations

from tests.support.batches import cut_rows
from tests.support.kernel_case import (
    HALVES,
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
        "tokens N K",
        aligned=(128, 256, 128),
        ragged=(50, 248, 72),
        of_odd_sizes=(133, 77, 51),
        of_size_1=(1, 1, 1),
    ),
    batch=cut_rows((0,), (2,)),
    large=[problem(dtype="bfloat16", tokens=1100, N=14336, K=4096)],
    calls=lambda: returning("gate_up_swiglu", normal(5, 32), normal(48, 32), out=normal(5, 24)),
    refused=lambda: [("weight has 5 rows", Call("gate_up_swiglu", "default", (normal(4, 8), normal(5, 8))))],
    small=lambda: Small(
        args={"x": half(1, 16), "weight": half(16, 16), "out": half(1, 8)}, unused=("x", "out")
    ),
)
