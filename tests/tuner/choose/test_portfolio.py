"""Which configs make a portfolio: by hand, and on a sweep recorded on an H200."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from aot_tune.tuner.choose.portfolio import MOST, choose_portfolio, estimates_inside, regrets
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support import recorded
from tests.support.recorded import DEFAULT

A, B, C = (recorded.config(64, 64, k) for k in (32, 64, 128))


def times(rows: Mapping[int, Mapping[Config, float]]) -> dict[Problem, dict[Config, Measurement]]:
    return {
        recorded.problem(size): {
            config: Measurement(config=config, mean_us=us, error_margin_us=0.0, num_samples=5)
            for config, us in row.items()
        }
        for size, row in rows.items()
    }


def chosen(rows: Mapping[int, Mapping[Config, float]], **options: object) -> tuple[Config, ...]:
    measured = times(rows)
    return choose_portfolio(measured, dict.fromkeys(measured, DEFAULT), **options)  # type: ignore[arg-type]


def test_the_config_that_shortens_most_over_all_problems_comes_first() -> None:
    rows = {
        1: {DEFAULT: 10, A: 6, B: 5, C: 9},
        2: {DEFAULT: 10, A: 6, B: 11, C: 3},
        4: {DEFAULT: 10, A: 6, B: 12, C: 9},
    }
    assert chosen(rows) == (A, C, B)


def test_a_config_that_gains_nowhere_more_than_the_tie_band_is_left_out() -> None:
    assert chosen({1: {DEFAULT: 100, A: 98.5}, 2: {DEFAULT: 100, A: 98.1}}) == ()
    assert chosen({1: {DEFAULT: 100, A: 97.9}}) == (A,)


def test_a_portfolio_holds_at_most_so_many_unless_that_leaves_a_problem_far_behind() -> None:
    def rows(gain: float) -> dict[int, dict[Config, float]]:
        winners = [recorded.config(64, 64, k) for k in range(1, 21)]
        return {i: {DEFAULT: 10.0, winner: 10.0 / gain} for i, winner in enumerate(winners, 1)}

    assert len(chosen(rows(1.025))) == MOST, "2.5 % behind: eight will do"
    assert len(chosen(rows(1.5))) == 16, "50 % behind: sixteen, and no more"


def test_beyond_eight_what_a_problem_far_behind_needs_comes_first_and_fills_no_more_than_sixteen() -> None:
    winners = [recorded.config(64, 64, k) for k in range(1, 31)]
    far = {i: {DEFAULT: 10.0, winner: 5.0} for i, winner in enumerate(winners[:9], 1)}
    near = {i: {DEFAULT: 10.0, winner: 9.75} for i, winner in enumerate(winners[9:], 100)}
    noise = {i: {DEFAULT: 10.0, winner: 9.85} for i, winner in enumerate(winners[9:], 100)}
    taken = chosen(far | near)
    assert len(taken) == 16
    assert set(taken[:9]) == set(winners[:9])
    assert set(chosen(far | noise)) == set(winners[:9]), "what ties gets no place"


def test_noise_of_one_problem_opens_no_places_for_others() -> None:
    winners = [recorded.config(64, 64, k) for k in range(1, 21)]
    measured = times({i: {DEFAULT: 10.0, winner: 9.75} for i, winner in enumerate(winners, 1)})
    noisy = recorded.problem(100)
    measured[noisy] = {
        config: Measurement(config=config, mean_us=us, error_margin_us=0.5, num_samples=5)
        for config, us in ((DEFAULT, 10.0), (winners[0], 9.5))
    }
    assert len(choose_portfolio(measured, dict.fromkeys(measured, DEFAULT))) == MOST


def test_the_rest_of_a_table_keeps_its_room_while_a_part_is_swept() -> None:
    winners = [recorded.config(64, 64, k) for k in range(1, 21)]
    far = {i: {DEFAULT: 10.0, winner: 5.0} for i, winner in enumerate(winners[8:10], 1)}
    near = {i: {DEFAULT: 10.0, winner: 9.75} for i, winner in enumerate(winners[10:], 100)}
    old = tuple(winners[:8])
    assert set(chosen(far | near, start=old)) == set(winners[:10])


def test_a_problem_without_the_default_s_time_does_not_count() -> None:
    assert chosen({1: {A: 1.0, B: 9.0}, 2: {DEFAULT: 10.0, A: 10.0, B: 5.0}}) == (B,)


def test_equal_configs_are_chosen_in_the_same_order_whatever_order_they_are_listed_in() -> None:
    one = {1: {DEFAULT: 10.0, A: 5.0, B: 10.0}, 2: {DEFAULT: 10.0, A: 10.0, B: 5.0}}
    other = {size: dict(reversed(row.items())) for size, row in reversed(one.items())}
    assert chosen(one) == chosen(other)
    assert len(chosen(one)) == 2


def test_start_is_kept_and_only_what_it_lacks_is_added() -> None:
    rows = {1: {DEFAULT: 10.0, A: 5.0, B: 5.05}, 2: {DEFAULT: 10.0, C: 5.0}}
    assert chosen(rows, start=(B,)) == (B, C)


def test_a_config_below_the_least_gain_does_not_count() -> None:
    rows = {1: {DEFAULT: 11.0, A: 10.0, B: 10.1}, 2: {DEFAULT: 10.0, B: 9.5}}
    assert chosen(rows, least_gain=0.1) == (A,)
    assert regrets(times(rows), dict.fromkeys(times(rows), DEFAULT), (A,), least_gain=0.1) == [0.0, 0.0]


def test_regrets_are_against_every_config() -> None:
    rows = {1: {DEFAULT: 10.0, A: 8.0, B: 5.0}, 2: {DEFAULT: 10.0, A: 12.0}}
    left = regrets(times(rows), dict.fromkeys(times(rows), DEFAULT), (A,))
    assert left == pytest.approx([0.6, 0.0])


# On the recorded sweep --------------------------------------------------------------------------------------


def inside_regrets(portfolio: tuple[Config, ...]) -> list[float]:
    return [
        min(recorded.regret(size, config) for config in (*portfolio, DEFAULT))
        for size in recorded.sizes()
        if size not in recorded.edges()
    ]


def test_estimates_inside_the_buckets_find_configs_that_win_at_no_edge() -> None:
    edges = recorded.times(recorded.edges())
    estimates = estimates_inside(edges, recorded.AXES, recorded.tiles, recorded.SM_COUNT)
    defaults = dict.fromkeys([*edges, *estimates], DEFAULT)
    without, with_them = (
        choose_portfolio(edges, defaults),
        choose_portfolio(edges, defaults, estimates=estimates),
    )
    assert len(with_them) <= MOST
    assert max(inside_regrets(without)) > 0.14
    assert max(inside_regrets(with_them)) < 0.07
    assert recorded.geometric_mean(inside_regrets(without)) > 0.02
    assert recorded.geometric_mean(inside_regrets(with_them)) < 0.01
    assert max(regrets(edges, defaults, with_them)) <= 0.02


def test_an_estimate_is_the_edge_s_time_scaled_by_waves() -> None:
    edges = recorded.times([512])
    estimates = estimates_inside(edges, recorded.AXES, recorded.tiles, recorded.SM_COUNT)
    assert [problem.size("M") for problem in estimates] == [309, 437]
    config = recorded.config(64, 64, 64)  # a row is 96 tiles: 5 rows take 4 waves of 132, 8 rows take 6
    estimate = estimates[recorded.problem(309)][config]
    assert estimate.mean_us == pytest.approx(recorded.us(512, config) * 4 / 6)
    assert estimate.num_samples == 0, "so that nobody takes it for a measurement"


def test_a_kernel_without_tiles_has_no_estimates() -> None:
    assert estimates_inside(recorded.times([256]), recorded.AXES, None, recorded.SM_COUNT) == {}
