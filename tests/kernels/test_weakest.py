"""What `test_weakest_on_gpu` runs, as far as no GPU is needed: its cases, its verdicts, the compiler."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from aot_tune import kernels
from aot_tune.declare.declaration import Close
from aot_tune.errors import LaunchError
from aot_tune.kernels.products.fp8 import fp8
from aot_tune.nvidia.cubin import resources
from aot_tune.tunable import Tunable
from aot_tune.tuner.plan.model import residency
from aot_tune.values.arch import Arch
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.kernels.cases import CASES
from tests.support.weakest.cases import (
    FOUND,
    LAYOUTS,
    Case,
    cases,
    compilation_of,
    compiled,
    weakest,
)
from tests.support.weakest.child import verdict
from tests.support.weakest.large import LARGE, attention_decode_args, rms_norm_args

SM90 = Arch.parse("sm90")
LAUNCHES = [case for kernel in CASES for case in cases(kernel)]
ONE_OF_EACH = [
    case
    for case in LAUNCHES
    if case.layout == "strided" and case.problem["dtype"] == CASES[case.kernel].dtypes[0]
]


def right(tunable: Tunable, problem: Problem, args: tuple[Any, ...]) -> None:
    """In a kernel's place: writes what the reference says."""
    answer = tunable.reference(*(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args))
    expected = {tunable.mutated[0]: answer} if isinstance(answer, Close) else answer
    for name, close in expected.items():
        args[tunable.parameters.index(name)].copy_(close.value)


def nothing(tunable: Tunable, problem: Problem, args: tuple[Any, ...]) -> None:
    """In a kernel's place: writes nothing."""


# The cases --------------------------------------------------------------------------------------------------


def test_every_shipped_kernel_is_there_in_every_dtype_that_is_declared_and_in_four_sizes() -> None:
    assert CASES.keys() == FOUND.keys()
    for kernel, found in FOUND.items():
        assert {problem["dtype"] for problem in found.tunable.typical_problems} <= set(CASES[kernel].dtypes)
        assert {"aligned", "ragged", "of odd sizes", "of size 1"} <= CASES[kernel].sizes.keys()
        first = found.tunable.typical_problems[0]
        assert all(case.problem.keys() == first.keys() for case in cases(kernel))


def test_the_layouts_are_what_they_are_called() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.int32):
        made = torch.arange(6 * 48).reshape(6, 48).to(dtype)
        laid = {name: lay(made) for name, lay in LAYOUTS.items()}
        assert all(torch.equal(one, made) for one in laid.values())
        assert laid["unaligned"].data_ptr() % 16 != 0
        assert laid["transposed"].stride() == (1, 6)
        assert laid["strided"].stride(1) == 3
        assert laid["strided"].stride(0) % 2 == 1
        assert laid["strided"].data_ptr() % 16 != 0


@pytest.mark.parametrize("kernel", [kernel for kernel, case in CASES.items() if case.kept])
def test_what_keeps_its_layout_is_not_the_callers_or_refused_in_any_other(kernel: str) -> None:
    host = inspect.signature(getattr(kernels, CASES[kernel].host or kernel)).parameters
    for name, reason in CASES[kernel].kept.items():
        assert name in FOUND[kernel].tunable.parameters
        assert (name in host) == ("laid_out" in reason)
    for case in cases(kernel) if "a" in CASES[kernel].kept and kernel.startswith("matmul_fp8") else ():
        a, b, *_ = FOUND[kernel].tunable.make_args(case.problem, torch.device("cpu"), 7)
        assert all(one is given for one, given in zip(fp8.laid_out(a, b), (a, b), strict=True))
        if case.layout == "contiguous" or case.problem["K"] == 1:
            continue
        for pair in ((LAYOUTS[case.layout](a), b), (a, LAYOUTS[case.layout](b))):
            if case.layout != "transposed" or pair[1] is b:  # b is one: transposed, it lies as a does
                try:
                    laid_a, laid_b = fp8.laid_out(*pair)
                except LaunchError:
                    continue
                assert (laid_a.stride(1), laid_a.stride(0) % 16, laid_a.data_ptr() % 16) == (1, 0, 0)
                assert (laid_b.stride(0), laid_b.stride(1) % 16, laid_b.data_ptr() % 16) == (1, 0, 0)
                for one, given in zip((laid_a, laid_b), pair, strict=True):
                    assert torch.equal(one.float(), given.float())


def test_the_layouts_of_a_problem_share_one_cubin() -> None:
    shared: dict[tuple[str, Problem], set[object]] = {}
    for case in LAUNCHES:
        one = compilation_of(case.tunable, case.problem, case.args("meta"), SM90)
        shared.setdefault((case.kernel, case.problem), set()).add(one)
    assert {len(each) for each in shared.values()} == {1}


# The verdicts -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: f"{case.kernel}, {case.name}")
def test_a_case_is_right_where_the_reference_is_written_and_wrong_where_nothing_is(case: Case) -> None:
    assert verdict(case, "cpu", right) == "right"
    assert "elements are wrong" in verdict(case, "cpu", nothing)


def test_what_cannot_be_launched_is_told() -> None:
    def refused(tunable: Tunable, problem: Problem, args: tuple[Any, ...]) -> None:
        raise LaunchError("too few blocks run at once")

    assert verdict(ONE_OF_EACH[0], "cpu", refused) == "not launched: too few blocks run at once"


# More than 2^31 elements ------------------------------------------------------------------------------------


def test_the_large_tensors_have_odd_strides_and_more_elements_than_32_bits_count() -> None:
    x, _, out, _ = rms_norm_args("meta")
    _, k, v, *_ = attention_decode_args("meta")
    for tensor in (x, out, k, v):
        assert tensor.numel() > 2**31
        assert any(stride % 2 for stride in tensor.stride()[:-1])
        assert max(tensor.shape + tensor.stride()) < 2**31


@pytest.mark.parametrize("kernel", LARGE)
def test_the_large_verdicts_on_small_tensors(kernel: str) -> None:
    _, _, check = LARGE[kernel]
    made = rms_norm_args("cpu", 70) if kernel == "rms_norm" else attention_decode_args("cpu", 530)
    assert check(made, right) == "right"
    assert "elements are wrong" in check(made, nothing)


# The compiler -----------------------------------------------------------------------------------------------


WAITING = ("attention_decode", "cross_entropy", "softmax")
"""Kernels whose blocks wait for each other: as many must run at once as their hints say."""


@pytest.mark.slow
@pytest.mark.process
def test_a_weakest_cubin_of_every_kernel_compiles_and_as_many_run_at_once_as_wait() -> None:
    each = {}
    for kernel in CASES:
        some = sorted(
            one for one in weakest(kernel, SM90) if kernel not in WAITING or "bf16" in one.signature
        )
        each[kernel] = {some[0], some[-1]} if kernel in WAITING else {some[0]}
    cubins = compiled(each, SM90)
    assert {kernel for kernel, _ in cubins} == CASES.keys()
    for (kernel, one), code in cubins.items():
        at_once = residency(Device.reference(SM90), resources(code))
        assert at_once >= dict(one.hints).get("occupancy", 1), (kernel, one)
