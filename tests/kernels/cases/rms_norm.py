"""`rms_norm` for the tests of every kernel."""

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
        "rows cols", aligned=(64, 2048), ragged=(50, 2040), of_odd_sizes=(33, 1501), of_size_1=(1, 1)
    ),
    batch=cut_rows((0,), (2,)),
    large=[problem(dtype="bfloat16", rows=700, cols=columns) for columns in (128, 2880, 8192)],
    calls=lambda: returning("rms_norm", normal(2, 3, 64)[:, :, :48], normal(48), 1e-5, out=normal(2, 3, 48)),
    refused=lambda: [
        ("x of 8 columns asks for", Call("rms_norm", "default", (normal(4, 8), normal(7)))),
        ("out has shape", Call("rms_norm", "out", (normal(4, 8), normal(8)), {"out": normal(8, 4)})),
    ],
    small=lambda: Small(args={"x": half(1, 16), "weight": half(16), "out": half(1, 16)}, unused=("x", "out")),
)
