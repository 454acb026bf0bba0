"""Contents of tensors: saved, restored, compared."""

from __future__ import annotations

import math

import cuda.tile as ct
import pytest
import torch

from aot_tune.declare.comparison import poison
from aot_tune.replay.record.memory import (
    Memory,
    Stores,
    add_up_alike,
    distance,
    stores_of,
    tensors_of,
    tolerance,
)
from tests.support.example_kernels import add_rows_kernel, count_kernel
from tests.support.tuned_once import scale_kernel

NAMES = ("x", "parts", "out", "n")


def args() -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, int]:
    return torch.arange(4.0), [torch.ones(2), torch.zeros(3)], torch.zeros(4), 4


def test_tensors_are_found_in_lists_and_those_without_contents_are_left_out() -> None:
    given = (*args(), torch.empty(3, device="meta"), None)
    assert list(tensors_of(given)) == [(0,), (1, 0), (1, 1), (2,)]


UNKNOWN = Stores(written=frozenset(), fresh=frozenset())


def test_what_a_launch_changed_is_found_restored_and_compared() -> None:
    given = args()
    memory = Memory(given, UNKNOWN)
    given[2].copy_(given[0] * 2)
    given[1][1].add_(5)
    memory.observe(given)
    assert memory.compared == ((1, 1), (2,))
    memory.restore(given)
    assert given[2].tolist() == [0, 0, 0, 0]
    assert given[1][1].tolist() == [0, 0, 0]
    assert memory.difference(given, NAMES) == (
        "parts differs from the first config's by 1 of its largest value; at most 0.002 is allowed for "
        "torch.float32"
    )
    given[1][1].fill_(5)
    given[2].copy_(given[0] * 2.001)
    assert memory.difference(given, NAMES) is None


def test_the_source_says_what_is_stored_to_and_what_is_never_read_before() -> None:
    assert stores_of(scale_kernel) == Stores(written=frozenset({1}), fresh=frozenset({1}))
    assert stores_of(add_rows_kernel) == Stores(written=frozenset({0}), fresh=frozenset())
    assert stores_of(count_kernel) == Stores(written=frozenset({1}), fresh=frozenset())
    unreadable = stores_of(ct.kernel(eval("lambda x, out: None")))
    assert unreadable == Stores(written=frozenset({0, 1}), fresh=frozenset())


def test_what_is_stored_to_is_poisoned_before_a_launch_and_compared_although_unchanged() -> None:
    given = (torch.ones(4), torch.ones(4), torch.full((4,), True), torch.full((4,), 9.0))
    memory = Memory(given, Stores(written=frozenset({1, 2, 3}), fresh=frozenset({1, 2, 3})))
    memory.prepare(given)
    assert given[1].isnan().all()
    given[1].fill_(1)
    given[2].fill_(True)  # the poison of a bool is a result too
    memory.observe(given)
    assert memory.compared == ((1,), (2,))
    assert given[3].tolist() == [9] * 4  # the launch stored nothing to it
    memory.prepare(given)
    assert "differs" in str(memory.difference(given, NAMES))
    memory.restore(given)
    assert [tensor[0].item() for tensor in given] == [1, 1, True, 9]


def test_what_shares_memory_is_not_poisoned() -> None:
    whole = torch.ones(8)
    given = (whole[:4], whole[4:], torch.ones(1).expand(4))
    memory = Memory(given, Stores(written=frozenset({1, 2}), fresh=frozenset({1, 2})))
    memory.prepare(given)  # an expanded view cannot be written to
    assert whole.tolist() == [1] * 8
    memory.observe(given)
    assert memory.compared == ((1,), (2,))


def test_the_same_bits_are_no_change_even_where_they_are_nan() -> None:
    given = (torch.tensor([math.nan, 1.0]),)
    memory = Memory(given, UNKNOWN)
    memory.observe(given)
    assert memory.compared == ()


def test_a_tensor_whose_shape_varies_is_neither_restored_nor_compared() -> None:
    given = (torch.zeros(4),)
    memory = Memory(given, UNKNOWN)
    given[0].fill_(1)
    memory.observe(given)
    other = (torch.full((8,), 3.0),)
    memory.restore(other)
    assert other[0].tolist() == [3.0] * 8
    assert memory.difference(other, NAMES) is None


def in_workspace(product: torch.Tensor, parts: int, *, tile: int = 1, rows: int = 128) -> torch.Tensor:
    """What a split-K kernel leaves in its workspace: parts of a product, each padded to whole tiles."""
    each = -(-len(product) // tile) * tile
    share = torch.rand(parts, *product.shape, generator=torch.Generator().manual_seed(parts))
    padded = torch.zeros(parts, each, *product.shape[1:])
    padded[:, : len(product)] = share / share.sum(0) * product
    workspace = torch.zeros(rows, *product.shape[1:])
    poison(workspace, 0)
    workspace[: parts * each] = padded.flatten(0, 1)[:rows]
    return workspace


PRODUCT = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("parts", "first"), [(1, 8), (8, 1), (2, 3), (4, 8)])
def test_other_parts_of_the_same_sums_do_not_differ(parts: int, first: int) -> None:
    kernel = Stores(written=frozenset({1}), fresh=frozenset({1}))
    given = (PRODUCT, torch.zeros(128, 4))
    memory = Memory(given, kernel)
    memory.prepare(given)
    given[1].copy_(in_workspace(PRODUCT, first))
    memory.observe(given)
    memory.prepare(given)
    given[1].copy_(in_workspace(PRODUCT, parts, tile=16))  # rows of zeros end each part
    assert memory.difference(given, NAMES) is None
    assert memory.in_parts == {"parts"}
    memory.prepare(given)
    given[1].copy_(in_workspace(PRODUCT * 1.01, parts))
    assert "parts differs from the first config's" in str(memory.difference(given, NAMES))


def along(parts: int, dim: int, *, rows: int = 16, scale: float = 1.0) -> torch.Tensor:
    """What a kernel leaves in a workspace of a dimension of parts, with room for more parts and rows."""
    share = in_workspace(PRODUCT * scale, parts)[: parts * 12].view(parts, 12, 4)
    workspace = torch.zeros(8, rows, 4)
    poison(workspace, 0)
    workspace[:parts, :12] = share
    return workspace.movedim(0, dim)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("parts", "first"), [(4, 1), (1, 8)])
def test_parts_may_lie_along_any_dimension_and_leave_padding(parts: int, first: int, dim: int) -> None:
    assert add_up_alike(along(parts, dim), along(first, dim))
    assert not add_up_alike(along(parts, dim, scale=1.01), along(first, dim))
    missing = along(parts, dim)
    missing.select(dim, 0).select(0, 5)[:] = math.nan
    assert not add_up_alike(missing, along(first, dim))


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (in_workspace(PRODUCT, 4)[:40], in_workspace(PRODUCT, 1)[:40]),  # the last part does not fit
        (in_workspace(PRODUCT, 4).roll(1, 0), in_workspace(PRODUCT, 1)),  # not the first rows
        (in_workspace(PRODUCT[:8], 1), in_workspace(PRODUCT, 1)),  # a tile is missing
        (in_workspace(PRODUCT.flip(0), 1), in_workspace(PRODUCT, 1)),
        (in_workspace(PRODUCT, 2)[:24].roll(12, 0), in_workspace(PRODUCT, 2)[:24]),  # as many parts
        (in_workspace(PRODUCT * 0, 4), in_workspace(PRODUCT * 0, 1)),  # zeros prove nothing
        (in_workspace(PRODUCT, 1), in_workspace(PRODUCT, 1, tile=24)),  # rows of zeros are not stored
        (in_workspace(PRODUCT, 1, tile=16), in_workspace(PRODUCT, 1)),  # zeros on what may be the caller's
        (in_workspace(PRODUCT, 1, tile=24), in_workspace(torch.cat([PRODUCT, PRODUCT * 1e-4]), 1)),
        (in_workspace(PRODUCT, 1, rows=12)[:0], in_workspace(PRODUCT, 1)),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.tensor([1, 1]), torch.tensor([2])),
    ],
)
def test_what_is_no_other_number_of_parts_differs(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    assert not add_up_alike(tensor, expected)


@pytest.mark.parametrize(
    ("tensor", "expected", "off"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), 0.5),
        (torch.tensor([math.nan]), torch.tensor([1.0]), math.inf),
        (torch.tensor([1.0]), torch.tensor([math.nan]), math.inf),
        (torch.tensor([math.inf, 2.0]), torch.tensor([math.inf, 2.0]), 0.0),
        (torch.tensor([math.inf, 1.0]), torch.tensor([-math.inf, 1.0]), math.inf),
        (torch.tensor([math.nan, 2.0]), torch.tensor([math.inf, 2.0]), math.inf),
        (torch.tensor([math.nan, 2.0]), torch.tensor([math.nan, 1.0]), 1.0),
        (torch.tensor([1]), torch.tensor([2]), math.inf),
        (torch.tensor([0.0]), torch.tensor([0.0]), 0.0),
        (torch.tensor([1.0]), torch.tensor([0.0]), math.inf),
        (torch.empty(0), torch.empty(0), 0.0),
    ],
)
def test_the_distance_is_a_fraction_of_the_largest_value(
    tensor: torch.Tensor, expected: torch.Tensor, off: float
) -> None:
    assert distance(tensor, expected) == off


def test_whole_numbers_must_be_equal_and_narrow_types_may_be_further_apart() -> None:
    assert tolerance(torch.int32) == 0
    assert tolerance(torch.bool) == 0
    assert tolerance(torch.float32) < tolerance(torch.bfloat16) < tolerance(torch.float8_e4m3fn)
