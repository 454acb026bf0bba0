"""`matmul_fp8_block` for the tests of every kernel."""

from __future__ import annotations

import torch

from tests.kernels.cases.matmul_fp8 import COPIED
from tests.support.batches import Args, cut_rows, made_anew
from tests.support.kernel_case import HALVES, KernelCase, problem, sizes_of


def _padded_scales(args: Args) -> torch.Tensor:
    """The scales of rows in the layout that they have for any number of rows: stride 1 along the rows."""
    scale: torch.Tensor = args[2]
    rows, blocks = scale.shape
    made = torch.empty((blocks, -(-rows // 4) * 4), dtype=scale.dtype, device=scale.device).t()[:rows]
    return made.copy_(scale)


CASE = KernelCase(
    dtypes=HALVES,
    sizes=sizes_of(
        "M N K",
        aligned=(128, 256, 128),
        ragged=(50, 248, 72),
        of_odd_sizes=(133, 77, 51),
        of_size_1=(1, 1, 1),
        of_some_blocks=(33, 200, 300),
    ),
    batch=made_anew(cut_rows((0, 2), (4,)), 2, _padded_scales),
    large=[problem(dtype="bfloat16", M=1337, N=7168, K=2048)],
    host="matmul_fp8",
    kept={"a": COPIED, "b": COPIED},
)
