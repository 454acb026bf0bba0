"""aot_tune.values.bucket: the laws of buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot_tune.errors import DeclarationError
from aot_tune.values.bucket import Exact, Pow2, bucket_of, classes_of, edge
from aot_tune.values.problem import Problem

AXES = {"M": Pow2(), "N": Exact()}
SIZES = st.integers(1, 1 << 40)
PROBLEMS = st.builds(
    lambda dtype, m, n: Problem({"dtype": dtype, "M": m, "N": n}),
    st.sampled_from(["bfloat16", "float16"]),
    st.integers(1, 1 << 15),
    st.sampled_from([1000, 1024, 2000, 2048, 4096, 5000]),
)


@given(SIZES)
def test_an_edge_is_the_smallest_power_of_two_not_below(size):
    assert edge(size) >= size
    assert edge(size) & (edge(size) - 1) == 0
    assert edge(size) == 1 or edge(size) // 2 < size


@given(SIZES)
def test_an_edge_is_in_its_own_bucket(size):
    assert edge(edge(size)) == edge(size)


@given(SIZES, SIZES)
def test_a_larger_size_never_has_a_smaller_edge(one, other):
    assert edge(min(one, other)) <= edge(max(one, other))


def test_the_smallest_sizes_belong_to_the_first_bucket():
    assert [edge(size) for size in (0, 1, 2, 3, 4, 5)] == [1, 1, 2, 4, 4, 8]


@given(PROBLEMS)
def test_a_bucket_keeps_exact_axes_classes_and_the_order_of_names(problem):
    bucket = bucket_of(AXES, problem)
    assert bucket_of(AXES, bucket) == bucket
    assert list(bucket) == list(problem)
    assert (bucket["N"], bucket["dtype"]) == (problem["N"], problem["dtype"])
    assert classes_of(AXES, problem) == {("dtype", problem["dtype"])}


def test_edges_are_listed_with_both_ends():
    assert Pow2.edges(1, 8) == (1, 2, 4, 8)
    assert Pow2.edges(16, 16) == (16,)


@pytest.mark.parametrize(("low", "high"), [(0, 8), (3, 8), (1, 9), (8, 4), (-2, 4)])
def test_edges_between_what_are_no_powers_of_two_are_refused(low, high):
    with pytest.raises(DeclarationError, match="powers of two"):
        Pow2.edges(low, high)
