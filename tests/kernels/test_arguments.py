"""Strides that 32 bits do not hold: refused, or along dimensions of size 1, which need none, made small."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune import cutile
from aot_tune.errors import LaunchError
from aot_tune.kernels import (
    attention,
    attention_tunable,
    attention_varlen,
    cross_entropy,
    fused_add_rms_norm,
    gate_up_swiglu,
    gated_activation,
    grouped_matmul,
    layer_norm,
    matmul,
    matmul_fp8,
    rms_norm,
    rope,
    softmax,
)
from aot_tune.kernels.arguments import LARGEST_INDEX, check_sizes, indexable

TOO_LARGE = 2**31 + 64


def half(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16)


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


@pytest.mark.parametrize("check", [indexable, check_sizes])
def test_what_is_indexed_beyond_32_bits_is_refused(check: Callable[..., Any]) -> None:
    for sizes, strides in (
        ((2, 8), (TOO_LARGE, 1)),
        ((1, 2**31), (2**31, 1)),
        ((1, 2, 8), (0, TOO_LARGE, 1)),
    ):
        large = torch.empty_strided(sizes, strides, device="meta")
        with pytest.raises(LaunchError, match=r"a has shape .* keep each at most 2147483647"):
            check("matmul", a=large)
    with pytest.raises(LaunchError, match="b is on cpu, not on meta; move it there"):
        check("matmul", a=large.new_empty(8), b=half(8))


def test_who_is_not_handed_another_view_is_refused_a_large_stride_of_any_dimension() -> None:
    with pytest.raises(LaunchError, match=r"a has shape \(1, 8\) .* keep each at most 2147483647"):
        check_sizes("linear", a=far(half(1, 8)))


def fp8(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.float8_e4m3fn)


def long(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


CALLS: tuple[tuple[Any, dict[str, torch.Tensor], tuple[str, ...]], ...] = (
    (
        attention,
        {"q": half(1, 3, 4, 64), "k": half(1, 5, 2, 64), "v": half(1, 5, 2, 64), "out": half(1, 3, 4, 64)},
        ("q", "k", "v", "out"),
    ),
    (
        attention_varlen,
        {
            "q": half(1, 4, 64), "k": half(1, 2, 64), "v": half(1, 2, 64), "out": half(1, 4, 64),
            "cu_seqlens_q": long(0, 1, dtype=torch.int32), "cu_seqlens_k": long(0, 1, dtype=torch.int32),
        },
        ("q", "k", "v", "out"),
    ),
    (matmul, {"a": half(1, 16), "b": half(16, 8), "out": half(1, 8)}, ("a", "out")),
    (
        matmul_fp8,
        {"a": fp8(1, 16), "b": fp8(16, 16).t(), "scale_a": torch.ones(()), "scale_b": torch.ones(())},
        ("a",),
    ),
    (
        grouped_matmul,
        {"a": half(1, 16), "b": half(1, 16, 8), "offsets": long(1, dtype=torch.int32), "out": half(1, 8)},
        ("a", "b", "out"),
    ),
    (gate_up_swiglu, {"x": half(1, 16), "weight": half(16, 16), "out": half(1, 8)}, ("x", "out")),
    (rope, {
        "q": half(1, 4, 8), "k": half(1, 2, 8), "cos": torch.ones(1, 4), "sin": torch.ones(1, 4),
    }, ("q", "k", "cos", "sin")),
    (rms_norm, {"x": half(1, 16), "weight": half(16), "out": half(1, 16)}, ("x", "out")),
    (
        fused_add_rms_norm,
        {"x": half(1, 16), "residual": half(1, 16), "weight": half(16)},
        ("x", "residual"),
    ),
    (
        layer_norm,
        {"x": half(1, 16), "weight": half(16), "bias": half(16), "out": half(1, 16)},
        ("x", "out"),
    ),
    (softmax, {"x": half(1, 16), "out": half(1, 16)}, ("x", "out")),
    (gated_activation, {"x": half(1, 16), "out": half(1, 8)}, ("x", "out")),
    (cross_entropy, {"logits": half(1, 16), "target": long(3)}, ("logits",)),
)  # fmt: skip


@pytest.mark.parametrize(("function", "args", "unused"), CALLS, ids=[call[0].__name__ for call in CALLS])
def test_host_functions_launch_with_strides_that_32_bits_hold(
    function: Any, args: dict[str, torch.Tensor], unused: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    name = function.__name__
    module = importlib.import_module(f"aot_tune.kernels.{name}")
    monkeypatch.setattr(
        module, f"{name}_tunable", SimpleNamespace(launch=lambda *passed: calls.append(passed))
    )
    more = {"max_seqlen_q": 1, "max_seqlen_k": 1} if name == "attention_varlen" else {}
    for changed in unused:
        given = {**args, changed: far(args[changed])}
        function(**given, **more)
        tensors = [one for one in calls.pop() if isinstance(one, torch.Tensor)]
        assert max(stride for one in tensors for stride in one.stride()) <= LARGEST_INDEX
        addresses = [one.data_ptr() for one in tensors]
        assert all(one.data_ptr() in addresses for one in given.values())


def test_a_weight_whose_gate_alone_has_more_than_2_to_the_31_elements_is_refused() -> None:
    n, k = 2**16, 2**15 + 16
    x, weight = (torch.empty(sizes, dtype=torch.bfloat16, device="meta") for sizes in ((1, k), (2 * n, k)))
    with pytest.raises(LaunchError, match=r"weight has shape \(2, 65536, 32784\) .* keep each at most"):
        gate_up_swiglu(x, weight)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_packed_sequences_that_begin_beyond_32_bits_are_refused(name: str) -> None:
    given = {
        one: torch.empty((4, 64, 128), dtype=torch.float16, device="meta") for one in ("q", "k", "v", "out")
    }
    row = 2**31 // given[name].shape[0]
    given[name] = torch.empty_strided((4, 64, 128), (row, 128, 1), dtype=torch.float16, device="meta")
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    with pytest.raises(LaunchError, match=f"{name} has shape .* pass fewer sequences a call"):
        attention_varlen(given["q"], given["k"], given["v"], starts, starts, 4, 4, out=given["out"])


def test_columns_that_begin_beyond_32_bits_are_refused() -> None:
    columns = torch.empty_strided((2**16, 2**15), (1, 2**16), dtype=torch.float16, device="meta")
    with pytest.raises(LaunchError, match=r"logits has shape .* pass logits.contiguous\(\)"):
        cross_entropy(columns, torch.empty(2**16, dtype=torch.int64, device="meta"))
    with pytest.raises(LaunchError, match=r"x has shape .* pass x.contiguous\(\)"):
        gated_activation(columns)
