"""How long a config may be silent, from what the others of its problem took."""

from __future__ import annotations

from aot_tune.tuner.measure.blame import FEW, HOPELESS, Pace
from aot_tune.tuner.measure.supervise import Limits
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

PROBLEM = Problem({"M": 16})
A, B = (Config(constants={"name": name}) for name in "ab")


def test_the_first_config_has_the_whole_limit_and_the_others_twice_the_longest() -> None:
    pace, limits = Pace(), Limits(config_s=30.0, least_s=5.0)
    assert pace.limit_s(PROBLEM, limits) == 30.0
    pace.note(PROBLEM, A, 0.1)
    assert pace.limit_s(PROBLEM, limits) == 5.0
    pace.note(PROBLEM, B, 4.0)
    assert pace.limit_s(PROBLEM, limits) == 8.0
    pace.note(PROBLEM, B, 20.0)
    assert pace.limit_s(PROBLEM, limits) == 30.0
    assert pace.limit_s(Problem({"M": 32}), limits) == 30.0


def test_hopeless_is_what_lasts_far_longer_than_several_others() -> None:
    pace = Pace()
    for number in range(FEW):
        assert not pace.hopeless(PROBLEM, 1e9)
        pace.note(PROBLEM, Config(constants={"number": number}), 0.01 if number else 9.0)
    assert pace.hopeless(PROBLEM, 0.01 * HOPELESS)
    assert not pace.hopeless(PROBLEM, 0.009 * HOPELESS)
