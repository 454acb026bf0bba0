"""The live search: when it is made, over what, what becomes of its result. Made-up times."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import multiprocessing
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aot_tune import environment
from aot_tune.errors import CacheWarning
from aot_tune.serve.kernels import HintedKernels
from aot_tune.serve.launch.dispatch import UnrankedRow, dispatcher_of
from aot_tune.serve.runtime import runtime
from aot_tune.serve.search import cache, trial
from aot_tune.serve.search import live as search
from aot_tune.serve.search.cache import UserCache, Winners, folder_here
from aot_tune.serve.search.live import LiveSearch, timing_estimate_s
from aot_tune.tables.table import Point
from aot_tune.tunable import Tunable
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support.driver import Driver
from tests.support.forks import right_in_a_fork
from tests.support.samples import DEFAULT, SM90, SPACE, scale, scale_table, with_entry, write
from tests.support.wide_samples import row_sum, scale_each

AT_64, AT_256 = scale_table().portfolio
ILLEGAL = Config(constants={"tile_m": 64, "tile_n": 128}, hints={"occupancy": 1, "num_ctas": 1})

pytestmark = pytest.mark.filterwarnings("ignore::aot_tune.errors.MissWarning")


def tensors(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(rows, 1024, dtype=dtype, device="meta"), torch.empty(
        rows, 1024, dtype=dtype, device="meta"
    )


def _live(tunable: Tunable) -> LiveSearch:
    kernels = dispatcher_of(tunable).kernels
    return LiveSearch(tunable, kernels, Winners(tunable, kernels))


@pytest.fixture
def tuned(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tunable:
    """The sample with its table, and time for any search."""
    write(tmp_path / "tables", scale_table())
    monkeypatch.setenv(environment.SEARCH_SECONDS, "1000")
    # By the tile in the symbol: 32 x 64 is the fastest of the portfolio and the default.
    driver.elapsed_ms = lambda symbol: 0.01 if "_I32_" in symbol else 0.05
    return dataclasses.replace(scale, tables=tmp_path / "tables")


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[list[Config]]:
    """The config lists that cuTile's search was given."""
    from cuda.tile import tune

    seen: list[list[Config]] = []
    real = tune.exhaustive_search

    def search_and_note(configs: list[Config], *args: Any, **options: Any) -> Any:
        seen.append(list(configs))
        return real(configs, *args, **options)

    monkeypatch.setattr(tune, "exhaustive_search", search_and_note)
    return seen


def grid_of(driver: Driver) -> tuple[int, ...]:
    return driver.launches[-1].grid


@pytest.mark.process
def test_a_miss_is_searched_once_over_the_portfolio_and_the_default_and_remembered(
    tuned: Tunable, driver: Driver, searched: list[list[Config]]
) -> None:
    for _ in range(2):
        tuned.launch(*tensors(4096))
        assert grid_of(driver) == (128, 16, 1)
    assert searched == [[AT_64, AT_256, DEFAULT]]
    [entry] = list((folder_here() or Path()).rglob("*.json"))
    assert str(entry).startswith(f"{folder_here()}/v1/sm90/scale/")


@pytest.mark.process
def test_another_process_finds_the_winner_without_searching(
    tuned: Tunable, driver: Driver, searched: list[list[Config]]
) -> None:
    tuned.launch(*tensors(4096))
    again = dataclasses.replace(tuned)
    again.launch(*tensors(4096))
    again.launch(*tensors(3000))  # of the same bucket
    assert len(searched) == 1
    assert grid_of(driver) == (-(-3000 // 32), 16, 1)
    assert dispatcher_of(again)._plans.popitem()[1].choice.source == "cached"


@pytest.mark.process
def test_a_winner_in_the_cache_that_the_space_lacks_now_is_replaced(
    tuned: Tunable, driver: Driver, searched: list[list[Config]]
) -> None:
    tuned.launch(*tensors(4096))
    [entry] = list((folder_here() or Path()).rglob("*.json"))
    good = entry.read_bytes()
    entry.write_bytes(good.replace(b'"tile_m": 32', b'"tile_m": 48'))
    assert entry.read_bytes() != good
    again = dataclasses.replace(tuned)
    again.launch(*tensors(4096))
    assert len(searched) == 2
    assert grid_of(driver) == (128, 16, 1)
    assert b'"tile_m": 32' in entry.read_bytes()


def test_what_the_kernel_mutates_is_cloned_and_the_rest_is_not(tuned: Tunable) -> None:
    source, target = tensors(64)
    first, second = trial.cloned(tuned, (source, target))
    assert first is source
    assert second is not target
    assert second.shape == target.shape
    both = trial.cloned(tuned, (target, target))
    assert both[0] is both[1]


def test_members_of_a_mutated_list_are_cloned_and_what_is_absent_stays_so() -> None:
    xs, outs = ([torch.empty(4, device="meta") for _ in range(2)] for _ in range(2))
    first, second = trial.cloned(scale_each, (xs, outs))
    assert all(one is other for one, other in zip(first, xs, strict=True))
    assert all(one is not other for one, other in zip(second, outs, strict=True))
    assert type(second) is list
    x, out = torch.empty(4, 4, device="meta"), torch.empty(4, device="meta")
    assert trial.cloned(row_sum, (x, out, None))[2] is None


@pytest.mark.process
def test_the_caller_s_tensors_never_reach_the_search(tuned: Tunable, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tensors(4096)
    given: list[Any] = []

    def note(configs: Any, stream: Any, grid_fn: Any, kernel: Any, args_fn: Any, **options: Any) -> Any:
        given.extend(args_fn(configs[0]))
        raise ValueError("no valid config")

    monkeypatch.setattr("cuda.tile.tune.exhaustive_search", note)
    tuned.launch(source, target)
    assert given[0] is source
    assert given[1] is not target


# When it is not made ---------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "value"),
    [
        (environment.DISABLE, "1"),
        (environment.SEARCH_SECONDS, "0"),
        (environment.SEARCH_SECONDS, "0.5"),  # three configs to compile take longer
        ("WORLD_SIZE", "2"),
        (environment.RANKED, "8"),
    ],
)
def test_the_nearest_is_taken_where_a_search_is_forbidden_or_does_not_fit(
    name: str, value: str, tuned: Tunable, driver: Driver, searched: list[list[Config]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(name, value)
    tuned.launch(*tensors(4096))
    assert searched == []
    assert grid_of(driver) == (64, 16, 1)  # AT_256 of the far bucket
    assert not (folder_here() or Path()).exists()


@pytest.mark.process
def test_configs_that_are_compiled_already_make_a_search_fit(
    tuned: Tunable, driver: Driver, searched: list[list[Config]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for config in (AT_64, AT_256, DEFAULT):
        tuned.launch(*tensors(512), config=config)  # the same signature as M=4096
    monkeypatch.setenv(environment.SEARCH_SECONDS, "0.5")
    tuned.launch(*tensors(4096))
    assert len(searched) == 1


def test_an_estimate_grows_with_what_is_run() -> None:
    assert 0.04 < timing_estimate_s([50.0] * 8) < 0.1  # eight cubins took 44 ms on an H200
    assert timing_estimate_s([50.0] * 9) > timing_estimate_s([50.0] * 8)
    assert timing_estimate_s([1e6] * 2) > 15.0  # a kernel that runs a second


@pytest.mark.process
def test_of_many_prebuilt_configs_the_most_promising_are_timed_in_less_than_a_tenth_of_a_second(
    driver: Driver, tmp_path: Path, searched: list[list[Config]], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = scale_table()
    legal = [c for c in SPACE if c != DEFAULT and not (c["tile_m"] == 64 and c["tile_n"] == 128)]
    portfolio = (*table.portfolio, *(c for c in legal if c not in table.portfolio))[:16]
    columns = len(portfolio) + 1
    # All take 450 us, and the later in the portfolio the less.
    us = tuple(450.0 - place for place in range(columns))
    entries = tuple(
        dataclasses.replace(e, mean_us=450.0, points=(Point(size={"M": e.bucket.size("M")}, us=us),))
        for e in table.entries
    )
    write(tmp_path, dataclasses.replace(table, portfolio=portfolio, entries=entries))
    driver.elapsed_ms = lambda symbol: 0.45
    monkeypatch.setattr(HintedKernels, "is_ready", lambda *args: True)
    dataclasses.replace(scale, tables=tmp_path).launch(*tensors(1200))
    [configs] = searched
    assert 2 <= len(configs) < 8
    assert configs == [c for c in (*portfolio, DEFAULT) if c in configs]
    assert timing_estimate_s([450.0 * 1200 / 256] * len(configs)) < 0.2
    assert portfolio[-1] in configs


@pytest.mark.process
@pytest.mark.parametrize("where", ["capturing", "captures_elsewhere"])
def test_b9_nothing_is_searched_while_any_thread_captures(
    where: str, tuned: Tunable, driver: Driver, searched: list[list[Config]]
) -> None:
    """B9: in this thread or another; afterwards another process's miss may search again."""
    for config in (AT_64, AT_256, DEFAULT):
        tuned.launch(*tensors(512), config=config)
    setattr(driver, where, True)
    tuned.launch(*tensors(4096))
    assert searched == []
    assert grid_of(driver) == (64, 16, 1)


class _Awaited:
    """A lock that is free after something happened."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile
        self.held = False

    def acquire(self, timeout: float) -> bool:
        self._meanwhile()
        self.held = True
        return True

    def release(self) -> None:
        self.held = False


@pytest.mark.process
@pytest.mark.parametrize("lock", ["thread's", "file's"])
def test_b9_nothing_is_searched_where_a_capture_began_while_a_lock_was_waited_for(
    lock: str, tuned: Tunable, driver: Driver, searched: list[list[Config]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B9: asked again at the last moment; after the capture the bucket is searched, and counts once."""
    monkeypatch.setattr(search, "_MOST_SEARCHES", 1)
    live = dispatcher_of(tuned)._search

    def begin() -> None:
        driver.captures_elsewhere = True

    with monkeypatch.context() as patched:
        if lock == "thread's":
            patched.setattr(live._turn, "lock", awaited := _Awaited(begin))
        else:
            acquired = cache._acquired

            def acquire(path: Path, timeout_s: float) -> Any:
                begin()
                return acquired(path, timeout_s)

            patched.setattr(cache, "_acquired", acquire)
        tuned.launch(*tensors(4096))
        assert driver.captures_elsewhere
        assert searched == []
        assert grid_of(driver) == (64, 16, 1)  # the nearest
        assert lock != "thread's" or not awaited.held
    assert not list((folder_here() or Path()).rglob("*.json"))
    driver.captures_elsewhere = False
    tuned.launch(*tensors(3000))  # of the same bucket
    assert len(searched) == 1
    assert grid_of(driver) == (-(-3000 // 32), 16, 1)


@pytest.mark.process
def test_b9_another_process_searches_whatever_is_captured_meanwhile(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B9: it has a CUDA context of its own, and this one is not touched."""
    driver.free_memory = 2 << 30
    monkeypatch.setenv(environment.SEARCH_SECONDS, "1000")
    monkeypatch.setattr(search.child, "fastest", lambda tunable, problem, configs, **_: (configs[-1], 5.0))
    unknown = dataclasses.replace(scale, tables=tmp_path / "none")
    awaited = _Awaited(lambda: setattr(driver, "captures_elsewhere", True))
    monkeypatch.setattr(dispatcher_of(unknown)._search._turn, "lock", awaited)
    unknown.launch(*tensors(64))
    assert driver.captures_elsewhere
    assert dispatcher_of(unknown)._plans.popitem()[1].choice.source == "searched"


@pytest.mark.process
def test_b10_a_rank_does_not_read_the_user_s_cache(
    tuned: Tunable, driver: Driver, searched: list[list[Config]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B10: two ranks, one with a cache that knows a winner: they choose alike."""
    tuned.launch(*tensors(4096))
    assert grid_of(driver) == (128, 16, 1)
    monkeypatch.setenv(environment.RANKED, "2")
    chosen = []
    for folder in (folder_here(), Path("/nonexistent/cache")):
        monkeypatch.setenv(environment.CACHE_DIR, str(folder))
        dataclasses.replace(tuned).launch(*tensors(4096))
        chosen.append(grid_of(driver))
    assert chosen == [(64, 16, 1)] * 2


def _by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


def _by_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.RANKED, "2")


def _by_a_changed_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # it was 1


def _by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)


@pytest.mark.process
@pytest.mark.parametrize("found", ["searched", "cached"])
@pytest.mark.parametrize("becomes", [_by_variable, _by_own_variable, _by_a_changed_variable, _by_torch])
def test_b10_a_process_that_becomes_a_rank_launches_what_ranks_do(
    becomes: Callable[[pytest.MonkeyPatch], None],
    found: str,
    tuned: Tunable,
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B10: torch.distributed may be initialised after the first launches; known shapes notice it too."""
    if becomes is _by_a_changed_variable:
        monkeypatch.setenv("WORLD_SIZE", "1")
    if found == "cached":
        dataclasses.replace(tuned).launch(*tensors(4096))
    for _ in range(2):
        tuned.launch(*tensors(4096))
        tuned.launch(*tensors(64))
    [private, shared] = dispatcher_of(tuned)._memo.values()
    assert (type(private), type(shared)) == (UnrankedRow, tuple)
    tuned.launch(*tensors(4096))
    assert grid_of(driver) == (128, 16, 1)
    becomes(monkeypatch)
    for _ in range(2):
        tuned.launch(*tensors(4096))
        assert grid_of(driver) == (64, 16, 1)
    assert {type(row) for row in dispatcher_of(tuned)._memo.values()} == {tuple}


@pytest.mark.process
def test_a_process_that_is_initialised_alone_keeps_what_it_searched(
    tuned: Tunable, driver: Driver, searched: list[list[Config]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned.launch(*tensors(4096))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    for _ in range(3):
        tuned.launch(*tensors(4096))
    assert len(searched) == 1
    assert grid_of(driver) == (128, 16, 1)
    tuned.launch.__globals__["slow"] = lambda *args: pytest.fail("a known shape took the slow path")
    tuned.launch(*tensors(4096))


@pytest.mark.process
def test_b7_a_child_forked_during_a_search_does_not_wait_for_its_end(tuned: Tunable, driver: Driver) -> None:
    """B7: the thread that searches stayed in the parent. The limit of the search is 1000 s."""

    def launches() -> bool:
        tuned.launch(*tensors(4096))
        return grid_of(driver) == (128, 16, 1)

    assert right_in_a_fork(dispatcher_of(tuned)._search._turn.lock, launches, within_s=60)


# When it fails ---------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("out of memory"), ValueError("No valid config found")]
)
def test_b11_a_search_that_fails_falls_back_and_is_not_made_again(
    error: Exception, tuned: Tunable, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B11: out of memory, every config failing; remembered for the process, not for others."""
    made: list[int] = []

    def fail(*args: Any, **options: Any) -> Any:
        made.append(1)
        raise error

    monkeypatch.setattr("cuda.tile.tune.exhaustive_search", fail)
    tuned.launch(*tensors(4096))
    tuned.launch(*tensors(4000))
    assert made == [1]
    assert grid_of(driver) == (-(-4000 // 64), 16, 1)
    assert not list((folder_here() or Path()).rglob("*.json"))


@pytest.mark.process
def test_b11_after_a_search_in_vain_another_process_s_winner_serves_the_next_shape(
    tuned: Tunable, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B11: the fallback is remembered for the shape that was searched for, not for its bucket for ever."""

    def fail(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("cuda.tile.tune.exhaustive_search", fail)
    monkeypatch.setattr(cache, "_SEEN_AFTER_S", 0.0)
    tuned.launch(*tensors(4096))
    assert grid_of(driver) == (64, 16, 1)
    live = _live(tuned)
    bucket = Problem({"dtype": "bfloat16", "M": 4096, "N": 1024})
    device = dispatcher_of(tuned).machine(0, runtime()).device
    UserCache(folder_here()).write(live._winners.key(device.arch, device.name, bucket), AT_64, 10.0)
    time.sleep(0.05)
    tuned.launch(*tensors(4000))
    assert grid_of(driver) == (125, 16, 1)
    tuned.launch(*tensors(4096))
    assert grid_of(driver) == (64, 16, 1)


@pytest.mark.process
def test_b11_a_search_that_uses_up_its_time_falls_back(
    tuned: Tunable, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B11: the clock runs out after the first config; what was measured until then decides nothing."""
    clock = iter([0.0] * 9 + [1e9] * 1000)  # the start, and the first config's eight runs
    monkeypatch.setattr(trial.time, "monotonic", lambda: next(clock))
    tuned.launch(*tensors(4096))
    assert grid_of(driver) == (64, 16, 1)


@pytest.mark.process
def test_b11_only_verified_configs_are_searched_in_process(
    driver: Driver, searched: list[list[Config]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B11: without a table, and with a predicted one, nothing runs in this process but what is chosen."""
    driver.free_memory = 2 << 30
    monkeypatch.setenv(environment.SEARCH_SECONDS, "1000")
    in_child: list[list[Config]] = []

    def child(tunable: Tunable, problem: Problem, configs: list[Config], **options: Any) -> Any:
        in_child.append(list(configs))
        return configs[-1], 5.0

    monkeypatch.setattr(search.child, "fastest", child)
    dataclasses.replace(scale, tables=tmp_path / "none").launch(*tensors(64))
    predicted = scale_table()
    for place in range(len(predicted.entries)):
        predicted = with_entry(predicted, place, evidence="predicted")
    write(tmp_path / "named", predicted)
    monkeypatch.setenv(environment.TABLES, str(tmp_path / "named"))
    dataclasses.replace(scale, tables=tmp_path / "none").launch(*tensors(4096))
    assert searched == []
    assert [len(configs) for configs in in_child] == [8, 8]
    assert all(configs[0] == DEFAULT for configs in in_child)
    assert {AT_64, AT_256} <= set(in_child[1])
    assert not any(ILLEGAL.constants == config.constants for configs in in_child for config in configs)


@pytest.fixture
def in_child(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """The numbers of candidates and the limits of searches in a made-up child; the last candidate wins."""
    made: list[tuple[int, float]] = []

    def fastest(
        tunable: Tunable, problem: Problem, configs: list[Config], *, limit_s: float, **_: Any
    ) -> tuple[Config, float]:
        made.append((len(configs), limit_s))
        return configs[-1], 5.0

    driver.free_memory = 2 << 30
    monkeypatch.setattr(search.child, "fastest", fastest)
    monkeypatch.setattr(search.child, "_spent_s", [0.0])
    monkeypatch.setattr(search, "_announced", [])
    return made


@pytest.mark.process
def test_without_a_table_a_bucket_is_searched_once_in_a_child_and_one_warning_says_how_to_avoid_it(
    in_child: list[tuple[int, float]], tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            unknown = dataclasses.replace(scale, tables=tmp_path)
            for rows in (64, 60, 256):
                unknown.launch(*tensors(rows))
    assert in_child == [(8, 15.0)] * 2
    told = [str(one.message) for one in caught if "is searched live" in str(one.message)]
    assert len(told) == 1
    assert told[0].startswith("no table for sm90 holds measured configs of scale: each bucket that misses is")
    assert "for 15 s at most and 120 s in the process" in told[0]
    assert "aot-tune tune scale --arch sm90" in told[0]
    assert told[0].endswith("AOT_TUNE_SEARCH_SECONDS=0")


@pytest.mark.process
@pytest.mark.parametrize(
    ("seconds", "spent", "made"),
    [
        ("0", 0.0, []),
        ("1", 0.0, []),  # no room for a process that imports torch
        ("9.5", 0.0, [(3, 9.5)]),
        ("", 112.0, [(2, 8.0)]),
        ("", 119.0, []),
        ("", 130.0, []),
        ("1000", 130.0, [(8, 870.0)]),
    ],
)
def test_the_time_of_a_search_in_a_child_has_the_limits_of_the_variable_and_of_the_process(
    seconds: str, spent: float, made: list[tuple[int, float]], in_child: list[tuple[int, float]],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(environment.SEARCH_SECONDS, seconds)
    search.child._spent_s[0] = spent
    unknown = dataclasses.replace(scale, tables=tmp_path)
    unknown.launch(*tensors(64))
    assert in_child == made
    choice = dispatcher_of(unknown)._plans.popitem()[1].choice
    assert (choice.source == "searched") is bool(made)


@pytest.mark.process
@pytest.mark.parametrize("why", ["no compiler", "memory", "primed", "rank", "capture", "forbidden"])
def test_the_default_is_taken_at_once_where_no_child_may_search(
    why: str, in_child: list[tuple[int, float]], driver: Driver, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    unknown = dataclasses.replace(scale, tables=tmp_path)
    unknown.launch(*tensors(64), config=DEFAULT)  # so that its code is loaded
    if why == "no compiler":
        monkeypatch.setattr(search.cutile, "may_have_compiler", lambda: False)
    elif why == "memory":
        driver.free_memory = (2 << 30) - 1
    elif why == "primed":
        monkeypatch.setattr("aot_tune.serve.launch.dispatch.is_primed", lambda: True)
    elif why == "capture":
        driver.capturing = True
    else:
        monkeypatch.setenv(*{"rank": ("PMI_SIZE", "2"), "forbidden": (environment.DISABLE, "1")}[why])
    unknown.launch(*tensors(64))
    assert (in_child, grid_of(driver)) == ([], (4, 16, 1))


@pytest.mark.process
def test_the_default_is_taken_at_once_while_another_process_searches_and_the_winner_later(
    in_child: list[tuple[int, float]], driver: Driver, tmp_path: Path
) -> None:
    other, unknown = UserCache(folder_here()), dataclasses.replace(scale, tables=tmp_path)
    key = dispatcher_of(unknown)._winners.key(SM90, "NVIDIA H200", Problem({"of": "another kernel"}))
    with other.locked(key, 0, of_children=True) as state:
        assert state == "held"
        unknown.launch(*tensors(64))
        assert (in_child, grid_of(driver)) == ([], (4, 16, 1))
    unknown.launch(*tensors(60))  # of the same bucket
    assert in_child == [(8, 15.0)]
    assert dispatcher_of(unknown)._plans.popitem()[1].choice.source == "searched"


@pytest.mark.process
def test_b12_a_process_makes_a_bounded_number_of_searches(
    tuned: Tunable, searched: list[list[Config]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B12: traffic of ever new shapes does not become a sweep."""
    monkeypatch.setattr(search, "_MOST_SEARCHES", 2)
    for rows in (2048, 4096, 8192, 16384):
        tuned.launch(*tensors(rows))
    assert len(searched) == 2


@pytest.mark.process
@pytest.mark.parametrize("seconds", ["1000", pytest.param("0.001", marks=pytest.mark.slow)])
def test_b12_thousands_of_new_shapes_leave_nothing_in_memory(
    tuned: Tunable, driver: Driver, monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    """B12: whatever is kept by shape has a bound, told by the memory of the second thousand.

    With time for searches, of which there are few, and with time for none.
    """
    monkeypatch.setenv(environment.SEARCH_SECONDS, seconds)
    for bound in (
        "serve.search.live.MOST_REMEMBERED",
        "serve.search.cache.MOST_REMEMBERED",
        "serve.launch.dispatch._MOST_PLANS",
        "choose.nearest._MOST_KEPT",
        "choose.points._MOST_KEPT",
    ):
        monkeypatch.setattr(f"aot_tune.{bound}", 64)
    served = dispatcher_of(tuned)
    sizes = iter(range(1, 10_000))

    def traffic(count: int) -> None:
        for cols in itertools.islice(sizes, count):
            # An Exact axis: each is a bucket of its own.
            tuned.launch(*(torch.empty(100, 16 * cols, dtype=torch.bfloat16, device="meta") for _ in "xy"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traffic(1000)
        gc.collect()
        tracemalloc.start()
        try:
            traffic(200)  # what the first launches under tracemalloc make anew
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            driver.launches.clear()
            traffic(1000)
            driver.launches.clear()
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert after - before < 50_000  # 50 bytes a shape; a memo without a bound keeps some hundreds
    assert len(served._winners.known) <= 64
    assert len(served._search._tried) <= 64


def test_b12_a_winner_that_no_file_holds_outlasts_thousands_of_other_shapes(
    tuned: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B12: room is made by forgetting files that cannot be used; shapes without a file are not kept."""

    class Everywhere(frozenset[str]):
        def __contains__(self, _: object) -> bool:
            return True

    monkeypatch.setattr(cache, "MOST_REMEMBERED", 64)
    live = _live(tuned)
    mine = Problem({"dtype": "bfloat16", "M": 4096, "N": 1024})
    live._winners.known[SM90, "NVIDIA H200", mine] = AT_64
    for cols in range(1, 100):
        assert live._winners.of(SM90, "NVIDIA H200", mine.replaced(N=16 * cols + 1)) is None
    assert len(live._winners.known) == 1
    monkeypatch.setattr(UserCache, "places", lambda cache, folder: Everywhere({"a"}))
    for cols in range(1, 500):
        assert live._winners.of(SM90, "NVIDIA H200", mine.replaced(N=16 * cols + 1)) is None
        assert len(live._winners.known) <= 64
    assert live._winners.of(SM90, "NVIDIA H200", mine) == AT_64
    for cols in range(64):  # and even winners are not kept without end
        live._winners.known[SM90, "NVIDIA H200", mine.replaced(N=cols + 10_000)] = AT_64
    live._winners.of(SM90, "NVIDIA H200", mine.replaced(N=7))
    assert len(live._winners.known) == 1


# Sharing ---------------------------------------------------------------------------------------------------


def _search_cold(tunable: Tunable, folder: Path, number: int) -> None:
    live = _live(tunable)

    def run() -> tuple[Config, float]:
        (folder / f"searched.{number}").write_text("")
        time.sleep(0.5)
        return AT_64, 10.0

    key = live._winners.key(SM90, "NVIDIA H200", Problem({"dtype": "bfloat16", "M": 4096, "N": 1024}))
    found = live._shared(key, run, 20.0, lambda config: True)
    (folder / f"found.{number}").write_text(str(found))


@pytest.mark.process
def test_b6_of_eight_processes_that_start_cold_one_searches_and_all_have_its_winner(
    tuned: Tunable, tmp_path: Path
) -> None:
    """B6: the others wait, within the limit."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_search_cold, args=(tuned, tmp_path, number)) for number in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(list(tmp_path.glob("searched.*"))) == 1
    assert {path.read_text() for path in tmp_path.glob("found.*")} == {str(AT_64)}
    assert len(list(tmp_path.glob("found.*"))) == 8


@pytest.mark.process
def test_b5_without_a_cache_the_winner_serves_this_process(
    tuned: Tunable,
    driver: Driver,
    searched: list[list[Config]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """B5: one warning; the search is made and its result used."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(environment.CACHE_DIR, str(tmp_path / "file" / "below"))
    cache._warned.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tuned.launch(*tensors(4096))
        tuned.launch(*tensors(3000))
    assert sum(one.category is CacheWarning for one in seen) == 1
    assert len(searched) == 1
    assert grid_of(driver) == (-(-3000 // 32), 16, 1)


def test_b8_a_search_is_made_where_no_lock_can_be_had(
    tuned: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B8: work may be done twice."""
    monkeypatch.setattr(
        cache, "_acquired", lambda path, timeout: (_ for _ in ()).throw(OSError("no locks here"))
    )
    cache._warned.clear()
    live = _live(tuned)
    key = live._winners.key(SM90, "NVIDIA H200", Problem({"dtype": "bfloat16", "M": 4096, "N": 1024}))
    with pytest.warns(CacheWarning, match="no locks here"):
        assert live._shared(key, lambda: (AT_64, 10.0), 1.0, lambda config: True) == AT_64
    assert UserCache(folder_here()).read(key) == AT_64


def test_a_lock_held_by_another_for_too_long_means_no_search(tuned: Tunable) -> None:
    live = _live(tuned)
    key = live._winners.key(SM90, "NVIDIA H200", Problem({"dtype": "bfloat16", "M": 4096, "N": 1024}))
    run: Callable[[], Any] = lambda: pytest.fail("searched")  # noqa: E731
    with UserCache(folder_here()).locked(key, 5.0) as state:
        assert state == "held"
        assert live._shared(key, run, 0.2, lambda config: True) is None
