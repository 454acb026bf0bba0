"""Rounds made into one figure: the median, its interval, outliers, and when finalists are told apart."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot_tune.tuner.measure.rounds import clean, combined, from_samples, in_turn, settled, usable
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.config import Config

A, B = Config(constants={"name": "a"}), Config(constants={"name": "b"})


def taken(*means: float, config: Config = A, margin: float = 0.01) -> list[Measurement]:
    return [Measurement(config=config, mean_us=mean, error_margin_us=margin, num_samples=5) for mean in means]


def test_every_second_round_runs_the_one_before_backwards_and_the_next_has_another_order() -> None:
    orders = [in_turn("abcde", number) for number in range(8)]
    assert orders[0] == list("abcde")
    assert orders[1::2] == [order[::-1] for order in orders[::2]]
    assert len({"".join(order) for order in orders}) == len(orders)
    assert all(sorted(order) == list("abcde") for order in orders)
    assert orders == [in_turn("abcde", number) for number in range(8)]


def test_nobody_always_follows_the_same_one() -> None:
    orders = [in_turn("abcde", number) for number in range(8)]
    for one in "abcde":
        assert len({order[order.index(one) - 1] for order in orders if order.index(one)}) > 2


def test_samples_in_turn_count_with_their_median_and_one_interrupted_launch_moves_nothing() -> None:
    calm = from_samples(A, [10.0, 10.1, 9.9, 10.05, 9.95, 10.02, 9.98, 10.0])
    assert calm.mean_us == pytest.approx(10.0)
    assert 0.02 < calm.error_margin_us < 0.1
    assert calm.num_samples == 8
    hit = from_samples(A, [10.0, 10.1, 9.9, 10.05, 9.95, 10.02, 9.98, 900.0])
    assert hit.mean_us == pytest.approx(10.0, abs=0.02)
    assert hit.error_margin_us < 0.15
    assert from_samples(A, [7.0]) == Measurement(config=A, mean_us=7.0, error_margin_us=0.0, num_samples=1)


def test_the_interval_of_samples_in_turn_holds_the_truth_as_often_as_it_says() -> None:
    source = random.Random(1)
    held = 0
    for _ in range(2000):
        one = from_samples(A, [source.gauss(100.0, 5.0) for _ in range(8)])
        held += abs(one.mean_us - 100.0) <= one.error_margin_us
    assert 0.88 <= held / 2000 <= 0.98


def test_one_round_is_itself() -> None:
    (only,) = taken(12.5, margin=0.25)
    assert combined(A, [only]) == only


def test_the_figure_is_the_median_of_the_clean_rounds_and_counts_their_samples() -> None:
    figure = combined(A, taken(10.0, 10.2, 10.1, 55.0))
    assert (figure.mean_us, figure.num_samples) == (10.1, 15)


def test_a_difference_below_what_the_timer_resolves_is_no_outlier() -> None:
    assert len(clean(taken(2.0, 2.0, 2.45))) == 3
    assert len(clean(taken(2.0, 2.0, 2.55))) == 2


def test_the_interval_is_the_wider_of_within_and_between_the_rounds() -> None:
    assert combined(A, taken(10.0, 10.0, 10.0, margin=0.3)).error_margin_us == pytest.approx(
        0.3 / math.sqrt(3)
    )
    assert combined(A, taken(9.9, 10.0, 10.1)).error_margin_us == pytest.approx(4.30 * 0.1 / math.sqrt(3))


def test_the_interval_holds_the_true_mean_about_as_often_as_it_says() -> None:
    draw = random.Random(1)
    held = 0
    for _ in range(2000):
        figure = combined(A, taken(*(draw.gauss(100, 1) for _ in range(5)), margin=0.0))
        held += abs(figure.mean_us - 100) <= figure.error_margin_us
    assert 0.90 <= held / 2000 <= 0.99


def test_finalists_far_apart_settle_after_three_rounds_and_not_before() -> None:
    assert not settled([taken(10.0, 10.0), taken(12.0, 12.0, config=B)])
    assert settled([taken(10.0, 10.0, 10.0), taken(12.0, 12.0, 12.0, config=B)])


def test_finalists_within_the_noise_go_on_until_the_noise_is_small_then_tie() -> None:
    assert not settled([taken(10.0, 10.2, 9.9), taken(10.1, 9.9, 10.2, config=B)])
    assert settled([taken(10.0, 10.01, 10.0), taken(10.01, 10.0, 10.01, config=B)])


def test_an_outlier_does_not_count_as_a_round() -> None:
    assert not settled([taken(10.0, 10.0, 90.0), taken(12.0, 12.0, 12.0, config=B)])
    assert settled([taken(10.0, 10.0, 90.0, 10.0), taken(12.0, 12.0, 12.0, config=B)])


def test_a_lone_finalist_settles() -> None:
    assert settled([taken(10.0, 10.5, 9.5)])


@pytest.mark.parametrize("us", [0.0, -1.0, 1e-9, 0.09, math.nan, math.inf, -math.inf])
def test_a_time_that_cannot_be_is_not_usable(us: float) -> None:
    assert not usable(taken(us)[0])


@pytest.mark.parametrize("margin", [-1.0, math.nan, math.inf])
def test_a_margin_that_cannot_be_is_not_usable(margin: float) -> None:
    assert not usable(taken(10.0, margin=margin)[0])


@given(st.lists(st.floats(0.5, 1e6), min_size=1, max_size=9))
def test_a_figure_lies_among_its_rounds_and_keeps_at_least_one(means: list[float]) -> None:
    figure = combined(A, taken(*means))
    assert min(means) <= figure.mean_us <= max(means)
    assert figure.num_samples >= 5
    assert usable(figure)
