"""`matmul_fp8` for the tests of every kernel."""

from __future__ import annotations

import torch

from tests.support.batches import cut_rows
from tests.support.kernel_case import (
    HALVES,
    Call,
    KernelCase,
    Small,
    fp8,
    half,
    normal,
    problem,
    returning,
    sizes_of,
)

COPIED = "the host function refuses or copies it: `fp8.laid_out`"

CASE = KernelCase(
    dtypes=HALVES,
    sizes=sizes_of(
        "M N K",
        aligned=(128, 256, 128),
        ragged=(50, 248, 72),
        of_odd_sizes=(133, 77, 51),
        of_size_1=(1, 1, 1),
    ),
    batch=cut_rows((0,), (4,)),
    large=[problem(dtype="bfloat16", M=1337, N=4096, K=14336)],
    calls=lambda: returning(
        "matmul_fp8",
        fp8(16, 32),
        fp8(24, 32).t(),
        torch.ones(1),
        torch.ones(1),
        out_dtype=torch.float16,
        out=normal(16, 24, dtype=torch.float16),
    ),
    refused=lambda: [
        (
            "scale_a has shape",
            Call("matmul_fp8", "default", (fp8(4, 32), fp8(24, 32).t(), torch.ones(4, 2), torch.ones(1))),
        )
    ],
    small=lambda: Small(
        args={
            "a": fp8(1, 16),
            "b": fp8(16, 16).t(),
            "scale_a": torch.ones(()),
            "scale_b": torch.ones(()),
            "out": half(1, 16),
        },
        unused=("a",),
    ),
    kept={"a": COPIED, "b": COPIED},
)
