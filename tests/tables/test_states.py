"""A config's time in its worst state: what the rule between measured sizes compares."""

from __future__ import annotations

import pytest

from aot_tune.tables.states import first_state, in_worst_state, worst_times
from aot_tune.tables.table import Point


def test_a_time_is_as_far_behind_the_fastest_as_in_its_worst_state() -> None:
    us, states = (100.0, 104.0, None), {"read": (216.0, 200.0, None), "written": (300.0, 303.0, 1.0)}
    assert worst_times(us, states) == (pytest.approx(108.0), pytest.approx(104.0), None)


def test_one_good_state_of_a_fragile_config_is_not_what_others_are_compared_with() -> None:
    us, states = (390.0, 428.0, 432.0), {"read": (426.0, 350.0, 388.0), "written": (569.0, 353.0, 392.0)}
    fragile, best, default = worst_times(us, states)
    assert best == pytest.approx(428.0), "without the fragile one it is the fastest of each state"
    assert default == pytest.approx(428.0 * 392 / 353)
    assert fragile == pytest.approx(428.0 * 569 / 353)


def test_times_without_states_are_as_they_are() -> None:
    assert worst_times((3.0, None, 1.0), {}) == (3.0, None, 1.0)
    point = Point(size={"M": 8}, us=(2.0, 1.0))
    assert in_worst_state(point) is point


def test_a_config_that_was_not_timed_in_a_state_is_judged_by_the_others() -> None:
    assert worst_times((10.0, 13.0, 11.0), {"written": (10.5, None, 10.0)}) == (10.5, 13.0, 11.0)
    assert worst_times((None, None), {"written": (None, None)}) == (None, None)


def test_the_times_without_a_state_have_a_name_beside_the_others() -> None:
    assert first_state({"written": (), "tight": ()}) == "read"
    assert first_state({"read": (), "written": (), "tight": ()}) == "loaded"
