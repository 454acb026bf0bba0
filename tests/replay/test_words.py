"""A recorded problem in words."""

from __future__ import annotations

from aot_tune.replay.problem import Array, Fixed, Items, Problem, Varying, Whole
from aot_tune.replay.words import config_in_words, difference_in_words, problem_in_words
from tests.support.recorded_tables import entry, problem


def test_what_does_not_vary_is_named() -> None:
    assert problem_in_words(problem()) == "x=float16[1024] out=float16[1024] n=1024 factor=float flag=true"


def test_strides_alignment_and_lists_are_told() -> None:
    odd = Array(dtype="bfloat16", shape=(4, 8), layout="16,1", aligned=False)
    arguments = (odd, Items((Whole(3), Fixed("null"))), Varying(), Fixed('"' + "a" * 99 + '"'))
    text = problem_in_words(Problem(names=("x", "y", "z", "w"), arguments=arguments, sm_count=1))
    assert text.startswith('x=bfloat16[4,8] strides 16,1 unaligned y=(3, null) w="aaa')
    assert len(text) < 120


def test_the_arguments_that_keep_two_problems_apart_are_told_with_both_values() -> None:
    def of(number: int, flag: str, sm_count: int) -> Problem:
        arguments = (Whole(number), Fixed(str(number)), Fixed(flag))
        return Problem(names=("n", "N", "flag"), arguments=arguments, sm_count=sm_count)

    assert difference_in_words(of(1, "true", 1), of(2, "false", 1), [0, 1, 2]) == (
        "n=1 is n=2 here; N=1 is N=2 here, and compiled in; flag=true is flag=false here"
    )
    other = difference_in_words(of(1, "true", 132), of(1, "true", 114), [])
    assert other == "its GPU had 132 multiprocessors, this one 114"


def test_a_winner_is_its_spelling_and_its_hints() -> None:
    assert config_in_words(entry(hints={})) == '{"SimpleNamespace":{"TILE":64,"occupancy":null}}'
    assert config_in_words(entry()).endswith(" (num_ctas=1 occupancy=2)")
