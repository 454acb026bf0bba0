"""`fused_add_rms_norm` for the tests of every kernel."""

from __future__ import annotations

from aot_tune.kernels.norms.rms_norm_space import LEAST_COLUMNS_IN_PLACE
from tests.support.batches import cut_rows
from tests.support.kernel_case import THREE, Call, KernelCase, Small, half, normal, problem, sizes_of

CASE = KernelCase(
    dtypes=THREE,
    sizes=sizes_of(
        "rows cols",
        aligned=(64, 2048),
        ragged=(50, 2040),
        of_odd_sizes=(33, 1501),
        of_size_1=(1, LEAST_COLUMNS_IN_PLACE),  # fewer columns are a sum and an rms_norm
    ),
    batch=cut_rows((), (), changed=(0, 1)),
    large=[problem(dtype="bfloat16", rows=700, cols=columns) for columns in (128, 2880, 4096)],
    calls=lambda: [Call("fused_add_rms_norm", "default", (normal(4, 48), normal(4, 48).neg(), normal(48)))],
    refused=lambda: [
        ("residual has shape", Call("fused_add_rms_norm", "default", (normal(4, 8), normal(4, 7), normal(8))))
    ],
    small=lambda: Small(
        args={"x": half(1, 16), "residual": half(1, 16), "weight": half(16)}, unused=("x", "residual")
    ),
)
