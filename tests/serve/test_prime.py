"""Priming: after it no launch of these shapes compiles, loads, reads a file or searches. Stand-in driver."""

from __future__ import annotations

import builtins
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aot_tune
from aot_tune import environment
from aot_tune.errors import LaunchError, MissError, UsageError
from aot_tune.serve import prime as priming
from aot_tune.serve import rank
from aot_tune.serve.launch.dispatch import Dispatcher, dispatcher_of
from aot_tune.serve.prime import Progress
from aot_tune.tunable import Tunable
from aot_tune.values.problem import Problem
from tests.support.driver import Driver
from tests.support.samples import DEFAULT, SM90, _make_args, scale, scale_table, write

AT_64, AT_256 = scale_table().portfolio

pytestmark = pytest.mark.filterwarnings(
    "ignore::aot_tune.errors.MissWarning", "ignore::aot_tune.errors.TableWarning"
)


def tensors(rows: int, cols: int = 1024, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(rows, cols, dtype=dtype, device="meta") for _ in range(2))


def _on_meta(problem: Problem, device: object, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _make_args(problem, "meta", seed)  # the stand-in's GPU 0


@pytest.fixture(autouse=True)
def _not_primed() -> Iterator[None]:
    yield
    rank.set_primed(False)


@pytest.fixture
def tuned(driver: Driver, tmp_path: Path) -> Tunable:
    write(tmp_path, scale_table())
    return dataclasses.replace(scale, tables=tmp_path, make_args=_on_meta)


def refuse(what: str) -> Callable[..., Any]:
    return lambda *args, **options: pytest.fail(what)


@pytest.mark.process
def test_after_it_no_launch_of_a_size_in_a_declared_bucket_loads_compiles_or_reads(
    tuned: Tunable, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    aot_tune.prime(tuned)
    loaded = len(driver.compiled)
    driver.launches.clear()
    monkeypatch.setattr(builtins, "open", refuse("a file was opened"))
    monkeypatch.setattr(os, "open", refuse("a file was opened"))
    monkeypatch.setattr("aot_tune.nvidia.cutile.with_hints", refuse("a kernel was made"))
    # Every size of the declared buckets: 1, 33 to 64, 129 to 256.
    sizes = [1, *range(33, 65), *range(129, 257)]
    for rows in sizes:
        tuned.launch(*tensors(rows))
    assert len(driver.launches) == len(sizes)
    assert len(driver.compiled) == loaded


@pytest.mark.process
def test_the_first_launch_of_a_declared_problem_finds_its_plan_ready(
    tuned: Tunable, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    aot_tune.prime(tuned)
    monkeypatch.setattr(Dispatcher, "_plan", refuse("a plan was made"))
    monkeypatch.setattr("aot_tune.serve.launch.dispatch.follow_problem", refuse("the slow path was taken"))
    driver.launches.clear()
    for rows, config in ((1, DEFAULT), (64, AT_64), (256, AT_256)):
        tuned.launch(*tensors(rows))
        assert driver.launches[-1].grid[0] == -(-rows // int(config["tile_m"]))


@pytest.mark.process
def test_the_smallest_problem_of_each_signature_is_launched(tuned: Tunable, driver: Driver) -> None:
    done = aot_tune.prime(tuned)
    symbols = [launch.symbol for launch in driver.launches]
    assert done.loaded == len(symbols) == len(driver.compiled)
    assert done.compiled == done.loaded  # there is no archive
    assert done.plans == 3
    # Three configs, and sizes of M: 1, a multiple of 16, no such multiple.
    assert len(set(symbols)) == 9
    for launch in driver.launches:
        assert launch.grid in {(1, 1, 1), (2, 1, 1)}  # N shrunk from 1024 to 16, M to 1, 16, or 31 at most
    assert driver.synchronized == [0]


@pytest.mark.process
def test_what_this_gpu_is_too_small_for_is_not_primed(tuned: Tunable, driver: Driver) -> None:
    def fits(config: Any, device: Any, problem: Problem) -> bool | str:
        return config != AT_256 and (config != AT_64 or problem.size("M") > 20 or "too few rows")

    small = dataclasses.replace(tuned, fits=fits)
    done = aot_tune.prime(small)
    assert done.loaded == len(driver.launches) < 9
    loaded = len(driver.compiled)
    for rows in (1, 33, 48, 64, 200, 256):
        small.launch(*tensors(rows))
    assert len(driver.compiled) == loaded


@pytest.mark.process
def test_exactly_the_problems_that_are_named_are_primed(tuned: Tunable, driver: Driver) -> None:
    done = aot_tune.prime(
        tuned, problems={"scale": [{"dtype": "bfloat16", "M": range(60, 63), "N": [1024, 2048]}]}
    )
    assert done.plans == 6
    assert done.loaded == 1  # one config and signature serve all of them
    aot_tune.prime(tuned, problems={"scale": [{"dtype": "float32", "M": 64, "N": 1024}]})
    before = len(driver.compiled)
    tuned.launch(*tensors(64, dtype=torch.float32))
    assert len(driver.compiled) == before


@pytest.mark.process
def test_a_miss_afterwards_takes_the_nearest_entry_and_is_not_searched(
    tuned: Tunable, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.SEARCH_SECONDS, "1000")
    monkeypatch.setattr("cuda.tile.tune.exhaustive_search", refuse("it searched"))
    aot_tune.prime(tuned)
    tuned.launch(*tensors(4096))
    plan = next(p for key, p in dispatcher_of(tuned)._plans.items() if key[1]["M"] == 4096)
    assert plan.choice.source == "far"


@pytest.mark.process
def test_b9_after_it_hit_nearest_and_miss_launch_during_capture(
    tuned: Tunable, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B9: nothing is searched, synchronised, compiled or loaded."""
    monkeypatch.setenv(environment.SEARCH_SECONDS, "1000")
    monkeypatch.setattr("cuda.tile.tune.exhaustive_search", refuse("it searched"))
    aot_tune.prime(tuned)
    driver.synchronized.clear()
    loaded, driver.capturing = len(driver.compiled), True
    for rows in (64, 256, 250, 100, 512, 4096, 4095):  # hits, nearest, misses
        tuned.launch(*tensors(rows))
    assert len(driver.compiled) == loaded
    assert driver.synchronized == []


@pytest.mark.process
def test_b9_what_was_not_primed_is_refused_during_capture_and_the_error_names_prime(
    tuned: Tunable, driver: Driver
) -> None:
    """B9: float32 is another signature."""
    aot_tune.prime(tuned)
    driver.launches.clear()
    driver.capturing = True
    with pytest.raises(LaunchError, match=r"graph capture.*aot_tune\.prime\(.*the declaration of scale"):
        tuned.launch(*tensors(64, dtype=torch.float32))
    assert driver.launches == []


@pytest.mark.process
def test_with_on_miss_error_it_compiles_and_nothing_does_afterwards(
    tuned: Tunable, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.ON_MISS, "error")
    aot_tune.prime(tuned, problems={"scale": [{"dtype": "bfloat16", "M": 64, "N": 1024}]})
    aot_tune.prime(tuned, problems={"scale": [{"dtype": "bfloat16", "M": 256, "N": 1024}]})
    launched, compiled = len(driver.launches), len(driver.compiled)
    tuned.launch(*tensors(64))
    with pytest.raises(MissError, match=r"scale would be compiled for the signature \S+ on sm90 after"):
        tuned.launch(*(one[:, ::2] for one in tensors(64, 2048)))
    assert (len(driver.launches), len(driver.compiled)) == (launched + 1, compiled)


def test_it_is_refused_during_capture(tuned: Tunable, driver: Driver) -> None:
    driver.capturing = True
    with pytest.raises(LaunchError, match="call it before the capture begins"):
        aot_tune.prime(tuned)
    assert driver.launches == []
    assert not rank.is_primed()


@pytest.mark.process
def test_progress_is_told_of_each_signature(tuned: Tunable) -> None:
    told: list[Progress] = []
    done = aot_tune.prime(tuned, progress=told.append)
    assert told == [Progress(kernel="scale", done=n + 1, total=9) for n in range(9)]
    assert done.loaded == 9


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        ({"gemm": []}, "problems names the kernel 'gemm'; the declarations given are scale"),
        ({"scale": [{"dtype": "bfloat16", "M": 64}]}, "state it like the declared dtype=bfloat16 M=1 N=1024"),
        ({"scale": [{"dtype": "bfloat16", "M": "64", "N": 1}]}, "state it like the declared"),
        ({"scale": [{"dtype": "bfloat16", "M": 0, "N": 1}]}, "a size of 0 is never launched"),
    ],
)
def test_problems_that_no_call_poses_are_refused(
    tuned: Tunable, driver: Driver, problems: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        aot_tune.prime(tuned, problems=problems)
    assert driver.launches == []


def test_what_is_no_declaration_is_refused(tuned: Tunable, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="prime takes declarations"):
        aot_tune.prime(tensors)  # type: ignore[arg-type]
    monkeypatch.setattr(priming, "is_replaying", lambda: False)
    with pytest.raises(UsageError, match=r"no declaration.*or call aot_tune.install\(\) before"):
        aot_tune.prime()
    assert not rank.is_primed()


def test_without_a_declaration_a_server_of_recorded_kernels_ends_its_warm_up(driver: Driver) -> None:

    aot_tune.install()
    try:
        done = aot_tune.prime()
        assert (done.loaded, done.compiled, done.plans, rank.is_primed()) == (0, 0, 0, True)
    finally:
        aot_tune.uninstall()


def test_a_gpu_that_is_not_there_is_refused(tuned: Tunable) -> None:
    with pytest.raises(LaunchError, match="there is no GPU 3"):
        aot_tune.prime(tuned, device="cuda:3")
    with pytest.raises(UsageError, match="device='cpu' is not a GPU"):
        aot_tune.prime(tuned, device="cpu")


@pytest.mark.process
def test_a_rank_primes_what_it_will_launch(
    tuned: Tunable, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    aot_tune.prime(tuned)
    loaded = len(driver.compiled)
    for rows in (1, 64, 200, 256):
        tuned.launch(*tensors(rows))
    assert len(driver.compiled) == loaded


@pytest.mark.process
def test_a_kernel_without_a_table_is_primed_with_its_default(driver: Driver, tmp_path: Path) -> None:
    tunable = dataclasses.replace(scale, tables=tmp_path, make_args=_on_meta)
    assert aot_tune.prime(tunable).loaded == 3
    assert dispatcher_of(tunable).choice(SM90, tunable.buckets[0]).config == DEFAULT


@pytest.mark.process
def test_naming_it_imports_neither_torch_nor_cutile_before_it_is_used() -> None:
    code = "import sys, aot_tune; assert 'prime' in dir(aot_tune); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
