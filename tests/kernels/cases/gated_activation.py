"""`gated_activation` for the tests of every kernel."""

from __future__ import annotations

from tests.support.batches import cut_rows
from tests.support.kernel_case import (
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
        "activation rows cols",
        aligned=("silu", 64, 2048),
        ragged=("gelu", 50, 2040),
        of_odd_sizes=("gelu_tanh", 33, 1501),
        of_size_1=("silu", 1, 1),
    ),
    batch=cut_rows((0,), (1,)),
    large=[problem(dtype="bfloat16", activation="silu", rows=700, cols=columns) for columns in (768, 14336)],
    calls=lambda: returning(
        "gated_activation", normal(2, 3, 64)[:, :, :48], activation="gelu", out=normal(2, 3, 24)
    ),
    refused=lambda: [
        ("its last size must be even", Call("gated_activation", "default", (normal(4, 7),))),
        (
            "activation is 'relu'",
            Call("gated_activation", "default", (normal(4, 8),), {"activation": "relu"}),
        ),
    ],
    small=lambda: Small(args={"x": half(1, 16), "out": half(1, 8)}, unused=("x", "out")),
)
