"""The weakest signature: it assumes nothing of arrays and keeps what is compiled in. The rest is in
test_cutile."""

from __future__ import annotations

import cuda.tile as ct
import pytest
import torch
from cuda.tile.compilation import ArrayConstraint, demangle_kernel_name

from aot_tune.errors import CutileError
from aot_tune.nvidia import cutile
from aot_tune.nvidia.signature import constants_of


@ct.kernel
def _kernel(source, target, count, factor, width: ct.Constant[int]):
    pass


@ct.kernel
def _annotated(
    source: ct.IndexedWithInt64,  # type: ignore[valid-type]
    target,
    width: ct.Constant[int],
):
    pass


def tensor(*shape: int, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    return torch.empty_strided(shape, strides or torch.empty(shape, device="meta").stride(), device="meta")


LAYOUTS = [
    tensor(64, 64),
    tensor(63, 63),
    tensor(1, 64),
    tensor(64, 1),
    tensor(64, 64, strides=(1, 64)),
    tensor(64, 64, strides=(0, 1)),
    tensor(64, 64, strides=(67, 3)),
]


def test_every_layout_of_a_kernel_has_the_same_weakest_signature() -> None:
    signatures = {cutile.signature_of(_kernel, (layout, layout, 3, 1.5, 32)) for layout in LAYOUTS}
    assert len(signatures) == len(LAYOUTS)
    weakest = {cutile.weakest_signature(_kernel, signature) for signature in signatures}
    assert len(weakest) == 1
    assert {cutile.weakest_signature(_kernel, signature) for signature in weakest} == weakest


def test_the_weakest_signature_assumes_nothing_of_arrays_and_keeps_dtypes_and_constants() -> None:
    strong = cutile.signature_of(_kernel, (tensor(1, 64), tensor(64, 64), 3, 1.5, 32))
    before = demangle_kernel_name(strong)[1].parameters
    after = demangle_kernel_name(cutile.weakest_signature(_kernel, strong))[1].parameters
    for array, was in zip(after[:2], before[:2], strict=True):
        assert isinstance(array, ArrayConstraint)
        assert (array.dtype, array.ndim, array.index_dtype) == (was.dtype, was.ndim, was.index_dtype)
        assert array.shape_constant == array.stride_constant == (None, None)
        assert array.shape_divisible_by == array.stride_divisible_by == (1, 1)
        assert array.base_addr_divisible_by == 1
        assert array.may_alias_internally
    assert after[2:4] == before[2:4]
    assert after[4].value == 32


def test_index_widths_are_kept_since_they_are_passed_at_that_width() -> None:
    strong = cutile.signature_of(_annotated, (tensor(64, 64), tensor(64, 64), 32))
    after = demangle_kernel_name(cutile.weakest_signature(_annotated, strong))[1].parameters
    assert [array.index_dtype for array in after[:2]] == [ct.int64, ct.int32]


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0)])
def test_constants_that_python_finds_equal_are_told_apart(one: object, other: object) -> None:
    layout = LAYOUTS[0]
    assert cutile.signature_of(_kernel, (layout, layout, 3, 1.5, one)) != cutile.signature_of(
        _kernel, (layout, layout, 3, 1.5, other)
    )


@ct.kernel
def _listed(sources, targets, width: ct.Constant[int]):
    pass


def test_the_weakest_signature_of_a_list_assumes_nothing_of_its_members() -> None:
    strong = [cutile.signature_of(_listed, ([one, one], [one], 32)) for one in (tensor(64, 64), tensor(3, 5))]
    assert strong[0] != strong[1]
    assert len({cutile.weakest_signature(_listed, signature) for signature in strong}) == 1
    after = demangle_kernel_name(cutile.weakest_signature(_listed, strong[0]))[1].parameters
    for listed in after[:2]:
        assert listed.element.stride_constant == (None, None)
        assert listed.element.may_alias_internally
    assert after[2].value == 32


def test_a_signature_tells_the_constants_that_it_has_compiled_in() -> None:
    signature = cutile.signature_of(_kernel, (tensor(1, 64), tensor(64, 64), 3, 1.5, 32))
    assert constants_of(signature) == (None, None, None, None, 32)
    with pytest.raises(CutileError, match="is not a mangled kernel name"):
        constants_of("matmul")
