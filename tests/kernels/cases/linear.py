"""`linear` for the tests of every kernel."""

from __future__ import annotations

from aot_tune.kernels.products import split_k
from tests.support.batches import cut_rows, made_anew
from tests.support.kernel_case import (
    OURS,
    THREE,
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
    dtypes=THREE,
    sizes=sizes_of(
        "activation M N K",
        aligned=("none", 128, 256, 128),
        ragged=("silu", 50, 248, 72),
        of_odd_sizes=("gelu", 33, 77, 51),
        of_a_long_sum=("none", 33, 77, 8201),
        of_size_1=("relu", 1, 1, 1),
    ),
    batch=made_anew(cut_rows((0,), (2,)), 4, lambda args: split_k.scratch(args[0], args[1].shape[0])),
    large=[
        problem(dtype=dtype, activation="none", M=1337, N=4096, K=14336) for dtype in ("bfloat16", "float32")
    ],
    calls=lambda: returning(
        "linear",
        normal(2, 3, 64)[:, :, :48],
        normal(24, 48),
        normal(24),
        activation="silu",
        out=normal(2, 3, 24),
    ),
    refused=lambda: [
        (
            "weight is float32; pass bfloat16",
            Call("linear", "default", (normal(4, 8), normal(5, 8).float())),
        ),
        ("out has shape", Call("linear", "out", (normal(4, 8), normal(5, 8)), {"out": normal(3, 3)})),
    ],
    small=lambda: Small(
        args={"x": half(1, 16), "weight": half(8, 16), "out": half(1, 8)}, unused=("x", "out")
    ),
    kept={"scratch": OURS},
)
