"""cross_entropy without a GPU: the declaration, the arithmetic, what it compiles to and what it takes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.arch import KNOWN_ARCHS, Arch
from aot_tune.config import Config
from aot_tune.errors import LaunchError
from aot_tune.kernels.cross_entropy import cross_entropy, cross_entropy_tunable
from aot_tune.problem import Problem
from tests.kernels import emulator
from tests.kernels.agree import assert_agrees, expected, poison, problem
from tests.kernels.test_compile import ARCHS, compiled
from tests.samples import SM90

CPU = torch.device("cpu")
CONFIG, PERSISTENT = (
    Config(
        constants={"chunk": 2048, "persistent": persistent},
        hints={"num_ctas": 1, "occupancy": 1, "num_worker_warps": 4},
    )
    for persistent in (False, True)
)
IGNORED = -100


def shape(rows: int, vocabulary: int, dtype: str = "bfloat16", *, gradient: bool = True) -> Problem:
    return problem(dtype=dtype, gradient=gradient, rows=rows, vocabulary=vocabulary)


@pytest.mark.parametrize("arch", KNOWN_ARCHS, ids=str)
def test_the_default_is_a_candidate_at_every_declared_shape_and_any_vocabulary(arch: Arch) -> None:
    for one in (*cross_entropy_tunable.typical_problems, shape(1, 1), shape(1, 10**6)):
        default = cross_entropy_tunable.default_config(arch, one)
        assert default in cross_entropy_tunable.candidates(arch, one), one


def test_the_sweep_stays_small_and_holds_both_problems_of_every_vocabulary() -> None:
    typical = cross_entropy_tunable.typical_problems
    assert len(typical) <= 60
    assert all(len(cross_entropy_tunable.candidates(SM90, one)) <= 24 for one in typical)
    with_gradient, without = (
        {p["vocabulary"] for p in typical if p["gradient"] is asked} for asked in (True, False)
    )
    assert with_gradient == without == {32000, 128256, 151936, 262144}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 5), (17, 100), (5, 2048), (3, 5000), (2, 9001)])
def test_the_kernel_agrees_with_the_reference(
    rows: int, cols: int, gradient: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = cross_entropy_tunable.make_args(shape(rows, cols, dtype, gradient=gradient), CPU, 1)
    args[1][rows // 2] = IGNORED if rows > 1 else 0
    wanted, logits = expected(cross_entropy_tunable, args), args[0].clone()
    for config, blocks in ((CONFIG, rows), (PERSISTENT, min(rows, 3))):
        args[0].copy_(logits)
        poison(cross_entropy_tunable, args)
        assert emulator.run(cross_entropy_tunable, args, config, monkeypatch) == blocks
        assert_agrees(cross_entropy_tunable, args, wanted)


@pytest.mark.parametrize("scale", [None, 1.0, -0.25, 0.0])
def test_the_reference_is_torchs_loss_and_its_gradient(scale: float | None) -> None:
    logits, target, loss, ignored, _ = cross_entropy_tunable.make_args(shape(7, 300, "float32"), CPU, 2)
    target[::3] = ignored
    wanted = expected(cross_entropy_tunable, (logits, target, loss, ignored, scale))
    leaf = logits.double().requires_grad_()
    right = torch.nn.functional.cross_entropy(leaf, target, ignore_index=ignored, reduction="none")
    torch.testing.assert_close(wanted["loss"].value, right)
    if scale is None:
        assert torch.equal(wanted["logits"].value, logits.double())
    else:
        [slopes] = torch.autograd.grad(right.sum() * scale, leaf)
        torch.testing.assert_close(wanted["logits"].value, slopes)


def test_a_target_that_is_no_column_gives_nan_and_no_other_row_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits, target, loss, ignored, scale = cross_entropy_tunable.make_args(shape(6, 3000), CPU, 3)
    target[1], target[2], target[3], target[4] = 3000, -1, 2**32 + 5, -(2**40)
    before = logits.clone()
    emulator.run(cross_entropy_tunable, (logits, target, loss, ignored, scale), CONFIG, monkeypatch)
    assert loss.isnan().tolist() == [False, True, True, True, True, False]
    assert logits.isnan().all(dim=1).tolist() == [False, True, True, True, True, False]
    kept = [0, 5]
    part = (before[kept], target[kept], loss[kept], ignored, scale)
    wanted = expected(cross_entropy_tunable, part)
    assert_agrees(cross_entropy_tunable, (logits[kept], target[kept], loss[kept], ignored, scale), wanted)


def test_a_row_of_infinities_or_nan_comes_out_as_torchs_does(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn((5, 3000))
    logits[0, 1:] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 7], logits[3, 7] = torch.nan, torch.inf
    logits[4] = torch.finfo(torch.float32).min
    target, loss = torch.zeros(5, dtype=torch.int64), torch.empty(5)
    leaf = logits.clone().requires_grad_()
    right = torch.nn.functional.cross_entropy(leaf, target, reduction="none")
    [slopes] = torch.autograd.grad(right.sum(), leaf)
    emulator.run(cross_entropy_tunable, (logits, target, loss, IGNORED, 1.0), CONFIG, monkeypatch)
    torch.testing.assert_close(loss, right.detach(), equal_nan=True, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, slopes, equal_nan=True)


def test_a_wrong_loss_or_gradient_is_told_from_a_rounding() -> None:
    args = cross_entropy_tunable.make_args(shape(4, 32000), CPU, 0)
    logits, target, loss = args[:3]
    wanted = expected(cross_entropy_tunable, args)
    right, slopes = wanted["loss"].value, wanted["logits"].value
    hit = torch.zeros_like(slopes).scatter_(1, target[:, None], 1.0)
    for wrong_loss, wrong_slopes in (
        (right, slopes + hit),  # without the target's one
        (right, slopes.where(hit.bool(), 0)),  # the shares lost
        (right, slopes * 32000 / 32768),  # padding counted
        (right - 0.02, slopes),
    ):
        loss.copy_(wrong_loss)
        logits.copy_(wrong_slopes)
        with pytest.raises(AssertionError, match="are wrong"):
            assert_agrees(cross_entropy_tunable, args, wanted)


def test_arguments_without_storage_pose_the_problem_that_made_them() -> None:
    for one in cross_entropy_tunable.typical_problems[::5]:
        args = cross_entropy_tunable.make_args(one, torch.device("meta"), 0)
        assert cross_entropy_tunable.problem_of(*args) == one


# What it compiles to ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHS)
def test_the_default_compiles_and_does_not_spill(name: str) -> None:
    arch = Arch.parse(name)
    for dtype, gradient in (("bfloat16", False), ("float32", True)):
        one = shape(4096, 128256, dtype, gradient=gradient)
        default = cross_entropy_tunable.default_config(arch, one)
        assert compiled(cross_entropy_tunable, arch, one, default).stack_bytes == 0, one


@pytest.mark.parametrize("gradient", [True, False])
def test_what_is_legal_on_sm90_does_not_spill(gradient: bool) -> None:
    one = shape(64, 151936, gradient=gradient)
    for config in cross_entropy_tunable.candidates(SM90, one)[1::4]:
        assert compiled(cross_entropy_tunable, SM90, one, config).stack_bytes == 0, config


def test_a_cluster_reads_a_row_only_where_rows_are_few_and_read_once() -> None:
    def most(one: Problem) -> int:
        return max(c.hints["num_ctas"] for c in cross_entropy_tunable.candidates(SM90, one))

    assert most(shape(1, 128256, gradient=False)) == 4
    assert most(shape(1024, 128256, gradient=False)) == 1
    assert most(shape(1, 128256, gradient=True)) == 1


def test_an_odd_vocabulary_compiles() -> None:
    one = shape(7, 50257, "float16")
    compiled(cross_entropy_tunable, SM90, one, cross_entropy_tunable.default_config(SM90, one))


# The host function ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    module = sys.modules["aot_tune.kernels.cross_entropy"]
    monkeypatch.setattr(
        module, "cross_entropy_tunable", SimpleNamespace(launch=lambda *args: calls.append(args))
    )
    return calls


def half(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16)


def columns(rows: int) -> torch.Tensor:
    return torch.zeros((rows,), dtype=torch.int64)


def test_the_loss_is_a_new_tensor_and_a_scale_asks_for_the_gradient(launched: list[tuple[Any, ...]]) -> None:
    logits, target = half(3, 9), columns(3)
    loss = cross_entropy(logits, target)
    assert (loss.shape, loss.dtype) == ((3,), torch.float32)
    assert cross_entropy(logits, target, ignore_index=0, grad_scale=2) is not loss
    first, second = launched
    assert first[0] is logits
    assert first[2] is loss
    assert first[3:] == (IGNORED, None)
    assert second[3:] == (0, 2.0)
    assert type(second[4]) is float


def test_rows_of_a_wider_tensor_are_taken_where_they_are(launched: list[tuple[Any, ...]]) -> None:
    cross_entropy(half(3, 16)[:, :9], columns(6)[::2])
    assert launched[0][0].stride() == (16, 1)
    assert launched[0][1].stride() == (2,)


def test_no_rows_are_not_launched(launched: list[tuple[Any, ...]]) -> None:
    assert cross_entropy(half(0, 8), columns(0), grad_scale=1.0).shape == (0,)
    assert launched == []


def test_each_unusable_argument_is_named(launched: list[tuple[Any, ...]]) -> None:
    def refused(says: str, *args: Any, **more: Any) -> None:
        with pytest.raises(LaunchError, match=says):
            cross_entropy(*args, **more)

    refused(r"logits is \(2, 3, 8\); pass a tensor of shape \(rows, vocabulary\)", half(2, 3, 8), columns(2))
    refused("logits is float64; pass bfloat16 or float16 or float32", half(2, 8).double(), columns(2))
    refused(r"logits has shape \(2, 0\); pass one column or more", half(2, 0), columns(2))
    refused("target is int32; pass int64", half(2, 8), columns(2).int())
    refused(r"target has shape \(3,\); logits of 2 rows asks for \(2,\)", half(2, 8), columns(3))
    refused("target is on meta, not on cpu", half(2, 8), columns(2).to("meta"))
    refused("ignore_index is 2147483648; pass one", half(2, 8), columns(2), ignore_index=2**31)
    assert launched == []
