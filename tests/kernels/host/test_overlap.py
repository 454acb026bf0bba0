"""Shared memory is told from memory that only lies between, as counting every byte does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aot_tune.errors import LaunchError
from aot_tune.kernels.host.arguments import check_apart
from aot_tune.kernels.host.overlap import share

BUFFER = torch.arange(24 * 30, dtype=torch.int16)


def parts(tensor: torch.Tensor) -> st.SearchStrategy[torch.Tensor]:
    """Slices with steps of a tensor, none of them empty, in any order of dimensions."""

    def sliced(ends: list[tuple[int, int, int]]) -> torch.Tensor:
        part = tensor
        for axis, (one, other, step) in enumerate(ends):
            first, last = sorted((one % tensor.shape[axis], other % tensor.shape[axis]))
            part = part[(slice(None),) * axis + (slice(first, last + 1, step),)]
        return part

    numbers = st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(1, 3))
    slices = st.lists(numbers, min_size=tensor.dim(), max_size=tensor.dim()).map(sliced)
    orders = st.permutations(range(tensor.dim()))
    return st.tuples(slices, orders).map(lambda drawn: drawn[0].permute(drawn[1]))


SHAPES = (BUFFER.view(24, 30), BUFFER.view(24, 5, 6), BUFFER.view(4, 6, 5, 6), BUFFER)


def shared(one: torch.Tensor, other: torch.Tensor) -> bool:
    distance = other.data_ptr() - one.data_ptr()
    return share(distance, one.shape, one.stride(), 2, other.shape, other.stride(), 2)


def really_shared(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not {*one.flatten().tolist()}.isdisjoint(other.flatten().tolist())


@given(st.sampled_from(SHAPES).flatmap(parts), st.sampled_from(SHAPES).flatmap(parts))
def test_what_is_said_to_share_memory_does(one: torch.Tensor, other: torch.Tensor) -> None:
    assert really_shared(one, other) or not shared(one, other)


@given(st.sampled_from(SHAPES).flatmap(lambda view: st.tuples(parts(view), parts(view))))
def test_of_two_parts_of_one_view_shared_memory_is_found(both: tuple[torch.Tensor, torch.Tensor]) -> None:
    one, other = both
    assert shared(one, other) == shared(other, one) == really_shared(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (BUFFER[:100].view(10, 10), BUFFER[99:199].view(10, 10)),
        (BUFFER.view(24, 30), BUFFER.view(24, 30)[:, 15:]),
        (BUFFER.view(24, 30)[:, :16], BUFFER.view(24, 30)[:, 15:]),
        (BUFFER.view(24, 30)[:20], BUFFER.view(24, 30)[19:].t()),
        (BUFFER.view(4, 6, 30)[:, :, :10], BUFFER[35:36]),
        (BUFFER[:1].expand(5, 7), BUFFER[:40]),
        (BUFFER.unfold(0, 5, 2), BUFFER[9:10]),
        (BUFFER[:40].view(torch.uint8), BUFFER[39:79]),
    ],
)
def test_views_that_overlap_share_memory(one: torch.Tensor, other: torch.Tensor) -> None:
    for a, b in ((one, other), (other, one)):
        with pytest.raises(LaunchError, match="matmul: out and x share memory; pass another tensor as out"):
            check_apart("matmul", "out", a, x=b)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (BUFFER[:100], BUFFER[100:]),
        (BUFFER.view(24, 30)[:, :15], BUFFER.view(24, 30)[:, 15:]),
        (BUFFER.view(24, 5, 6)[:, 1:3], BUFFER.view(24, 5, 6)[:, 3:]),
        (BUFFER.view(24, 30)[::2], BUFFER.view(24, 30)[1::2]),
        (BUFFER.view(24, 30)[:, ::2], BUFFER.view(24, 30)[:, 1::2]),
        (BUFFER.view(24, 30)[:, :10], BUFFER[10:30]),
        (BUFFER.view(4, 6, 30)[:, 1:], BUFFER.view(24, 30)[::6]),
        (BUFFER[:100], BUFFER.new_empty(0)),
        (BUFFER.to("meta"), BUFFER.to("meta")),
    ],
)
def test_views_beside_each_other_are_taken(one: torch.Tensor, other: torch.Tensor) -> None:
    check_apart("rope", "q", one, k=other)
    check_apart("rope", "q", other, k=one)
