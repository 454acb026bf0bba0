"""The sample of entries to measure again, its bound, and the verdict on new times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from aot_tune.tables import store
from aot_tune.tables.states import in_worst_state
from aot_tune.tables.table import Entry, Table
from aot_tune.tuner.choose.times import ProblemTimes
from aot_tune.tuner.choose.verdict import bound, draw, enough, rivals, shares, verdict
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.config import Config
from tests.support.samples import DEFAULT, scale_table, with_entry

SHIPPED = [
    store.read_table(path)
    for path in store.listed(Path(__file__).parents[3] / "tuned_configs")
    if "." not in path.stem
]

WINNER, OTHER = scale_table().portfolio
ENTRY = scale_table().entries[1]
"""An entry of 10 us, whose default takes 15."""


def _run(us: Mapping[Config, float], **more: object) -> dict[Config, Measurement]:
    return {
        config: Measurement(config=config, mean_us=time, error_margin_us=0.01, num_samples=5, **more)  # type: ignore[arg-type]
        for config, time in us.items()
    }


def _found(
    first: Mapping[Config, float], tight: Mapping[Config, float] | None = None, entry: Entry = ENTRY
) -> set[str]:
    states = {} if tight is None else {"tight": _run(tight)}
    times = ProblemTimes(portfolio=_run(first), portfolio_states=states, runoff=_run(first))  # type: ignore[arg-type]
    return set(verdict(entry, DEFAULT, times).findings)


@pytest.mark.parametrize(
    ("drawn", "size", "less"),
    [
        (28, 1096, 110),
        (57, 1096, 55),
        (139, 1096, 22),
        (261, 1096, 11),
        (25, 64, 6),
        (40, 64, 3),
        (61, 64, 1),
    ],
)
def test_a_sample_without_failures_bounds_them(drawn: int, size: int, less: int) -> None:
    """Hypergeometric, 95 %: 28 entries of 1,096 leave less than 10 %, 57 of them 5 %, 139 of them 2 %."""
    assert bound([(drawn, size)]) == less


def test_the_bound_takes_the_worst_distribution_over_the_kernels() -> None:
    assert bound([(10, 100), (10, 100)]) > bound([(20, 200)]) - 1
    assert bound([(19, 100), (1, 100)]) > bound([(10, 100), (10, 100)])
    assert bound([(7, 7), (3, 3)]) == 1  # all are drawn: none fails
    assert bound([(0, 5)]) == 5


def test_a_sample_has_each_kernel_and_equal_parts() -> None:
    assert shares([45, 37, 134], 3) == [1, 1, 1]
    assert shares([45, 37, 134], 1) == [1, 1, 1]
    assert shares([10, 20, 40], 14) == [2, 4, 8]
    assert shares([2, 3], 9) == [2, 3]
    assert shares([0, 3], 2) == [0, 2]


def test_the_same_seed_draws_the_same_entries() -> None:
    tables = [table for table in SHIPPED if len(table.entries) > 8][:3]
    assert draw(tables, 12, 1) == draw(tables, 12, 1)
    assert draw(tables, 12, 1) != draw(tables, 12, 2)
    assert [len(entries) for entries in draw(tables, 10_000, 1)] == [len(table.entries) for table in tables]


def test_as_many_are_drawn_as_bound_the_rest_by_five_percent() -> None:
    """Whatever the tables' sizes are; 58 suffice for 1,096 entries of one kernel."""
    for strata in ([1096], [64], [len(table.entries) for table in SHIPPED]):
        count = enough(strata)
        less = [bound(list(zip(shares(strata, n), strata, strict=True))) for n in (count, count - 1)]
        assert less[0] < 0.05 * sum(strata) <= less[1]
    assert enough([1096]) == 58
    assert enough([3]) == 3
    assert sum(map(len, draw(SHIPPED, None, 1))) == enough([len(table.entries) for table in SHIPPED])


def test_an_entry_holds_where_its_gain_ties_with_the_tables() -> None:
    assert _found({WINNER: 10.0, DEFAULT: 15.0}) == set()
    assert _found({WINNER: 30.0, DEFAULT: 45.0}) == set()  # another clock
    assert _found({WINNER: 10.1, DEFAULT: 15.0}) == set()


def test_a_smaller_gain_is_weaker_and_does_not_fail() -> None:
    assert _found({WINNER: 12.0, DEFAULT: 15.0}) == {"weaker"}


def test_slower_than_the_default_is_so_in_every_state() -> None:
    slow, fast = {WINNER: 16.0, DEFAULT: 15.0}, {WINNER: 15.0, DEFAULT: 16.0}
    assert "slower" in _found(slow)
    assert "slower" in _found(slow, slow)
    assert "slower" not in _found(slow, fast)
    assert "slower" not in _found({WINNER: 15.2, DEFAULT: 15.0})


def test_a_member_of_the_portfolio_that_is_clearly_faster_is_named() -> None:
    assert _found({WINNER: 10.0, OTHER: 9.0, DEFAULT: 15.0}) == {"beaten"}
    assert _found({WINNER: 10.0, OTHER: 9.7, DEFAULT: 15.0}) == set()
    # judged by the worst state, as the table was chosen
    assert (
        _found({WINNER: 10.0, OTHER: 9.0, DEFAULT: 15.0}, {WINNER: 10.0, OTHER: 12.0, DEFAULT: 15.0}) == set()
    )


def test_nothing_can_be_said_of_disturbed_samples() -> None:
    times = ProblemTimes(portfolio=_run({WINNER: 20.0, DEFAULT: 15.0}, disturbed="throttled: heat"))
    found = verdict(ENTRY, DEFAULT, times)
    assert (set(found.findings), found.gain) == ({"unknown"}, None)


def test_rivals_are_near_the_winner_in_the_table() -> None:
    assert rivals(ENTRY, (WINNER, OTHER)) == [WINNER]
    near = [replace(point, us=(10.0, 10.9, 15.0)) for point in ENTRY.points]
    assert rivals(replace(ENTRY, points=tuple(near)), (WINNER, OTHER)) == [WINNER, OTHER]


def _of_table(table: Table, entry: Entry) -> tuple[Config, ProblemTimes]:
    """The default and the times that the table itself gives at an entry's edge."""
    default = Config(constants={"of": "default"})
    columns, edge = (*table.portfolio, default), entry.points[-1]

    def run(us: tuple[float | None, ...]) -> dict[Config, Measurement]:
        return _run({config: time for config, time in zip(columns, us, strict=True) if time is not None})

    states = {name: run(us) for name, us in edge.states.items()}
    return default, ProblemTimes(portfolio=run(edge.us), portfolio_states=states)  # type: ignore[arg-type]


def test_worse_configs_in_the_shipped_tables_fail_and_near_ties_do_not() -> None:
    """By the tables' own times: configs over 10 % behind the default, and those within 1 % of the best."""
    worse = ties = 0
    for table in SHIPPED:
        for entry in table.entries[::7]:
            edge = entry.points[-1]
            rows, judged = [edge.us, *edge.states.values()], in_worst_state(edge).us
            default, times = _of_table(table, entry)
            for place, config in enumerate(table.portfolio):
                ratios = [own / row[-1] for row in rows if (own := row[place]) and row[-1]]
                mine, best = judged[place], min(us for us in judged if us is not None)
                is_worse = len(ratios) == len(rows) and min(ratios) > 1.1
                if is_worse or (mine is not None and mine <= 1.01 * best):
                    found = verdict(replace(entry, config=config), default, times).findings
                    assert ("slower" in found) == is_worse
                    worse, ties = worse + is_worse, ties + (not is_worse)
    assert (worse > 30, ties > 150) == (True, True)


def test_a_default_of_another_table_is_not_compared() -> None:
    times = ProblemTimes(portfolio=_run({WINNER: 12.0, DEFAULT: 15.0}))
    found = verdict(with_entry(scale_table(), 1).entries[1], DEFAULT, times, gains_compare=False)
    assert (dict(found.findings), found.table_gain) == ({}, None)
