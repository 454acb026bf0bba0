"""`cross_entropy` for the tests of every kernel."""

from __future__ import annotations

import torch

from aot_tune.kernels.softmax_and_loss import cross_entropy
from tests.support.batches import cut_rows, made_anew
from tests.support.kernel_case import (
    MADE,
    OURS,
    THREE,
    Call,
    KernelCase,
    Small,
    half,
    ints,
    normal,
    problem,
    sizes_of,
)


def _calls() -> list[Call]:
    logits, target = normal(5, 40), torch.tensor([1, 39, -100, 0, 7])
    return [
        Call("cross_entropy", "default", (logits, target)),
        Call("cross_entropy", "gradient", (logits, target), {"grad_scale": 0.5}),
    ]


def _refused() -> list[tuple[str, Call]]:
    logits, target = normal(5, 40), torch.zeros(5, dtype=torch.int64)
    wrong = {"grad_scale": 1.0, "ignore_index": 2**32}
    return [
        ("target is int32", Call("cross_entropy", "default", (logits, target.int()))),
        ("ignore_index is 4294967296", Call("cross_entropy", "gradient", (logits, target), wrong)),
    ]


CASE = KernelCase(
    dtypes=THREE,
    sizes=sizes_of(
        "gradient rows vocabulary",
        aligned=(False, 64, 4096),
        ragged=(True, 50, 4088),
        of_odd_sizes=(True, 33, 1501),
        of_shared_rows=(True, 5, 50257),
        of_size_1=(True, 1, 1),
    ),
    batch=made_anew(
        cut_rows((1,), (2,), changed=(0,)),
        3,
        lambda args: cross_entropy._slots(args[0], args[5] is not None),
    ),
    large=[
        problem(dtype="bfloat16", gradient=gradient, rows=rows, vocabulary=columns)
        for gradient, rows, columns in ((False, 300, 128256), (True, 300, 128256), (False, 70, 32000))
    ],
    calls=_calls,
    refused=_refused,
    small=lambda: Small(
        args={"logits": half(1, 16), "target": ints(3, dtype=torch.int64)}, unused=("logits",)
    ),
    kept={"loss": MADE, "slots": OURS},
)
