"""aot_tune.choose.nearest: the laws of the rule of the nearest bucket."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot_tune.choose.nearest import Buckets, distance
from aot_tune.values.bucket import Exact
from aot_tune.values.problem import Problem

SIZES = st.tuples(
    st.integers(0, 15).map(lambda power: 1 << power), st.sampled_from([1000, 1024, 2000, 2048, 4096, 5000])
)


@st.composite
def with_neighbours(draw):
    """Wanted sizes, and buckets of which many are equally far: up to two doublings away on each axis."""
    wanted = (1 << draw(st.integers(2, 13)), draw(st.sampled_from([1000, 1024, 5000])))
    doublings = st.tuples(st.integers(-2, 2), st.integers(-2, 2))
    neighbours = doublings.map(
        lambda steps: tuple(int(size * 2.0**step) for size, step in zip(wanted, steps, strict=True))
    )
    return wanted, draw(st.lists(neighbours | SIZES, max_size=12))


def found(wanted, several, within=1.0):
    place = place_of(wanted, several, within)
    return None if place is None else several[place]


def place_of(wanted, several, within=1.0):
    axes = {str(axis): Exact() for axis in range(len(wanted))}
    wanted, *several = (Problem(dict(zip(axes, sizes, strict=True))) for sizes in (wanted, *several))
    near = Buckets(axes, several).nearest(wanted, within)
    return None if near is None else near[-1]


@given(SIZES, SIZES)
def test_distance_is_symmetric_and_nothing_only_between_equals(one, other):
    apart = distance(one, other)
    assert apart == pytest.approx(distance(other, one))
    assert (apart == 0) == (one == other)


@given(with_neighbours(), st.sampled_from([1.0, 2.0, math.inf]))
def test_the_nearest_is_the_best_within_reach_by_brute_force(buckets, within):
    wanted, several = buckets

    def rank(sizes):
        apart = [abs(math.log2(size / other)) for size, other in zip(sizes, wanted, strict=True)]
        return round(sum(apart), 9), *(-size for size in sizes)

    most = 2**within
    reachable = [
        sizes
        for sizes in several
        if all(1 / most <= size / other <= most for size, other in zip(sizes, wanted, strict=True))
    ]
    assert found(wanted, several, within) == min(reachable, key=rank, default=None)


@given(SIZES, st.lists(SIZES, max_size=12))
def test_the_very_sizes_are_found_first(wanted, several):
    assert found(wanted, [*several, wanted]) == wanted


@given(SIZES, st.lists(SIZES, max_size=12))
def test_at_any_distance_something_is_found_where_anything_is(wanted, several):
    assert (found(wanted, several, math.inf) is not None) == bool(several)


@given(SIZES, st.permutations([(1 << (2 * power + 1), 1024) for power in range(6)]))
def test_the_order_of_different_sizes_does_not_matter(wanted, shuffled):
    assert found(wanted, shuffled, math.inf) == found(wanted, sorted(shuffled), math.inf)


@given(st.integers(1, 12))
def test_a_tie_goes_to_the_larger(power):
    smaller, middle, larger = ((1 << power + step, 1024) for step in (-1, 0, 1))
    assert found(middle, [smaller, larger]) == larger
    assert found(middle, [larger, smaller]) == larger


def test_of_equal_sizes_the_earlier_is_found():
    assert place_of((64, 1024), [(128, 1024), (128, 1024)]) == 0


def test_equal_distances_summed_in_another_order_tie():
    """The doublings of 3 and of 5 to 1 add up to other roundings in the two orders."""
    assert found((1, 1, 1), [(3, 5, 7), (7, 5, 3)], math.inf) == (7, 5, 3)
    assert found((1, 1, 1), [(7, 5, 3), (3, 5, 7)], math.inf) == (7, 5, 3)


def test_more_than_one_doubling_on_one_axis_is_out_of_reach_however_close_the_others_are():
    assert found((64, 1024), [(64, 2049)]) is None
    assert found((64, 1024), [(64, 2048)]) == (64, 2048)
    assert found((64, 1024), [(256, 1024)]) is None


@pytest.mark.parametrize("size", [3, 1000, 5120, 11008, 28672, 151936])
def test_exactly_one_doubling_is_in_reach_whatever_the_logarithms_round_to(size):
    assert found((size,), [(2 * size,)]) == (2 * size,)
    assert found((2 * size,), [(size,)]) == (size,)


def test_a_size_of_zero_has_a_distance():
    assert distance((0, 1), (4, 1)) == 2.0


def test_there_is_no_distance_beyond_the_reach_of_one_axis():
    assert distance((64, 1024), (32, 2048), within=1.0) == 2.0
    assert distance((64, 1024), (64, 4096), within=1.0) is None


def test_without_an_axis_the_first_is_the_nearest():
    assert found((), [(), ()]) == ()
