"""Which recorded problem may stand for another."""

from __future__ import annotations

import pytest

from aot_tune.replay.nearest import ANY, apart, distance, larger
from aot_tune.replay.problem import Argument, Array, Fixed, Items, Problem, Real, Whole


def tensor(*shape: int, dtype: str = "float16", layout: str = "contiguous", aligned: bool = True) -> Array:
    return Array(dtype=dtype, shape=shape, layout=layout, aligned=aligned)


def problem(*arguments: Argument, sm_count: int = 132) -> Problem:
    return Problem(
        names=tuple(f"p{at}" for at in range(len(arguments))), arguments=arguments, sm_count=sm_count
    )


def test_doublings_of_all_dimensions_are_added() -> None:
    recorded = problem(tensor(1024, 512), tensor(64))
    assert distance(recorded, recorded) == 0
    assert distance(recorded, problem(tensor(600, 500), tensor(64))) == 0
    assert distance(recorded, problem(tensor(2048, 512), tensor(33))) == 1
    assert distance(recorded, problem(tensor(2048, 256), tensor(64))) == 2
    assert distance(recorded, problem(tensor(4096, 512), tensor(64))) is None
    assert distance(recorded, problem(tensor(4096, 512), tensor(64)), ANY) == 2


def test_a_number_moves_with_a_size_or_stays() -> None:
    recorded = problem(tensor(1024, 512), Whole(1024), Whole(1024 * 512), Whole(7))
    assert distance(recorded, problem(tensor(600, 512), Whole(600), Whole(600 * 512), Whole(7))) == 0
    assert distance(recorded, problem(tensor(600, 512), Whole(1024), Whole(600 * 512), Whole(7))) == 0
    assert distance(recorded, problem(tensor(600, 512), Whole(600), Whole(600 * 512), Whole(8))) is None


def test_a_number_may_be_the_next_power_of_two_of_a_size() -> None:
    recorded = problem(tensor(600), Whole(1024))
    assert distance(recorded, problem(tensor(1500), Whole(2048))) == 1


def test_a_number_that_follows_no_size_is_a_size_from_16_on() -> None:
    recorded = problem(tensor(8, 512), Whole(64), Whole(12))  # 64 rows of 8 batches, or a longest sequence
    assert distance(recorded, problem(tensor(8, 512), Whole(40), Whole(12))) == 0
    assert distance(recorded, problem(tensor(8, 512), Whole(100), Whole(12))) == 1
    assert distance(recorded, problem(tensor(8, 1000), Whole(100), Whole(12))) == 2
    assert distance(recorded, problem(tensor(8, 512), Whole(16), Whole(12))) is None
    assert distance(recorded, problem(tensor(8, 512), Whole(16), Whole(12)), ANY) == 2


@pytest.mark.parametrize(("old", "new"), [(16, 15), (8, 7), (1, 0), (16, -16), (-20, -20000), (0, 64)])
def test_smaller_numbers_are_modes_and_must_be_equal(old: int, new: int) -> None:
    assert distance(problem(tensor(100), Whole(old)), problem(tensor(100), Whole(new)), ANY) is None
    assert distance(problem(tensor(100), Whole(new)), problem(tensor(100), Whole(old)), ANY) is None


@pytest.mark.parametrize(
    "asked",
    [
        problem(tensor(64, dtype="bfloat16"), Fixed("64"), Real()),
        problem(tensor(64, layout="-"), Fixed("64"), Real()),
        problem(tensor(64, aligned=False), Fixed("64"), Real()),
        problem(tensor(64, 1), Fixed("64"), Real()),
        problem(tensor(64), Fixed("128"), Real()),
        problem(tensor(64), Fixed("64"), Whole(1)),
        problem(tensor(64), Fixed("64"), Items((Real(),))),
        problem(tensor(64), Fixed("64"), Real(), sm_count=114),
    ],
)
def test_all_else_must_be_equal(asked: Problem) -> None:
    assert distance(problem(tensor(64), Fixed("64"), Real()), asked, ANY) is None


@pytest.mark.parametrize(
    ("old", "new", "between"),
    [
        (str(128**-0.5), str(1 / 128**0.5), 0),  # two ways to compute one scale
        (str(128**-0.5), str(1.0001 * 128**-0.5), None),
        ("1.0", "1", None),  # they compile to different code
        ("16777217", "16777216", None),
        ('"0.10"', '"0.1"', None),
        ("1.0e300", "1.1e300", None),
    ],
)
def test_fractions_that_are_compiled_in_are_equal_as_float32(old: str, new: str, between: int | None) -> None:
    assert (old == new, distance(problem(Fixed(old)), problem(Fixed(new)))) == (False, between)


def test_the_arguments_that_keep_two_problems_apart_are_found() -> None:
    recorded = problem(tensor(1024), Whole(1024), Whole(7), Fixed("64"))
    assert apart(recorded, problem(tensor(600), Whole(600), Whole(7), Fixed("64"))) == []
    assert apart(recorded, problem(tensor(600), Whole(600), Whole(8), Fixed("65"))) == [2, 3]
    assert apart(recorded, problem(tensor(100), Whole(600), Whole(7), Fixed("64"))) == [0]
    assert apart(problem(tensor(8), Whole(8)), problem(tensor(4), Whole(4))) == []
    assert apart(problem(tensor(8), Whole(8)), problem(tensor(4), Whole(5))) == [1]


def test_lists_are_compared_item_by_item() -> None:
    recorded = problem(Items((tensor(64), tensor(128))))
    assert distance(recorded, problem(Items((tensor(40), tensor(128))))) == 0
    assert distance(recorded, problem(Items((tensor(64),)))) is None
    assert distance(recorded, problem(Items((tensor(64), Items((tensor(128),)))))) is None


def test_empty_tensors_are_near_each_other_alone() -> None:
    assert distance(problem(tensor(0)), problem(tensor(0))) == 0
    assert distance(problem(tensor(0)), problem(tensor(2))) is None


def test_the_larger_of_two_has_more_elements() -> None:
    assert larger(problem(tensor(4, 4), Items((tensor(3),)))) == (19, 0)


def test_the_larger_of_two_with_equal_tensors_has_the_larger_number() -> None:
    assert larger(problem(tensor(4), Whole(128))) > larger(problem(tensor(4), Whole(64)))
