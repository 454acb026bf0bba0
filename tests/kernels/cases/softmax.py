"""`softmax` for the tests of every kernel."""

from __future__ import annotations

from aot_tune.kernels.softmax_and_loss import softmax
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
        "rows cols",
        aligned=(64, 2048),
        ragged=(50, 2040),
        of_odd_sizes=(33, 1501),
        of_size_1=(1, 1),
        of_shared_rows=(3, 50257),
    ),
    batch=made_anew(cut_rows((0,), (1,)), 2, lambda args: softmax._slots(args[0])),
    large=[problem(dtype="float32", rows=300, cols=columns) for columns in (8, 128, 2048, 32000, 128256)],
    calls=lambda: returning("softmax", normal(2, 3, 64)[:, :, :48], out=normal(2, 3, 48)),
    refused=lambda: [("x is float64", Call("softmax", "default", (normal(4, 8).double(),)))],
    small=lambda: Small(args={"x": half(1, 16), "out": half(1, 16)}, unused=("x", "out")),
    kept={"slots": OURS},
)
