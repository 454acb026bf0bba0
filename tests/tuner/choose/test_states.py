"""Which configs are timed in other states of the GPU, and how one time is made of several states' times."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from aot_tune.tables.states import worst_times
from aot_tune.tuner.choose.states import (
    LONG_US,
    NEAR,
    contenders,
    in_worst_state,
    mean_ratio,
    other_states,
)
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.config import Config
from tests.support.recorded import config

A, B, C, D = (config(64, 64, k) for k in (16, 32, 64, 128))


def times(row: Mapping[Config, float]) -> dict[Config, Measurement]:
    return {
        one: Measurement(config=one, mean_us=us, error_margin_us=us / 100, num_samples=4)
        for one, us in row.items()
    }


def test_long_kernels_are_timed_in_one_more_state() -> None:
    assert other_states(times({A: LONG_US, B: 999.0})) == ("read", "written", "tight")
    assert other_states(times({A: LONG_US - 1, B: 999.0})) == ("written", "tight")


def test_those_that_may_win_are_timed_in_other_states() -> None:
    known = times({A: 100.0, B: 100.0 * NEAR, C: 101.0 * NEAR, D: 500.0})
    assert contenders(known, keep=[D]) == [A, B, D]
    assert contenders(known, keep=[D], most=1) == [A, D]
    assert contenders(times({A: 1.0, C: 2.0}), keep=[B]) == [], "there is no choice to make"
    assert contenders({}, keep=[B]) == []


def test_the_worst_state_counts_and_its_margin_with_it() -> None:
    judged = in_worst_state(
        times({A: 100.0, B: 104.0, C: 200.0}), {"written": times({A: 43.2, B: 40.0}), "tight": times({})}
    )
    assert judged[A].mean_us == pytest.approx(108.0)
    assert judged[A].error_margin_us == pytest.approx(1.08)
    assert judged[B] == times({B: 104.0})[B]
    assert judged[C] == times({C: 200.0})[C], "not timed there: it is judged by what there is"
    assert [judged[one].mean_us for one in (A, B)] == pytest.approx(
        worst_times((100.0, 104.0), {"written": (43.2, 40.0)})
    ), "the tuner and the rule judge alike"


def test_without_states_times_are_as_they_are() -> None:
    known = times({A: 100.0, B: 110.0})
    assert in_worst_state(known, {}) == known
    assert in_worst_state({}, {"written": {}}) == {}


def test_a_mean_ratio_is_over_the_runs_that_have_both() -> None:
    runs = [times({A: 4.0, B: 1.0}), times({A: 1.0, B: 1.0}), times({A: 9.0})]
    assert mean_ratio(A, B, runs) == pytest.approx(2.0)
    assert mean_ratio(A, C, runs) == 1.0
