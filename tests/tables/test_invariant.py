"""One config for every size of a batch, from times by hand."""

from __future__ import annotations

import dataclasses

from aot_tune.tables.invariant import (
    default_for_every_batch,
    every_batch,
    ranked,
    refused_somewhere,
    without_batch,
)
from aot_tune.tables.table import Entry, Point, Table
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support.samples import DEFAULT, SM90, scale, scale_table

batched = dataclasses.replace(scale, batch_axes=("M",))
NARROW, WIDE = scale_table().portfolio


def at(rows: int) -> Problem:
    return Problem({"dtype": "bfloat16", "M": rows, "N": 1024})


def timed(rows: int, *us: float | None, **states: tuple[float | None, ...]) -> Entry:
    """A bucket with the times of NARROW, WIDE and the default at its edge."""
    return dataclasses.replace(
        scale_table().entries[0],
        bucket=at(rows),
        points=(Point(size={"M": rows}, us=us, states=states),),
    )


def rank(*entries: Entry) -> list[tuple[Config, float, int]]:
    table: Table = scale_table()
    found = ranked(batched, SM90, [(entry, table) for entry in entries])
    return [(one.config, round(one.regret, 6), one.untimed) for one in found]


def test_the_config_with_the_least_worst_regret_comes_first() -> None:
    entries = timed(1, 10.0, 13.0, 11.0), timed(64, 12.0, 10.0, 20.0), timed(256, 15.0, 10.0, 20.0)
    assert rank(*entries) == [(WIDE, 0.3, 0), (NARROW, 0.5, 0)]


def test_the_regret_is_against_the_default_too_and_in_the_worst_state() -> None:
    assert rank(timed(1, 10.0, 12.0, 5.0)) == [(NARROW, 1.0, 0), (WIDE, 1.4, 0)]
    in_two_states = timed(1, 10.0, 10.4, 20.0, written=(11.0, 10.0, 20.0))
    assert rank(in_two_states) == [(WIDE, 0.0, 0), (NARROW, 0.057692, 0)]


def test_a_config_without_a_time_somewhere_comes_after_those_that_have_all() -> None:
    assert rank(timed(1, None, 20.0, 10.0), timed(64, 10.0, 11.0, 12.0)) == [(WIDE, 1.0, 0), (NARROW, 0.0, 1)]


def test_the_size_of_the_worst_regret_is_told() -> None:
    table = scale_table()
    entries = timed(1, 10.0, 13.0, 11.0), timed(64, 12.0, 10.0, 20.0)
    first, second = ranked(batched, SM90, [(entry, table) for entry in entries])
    assert (first.config, first.worst_at, second.worst_at) == (NARROW, {"M": 64}, {"M": 1})
    assert first.sizes == 2


def test_every_batch_is_each_bucket_up_to_the_largest_declared_one() -> None:
    assert [one.size("M") for one in every_batch(batched, at(64))] == [256, 128, 64, 32, 16, 8, 4, 2, 1]
    assert without_batch(batched, at(64)) == Problem({"dtype": "bfloat16", "N": 1024})


def test_a_config_is_refused_for_every_batch_where_it_is_for_one() -> None:
    def refusal(config: Config, problem: Problem) -> str | None:
        return "too few rows" if config == WIDE and problem.size("M") < 8 else None

    assert refused_somewhere(batched, at(64), WIDE, refusal) == f"{at(4)}: too few rows"
    assert refused_somewhere(batched, at(64), NARROW, refusal) is None


def test_the_default_that_serves_every_batch_may_be_another_batchs() -> None:
    changing = dataclasses.replace(
        batched,
        default=lambda arch, problem: DEFAULT if problem.size("M") < 8 else NARROW,
        legal=lambda config, arch, problem: config == DEFAULT or problem.size("M") >= 8 or "too few rows",
    )

    def refusal(config: Config, problem: Problem) -> str | None:
        return changing.refusal(config, SM90, problem)

    assert default_for_every_batch(changing, SM90, at(64), refusal) == DEFAULT
    assert default_for_every_batch(changing, SM90, at(64), lambda *_: "never") is None
