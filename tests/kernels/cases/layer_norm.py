"""`layer_norm` for the tests of every kernel."""

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
        "bias rows cols",
        aligned=(True, 64, 2048),
        ragged=(False, 50, 2040),
        of_odd_sizes=(True, 33, 1501),
        of_size_1=(True, 1, 1),
    ),
    batch=cut_rows((0,), (3,)),
    large=[problem(dtype="bfloat16", bias=True, rows=700, cols=columns) for columns in (768, 1152, 6144)],
    calls=lambda: returning(
        "layer_norm", normal(2, 3, 64)[:, :, :48], normal(48), normal(48), out=normal(2, 3, 48)
    ),
    refused=lambda: [
        ("pass a last size of", Call("layer_norm", "default", (normal(2, 40000), normal(40000))))
    ],
    small=lambda: Small(
        args={"x": half(1, 16), "weight": half(16), "bias": half(16), "out": half(1, 16)}, unused=("x", "out")
    ),
)
