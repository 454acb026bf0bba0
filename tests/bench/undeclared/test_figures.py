"""What is stated of undeclared problems, from samples by hand."""

from __future__ import annotations

import dataclasses

from aot_tune.bench.undeclared.figures import RIVAL, Seen, figures
from aot_tune.bench.undeclared.journal import Samples


def run(**us: dict[str, float]) -> Samples:
    """A run with eleven samples of each config in each state, 1 % apart from first to last."""
    return {
        name: {state: [time * (1 + 0.001 * i) for i in range(-5, 6)] for state, time in by_state.items()}
        for name, by_state in us.items()
    }


ONE = run(
    a={"read": 11.0, "tight": 12.0}, b={"read": 10.0, "tight": 10.0}, default={"read": 20.0, "tight": 11.0}
)
SEEN = Seen(problem="M=3", runs=[ONE, ONE], chosen="a", default="default", portfolio=("a", "b", "gone"))


def test_the_regret_is_the_worst_over_the_states_against_the_best_of_each() -> None:
    found = figures([SEEN], 60)
    assert (found["problems"], found["drawn"], found["runs"]) == (1, 60, 2)
    assert found["regret"]["worst state"]["worst %"] == 20.0
    assert found["regret"]["read"]["worst %"] == 10.0
    assert found["default"]["worst state"]["worst %"] == 100.0
    assert found["worst at"] == "M=3, tight: a"


def test_the_choice_is_behind_the_default_where_it_is_so_beyond_noise_in_each_run() -> None:
    assert figures([SEEN], 1)["behind the default"] == ["M=3: tight"]
    other = {**ONE, **run(a={"read": 11.0, "tight": 11.2})}
    assert figures([dataclasses.replace(SEEN, runs=[ONE, other])], 1)["behind the default"] == []


def test_noise_is_no_loss() -> None:
    noisy = {
        name: {
            state: [time * (0.6 + 0.08 * i) for i, time in enumerate(us)] for state, us in by_state.items()
        }
        for name, by_state in ONE.items()
    }
    assert figures([dataclasses.replace(SEEN, runs=[noisy, noisy])], 1)["behind the default"] == []


def test_configs_outside_the_portfolio_count_only_where_the_whole_space_was_measured() -> None:
    runs = [{**ONE, **run(other={"read": 5.0, "tight": 5.0})}] * 2
    found = figures([dataclasses.replace(SEEN, runs=runs)], 1)
    assert found["regret"]["worst state"]["worst %"] == 20.0
    assert "regret against the whole space" not in found
    found = figures([dataclasses.replace(SEEN, runs=runs, whole=True)], 1)
    assert found["regret"]["worst state"]["worst %"] == 20.0
    assert found["regret against the whole space"]["worst state"]["worst %"] == 140.0


def test_the_rival_is_told_by_state_and_is_no_config() -> None:
    runs = [{**ONE, **run(**{RIVAL: {"read": 5.5, "tight": 6.0}})}] * 2
    found = figures([dataclasses.replace(SEEN, runs=runs, whole=True)], 1)
    assert found["cuBLAS over the choice"]["tight"] == {"geometric mean": 0.5, "worst": 0.5, "problems": 1}
    assert found["regret against the whole space"]["worst state"]["worst %"] == 20.0
    assert "cuBLAS over the choice" not in figures([SEEN], 1)


def test_the_power_cap_counts_for_the_problems_that_were_measured_at_it() -> None:
    capped = {**ONE, **run(a={"read": 11.0, "read, loaded": 30.0}, b={"read": 10.0, "read, loaded": 20.0},
                           default={"read": 20.0, "read, loaded": 20.0})}  # fmt: skip
    found = figures([SEEN, dataclasses.replace(SEEN, problem="M=5", runs=[capped])], 2)
    assert found["regret"]["read, loaded"]["worst %"] == 50.0
    assert found["regret"]["worst state"]["worst %"] == 50.0
    assert found["runs"] == 1


def test_where_nothing_was_measured_it_says_why() -> None:
    assert figures([], 60, ["M=3: out of memory"]) == {
        "problems": 0, "drawn": 60, "not measured": ["M=3: out of memory"],
    }  # fmt: skip
