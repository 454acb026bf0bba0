"""The rung of batch invariance: one config for every batch, whatever is launched first, without a search."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from aot_tune.choose.batch import (
    BatchInvariant,
    default_for_every_batch,
    every_batch,
    ranked,
    refused_somewhere,
    without_batch,
)
from aot_tune.choose.choice import Choice, Options
from aot_tune.choose.index import Index
from aot_tune.choose.legality import Legality
from aot_tune.choose.resolve import Live, resolve
from aot_tune.environment import OnMiss
from aot_tune.errors import LaunchError, MissError, TableWarning
from aot_tune.tables.table import Entry, Point, Table
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support.samples import DEFAULT, SM90, SPACE, scale, scale_table, with_entry

AT_64, AT_256 = scale_table().portfolio
OTHER = next(c for c in SPACE if c not in (AT_64, AT_256, DEFAULT))
batched = dataclasses.replace(scale, batch_axes=("M",))

# AT_256 wins at M=256 by 2, AT_64 at M=64 by 1.5, the default at M=1 by 1.5.
TABLE = with_entry(
    scale_table(),
    2,
    points=tuple(
        dataclasses.replace(point, us=(80.0, 40.0, 80.0)) for point in scale_table().entries[2].points
    ),
)


def at(rows: int, cols: int = 1024, dtype: str = "bfloat16") -> Problem:
    return Problem({"dtype": dtype, "M": rows, "N": cols})


def chooser(*tables: Table, tunable: Tunable = batched) -> Any:
    index = Index(
        tunable.axes, tunable.tiles, {Path(f"t{place}.json"): table for place, table in enumerate(tables)}
    )
    legality = Legality(tunable, SM90)
    every = BatchInvariant(index, legality)

    def choose(problem: Problem, **options: Any) -> Choice:
        live = Live(**{name: options.pop(name) for name in ("remembered", "search") if name in options})
        fitting = legality.fitting(options.pop("unfit")) if "unfit" in options else legality
        return resolve(problem, index, fitting, Options(**options), live=live, every_batch=every)

    return choose


@pytest.mark.parametrize("rows", [1, 3, 64, 200, 256])
def test_the_batch_does_not_influence_the_config(rows: int) -> None:
    choice = chooser(TABLE)(at(rows), remembered=lambda bucket: OTHER)
    assert (choice.config, choice.source, choice.missed) == (AT_256, "invariant", False)
    assert "one config for every M: its worst regret over " in choice.reason
    assert "50.0%, at M=" in choice.reason


def test_the_caller_s_config_is_taken_before() -> None:
    assert chooser(TABLE)(at(64), given=OTHER).source == "given"


def test_the_a_b_switch_takes_one_default_for_every_batch() -> None:
    changing = dataclasses.replace(
        batched, default=lambda arch, problem: DEFAULT if problem.size("M") < 64 else OTHER
    )
    choose = chooser(TABLE, tunable=changing)
    choices = [choose(at(rows), asked_default=True) for rows in (1, 64, 256)]
    assert {(one.config, one.source) for one in choices} == {(OTHER, "invariant")}


def test_a_config_that_may_not_run_at_some_batch_is_left_out() -> None:
    large_only = dataclasses.replace(
        batched,
        legal=lambda config, arch, problem: config != AT_256 or problem.size("M") >= 64 or "too few rows",
    )
    choose = chooser(TABLE, tunable=large_only)
    assert {choose(at(rows)).config for rows in (1, 64, 256)} == {AT_64}


def test_a_config_whose_bits_depend_on_the_batch_is_left_out() -> None:
    exact = dataclasses.replace(batched, invariant=lambda config, problem: config != AT_256 or "it splits")
    choose = chooser(TABLE, tunable=exact)
    assert {choose(at(rows)).config for rows in (1, 64, 256)} == {AT_64}


@pytest.mark.filterwarnings("ignore::aot_tune.errors.TableWarning")
def test_a_declaration_that_raises_for_a_config_leaves_it_out() -> None:
    def invariant(config: Config, problem: Problem) -> bool:
        return config != AT_256 or bool(1 // 0)

    assert chooser(TABLE, tunable=dataclasses.replace(batched, invariant=invariant))(at(64)).config == AT_64


def test_other_sizes_take_the_nearest_bucket_s_choice() -> None:
    choice = chooser(TABLE)(at(64, cols=2000))
    assert (choice.config, choice.source) == (AT_256, "invariant")
    assert "of the nearest buckets, dtype=bfloat16 N=1024," in choice.reason


def _no_search(problem: Problem, found: object) -> Config:
    raise AssertionError("a search was made")


@pytest.mark.parametrize(
    ("mode", "source", "config"),
    [("search", "far", AT_256), ("nearest", "far", AT_256), ("default", "default", DEFAULT)],
)
def test_a_miss_is_not_searched(mode: OnMiss, source: str, config: Config) -> None:
    choice = chooser(TABLE)(at(64, cols=65536), search=_no_search, on_miss=mode)
    assert (choice.source, choice.config, choice.missed) == (source, config, True)
    asked = choice.reason == "the default that serves every M: AOT_TUNE_ON_MISS=default"
    assert asked == (mode == "default")


def test_a_miss_raises_where_it_is_an_error() -> None:
    with pytest.raises(MissError, match=r"no tuned config for scale .* aot-tune tune scale"):
        chooser(TABLE)(at(64, cols=65536), on_miss="error")
    assert chooser(TABLE)(at(4096), on_miss="error").config == AT_256


def test_a_miss_that_tuning_cannot_end_is_told_by_the_default() -> None:
    def default(arch: Arch, problem: Problem) -> Config:
        if problem.size("N") > 32768:
            raise LaunchError("pass rows of at most 32768")
        return DEFAULT

    with pytest.raises(LaunchError, match="pass rows of at most 32768"):
        chooser(TABLE, tunable=dataclasses.replace(batched, default=default))(
            at(64, cols=65536), on_miss="error"
        )


def test_where_nothing_tuned_serves_every_batch_a_default_does_and_it_is_no_miss() -> None:
    only_default = dataclasses.replace(batched, invariant=lambda config, problem: config == DEFAULT)
    choice = chooser(TABLE, tunable=only_default)(at(64), on_miss="error")
    assert (choice.config, choice.source) == (DEFAULT, "invariant")
    assert choice.reason == "the default that serves every M: no tuned config does"


def test_without_a_table_every_batch_has_the_same_default() -> None:
    choose = chooser()
    assert {(choose(at(rows)).config, choose(at(rows)).source) for rows in (1, 64)} == {(DEFAULT, "default")}


def test_where_no_config_serves_every_batch_the_launch_is_refused() -> None:
    none = dataclasses.replace(
        batched, invariant=lambda config, problem: problem.size("M") > 2 or "it splits"
    )
    told = (
        r"size of M, so no config keeps a row's bits; the default, .*, is refused at .*M=2.*: it splits; un"
    )
    with pytest.raises(LaunchError, match=told):
        chooser(TABLE, tunable=none)(at(64))


@pytest.mark.parametrize("verdict", [None, "", 1])
def test_an_invariant_of_another_kind_refuses_a_config_and_is_told(verdict: Any) -> None:
    def invariant(config: Config, problem: Problem) -> Any:
        return True if config == DEFAULT else verdict

    wrong = dataclasses.replace(batched, invariant=invariant)
    told = f"invariant() returned {verdict!r}, neither True nor the reason as a text"
    assert wrong.batch_refusal(AT_64, at(64)) == told
    assert chooser(TABLE, tunable=wrong)(at(64)).config == DEFAULT


def test_a_batch_beyond_the_declared_ones_never_gets_another_config() -> None:
    bounded = dataclasses.replace(
        batched, legal=lambda config, arch, problem: problem.size("M") <= 1000 or "too many rows"
    )
    choose = chooser(TABLE, tunable=bounded)
    with pytest.raises(LaunchError, match=r"may not run .*M=5000.*: too many rows; launch fewer M at a time"):
        choose(at(5000))
    assert choose(at(900)).config == AT_256


@pytest.mark.parametrize("first", [1, 3, 5000])
def test_the_choice_does_not_depend_on_what_was_launched_before(first: int) -> None:
    choose = chooser(TABLE)
    choose(at(first))
    assert choose(at(64)).config == AT_256


def test_a_gpu_that_is_too_small_for_it_gets_another_one_for_every_batch() -> None:
    choose = chooser(TABLE)
    unfit = {AT_256: "too few multiprocessors"}.get
    assert {choose(at(rows), unfit=unfit).config for rows in (1, 64, 256)} == {AT_64}


def test_b3_a_config_of_no_search_space_is_never_chosen() -> None:
    foreign = Config(constants={"tile_m": 48, "tile_n": 64}, hints={"occupancy": 1, "num_ctas": 1})
    table = dataclasses.replace(TABLE, portfolio=(AT_64, foreign))
    assert chooser(table)(at(64)).config == AT_64


def test_a_warning_names_the_config_for_which_the_declaration_raises() -> None:
    def legal(config: Config, arch: Any, problem: Problem) -> bool:
        return config != AT_256 or problem.size("M") > 1 or bool(1 // 0)

    choose = chooser(TABLE, tunable=dataclasses.replace(batched, legal=legal))
    with pytest.warns(TableWarning, match="is passed over for .*M=1 .*ZeroDivisionError"):
        assert choose(at(64)).config == AT_64


# The ranking over all sizes of a batch, from times by hand.


def timed(rows: int, *us: float | None, **states: tuple[float | None, ...]) -> Entry:
    """A bucket with the times of AT_64, AT_256 and the default at its edge."""
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
    assert rank(*entries) == [(AT_256, 0.3, 0), (AT_64, 0.5, 0)]


def test_the_regret_is_against_the_default_too_and_in_the_worst_state() -> None:
    assert rank(timed(1, 10.0, 12.0, 5.0)) == [(AT_64, 1.0, 0), (AT_256, 1.4, 0)]
    in_two_states = timed(1, 10.0, 10.4, 20.0, written=(11.0, 10.0, 20.0))
    assert rank(in_two_states) == [(AT_256, 0.0, 0), (AT_64, 0.057692, 0)]


def test_a_config_without_a_time_somewhere_comes_after_those_that_have_all() -> None:
    assert rank(timed(1, None, 20.0, 10.0), timed(64, 10.0, 11.0, 12.0)) == [
        (AT_256, 1.0, 0),
        (AT_64, 0.0, 1),
    ]


def test_the_size_of_the_worst_regret_is_told() -> None:
    table = scale_table()
    entries = timed(1, 10.0, 13.0, 11.0), timed(64, 12.0, 10.0, 20.0)
    first, second = ranked(batched, SM90, [(entry, table) for entry in entries])
    assert (first.config, first.worst_at, second.worst_at) == (AT_64, {"M": 64}, {"M": 1})
    assert first.sizes == 2


def test_every_batch_is_each_bucket_up_to_the_largest_declared_one() -> None:
    assert [one.size("M") for one in every_batch(batched, at(64))] == [256, 128, 64, 32, 16, 8, 4, 2, 1]
    assert without_batch(batched, at(64)) == Problem({"dtype": "bfloat16", "N": 1024})


def test_a_config_is_refused_for_every_batch_where_it_is_for_one() -> None:
    def refusal(config: Config, problem: Problem) -> str | None:
        return "too few rows" if config == AT_256 and problem.size("M") < 8 else None

    assert refused_somewhere(batched, at(64), AT_256, refusal) == f"{at(4)}: too few rows"
    assert refused_somewhere(batched, at(64), AT_64, refusal) is None


def test_the_default_that_serves_every_batch_may_be_another_batchs() -> None:
    changing = dataclasses.replace(
        batched,
        default=lambda arch, problem: DEFAULT if problem.size("M") < 8 else AT_64,
        legal=lambda config, arch, problem: config == DEFAULT or problem.size("M") >= 8 or "too few rows",
    )

    def refusal(config: Config, problem: Problem) -> str | None:
        return changing.refusal(config, SM90, problem)

    assert default_for_every_batch(changing, SM90, at(64), refusal) == DEFAULT
    assert default_for_every_batch(changing, SM90, at(64), lambda *_: "never") is None
