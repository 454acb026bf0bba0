"""What all host functions refuse: large strides, no tensors, tensors without memory, memory that is shared.

Along dimensions of size 1, which need none, strides that 32 bits do not hold are made small.
"""

from __future__ import annotations

import itertools
import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from aot_tune import kernels
from aot_tune.errors import LaunchError
from aot_tune.kernels import (
    attention,
    attention_decode,
    attention_tunable,
    cross_entropy,
    fused_add_rms_norm,
    gate_up_swiglu,
    gated_activation,
    layer_norm,
    linear,
    matmul,
    rms_norm,
    rope,
)
from aot_tune.kernels.host.arguments import LARGEST_INDEX, indexable
from aot_tune.nvidia import cutile
from tests.kernels.cases import CASES
from tests.support.kernel_case import half, ints

TOO_LARGE = 2**31 + 64


def far(tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """The tensor with a stride along a dimension of size 1 as a part of something huge has it."""
    assert tensor.shape[axis] == 1
    strides = list(tensor.stride())
    strides[axis] = TOO_LARGE
    return tensor.as_strided(tensor.shape, strides)


def test_strides_that_fit_are_passed_as_they_are() -> None:
    tensors = half(3, 8), half(1, 8), half(8), torch.zeros(())
    counted = indexable("matmul", **dict(zip("abcd", tensors, strict=True)))
    assert [one is other for one, other in zip(counted, tensors, strict=True)] == [True] * 4


@pytest.mark.parametrize(
    ("sizes", "axis", "wanted"),
    [
        ((1, 5, 4, 64), 0, (1280, 256, 64, 1)),
        ((5, 1, 64), 1, (64, 320, 1)),
        ((1, 1), 0, (16, 1)),
        ((1, 1, 8), 1, (8, 16, 1)),
        ((1, 5), 0, (16, 1)),
    ],
)
def test_a_stride_that_is_never_used_becomes_small(
    sizes: tuple[int, ...], axis: int, wanted: tuple[int, ...]
) -> None:
    tensor = far(torch.arange(half(*sizes).numel()).view(sizes), axis)
    [counted] = indexable("matmul", a=tensor)
    assert counted.stride() == wanted
    assert counted.data_ptr() == tensor.data_ptr()
    assert torch.equal(counted, tensor)


def test_a_tensor_of_more_than_2_to_the_31_elements_keeps_its_signature() -> None:
    def signature(q: torch.Tensor) -> str:
        k = torch.empty((1, 160, 8, 128), dtype=q.dtype, device="meta")
        lse = torch.empty((1, 64, 160), device="meta")
        out = torch.empty((1, 160, 64, 128), dtype=q.dtype, device="meta")
        return cutile.signature_of(
            attention_tunable.kernel, (q, k, k, out, lse, 0.1, 0, 64, 64, 128, True, False)
        )

    small, large = (
        torch.empty((1, tokens, 64, 128), dtype=torch.bfloat16, device="meta") for tokens in (160, 262464)
    )
    assert large.stride(0) > LARGEST_INDEX
    [counted] = indexable("attention", q=large)
    assert max(counted.stride()) == 8192
    assert signature(counted) == signature(small)


def test_what_is_indexed_beyond_32_bits_is_refused() -> None:
    for sizes, strides in (
        ((2, 8), (TOO_LARGE, 1)),
        ((1, 2**31), (2**31, 1)),
        ((1, 2, 8), (0, TOO_LARGE, 1)),
    ):
        large = torch.empty_strided(sizes, strides, device="meta")
        with pytest.raises(LaunchError, match=r"a has shape .* keep each at most 2147483647"):
            indexable("matmul", a=large)
    with pytest.raises(LaunchError, match="b is on cpu, not on meta; move it there"):
        indexable("matmul", a=large.new_empty(8), b=half(8))


def refused(says: str, function: Any, *args: Any, **more: Any) -> None:
    with pytest.raises(LaunchError, match=says):
        function(*args, **more)


HOSTS = {name: (getattr(kernels, name), case.small()) for name, case in CASES.items() if case.small}
"""Host function and arguments of a first dimension of size 1, by its name."""


def test_every_host_function_is_held_to_what_all_refuse() -> None:
    assert HOSTS.keys() == {case.host or name for name, case in CASES.items()}


@pytest.mark.parametrize("name", HOSTS)
def test_host_functions_launch_with_strides_that_32_bits_hold(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, small = HOSTS[name]
    calls = launches(function, monkeypatch)
    for changed in small.unused:
        tensors_given = {**small.args, changed: far(small.args[changed])}
        function(**tensors_given, **small.numbers)
        tensors = [one for one in calls.pop() if isinstance(one, torch.Tensor)]
        assert max(stride for one in tensors for stride in one.stride()) <= LARGEST_INDEX
        addresses = [one.data_ptr() for one in tensors]
        assert all(one.data_ptr() in addresses for one in tensors_given.values())


def test_a_weight_whose_gate_alone_has_more_than_2_to_the_31_elements_is_refused() -> None:
    n, k = 2**16, 2**15 + 16
    x, weight = (torch.empty(sizes, dtype=torch.bfloat16, device="meta") for sizes in ((1, k), (2 * n, k)))
    with pytest.raises(LaunchError, match=r"weight has shape \(2, 65536, 32784\) .* keep each at most"):
        gate_up_swiglu(x, weight)


def test_columns_that_begin_beyond_32_bits_are_refused() -> None:
    columns = torch.empty_strided((2**16, 2**15), (1, 2**16), dtype=torch.float16, device="meta")
    with pytest.raises(LaunchError, match=r"logits has shape .* pass logits.contiguous\(\)"):
        cross_entropy(columns, torch.empty(2**16, dtype=torch.int64, device="meta"))
    with pytest.raises(LaunchError, match=r"x has shape .* pass x.contiguous\(\)"):
        gated_activation(columns)


@pytest.mark.parametrize("name", HOSTS)
def test_what_negates_its_memory_is_refused(name: str) -> None:
    function, small = HOSTS[name]
    for one, tensor in small.args.items():
        if tensor.dtype != torch.float8_e4m3fn:
            wrong = {**small.args, **small.numbers, one: torch._neg_view(tensor)}  # type: ignore[attr-defined]
            refused(f"{name}: {one} .* pass {one}.resolve_neg", function, **wrong)


def test_a_bias_that_negates_its_memory_is_refused() -> None:
    bias = torch._neg_view(half(8))  # type: ignore[attr-defined]
    refused("linear: bias .* pass bias.resolve_neg", linear, half(1, 16), half(8, 16), bias)


def test_targets_in_the_memory_of_logits_that_become_a_gradient_are_refused() -> None:
    target = torch.zeros(8, dtype=torch.int64)
    logits = target.view(torch.bfloat16)[:16].view(1, 16)
    refused("logits and target share memory", cross_entropy, logits, target[:1], grad_scale=1.0)


@pytest.mark.parametrize("name", HOSTS)
def test_what_is_no_tensor_is_named(name: str) -> None:
    function, small = HOSTS[name]
    for one, wrong in itertools.product(small.args, (None, 1e-5, "a", [1.0])):
        if wrong is not None or one not in ("out", "bias"):
            args = {**small.args, **small.numbers, one: wrong}
            refused(f"{name}: {one} is (a |'a'|1e-05)", function, **args)


@pytest.mark.parametrize("name", HOSTS)
def test_tensors_without_memory_are_left_to_the_launch_which_says_so(name: str) -> None:
    function, small = HOSTS[name]
    for fake in (lambda one: one.to("meta"), FakeTensorMode().from_tensor):
        tensors = {**{one: fake(tensor) for one, tensor in small.args.items()}, **small.numbers}
        first = next(iter(small.args))
        says = f"{name}.launch: argument {first} is (on device meta; pass a CUDA|a torch)"
        refused(says, function, **tensors)
        refused(says, function, **{one: other for one, other in tensors.items() if one != "out"})


def test_numbers_that_no_kernel_takes_are_named() -> None:
    x, weight = half(2, 8), half(8)
    for wrong, named in (("a", "'a'"), (None, "a NoneType"), (x, "a Tensor")):
        refused(f"rms_norm: eps is {named}; pass a number", rms_norm, x, weight, wrong)
        refused(f"layer_norm: eps is {named}; pass a number", layer_norm, x, weight, None, wrong)
        refused(f"fused_add_rms_norm: eps is {named}", fused_add_rms_norm, x, x.clone(), weight, wrong)
    refused("layer_norm: bias is 1e-05; pass a tensor of shape", layer_norm, x, weight, 1e-5)
    q, cache = half(1, 4, 64), half(1, 16, 1, 64)
    pages, lengths = ints(0)[None], ints(7)
    for function, arrays in (
        (attention, (q[None], q[None], q[None])),
        (attention_decode, (q, cache, cache, pages, lengths)),
    ):
        for window, named in ((2.5, "2.5"), ((3, 0), "a tuple"), (True, "True"), ("a", "'a'"), (0, "0")):
            refused(f"window is {named}; pass an int of 1 or more", function, *arrays, window=window)
        for scale, named in (
            ("a", "'a'; pass a number"),
            (q, "a Tensor"),
            (math.nan, "nan"),
            (math.inf, "inf"),
        ):
            refused(f"scale is {named}", function, *arrays, scale=scale)
    logits, target = half(1, 8), ints(3, dtype=torch.int64)
    for wrong, named in ((None, "a NoneType"), (1.5, "1.5"), ("a", "'a'")):
        refused(f"ignore_index is {named}; pass an int", cross_entropy, logits, target, ignore_index=wrong)
    refused("grad_scale is 'a'; pass a number", cross_entropy, logits, target, grad_scale="a")


def launches(function: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    tunable = f"{function.__name__}_tunable"
    played = SimpleNamespace(launch=lambda *passed: calls.append(passed))
    for name, module in list(sys.modules.items()):
        if name.startswith("aot_tune.kernels.") and tunable in vars(module):
            monkeypatch.setattr(module, tunable, played)
    return calls


@pytest.mark.parametrize("eps", [np.float32(0.25), np.float64(0.25), 0.25])
def test_numpys_numbers_are_launched_as_pythons(eps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = launches(rms_norm, monkeypatch)
    rms_norm(half(2, 8), half(8), eps)
    assert (type(calls[0][-1]), calls[0][-1]) == (float, 0.25)
    calls = launches(layer_norm, monkeypatch)
    layer_norm(half(2, 8), half(8), eps=1)
    assert (type(calls[0][-1]), calls[0][-1]) == (float, 1.0)


def test_a_window_longer_than_any_context_means_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = launches(attention_decode, monkeypatch)
    attention_decode(**HOSTS["attention_decode"][1].args, window=2**40)
    assert calls[0][-1] == LARGEST_INDEX


# Memory ---------------------------------------------------------------------------------------------------


def test_results_that_would_overwrite_arguments_in_part_are_refused() -> None:
    wide, square, flat = half(4, 16), half(16, 16), half(512)
    refused("out and x share memory", gated_activation, wide, out=wide[:, 8:])
    refused("out and a share memory", matmul, square[:8], half(16, 16), out=square[4:12])
    refused(
        "out and x share memory", rms_norm, flat[:256].view(4, 64), half(64), out=flat[64:320].view(4, 64)
    )
    refused("x and residual share memory", fused_add_rms_norm, square[:8], square[1:9], half(16))
    angles, heads = torch.ones(4, 8), half(4, 8, 16)
    refused("q and k share memory", rope, heads[:, :6], heads[:, 4:], angles, angles)
    refused("out and weight share memory", linear, half(4, 16), square, out=square[3:7])
    queries = half(1, 8, 2, 64)
    refused("out and k share memory", attention, queries.clone(), queries[:, 1:], queries[:, 1:], out=queries)


def test_queries_and_keys_of_one_projection_are_rotated_where_they_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = launches(rope, monkeypatch)
    projected, angles = half(4, 8, 16), torch.ones(4, 8)
    rope(projected[:, :5], projected[:, 5:7], angles, angles)
    assert len(calls) == 1
