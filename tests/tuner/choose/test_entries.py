"""From times to a table: ties, points, what a re-tune and a partial sweep keep."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Mapping

import pytest

from aot_tune.choose.points import PREDICTED_GAIN
from aot_tune.errors import TuneError
from aot_tune.tables import reader, writer
from aot_tune.tables.strict_json import check_text
from aot_tune.tables.table import Entry, Point, StateTimes, Table
from aot_tune.tuner.choose.entries import choose_entries, settle_portfolio
from aot_tune.tuner.choose.incumbent import keeps_figures
from aot_tune.tuner.choose.portfolio import MOST_WHEN_WORSE, crowded_out
from aot_tune.tuner.choose.times import SweepTimes, as_of_first_run, finalists, is_tie, unserved
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support import recorded
from tests.support.recorded import DEFAULT, problem

A, B, C = (recorded.config(64, 64, k) for k in (32, 64, 128))

Row = Mapping[Config, "float | tuple[float, float]"]


def measured(rows: Mapping[int, Row]) -> dict[Problem, dict[Config, Measurement]]:
    """Times, or (time, error margin), by size and config."""
    return {
        problem(size): {config: _measurement(config, us) for config, us in row.items()}
        for size, row in rows.items()
    }


def _measurement(config: Config, us: float | tuple[float, float]) -> Measurement:
    mean, margin = us if isinstance(us, tuple) else (us, 0.0)
    return Measurement(config=config, mean_us=mean, error_margin_us=margin, num_samples=5)


def sweep(rows: Mapping[int, Row], finals: Mapping[int, Row] | None = None, **values: object) -> SweepTimes:
    known = {problem(size): DEFAULT for size in (*rows, *(finals or {}))}
    fields: dict[str, object] = {
        "candidates": measured(rows),
        "portfolio": measured(finals or {}),
        "defaults": known,
        "tiles": None,
    }
    return recorded.sweep(**{**fields, **values})


def entry(table: Table, size: int) -> Entry:
    found = table.entry(problem(size))
    assert found is not None
    return found


def winner(rows: Mapping[int, Row], size: int = 64, incumbent: Table | None = None) -> Config:
    return entry(choose_entries(sweep(rows), (A, B, C), incumbent=incumbent), size).config


# Ties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "tie"),
    [
        ((100.0, 0.0), (102.0, 0.0), True),
        ((100.0, 0.0), (102.1, 0.0), False),
        ((100.0, 2.0), (104.0, 2.1), True),
        ((100.0, 2.0), (104.0, 1.9), False),
    ],
)
def test_times_tie_within_2_percent_or_when_their_intervals_overlap(
    one: tuple[float, float], other: tuple[float, float], tie: bool
) -> None:
    assert is_tie(_measurement(A, one), _measurement(B, other)) is tie
    assert is_tie(_measurement(B, other), _measurement(A, one)) is tie


def test_the_fastest_wins_and_its_figures_are_those_of_the_edge() -> None:
    table = choose_entries(sweep({64: {DEFAULT: 30.0, A: (20.0, 0.2), B: 25.0}}), (A, B))
    chosen = entry(table, 64)
    assert (chosen.config, chosen.mean_us, chosen.error_margin_us, chosen.default_us) == (A, 20.0, 0.2, 30.0)


def test_the_default_wins_a_clear_tie() -> None:
    assert winner({64: {DEFAULT: 20.1, A: 20.0}}) == DEFAULT
    assert winner({64: {DEFAULT: 20.5, A: 20.0}}) == A


def test_a_default_that_wins_has_one_time() -> None:
    chosen = entry(choose_entries(sweep({64: {DEFAULT: 20.1, A: 20.0}}), (A,)), 64)
    assert chosen.mean_us == chosen.default_us == 20.1


def test_a_tie_goes_to_the_config_that_serves_more_entries() -> None:
    rows: dict[int, Row] = {
        64: {DEFAULT: 30.0, A: 20.0, B: 20.1},
        128: {DEFAULT: 30.0, A: 25.0, B: 20.0},
        256: {DEFAULT: 30.0, A: 25.0, B: 20.0},
    }
    assert winner(rows) == B


def test_a_preference_spends_only_half_of_the_tie_band_so_that_noise_does_not_undo_it() -> None:
    rows: dict[int, Row] = {
        64: {DEFAULT: 30.0, A: 20.0, B: 20.3},
        128: {DEFAULT: 30.0, A: 25.0, B: 20.0},
        256: {DEFAULT: 30.0, A: 25.0, B: 20.0},
    }
    assert winner(rows) == A


def test_a_tie_goes_to_the_incumbent_before_the_default() -> None:
    old = choose_entries(sweep({64: {DEFAULT: 30.0, A: 22.0}}), (A, B, C))
    assert winner({64: {DEFAULT: 20.1, A: 20.3, B: 20.0}}, incumbent=old) == DEFAULT, "A is slower than it"
    assert winner({64: {DEFAULT: 20.4, A: 20.3, B: 20.0}}, incumbent=old) == A
    assert winner({64: {DEFAULT: 20.4, A: 20.3, B: 19.0}}, incumbent=old) == B


def test_the_portfolio_s_times_of_the_second_pass_supersede_the_first() -> None:
    first: Row = {DEFAULT: 30.0, A: 20.0, B: 25.0}
    second: Row = {DEFAULT: 31.0, A: 26.0, B: 25.0}
    chosen = entry(choose_entries(sweep({64: first}, {64: second}), (A, B)), 64)
    assert (chosen.config, chosen.mean_us, chosen.default_us) == (B, 25.0, 31.0)


def test_no_entry_is_slower_than_its_default_whatever_the_times() -> None:
    random_source = random.Random(1)
    rows: dict[int, Row] = {
        1 << i: {config: (random_source.uniform(10, 11), 0.5) for config in (DEFAULT, A, B, C)}
        for i in range(15)
    }
    table = choose_entries(sweep(rows), (A, B, C))
    again = {size: {c: (random_source.uniform(10, 11), 0.5) for c in row} for size, row in rows.items()}
    for one in (table, choose_entries(sweep(again), (A, B, C), incumbent=table)):
        assert len(one.entries) == 15
        assert all(line.mean_us <= line.default_us for line in one.entries)


# Wrong, missing, illegal ------------------------------------------------------------------------------------


def test_a_config_that_is_wrong_anywhere_wins_nowhere() -> None:
    rows: dict[int, Row] = {64: {DEFAULT: 30.0, A: 20.0, B: 25.0}, 128: {DEFAULT: 30.0, A: 20.0, B: 25.0}}
    wrong = sweep(rows, wrong=frozenset({A}))
    assert settle_portfolio(wrong) == (B,)
    table = choose_entries(wrong, (A, B))
    assert [line.config for line in table.entries] == [B, B]
    assert all(point.us[0] is None for line in table.entries for point in line.points)


def test_a_wrong_default_is_an_error_that_names_it() -> None:
    wrong = sweep({64: {DEFAULT: 30.0, A: 20.0}}, wrong=frozenset({DEFAULT}))
    for attempt in (lambda: settle_portfolio(wrong), lambda: choose_entries(wrong, (A,))):
        with pytest.raises(TuneError, match=r"matmul .*M=64.* the default .* computed a wrong result"):
            attempt()


def test_a_config_that_cannot_run_at_a_size_has_no_time_there_and_is_not_taken() -> None:
    table = choose_entries(
        sweep({64: {DEFAULT: 30.0, B: 25.0}, 128: {DEFAULT: 30.0, A: 20.0, B: 25.0}}), (A, B)
    )
    assert entry(table, 64).config == B
    assert entry(table, 64).points[-1].us == (None, 25.0, 30.0)


def test_an_edge_whose_default_has_no_time_has_no_entry_and_is_named() -> None:
    failed = sweep({64: {A: 20.0}, 128: {DEFAULT: 30.0, A: 20.0}})
    assert [line.bucket.size("M") for line in choose_entries(failed, (A,)).entries] == [128]
    (line,) = unserved(failed)
    assert "M=64" in line
    assert str(DEFAULT) in line


# Points -----------------------------------------------------------------------------------------------------


def test_points_ascend_to_the_edge_in_the_portfolio_s_order_with_the_default_last() -> None:
    inside: dict[int, Row] = {
        256: {DEFAULT: 30.0, A: 20.0, B: 25.0},
        213: {DEFAULT: 29.0, A: 19.0, B: 24.0},
        149: {DEFAULT: 28.0, B: 14.0},
    }
    table = choose_entries(sweep({256: inside[256]}, inside), (B, A))
    points = entry(table, 256).points
    assert [(dict(point.size), point.us) for point in points] == [
        ({"M": 149}, (14.0, None, 28.0)),
        ({"M": 213}, (24.0, 19.0, 29.0)),
        ({"M": 256}, (25.0, 20.0, 30.0)),
    ]


def test_a_size_at_which_nothing_ran_is_no_point() -> None:
    rows: dict[int, Row] = {256: {DEFAULT: 30.0, A: 20.0}, 213: {}}
    table = choose_entries(sweep({256: rows[256]}, rows), (A,))
    assert [point.size["M"] for point in entry(table, 256).points] == [256]


def test_regret_is_what_the_rule_leaves_at_points_left_out() -> None:
    rows: dict[int, Row] = {
        256: {DEFAULT: 30.0, A: 20.0, B: 25.0},
        149: {DEFAULT: 30.0, A: 30.0, B: 10.0},
    }
    table = choose_entries(sweep({256: rows[256]}, rows), (A, B))
    assert entry(table, 256).regret == pytest.approx(2.0), "149 told from 256 takes A"


def test_entries_are_in_the_table_s_order_and_it_can_be_written_and_read() -> None:
    table = tune(0)
    text = writer.dump(table)
    assert writer.dump(reader.parse(text)) == text
    assert [line.bucket.size("M") for line in table.entries] == recorded.edges()
    assert 0 < table.portfolio_regret <= 0.03


# A re-tune --------------------------------------------------------------------------------------------------


def noisy(seed: int, sizes: Iterable[int] | None = None) -> dict[Problem, dict[Config, Measurement]]:
    """The recorded times as another run would have given them, by their own error margins."""
    source = random.Random(seed)
    return {
        one: {
            config: dataclasses.replace(t, mean_us=t.mean_us + source.gauss(0, t.error_margin_us / 1.96))
            for config, t in row.items()
        }
        for one, row in recorded.times(sizes).items()
    }


def tune(seed: int, incumbent: Table | None = None, **values: object) -> Table:
    """Both passes over the recorded sweep; points at the recorded sizes inside."""
    first = recorded.sweep(candidates=noisy(seed, recorded.edges()), **values)
    portfolio = settle_portfolio(first, incumbent)
    second = {
        one: {config: time for config, time in row.items() if config in (*portfolio, DEFAULT)}
        for one, row in noisy(seed + 1).items()
    }
    return choose_entries(recorded.with_times(first, portfolio=second), portfolio, incumbent=incumbent)


@pytest.mark.long
def test_a_re_tune_differs_only_where_a_time_left_the_tie_band() -> None:
    same = changed = 0
    for seed in range(0, 100, 4):
        old = reader.parse(writer.dump(tune(seed)))
        new = tune(seed + 2, old)
        assert new.portfolio == old.portfolio
        same += writer.dump(new) == writer.dump(old)
        for before, after in zip(old.entries, new.entries, strict=True):
            if after is not before:
                changed += 1
                now = noisy(seed + 3)[before.bucket]
                best = min((now[c] for c in (*old.portfolio, DEFAULT)), key=lambda t: t.mean_us)
                then = dataclasses.replace(
                    now[before.config], mean_us=before.mean_us, error_margin_us=before.error_margin_us
                )
                assert not is_tie(now[before.config], best) or not is_tie(now[before.config], then)
    assert same >= 20, "of 25 re-tunes"
    assert changed <= 6, "of 325 entries"


@pytest.mark.long
def test_without_the_incumbent_the_same_noise_changes_most_tables() -> None:
    same = sum(writer.dump(tune(seed)) == writer.dump(tune(seed + 2)) for seed in range(0, 40, 4))
    assert same == 0


def test_the_incumbent_itself_comes_back_when_nothing_left_the_tie_band() -> None:
    rows: dict[int, Row] = {64: {DEFAULT: 30.0, A: 20.0, B: 19.9}, 128: {DEFAULT: 30.0, B: 20.0}}
    old = choose_entries(sweep(rows), (B, A))
    again: dict[int, Row] = {64: {DEFAULT: 30.4, A: 19.9, B: 20.1}, 128: {DEFAULT: 29.0, B: 20.3}}
    driver = dataclasses.replace(recorded.BUILT_WITH, driver="600.1")
    assert settle_portfolio(sweep(again), old) == (B, A)
    assert choose_entries(sweep(again, built_with=driver), (B, A), incumbent=old) is old


def test_one_changed_entry_changes_its_line_and_the_head_alone() -> None:
    old = choose_entries(
        sweep({64: {DEFAULT: 30.0, A: 20.0}, 128: {DEFAULT: 30.0, A: 20.0, B: 25.0}}), (A, B)
    )
    rows: dict[int, Row] = {64: {DEFAULT: 30.2, A: 20.1}, 128: {DEFAULT: 30.0, A: 20.0, B: 15.0}}
    driver = dataclasses.replace(recorded.BUILT_WITH, driver="600.1")
    new = choose_entries(sweep(rows, built_with=driver), (A, B), incumbent=old)
    assert entry(new, 64) is entry(old, 64)
    assert entry(new, 128).config == B
    assert new.built_with == driver


def test_an_entry_slower_than_its_default_by_noise_keeps_its_line() -> None:
    old = choose_entries(sweep({64: {DEFAULT: 20.5, A: 20.0}}), (A,))
    assert entry(old, 64).config == A
    assert choose_entries(sweep({64: {DEFAULT: 20.0, A: 20.1}}), (A,), incumbent=old) is old
    checked = choose_entries(sweep({64: {DEFAULT: 20.0, A: 20.1}}, check_hash="f" * 16), (A,), incumbent=old)
    assert checked == dataclasses.replace(old, check_hash="f" * 16), "the check alone is another one"


@pytest.mark.parametrize(
    "values",
    [
        {"source_hash": "fedcba9876543210"},
        {"built_with": dataclasses.replace(recorded.BUILT_WITH, tileiras="13.5.1")},
        {"built_with": dataclasses.replace(recorded.BUILT_WITH, cuda_tile="1.8.0")},
        {"built_with": dataclasses.replace(recorded.BUILT_WITH, device_name="NVIDIA H100")},
        {"evidence": "predicted"},
    ],
)
def test_under_other_conditions_the_config_stays_in_a_tie_and_its_figures_are_new(
    values: dict[str, object],
) -> None:
    old = choose_entries(sweep({64: {DEFAULT: 30.0, A: 20.0, B: 20.1}}), (A, B))
    new = choose_entries(sweep({64: {DEFAULT: 30.0, A: 20.2, B: 20.0}}, **values), (A, B), incumbent=old)
    assert (entry(new, 64).config, entry(new, 64).mean_us) == (A, 20.2)
    assert all(getattr(new, name) == value for name, value in values.items() if name != "evidence")


def test_other_sizes_inside_give_new_figures() -> None:
    row: Row = {DEFAULT: 30.0, A: 20.0}
    old = choose_entries(sweep({256: row}, {256: row, 149: row}), (A,))
    new = choose_entries(sweep({256: row}, {256: row, 213: row}), (A,), incumbent=old)
    assert [point.size["M"] for point in entry(new, 256).points] == [213, 256]


def test_a_portfolio_that_serves_as_well_as_a_new_one_is_kept_in_its_order() -> None:
    rows: dict[int, Row] = {64: {DEFAULT: 30.0, A: 20.2, C: 20.0}, 128: {DEFAULT: 30.0, B: 10.0}}
    old = choose_entries(sweep({64: {DEFAULT: 30.0, A: 20.0}, 128: {DEFAULT: 30.0, B: 20.0}}), (A, B))
    assert settle_portfolio(sweep(rows)) == (B, C)
    assert settle_portfolio(sweep(rows), old) == (A, B)
    slower: dict[int, Row] = {64: {DEFAULT: 30.0, A: 20.8, C: 20.0}, 128: {DEFAULT: 30.0, B: 10.0}}
    assert settle_portfolio(sweep(slower), old) == (B, C), "its mean is 2 % worse"


@pytest.mark.parametrize(("us", "portfolio"), [(20.9, (A,)), (21.1, (A, C))])
def test_a_portfolio_may_lag_at_one_problem_of_many_by_what_any_may_leave_and_the_tie_band(
    us: float, portfolio: tuple[Config, ...]
) -> None:
    others: dict[int, Row] = {1 << i: {DEFAULT: 30.0, A: 20.0} for i in range(14)}
    old = choose_entries(sweep(others), (A,))
    assert settle_portfolio(sweep({**others, 1: {DEFAULT: 30.0, A: us, C: 20.0}}), old) == portfolio


def test_a_portfolio_with_a_config_that_left_the_search_space_is_chosen_anew() -> None:
    rows: dict[int, Row] = {64: {DEFAULT: 30.0, A: 20.0}, 128: {DEFAULT: 30.0, A: 20.0}}
    old = choose_entries(sweep(rows), (A, C))
    assert settle_portfolio(sweep(rows), old) == (A,)


def test_a_table_of_other_axes_is_no_incumbent() -> None:
    rows: dict[int, Row] = {64: {DEFAULT: 30.0, A: 20.2, B: 20.0}}
    old = choose_entries(sweep({64: {DEFAULT: 30.0, A: 20.0}}), (A, B))
    other = dataclasses.replace(old, axes={**old.axes, "N": old.axes["M"]})
    assert winner(rows, incumbent=old) == A
    assert winner(rows, incumbent=other) == B


# A partial sweep --------------------------------------------------------------------------------------------


def whole() -> Table:
    rows: dict[int, Row] = {
        64: {DEFAULT: 30.0, A: 20.0, B: 25.0, C: 16.0},
        128: {DEFAULT: 30.0, A: 25.0, B: 20.0},
        256: {DEFAULT: 30.0, A: 22.0, B: 24.0},
    }
    return choose_entries(sweep(rows), (A, B))


def partial(row: Row, old: Table, **values: object) -> Table:
    keep = [line.bucket for line in old.entries]
    part = sweep({128: row}, **values)
    return choose_entries(part, settle_portfolio(part, old, keep=keep), incumbent=old, keep=keep)


def test_a_partial_sweep_keeps_the_entries_that_it_left_out() -> None:
    old = whole()
    new = partial({DEFAULT: 30.0, A: 15.0, B: 20.0}, old)
    assert new.portfolio == (A, B)
    assert [line.config for line in new.entries] == [A, A, A]
    assert new.entries[0] is old.entries[0]
    assert new.entries[2] is old.entries[2]
    assert new.portfolio_regret == old.portfolio_regret == 0.25, "the worst is at an entry left out"


def test_a_partial_sweep_without_a_change_gives_the_same_table() -> None:
    old = whole()
    assert partial({DEFAULT: 30.0, A: 25.1, B: 20.1}, old) is old


def test_a_partial_sweep_adds_configs_at_the_portfolio_s_end_which_other_entries_have_no_time_of() -> None:
    old = whole()
    new = partial({DEFAULT: 30.0, A: 15.0, B: 20.0, C: 5.0}, old)
    assert new.portfolio == (A, B, C)
    assert entry(new, 128).config == C
    assert entry(new, 64).points[0].us == (20.0, 25.0, None, 30.0)
    assert (entry(new, 64).mean_us, entry(new, 64).config) == (20.0, A)
    text = writer.dump(new)
    assert writer.dump(reader.parse(text)) == text


def test_what_finds_no_place_in_a_full_portfolio_is_told_with_what_to_do() -> None:
    places = [recorded.config(64, 64, 256 + i) for i in range(MOST_WHEN_WORSE)]
    part = sweep({64: {DEFAULT: 30.0, places[0]: 20.0, C: 16.0}, 128: {DEFAULT: 30.0, places[1]: 20.0}})
    assert crowded_out(part, places[1:], whole=False) == ()
    [line] = crowded_out(part, places, whole=False)
    assert "M=64" in line
    assert f"25% slower than with {C}" in line
    assert "not among the portfolio's 16 configs; tune the whole kernel" in line
    assert crowded_out(part, places, whole=True) == (line.partition(";")[0],)


def test_a_partial_sweep_over_a_table_of_another_source_is_refused_with_what_differs() -> None:
    with pytest.raises(TuneError, match=r"2 entries .* source's hash was 0123.*tune the whole kernel"):
        partial({DEFAULT: 30.0, A: 15.0}, whole(), source_hash="fedcba9876543210")


def test_a_partial_sweep_that_finds_a_portfolio_s_config_wrong_is_refused() -> None:
    with pytest.raises(TuneError, match=r"computed a wrong result, and 2 entries"):
        partial({DEFAULT: 30.0, A: 15.0}, whole(), wrong=frozenset({B}))


def test_a_whole_sweep_drops_entries_that_are_no_longer_declared() -> None:
    new = choose_entries(sweep({128: {DEFAULT: 30.0, A: 25.0, B: 20.0}}), (A, B), incumbent=whole())
    assert [line.bucket.size("M") for line in new.entries] == [128]


# Predictions ------------------------------------------------------------------------------------------------


def test_a_prediction_leaves_the_default_only_for_the_full_gain() -> None:
    rows: dict[int, Row] = {64: {DEFAULT: 20.0, A: 18.5}, 128: {DEFAULT: 20.0, A: 18.0}}
    predicted = sweep(rows, evidence="predicted", least_gain=PREDICTED_GAIN)
    portfolio = settle_portfolio(predicted)
    assert portfolio == (A,)
    table = choose_entries(predicted, portfolio)
    assert [line.config for line in table.entries] == [DEFAULT, A]
    assert {line.evidence for line in table.entries} == {"predicted"}
    assert table.portfolio_regret == 0.0


def test_an_entry_keeps_its_figures_while_its_gain_over_the_default_stays() -> None:
    old = Entry(
        bucket=Problem({"M": 64}), config=Config(constants={"a": 1}), mean_us=80.0, error_margin_us=0.1,
        default_us=120.0, regret=0.0, evidence="measured", points=(),
    )  # fmt: skip
    default = Config(constants={"a": 0})

    def kept(us: float, default_us: float) -> bool:
        time, beside = (
            Measurement(config=config, mean_us=mean, error_margin_us=0.1, num_samples=5)
            for config, mean in ((old.config, us), (default, default_us))
        )
        return keeps_figures(old, {old.config: time, default: beside}, default, [old.config])

    assert kept(80.5, 140.0), "the time is as it was"
    assert kept(88.0, 132.5), "clocks were lower: all times moved together"
    assert not kept(88.0, 120.0), "it lost a tenth against the default"


def test_an_entry_that_shows_another_default_keeps_no_figures() -> None:
    winner, default, other = (Config(constants={"a": number}) for number in range(3))
    edge = Point(size={"M": 64}, us=(80.0, 120.0, 120.0))
    old = Entry(
        bucket=Problem({"M": 64}), config=winner, mean_us=80.0, error_margin_us=0.1, default_us=120.0,
        regret=0.0, evidence="measured", points=(Point(size={"M": 41}, us=(90.0, 140.0, 130.0)), edge),
    )  # fmt: skip

    def kept(now: Config, entry: Entry = old) -> bool:
        times = {
            config: Measurement(config=config, mean_us=mean, error_margin_us=0.1, num_samples=5)
            for config, mean in ((default, 120.0), (other, 120.0), (winner, 80.0))
        }
        return keeps_figures(entry, times, now, (winner, default))

    assert kept(default), "the declaration may have another default at 41"
    assert kept(other), "nothing tells"
    assert not kept(winner), "the winner is the default now"
    slower = dataclasses.replace(edge, us=(80.0, 120.0, 125.0))
    assert not kept(default, dataclasses.replace(old, points=(slower,))), "a slower one was the default"
    assert not kept(default, dataclasses.replace(old, config=other)), "the old default won"


def test_the_entry_of_a_default_keeps_its_figures_while_its_gain_over_the_best_other_stays() -> None:
    default, *others = (Config(constants={"a": number}) for number in range(4))
    portfolio = others[0], default, *others[1:]  # which may hold what is the default here
    old = Entry(
        bucket=Problem({"M": 64}), config=default, mean_us=80.0, error_margin_us=0.1, default_us=80.0,
        regret=0.0, evidence="measured", points=(Point(size={"M": 64}, us=(100.0, 80.0, None, 140.0, 80.0)),),
    )  # fmt: skip

    def kept(us: float, *beside: float) -> bool:
        times = {
            config: Measurement(config=config, mean_us=mean, error_margin_us=0.1, num_samples=5)
            for config, mean in zip((default, *others), (us, *beside), strict=False)
        }
        return keeps_figures(old, times, default, portfolio)

    assert kept(80.5, 300.0), "the time is as it was"
    assert kept(40.0, 50.0, 70.0), "clocks were higher: all times moved together"
    assert not kept(40.0, 43.0), "the best other is nearer than it was"
    assert not kept(40.0), "nothing tells"


def test_the_line_of_a_default_whose_lead_changed_is_new() -> None:
    rows: dict[int, Row] = {64: {DEFAULT: 20.0, A: 30.0}, 128: {DEFAULT: 30.0, A: 20.0}}
    old = choose_entries(sweep(rows, rows), (A,))
    moved: dict[int, Row] = {64: {DEFAULT: 10.0, A: 15.0}, 128: rows[128]}
    assert choose_entries(sweep(moved, moved), (A,), incumbent=old) is old
    nearer: dict[int, Row] = {64: {DEFAULT: 10.0, A: 12.0}, 128: rows[128]}
    new = choose_entries(sweep(nearer, nearer), (A,), incumbent=old)
    assert entry(new, 64).mean_us == 10.0
    assert new.entries[1] is old.entries[1]


# Runs at other clocks ---------------------------------------------------------------------------------------


def _at(**us: float) -> dict[Config, Measurement]:
    """Times of configs by name; `default` is the default."""
    return {
        _called(name): Measurement(config=_called(name), mean_us=mean, error_margin_us=0.1, num_samples=5)
        for name, mean in us.items()
    }


def _called(name: str) -> Config:
    return (
        DEFAULT
        if name == "default"
        else Config(constants={**DEFAULT.constants, "tile_m": {"tall": 256}[name]})
    )


def test_an_edge_is_decided_within_one_run_whatever_another_run_said() -> None:
    edge = problem(256)
    first = recorded.sweep(candidates={edge: _at(default=100.0, tall=108.0)})
    # The runoff ran under a power cap, at lower clocks: the default took 120 there, and `tall` was not in it.
    sweep = recorded.with_times(
        first, portfolio={edge: _at(default=100.0, tall=108.0)}, runoff={edge: _at(default=120.0)}
    )
    [entry] = choose_entries(sweep, (_called("tall"),)).entries
    assert entry.config == DEFAULT
    assert entry.mean_us == entry.default_us == 120.0


def test_times_of_an_earlier_run_are_told_at_the_clocks_of_the_later_one() -> None:
    edge = problem(256)
    first = recorded.sweep(candidates={edge: _at(default=100.0, tall=90.0)})
    sweep = recorded.with_times(first, portfolio={edge: _at(default=120.0)})
    assert sweep.times()[edge][_called("tall")].mean_us == pytest.approx(108.0)


def test_finalists_are_told_at_the_clocks_of_the_first_run() -> None:
    told = as_of_first_run(_at(default=100.0, tall=50.0), _at(default=120.0, tall=60.0))
    assert {one.mean_us for one in told.values()} == {100.0, 50.0}
    assert as_of_first_run(_at(default=100.0), {}) == {}


# Glitches and disturbances ----------------------------------------------------------------------------------


def _named(**us: float) -> dict[Config, Measurement]:
    return {
        Config(constants={"name": name}): Measurement(
            config=Config(constants={"name": name}), mean_us=time, error_margin_us=0.1, num_samples=5
        )
        for name, time in us.items()
    }


def _names(configs: Iterable[Config]) -> set[object]:
    return {config["name"] for config in configs}


@pytest.mark.parametrize("factor", [0.9, 0.7, 0.5, 0.1, 1e-4])
def test_one_glitch_does_not_keep_the_contenders_out_of_the_finals(factor: float) -> None:
    times = _named(best=100.0, near=103.0, glitch=110.0 * factor, far=150.0)
    assert _names(finalists(times, [])) >= {"best", "near", "glitch"}
    assert _names(finalists(_named(best=100.0, near=103.0, far=150.0), [])) == {"best", "near"}
    assert _names(finalists(_named(best=100.0), [])) == {"best"}


def test_a_glitch_does_not_move_the_times_of_those_that_were_not_timed_again() -> None:
    first, again = _named(glitch=50.0, best=100.0), _named(glitch=110.0, best=100.0)
    told = {config["name"]: time.mean_us for config, time in as_of_first_run(first, again).items()}
    assert told == {"glitch": 110.0, "best": 100.0}


def _disturbed_at(edge: Problem, by: str | None) -> SweepTimes:
    times = {
        config: dataclasses.replace(time, disturbed=by if config == DEFAULT else None)
        for config, time in _at(default=100.0, tall=80.0).items()
    }
    return recorded.sweep(candidates={edge: times}, portfolio={edge: times}, runoff={edge: times})


def test_what_disturbed_samples_is_in_the_entry_until_a_clean_run() -> None:
    edge, portfolio = problem(256), (_called("tall"),)
    spoilt = choose_entries(_disturbed_at(edge, "throttling"), portfolio)
    assert [entry.disturbed for entry in spoilt.entries] == ["throttling"]
    again = choose_entries(_disturbed_at(edge, "another process"), portfolio, incumbent=spoilt)
    assert again is spoilt, "one disturbance is as good as another"
    clean = choose_entries(_disturbed_at(edge, None), portfolio, incumbent=spoilt)
    assert [entry.disturbed for entry in clean.entries] == [None]
    assert choose_entries(_disturbed_at(edge, "throttling"), portfolio, incumbent=clean) is clean


def test_of_many_disturbances_an_entry_holds_what_a_table_can() -> None:
    by = "other processes on the GPU: " + ", ".join(map(str, range(4000, 4200))) + "\n\x1b[31m"
    (entry,) = choose_entries(_disturbed_at(problem(256), by), (_called("tall"),)).entries
    check_text(entry.disturbed, "disturbed")
    assert str(entry.disturbed).startswith("other processes on the GPU: 4000, 4001")
    (entry,) = choose_entries(_disturbed_at(problem(256), "hot\nand slow"), (_called("tall"),)).entries
    assert entry.disturbed == "hot and slow"


def test_a_config_that_is_barred_at_an_edge_wins_elsewhere() -> None:
    edges = problem(256), problem(512)
    times = {edge: _at(default=100.0, tall=80.0) for edge in edges}
    sweep = recorded.sweep(candidates=times, portfolio=times, barred={edges[0]: frozenset({_called("tall")})})
    table = choose_entries(sweep, (_called("tall"),))
    assert [entry.config for entry in table.entries] == [DEFAULT, _called("tall")]


# States -----------------------------------------------------------------------------------------------------


def in_states(**rows: Mapping[int, Row]) -> dict[str, object]:
    """Times in other states of the GPU, by the state's name, size and config, as of the second pass."""
    found: dict[Problem, dict[str, Mapping[Config, Measurement]]] = {}
    for name, sizes in rows.items():
        for size, times in measured(sizes).items():
            found.setdefault(size, {})[name] = times
    return {"portfolio_states": found}


FRAGILE: dict[int, Row] = {64: {DEFAULT: 432.0, A: 390.0, B: 428.0}}
"""A wins under load, and nowhere else: a product of 885 x 5120 x 25600 on an H200."""

ELSEWHERE = in_states(
    read={64: {DEFAULT: 388.0, A: 426.0, B: 350.0}}, written={64: {DEFAULT: 392.0, A: 569.0, B: 353.0}}
)


def test_a_config_that_is_fastest_in_one_state_and_slow_in_another_loses() -> None:
    assert winner(FRAGILE) == A
    table = choose_entries(sweep(FRAGILE, **ELSEWHERE), (A, B, C))
    chosen = entry(table, 64)
    assert chosen.config == B
    assert (chosen.mean_us, chosen.default_us) == (428.0, 432.0)
    assert chosen.states == {
        "read": StateTimes(mean_us=350.0, default_us=388.0),
        "written": StateTimes(mean_us=353.0, default_us=392.0),
    }
    [point] = chosen.points
    assert point.us == (390.0, 428.0, None, 432.0)
    assert point.states == {
        "read": (426.0, 350.0, None, 388.0),
        "written": (569.0, 353.0, None, 392.0),
    }
    assert reader.parse(writer.dump(table)) == table


def test_times_in_states_are_those_of_the_second_pass_where_it_has_them() -> None:
    first = {problem(64): {"written": measured({64: {DEFAULT: 784.0, A: 9.0, C: 700.0}})[problem(64)]}}
    times = sweep(FRAGILE, candidate_states=first, **ELSEWHERE).in_states(problem(64))
    assert times["written"][A].mean_us == 569.0
    assert times["written"][C].mean_us == 350.0, "the first pass as it would be at the second's clocks"
    assert times["read"].keys() == {DEFAULT, A, B}


def test_no_config_wins_that_is_slower_than_the_default_in_a_state() -> None:
    rows: dict[int, Row] = {64: {DEFAULT: 30.0, A: 20.0}}
    assert entry(choose_entries(sweep(rows), (A,)), 64).config == A
    slower = in_states(written={64: {DEFAULT: 30.0, A: 31.0}})
    assert entry(choose_entries(sweep(rows, **slower), (A,)), 64).config == DEFAULT
    tied = in_states(written={64: {DEFAULT: 30.0, A: 30.5}})
    assert entry(choose_entries(sweep(rows, **tied), (A,)), 64).config == A


def test_of_those_equal_in_their_worst_states_the_fastest_over_all_wins() -> None:
    rows: dict[int, Row] = {64: {DEFAULT: 45.0, A: 20.0, B: 21.0, C: 21.1}}
    states = in_states(written={64: {DEFAULT: 45.0, A: 32.4, B: 30.0, C: 31.0}})
    assert entry(choose_entries(sweep(rows, **states), (A, B, C)), 64).config == B
    old = choose_entries(sweep({64: {DEFAULT: 45.0, C: 20.0}}), (C,))
    again = choose_entries(sweep(rows, **states), (A, B, C), incumbent=old)
    assert entry(again, 64).config == B, "C ties in its worst state, but is clearly slower in another"


def test_an_incumbent_wins_a_tie_in_all_states() -> None:
    rows: dict[int, Row] = {64: {DEFAULT: 45.0, A: 20.0, B: 20.2}}
    states = in_states(written={64: {DEFAULT: 45.0, A: 30.0, B: 30.4}})
    old = choose_entries(sweep({64: {DEFAULT: 45.0, B: 20.0}}), (B,))
    assert entry(choose_entries(sweep(rows, **states), (A, B)), 64).config == A
    assert entry(choose_entries(sweep(rows, **states), (A, B), incumbent=old), 64).config == B


def test_a_line_stays_while_its_states_hold_within_the_noise() -> None:
    rows: dict[int, Row] = {64: {DEFAULT: 45.0, A: 20.0}}

    def again(us: float, **more: Mapping[int, Row]) -> SweepTimes:
        return sweep(rows, **in_states(written={64: {DEFAULT: 45.0, A: us}}, **more))

    old = choose_entries(again(30.0), (A,))
    assert choose_entries(again(31.2), (A,), incumbent=old) is old
    assert entry(choose_entries(again(33.0), (A,), incumbent=old), 64).states["written"].mean_us == 33.0
    more = {"tight": {64: {DEFAULT: 45.0, A: 20.0}}}
    assert entry(choose_entries(again(30.0, **more), (A,), incumbent=old), 64).states.keys() == {
        "tight",
        "written",
    }


def test_a_line_with_a_spoilt_time_at_a_point_gives_way() -> None:
    """The clock may change all times of a point; one alone was spoilt, in whichever sweep."""

    def at(first: float, second: float, written: float = 30.0) -> SweepTimes:
        rows: dict[int, Row] = {
            48: {DEFAULT: 40.0, A: first, B: second},
            64: {DEFAULT: 45.0, A: 20.0, B: 30.0},
        }
        return sweep(rows, **in_states(written={48: {DEFAULT: 40.0, A: 30.0, B: written}}))

    old = choose_entries(at(18.0, 25.0), (A, B))
    assert choose_entries(at(18.4, 25.5), (A, B), incumbent=old) is old
    for wrong in (at(18.0, 40.0), at(18.0, 25.0, written=60.0)):
        spoilt = choose_entries(wrong, (A, B))
        assert choose_entries(at(18.0, 25.0), (A, B), incumbent=spoilt).entries == old.entries
        assert choose_entries(wrong, (A, B), incumbent=old) != old


def test_a_line_without_states_gives_way_to_one_with_them() -> None:
    rows: dict[int, Row] = {64: {DEFAULT: 45.0, A: 20.0}}
    old = choose_entries(sweep(rows), (A,))
    new = choose_entries(
        sweep(rows, **in_states(written={64: {DEFAULT: 45.0, A: 30.0}})), (A,), incumbent=old
    )
    assert entry(new, 64).states.keys() == {"written"}


def test_carried_entries_keep_their_states_under_a_wider_portfolio() -> None:
    rows: dict[int, Row] = {64: {DEFAULT: 45.0, A: 20.0}, 128: {DEFAULT: 45.0, A: 20.0}}
    states = in_states(written={64: {DEFAULT: 45.0, A: 30.0}, 128: {DEFAULT: 45.0, A: 30.0}})
    old = choose_entries(sweep(rows, **states), (A,))
    part = sweep({128: {DEFAULT: 45.0, A: 20.0, B: 10.0}})
    new = choose_entries(part, (A, B), incumbent=old, keep=[problem(64), problem(128)])
    [point] = entry(new, 64).points
    assert point.states == {"written": (30.0, None, 45.0)}
    assert reader.parse(writer.dump(new)) == new


def test_a_portfolio_holds_what_is_good_in_every_state() -> None:
    chosen = settle_portfolio(sweep(FRAGILE, candidate_states=ELSEWHERE["portfolio_states"]))
    assert chosen == (B,)
    assert settle_portfolio(sweep(FRAGILE)) == (A,)
