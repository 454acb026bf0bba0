"""`rope` for the tests of every kernel."""

from __future__ import annotations

import torch

from tests.support.batches import cut_rows
from tests.support.kernel_case import THREE, Call, KernelCase, Small, half, normal, problem, sizes_of


def _refused() -> list[tuple[str, Call]]:
    q, angles = normal(6, 4, 64), normal(5, 40)
    return [("cos has 40 columns", Call("rope", "default", (q, q.clone(), angles, angles)))]


CASE = KernelCase(
    dtypes=THREE,
    sizes=sizes_of(
        "interleaved tokens heads kv_heads head_dim rotary_dim",
        aligned=(False, 64, 16, 16, 128, 128),
        ragged=(True, 50, 5, 3, 64, 32),
        of_odd_sizes=(False, 33, 3, 1, 65, 32),
        of_size_1=(False, 1, 1, 1, 2, 2),
    ),
    batch=cut_rows((2, 3), (), changed=(0, 1)),
    large=[
        problem(
            dtype="bfloat16",
            interleaved=False,
            tokens=700,
            heads=40,
            kv_heads=8,
            head_dim=128,
            rotary_dim=128,
        )
    ],
    calls=lambda: [
        Call("rope", "default", (normal(5, 4, 16), normal(5, 2, 16), *(normal(5, 8).float() for _ in "cs")))
    ],
    refused=_refused,
    small=lambda: Small(
        args={"q": half(1, 4, 8), "k": half(1, 2, 8), "cos": torch.ones(1, 4), "sin": torch.ones(1, 4)},
        unused=("q", "k", "cos", "sin"),
    ),
)
