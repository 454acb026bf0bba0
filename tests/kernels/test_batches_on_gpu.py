"""On a real GPU a row's bits are the same alone and in any batch, for every shipped kernel that has one."""

from __future__ import annotations

import pytest
import torch

import aot_tune.kernels  # noqa: F401 - it defines the operators
from aot_tune import environment
from aot_tune.values.problem import Problem
from tests.kernels.cases import CASES
from tests.support.batches import batch_size, parts
from tests.support.shipped import FOUND

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("memory_given_back")]


@pytest.mark.parametrize(
    ("kernel", "one"),
    [(kernel, one) for kernel, case in CASES.items() for one in case.large],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else str(value).replace(" ", "_"),
)
@pytest.mark.filterwarnings("ignore::aot_tune.errors.MissWarning")
def test_a_rows_bits_are_the_same_alone_and_in_any_batch(kernel: str, one: Problem) -> None:
    tunable, batch = FOUND[kernel].tunable, CASES[kernel].batch
    args = tunable.make_args(one, torch.device("cuda"), 0)
    size = batch_size(tunable, args)
    whole = batch.of(args, 0, size)
    tunable.launch(*whole, batch_invariant=True)
    for first, last in parts(size):
        part = batch.of(args, first, last)
        tunable.launch(*part, batch_invariant=True)
        pairs = zip(batch.results(part, 0, last - first), batch.results(whole, first, last), strict=True)
        for ours, theirs in pairs:
            assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)), (
                f"{kernel} {one}: rows {first} to {last} differ"
            )


@pytest.mark.filterwarnings("ignore::aot_tune.errors.MissWarning")
def test_operators_keep_a_rows_bits_where_the_environment_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.BATCH_INVARIANT, "1")
    a = torch.randn(977, 4096, device="cuda").bfloat16()
    b = torch.randn(4096, 6016, device="cuda").bfloat16()  # of no other test: its plans are made here
    whole = torch.ops.aot_tune.matmul(a, b)
    for first, last in parts(977):
        assert torch.equal(torch.ops.aot_tune.matmul(a[first:last], b), whole[first:last]), (first, last)
