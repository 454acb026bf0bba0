"""The ladder, step by step, without a GPU, a file or a kernel's launch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from aot_tune.choose.choice import Choice, Options, miss_message, tune_command
from aot_tune.choose.index import Index, Match
from aot_tune.choose.legality import Legality
from aot_tune.choose.resolve import Live, resolve
from aot_tune.declare.declaration import Work
from aot_tune.environment import OnMiss
from aot_tune.errors import LaunchError, MissError, TableWarning, UsageError
from aot_tune.serve.launch.messages import passed_over_message
from aot_tune.tables.table import Table
from aot_tune.tunable import Tunable
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support.samples import (
    DEFAULT,
    SM90,
    SPACE,
    equally_fast,
    loading_more,
    scale,
    scale_table,
    with_entry,
)

AT_64, AT_256 = scale_table().portfolio
OTHER = next(c for c in SPACE if c not in (AT_64, AT_256, DEFAULT))


def at(rows: int, cols: int = 1024, dtype: str = "bfloat16") -> Problem:
    return Problem({"dtype": dtype, "M": rows, "N": cols})


def choose(problem: Problem, *tables: Table, tunable: Tunable = scale, **options: Any) -> Choice:
    index = Index(
        tunable.axes, tunable.tiles, {Path(f"t{place}.json"): table for place, table in enumerate(tables)}
    )
    live = Live(**{name: options.pop(name) for name in ("remembered", "search") if name in options})
    return resolve(problem, index, Legality(tunable, SM90), Options(**options), live=live)


TABLE = scale_table()


def test_step_1_the_caller_s_config_is_taken() -> None:
    choice = choose(at(64), TABLE, given=OTHER)
    assert (choice.config, choice.source) == (OTHER, "given")


def test_step_1_the_default_is_taken_where_it_is_asked_for() -> None:
    choice = choose(at(64), TABLE, asked_default=True)
    assert (choice.config, choice.source) == (DEFAULT, "asked default")


def test_step_2_the_own_bucket_s_entry_is_taken() -> None:
    choice = choose(at(64), TABLE, remembered=lambda bucket: OTHER)
    assert (choice.config, choice.source, choice.entry) == (AT_64, "own", TABLE.entries[1])
    assert not choice.missed


@pytest.mark.parametrize(
    ("gpu_model", "taken"), [(None, AT_64), ("NVIDIA H200", AT_64), ("NVIDIA H100 80GB HBM3", AT_256)]
)
def test_step_2_on_another_card_the_one_that_loads_less_is_taken_of_those_that_overlap(
    gpu_model: str | None, taken: Config
) -> None:
    choice = choose(at(64), equally_fast(at(64), AT_64), tunable=loading_more(AT_64), gpu_model=gpu_model)
    assert (choice.config, choice.source) == (taken, "own")
    assert ("another GPU model's" in choice.reason) == (taken == AT_256)
    declared_without = dataclasses.replace(loading_more(AT_64), work=None)
    assert (
        choose(at(64), equally_fast(at(64), AT_64), tunable=declared_without, gpu_model=gpu_model).config
        == AT_64
    )


def test_predicted_times_are_of_no_card() -> None:
    table = equally_fast(at(64), AT_64)
    entries = tuple(dataclasses.replace(one, evidence="predicted") for one in table.entries)
    choice = choose(
        at(64),
        dataclasses.replace(table, entries=entries),
        tunable=loading_more(AT_64),
        gpu_model="NVIDIA H100 PCIe",
    )
    assert choice.config == AT_64


def test_a_work_that_raises_is_told_and_decides_nothing() -> None:
    def work(config: Config, problem: Problem) -> Work:
        if problem == at(48):
            raise ValueError("no such size")
        return Work()

    broken = dataclasses.replace(loading_more(AT_64), work=work)
    with pytest.warns(TableWarning, match="the work of tile_m=.* is passed over.*no such size"):
        choice = choose(at(48), equally_fast(at(64), AT_64), tunable=broken, gpu_model="NVIDIA H100 PCIe")
    assert (choice.config, choice.source) == (choose(at(48), equally_fast(at(64), AT_64)).config, "own")


def test_step_2_then_what_the_user_s_cache_remembers_for_the_bucket() -> None:
    asked: list[Problem] = []

    def remembered(bucket: Problem) -> Config:
        asked.append(bucket)
        return OTHER

    choice = choose(at(100), TABLE, remembered=remembered)
    assert (choice.config, choice.source) == (OTHER, "cached")
    assert asked == [at(128)]


@pytest.mark.parametrize(("rows", "near"), [(128, 256), (20, 64), (512, 256)])
def test_step_3_the_nearest_bucket_within_one_doubling_is_taken(rows: int, near: int) -> None:
    choice = choose(at(rows), TABLE, search=lambda problem, found: OTHER)
    assert choice.source == "nearest"
    assert choice.entry is not None
    assert choice.entry.bucket == at(near)
    assert not choice.missed


def test_step_4_a_miss_is_searched_for() -> None:
    choice = choose(at(4096), TABLE, search=lambda problem, found: OTHER)
    assert (choice.config, choice.source) == (OTHER, "searched")
    assert choice.missed


def test_step_4_without_a_search_the_nearest_at_any_distance_is_taken() -> None:
    choice = choose(at(4096), TABLE)
    assert (choice.source, choice.entry) == ("far", TABLE.entries[2])
    assert choice.missed


def test_step_4_the_search_is_told_the_nearest_entry() -> None:
    seen: list[Any] = []
    choose(at(4096), TABLE, search=lambda problem, found: seen.append((problem, found.entry)))
    assert seen == [(at(4096), TABLE.entries[2])]


def _no_search(problem: Problem, found: Match | None) -> Config:
    raise AssertionError("a search was made")


def test_on_miss_nearest_makes_no_search() -> None:
    assert choose(at(4096), TABLE, search=_no_search, on_miss="nearest").source == "far"
    assert choose(at(4096, dtype="float32"), TABLE, search=_no_search, on_miss="nearest").source == "default"


def test_on_miss_default_takes_the_default_also_where_a_far_bucket_is_known() -> None:
    choice = choose(at(4096), TABLE, search=_no_search, on_miss="default")
    assert (choice.config, choice.source, choice.missed) == (DEFAULT, "default", True)
    assert "AOT_TUNE_ON_MISS=default" in choice.reason


def test_on_miss_error_raises_with_the_command_that_tunes_it() -> None:
    with pytest.raises(MissError, match=r"AOT_TUNE_ON_MISS=error; tune it: aot-tune tune scale .*M=4096"):
        choose(at(4096), TABLE, search=_no_search, on_miss="error")


@pytest.mark.parametrize("mode", ["nearest", "default", "error"])
def test_on_miss_changes_nothing_that_is_tuned_or_near(mode: OnMiss) -> None:
    for problem in (at(64), at(128)):
        assert choose(problem, TABLE, on_miss=mode) == choose(problem, TABLE)
    assert choose(at(4096), TABLE, remembered=lambda bucket: OTHER, on_miss=mode).source == "cached"


def test_step_5_the_default_is_taken_for_a_dtype_that_no_table_has() -> None:
    choice = choose(at(64, dtype="float32"), TABLE)
    assert (choice.config, choice.source) == (DEFAULT, "default")
    assert choice.missed
    assert "no table has an entry of these dtypes" in choice.reason


def test_step_5_says_so_where_entries_of_the_dtype_hold_nothing_that_may_run() -> None:
    tunable = dataclasses.replace(
        scale, legal=lambda config, arch, problem: problem.size("M") < 4096 or "too many rows"
    )
    told = (
        "no entry of these dtypes has a config that may run for it, and the default, .* is refused: too many"
    )
    with pytest.raises(LaunchError, match=told):
        choose(at(8192), TABLE, tunable=tunable)


def test_step_5_without_a_table_the_arch_is_named() -> None:
    assert "no table that can be used for sm90" in choose(at(64)).reason


ILLEGAL = Config(constants={"tile_m": 64, "tile_n": 128}, hints={"occupancy": 1, "num_ctas": 1})
FOREIGN = Config(constants={"tile_m": 48, "tile_n": 64}, hints={"occupancy": 1, "num_ctas": 1})


@pytest.mark.parametrize("bad", [ILLEGAL, FOREIGN], ids=["not legal", "outside the search space"])
def test_b3_a_config_that_may_not_run_is_passed_over_wherever_it_comes_from(bad: Config) -> None:
    """B3: shared memory too large (`legal`), outside the search space; the fallback is one that may run."""
    table = with_entry(dataclasses.replace(TABLE, portfolio=(bad, AT_256)), 1, config=bad)
    assert choose(at(64), table).config in (AT_256, DEFAULT)
    assert choose(at(100), remembered=lambda bucket: bad).config == DEFAULT
    assert choose(at(4096), search=lambda problem, found: bad).config == DEFAULT


def test_b3_legal_is_not_asked_of_a_winner_that_no_search_space_holds() -> None:
    """B3: the loader has said that it is left out; the author's `legal` would raise."""
    strict = dataclasses.replace(scale)
    object.__setattr__(strict, "legal", lambda config, arch, problem: int(config["tile_m"]) > 0)
    word = Config(constants={"tile_m": "x", "tile_n": 64}, hints={"occupancy": 1, "num_ctas": 1})
    choice = choose(at(64), with_entry(TABLE, 1, config=word), tunable=strict)
    assert choice.config in (AT_64, AT_256, DEFAULT)
    assert passed_over_message(strict, SM90, at(64), choice) is None


def test_b3_a_given_config_that_is_not_legal_is_an_error_with_the_reason() -> None:
    """B3: the caller is told, instead of being given something else."""
    with pytest.raises(LaunchError, match="64 x 128 does not fit"):
        choose(at(64), given=ILLEGAL)


def test_a_default_that_is_not_legal_is_an_error_that_names_the_declaration() -> None:
    strict = dataclasses.replace(scale)
    object.__setattr__(strict, "legal", lambda config, arch, problem: config != DEFAULT or "it does not fit")
    with pytest.raises(LaunchError, match=r"nothing may run.*does not fit; make default\(\) and legal\(\)"):
        choose(at(64), tunable=strict)


def test_where_an_arch_runs_no_config_the_declaration_is_not_blamed() -> None:
    strict = dataclasses.replace(scale)
    object.__setattr__(strict, "legal", lambda config, arch, problem: "fp8 needs sm90")
    with pytest.raises(LaunchError, match=r"nothing may run.*fp8 needs sm90$"):
        choose(at(64), tunable=strict)


def test_the_search_space_is_asked_for_once_for_configs_that_are_in_it() -> None:
    asked: list[Problem] = []
    counting = dataclasses.replace(scale)
    object.__setattr__(counting, "search_space", lambda arch, problem: asked.append(problem) or SPACE)
    legality = Legality(counting, SM90)
    for rows in range(1, 50):
        assert legality.refusal(AT_64, at(rows)) is None
    assert asked == [at(1)]


@pytest.mark.parametrize("first", [64, 256, 4096, 5000])
def test_what_is_in_the_search_space_does_not_depend_on_what_was_met_before(first: int) -> None:
    """Where the space depends on the sizes: a declared problem's counts for all, any other's for itself."""
    by_size = {64: [AT_64], 256: [AT_64, AT_256], 5000: [FOREIGN]}
    changing = dataclasses.replace(scale, typical=[{"dtype": "bfloat16", "M": (64, 256), "N": 1024}])
    spaces = lambda arch, problem: by_size.get(problem.size("M"), [DEFAULT])  # noqa: E731
    object.__setattr__(changing, "search_space", spaces)
    legality = Legality(changing, SM90)
    legality.refusal(AT_256, at(first))
    legality.refusal(FOREIGN, at(first))
    allowed = {
        rows: [c for c in (AT_64, AT_256, DEFAULT, FOREIGN) if legality.refusal(c, at(rows)) is None]
        for rows in (64, 4096, 5000)
    }
    assert allowed == {64: [AT_64, AT_256], 4096: [AT_64, AT_256, DEFAULT], 5000: [AT_64, AT_256, FOREIGN]}


def test_a_miss_names_the_problem_what_was_taken_and_the_command() -> None:
    message = miss_message(scale, SM90, at(4096), choose(at(4096), TABLE), [Path("a"), Path("b")])
    start = "no tuned config for scale dtype=bfloat16 M=4096 N=1024 on sm90 in a or b; took tile_m="
    assert message.startswith(start)
    assert message.endswith(tune_command(scale, SM90, at(4096)))


def test_b10_the_same_files_and_problem_give_the_same_choice_without_cache_and_search() -> None:
    """B10: what a rank passes in leaves nothing but the shipped tables to choose by."""
    for rows in range(1, 600, 7):
        one, other = choose(at(rows), TABLE), choose(at(rows), scale_table())
        assert (one.config, one.source) == (other.config, other.source)


# The declaration's functions --------------------------------------------------------------------------------


def test_b3_legal_is_asked_only_about_configs_of_a_search_space() -> None:
    asked: list[Config] = []
    watching = dataclasses.replace(scale)
    object.__setattr__(watching, "legal", lambda config, arch, problem: asked.append(config) or True)
    strange = Config(constants={"other": 1}, hints={})
    assert choose(at(100), tunable=watching, remembered=lambda bucket: strange).config == DEFAULT
    assert choose(at(100), tunable=watching, search=lambda problem, found: FOREIGN).config == DEFAULT
    assert set(asked) == {DEFAULT}


def _raising(*_: object) -> Any:
    raise ZeroDivisionError("by the author")


@pytest.mark.parametrize("function", ["tiles", "legal"])
def test_b3_a_function_that_raises_for_a_tables_config_is_a_fallback(function: str) -> None:
    """B3: one warning, and no launch fails because of what a table holds."""
    broken = dataclasses.replace(scale)
    real = getattr(scale, function)
    object.__setattr__(
        broken, function, lambda config, *rest: real(config, *rest) if config == DEFAULT else _raising()
    )
    index = Index(broken.axes, broken.tiles, {Path("t.json"): TABLE})
    legality = Legality(broken, SM90)
    with pytest.warns(TableWarning, match=r"declaration raises ZeroDivisionError: by the author") as seen:
        chosen = {rows: resolve(at(rows), index, legality) for rows in (45, 64, 100, 4096)}
    assert len(seen) == 1
    edge = AT_64 if function == "tiles" else DEFAULT  # at an edge and at a point no tiles are counted
    assert {rows: choice.config for rows, choice in chosen.items()} == {
        45: DEFAULT, 64: edge, 100: DEFAULT, 4096: DEFAULT,
    }  # fmt: skip


def test_b11_a_live_search_that_raises_is_a_fallback() -> None:
    with pytest.warns(TableWarning, match="a live search is passed over"):
        assert choose(at(4096), TABLE, search=_raising).source == "far"


def test_a_wrong_variable_is_reported_and_no_fallback() -> None:
    def search(problem: Problem, found: object) -> Config:
        raise UsageError("AOT_TUNE_SEARCH_SECONDS='x'")

    with pytest.raises(UsageError):
        choose(at(4096), TABLE, search=search)
