"""Contents of tensors: saved, restored, compared."""

from __future__ import annotations

import math

import pytest
import torch

from aot_tune.replay.record.memory import distance, observed, saved, tensors_of, tolerance

NAMES = ("x", "parts", "out", "n")


def args() -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, int]:
    return torch.arange(4.0), [torch.ones(2), torch.zeros(3)], torch.zeros(4), 4


def test_tensors_are_found_in_lists_and_those_without_contents_are_left_out() -> None:
    given = (*args(), torch.empty(3, device="meta"), None)
    assert list(tensors_of(given)) == [(0,), (1, 0), (1, 1), (2,)]


def test_what_a_launch_changed_is_found_restored_and_compared() -> None:
    given = args()
    before = saved(given)
    given[2].copy_(given[0] * 2)
    given[1][1].add_(5)
    memory = observed(before, given)
    assert list(memory.before) == [(1, 1), (2,)]
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


def test_the_same_bits_are_no_change_even_where_they_are_nan() -> None:
    given = (torch.tensor([math.nan, 1.0]),)
    assert observed(saved(given), given).before == {}


def test_a_tensor_whose_shape_varies_is_neither_restored_nor_compared() -> None:
    given = (torch.zeros(4),)
    before = saved(given)
    given[0].fill_(1)
    memory = observed(before, given)
    other = (torch.full((8,), 3.0),)
    memory.restore(other)
    assert other[0].tolist() == [3.0] * 8
    assert memory.difference(other, NAMES) is None


@pytest.mark.parametrize(
    ("tensor", "expected", "off"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), 0.5),
        (torch.tensor([math.nan]), torch.tensor([1.0]), math.inf),
        (torch.tensor([1.0]), torch.tensor([math.nan]), math.inf),
        (torch.tensor([math.inf, 2.0]), torch.tensor([math.inf, 2.0]), 0.0),
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
