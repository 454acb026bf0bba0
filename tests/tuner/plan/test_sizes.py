"""The sizes that a sweep measures inside a bucket: the first, and those added where the rule is worst."""

from __future__ import annotations

import pytest

from aot_tune.tuner.plan.sizes import LEFT_AT_MOST, MOST_ADDED, next_size, sizes_inside
from aot_tune.values.bucket import Exact, Pow2, edge
from aot_tune.values.problem import Problem
from tests.support import recorded


@pytest.mark.parametrize(
    ("bucket", "inside"),
    [(1, []), (2, []), (4, [3]), (8, [5, 7]), (16, [11, 15]), (64, [41, 57]), (256, [149, 213])],
)
def test_a_bucket_has_these_sizes_inside_at_first(bucket: int, inside: list[int]) -> None:
    found = sizes_inside(recorded.AXES, recorded.problem(bucket))
    assert [problem.size("M") for problem in found] == inside
    assert all(problem["N"] == 6144 and problem["dtype"] == "bfloat16" for problem in found)


@pytest.mark.parametrize("exponent", range(3, 31))
def test_from_eight_on_there_is_one_in_each_half_of_the_bucket_and_both_are_odd(exponent: int) -> None:
    bucket = 1 << exponent
    sizes = [p.size("M") for p in sizes_inside(recorded.AXES, recorded.problem(bucket))]
    assert all(edge(size) == bucket and size != bucket for size in sizes)
    assert sizes[0] < bucket * 3 / 4 < sizes[1]
    assert all(size % 2 for size in sizes)


def test_several_axes_shrink_together_and_exact_ones_stay() -> None:
    axes = {"rows": Pow2(), "cols": Pow2(), "depth": Exact()}
    bucket = Problem({"rows": 64, "cols": 2, "depth": 7})
    assert [dict(problem) for problem in sizes_inside(axes, bucket)] == [
        {"rows": rows, "cols": 2, "depth": 7} for rows in (41, 57)
    ]


def test_a_kernel_without_bucketed_axes_has_nothing_inside() -> None:
    assert sizes_inside({"N": Exact()}, Problem({"N": 4096})) == []


def next_of(left: dict[int, float], bucket: int = 256) -> int | None:
    told = {recorded.problem(size): regret for size, regret in left.items()}
    found = next_size(recorded.AXES, recorded.problem(bucket), told)
    return None if found is None else found.size("M")


def test_a_size_is_added_in_the_wider_gap_beside_the_worst_point() -> None:
    assert next_of({149: 0.06, 213: 0.30, 256: 0.0}) == 178, "between 149 and 213"
    assert next_of({149: 0.30, 213: 0.06, 256: 0.0}) == 178
    assert next_of({149: 0.30, 178: 0.06, 213: 0.0, 256: 0.0}) == 163
    assert next_of({149: 0.0, 178: 0.0, 213: 0.30, 256: 0.0}) == 234


def test_a_size_that_is_added_is_no_multiple_of_16() -> None:
    assert next_of({200: 0.3, 256: 0.0}) == 159, "the middle of 128 and 200 is 160"


def test_no_size_is_added_where_the_rule_is_good_enough_or_the_edge_alone_is_worse() -> None:
    assert next_of({149: LEFT_AT_MOST, 213: 0.0, 256: 0.0}) is None
    assert next_of({149: 0.0, 213: 0.0, 256: 0.9}) is None


def test_at_most_four_sizes_are_added() -> None:
    left = {149: 0.9, 213: 0.9, 256: 0.0}
    added = []
    while (size := next_of(left)) is not None:
        assert size not in left
        added.append(size)
        left[size] = 0.9
    assert len(added) == MOST_ADDED


def test_a_bucket_whose_sizes_are_all_measured_gets_no_more() -> None:
    assert next_of({5: 0.9, 6: 0.9, 7: 0.9, 8: 0.0}, bucket=8) is None
    assert next_of({5: 0.9, 7: 0.9, 8: 0.0}, bucket=8) == 6


def test_axes_that_shrink_together_do_so_in_sizes_that_are_added() -> None:
    axes = {"batch": Pow2(), "tokens": Pow2()}
    bucket = Problem({"batch": 8, "tokens": 1024})
    left = {Problem({"batch": 5, "tokens": 629}): 0.0, Problem({"batch": 7, "tokens": 885}): 0.4, bucket: 0.0}
    assert next_size(axes, bucket, left) == Problem({"batch": 6, "tokens": 746})
