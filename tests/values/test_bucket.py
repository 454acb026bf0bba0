"""aot_tune.values.bucket: the laws of buckets and of the distance between them."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aot_tune.errors import DeclarationError
from aot_tune.values.bucket import Exact, Pow2, bucket_of, classes, doublings, edge, nearest, same_classes
from aot_tune.values.problem import Problem

AXES = {"M": Pow2(), "N": Exact()}
SIZES = st.integers(1, 1 << 40)
PROBLEMS = st.builds(
    lambda dtype, m, n: Problem({"dtype": dtype, "M": m, "N": n}),
    st.sampled_from(["bfloat16", "float16"]),
    st.integers(1, 1 << 15),
    st.sampled_from([1000, 1024, 2000, 2048, 4096, 5000]),
)
BUCKETS = PROBLEMS.map(lambda problem: bucket_of(AXES, problem))


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
    assert classes(AXES, problem) == {"dtype": problem["dtype"]}


def test_edges_are_listed_with_both_ends():
    assert Pow2.edges(1, 8) == (1, 2, 4, 8)
    assert Pow2.edges(16, 16) == (16,)


@pytest.mark.parametrize(("low", "high"), [(0, 8), (3, 8), (1, 9), (8, 4), (-2, 4)])
def test_edges_between_what_are_no_powers_of_two_are_refused(low, high):
    with pytest.raises(DeclarationError, match="powers of two"):
        Pow2.edges(low, high)


@given(BUCKETS, BUCKETS)
def test_distance_is_symmetric_and_nothing_only_between_equals(one, other):
    apart = doublings(AXES, one, other)
    assert apart == pytest.approx(doublings(AXES, other, one))
    assert (sum(apart.values()) == 0) == all(one[name] == other[name] for name in AXES)


@given(PROBLEMS, st.lists(BUCKETS, max_size=12))
def test_nearest_is_the_best_within_reach_by_brute_force(problem, buckets):
    wanted = bucket_of(AXES, problem)

    def rank(bucket):
        apart = [abs(math.log2(bucket[name] / wanted[name])) for name in AXES]
        return round(sum(apart), 9), -bucket["M"], -bucket["N"], buckets.index(bucket)

    reachable = [
        bucket
        for bucket in buckets
        if bucket["dtype"] == problem["dtype"]
        and all(0.5 <= bucket[name] / wanted[name] <= 2 for name in AXES)
    ]
    assert nearest(AXES, problem, buckets) == (min(reachable, key=rank) if reachable else None)


@given(PROBLEMS, st.lists(BUCKETS, min_size=1, max_size=12))
def test_nearest_finds_its_own_bucket_first(problem, buckets):
    assert nearest(AXES, problem, [*buckets, bucket_of(AXES, problem)]) == bucket_of(AXES, problem)


@given(PROBLEMS, st.lists(BUCKETS, max_size=12))
def test_at_any_distance_a_bucket_with_the_same_classes_is_always_found(problem, buckets):
    found = nearest(AXES, problem, buckets, within=math.inf)
    assert (found is not None) == any(same_classes(AXES, problem, bucket) for bucket in buckets)
    assert found is None or same_classes(AXES, problem, found)


@given(PROBLEMS, st.permutations(range(6)))
def test_the_order_of_different_buckets_does_not_matter(problem, order):
    buckets = [bucket_of(AXES, problem.replaced(M=1 << (2 * place + 1))) for place in range(6)]
    shuffled = [buckets[place] for place in order]
    assert nearest(AXES, problem, shuffled, within=math.inf) == nearest(
        AXES, problem, buckets, within=math.inf
    )


@given(st.integers(1, 12))
def test_a_tie_goes_to_the_larger(exponent):
    assume(exponent > 0)
    middle = Problem({"dtype": "bfloat16", "M": 1 << exponent, "N": 1024})
    smaller, larger = middle.replaced(M=1 << (exponent - 1)), middle.replaced(M=1 << (exponent + 1))
    assert nearest(AXES, middle, [smaller, larger]) == larger
    assert nearest(AXES, middle, [larger, smaller]) == larger


def test_more_than_one_doubling_on_one_axis_is_out_of_reach_however_close_the_others_are():
    problem = Problem({"dtype": "bfloat16", "M": 64, "N": 1024})
    assert nearest(AXES, problem, [problem.replaced(N=2049)]) is None
    assert nearest(AXES, problem, [problem.replaced(N=2048)]) == problem.replaced(N=2048)
    assert nearest(AXES, problem, [problem.replaced(M=256)]) is None


def test_a_size_of_zero_has_a_distance():
    assert doublings(AXES, Problem({"M": 0, "N": 1}), Problem({"M": 4, "N": 1})) == {"M": 2.0, "N": 0.0}
