"""The ways that servers run: forked workers, many threads, several ranks, GPUs of different archs."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aot_tune import environment
from aot_tune.nvidia.nvml import Gpu
from aot_tune.serve import loader
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from tests.support.driver import Driver, FakeTensor
from tests.support.samples import DEFAULT, SM90, scale, scale_table, write

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SM100 = Arch.parse("sm100")
AT_64, AT_256 = scale_table().portfolio


def tensors(rows: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(rows, 1024, dtype=torch.bfloat16, device="meta") for _ in range(2))


@pytest.fixture
def tuned(driver: Driver, tmp_path: Path) -> Tunable:
    write(tmp_path, scale_table())
    return dataclasses.replace(scale, tables=tmp_path)


def test_workers_forked_from_a_server_launch_what_it_had_launched_and_what_it_had_not(
    tuned: Tunable, driver: Driver
) -> None:
    tuned.launch(*tensors(64))
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for rows in (64, 256, 100):
                    tuned.launch(*tensors(rows))
                grids = [one.grid[0] for one in driver.launches]
                code = 0 if grids[:3] == [2, 2, 4] and len(grids) == 4 else 2
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    tuned.launch(*tensors(256))
    assert len(driver.launches) == 2


def test_a_forked_child_loads_while_another_thread_of_its_parent_holds_the_lock() -> None:
    code = """
import os, threading
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.serve.launch.dispatch import SLOW_PATH
from tests.support.samples import SM90, scale
held, go = threading.Event(), threading.Event()
def hold():
    with SLOW_PATH.lock:
        held.set(); go.wait()
thread = threading.Thread(target=hold); thread.start(); held.wait()
child = os.fork()
if child == 0:
    index = dispatcher_of(scale).load(SM90)
    os._exit(0 if index.tables == {} else 1)
more = os.waitpid(child, 0)[1]
go.set(); thread.join()
"""
    program = "import warnings; warnings.simplefilter('ignore')\n" + code + "print(more)"
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.strip() == "0"


def test_a_forked_child_compiles_while_a_thread_of_its_parent_does_or_imports() -> None:
    code = """
import os, signal, sys, threading
import cuda.tile
import aot_tune.nvidia.cutile
inside, go = threading.Event(), threading.Event()

class Slow:
    def find_spec(self, name, path, target=None):
        if "cuda.tile._compile" in sys.modules and name.startswith("cuda.tile."):
            inside.set(); go.wait()

def forked(work):
    child = os.fork()
    if child == 0:
        signal.alarm(10); work(); os._exit(0)
    return os.waitpid(child, 0)[1]

def compiling():
    import cuda.tile._compile
    return cuda.tile._compile

sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=compiling); thread.start(); inside.wait()
threading.Timer(0.3, go.set).start()
codes = [forked(compiling)]
thread.join(); inside.clear(); go.clear()
def compile_one():
    with compiling()._compiler_lock:
        inside.set(); go.wait()
thread = threading.Thread(target=compile_one); thread.start(); inside.wait()
codes.append(forked(lambda: compiling()._compiler_lock.acquire()))
go.set(); thread.join()
print(codes)
"""
    program = "import warnings; warnings.simplefilter('ignore')\n" + code
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert told.stdout.strip() == "[0, 0]"


@pytest.mark.parametrize("rows", [64, 100], ids=["the edge of a bucket", "a size inside, by the rule"])
def test_a_worker_forked_while_a_thread_of_the_server_resolves_launches(
    rows: int, tuned: Tunable, driver: Driver
) -> None:
    inside, go = threading.Event(), threading.Event()
    go.set()  # while it is declared

    def slow(config: object, problem: object) -> int:
        inside.set()
        go.wait(60)
        return 1

    held = dataclasses.replace(tuned, tiles=slow)
    inside.clear()
    go.clear()
    thread = threading.Thread(target=lambda: held.launch(*tensors(100)))
    thread.start()
    assert inside.wait(30)
    try:
        assert forked(lambda: tuned.launch(*tensors(rows))) == 0
    finally:
        go.set()
        thread.join()


def test_workers_forked_while_threads_ask_for_configs_get_theirs(tuned: Tunable, driver: Driver) -> None:
    done = threading.Event()

    def ask(first: int, tunable: Tunable = tuned) -> None:
        for rows in range(first, 2**20, 7):
            if done.is_set():
                return
            fresh = dataclasses.replace(tunable)  # the rules of its buckets are made anew
            dispatcher_of(fresh).choice(SM90, tunable.problem_of(*tensors(rows % 250 + 1)))

    def ask_a_few() -> None:
        for rows in (3, 100, 200):
            dispatcher_of(tuned).choice(SM90, tuned.problem_of(*tensors(rows)))

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert [forked(ask_a_few) for _ in range(20)] == [0] * 20
    finally:
        done.set()
        for thread in threads:
            thread.join()


def forked(work: Callable[[], None], limit_s: int = 30) -> int:
    """Do something in a forked child, which is killed when it takes longer; its exit code, 0 if it did it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(limit_s)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_threads_resolve_and_launch_at_once_and_a_fresh_one_joins_them(
    tuned: Tunable, driver: Driver
) -> None:
    driver.devices = 2
    failures: list[BaseException] = []
    begun = threading.Event()

    def work(seed: int) -> None:
        try:
            for rows in range(33 + seed, 500, 61):
                for device in (0, 1):
                    tuned.launch(*(FakeTensor((rows, 1024), torch.bfloat16, device) for _ in range(2)))
                begun.set()
        except BaseException as error:
            failures.append(error)
            begun.set()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    fresh = threading.Thread(target=work, args=(7,))
    fresh.start()
    for thread in (*threads, fresh):
        thread.join()
    assert failures == []
    each = sum(len(range(33 + seed, 500, 61)) for seed in (*range(6), 7))
    assert sorted(one.device for one in driver.launches) == [0] * each + [1] * each
    alone = dispatcher_of(dataclasses.replace(tuned))
    for (_, problem, _), plan in dispatcher_of(tuned)._plans.items():
        assert plan.choice.config == alone.choice(SM90, problem).config


def test_gpus_of_different_archs_in_one_process_take_their_own_tables(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row B3 as well: a table of another arch is read for no GPU but its own."""
    table = scale_table()
    write(tmp_path, table)
    entries = tuple(dataclasses.replace(entry, config=DEFAULT, points=()) for entry in table.entries)
    write(tmp_path, dataclasses.replace(table, arch=SM100, entries=entries))
    driver.devices = 2
    driver.capability_of[1] = (10, 0)
    gpus = tuple(Gpu(index=n, name="GPU", arch=a, uuid=f"{n}") for n, a in enumerate((SM90, SM100)))
    monkeypatch.setattr(loader, "gpus", lambda: gpus)
    tunable = dataclasses.replace(scale, tables=tmp_path)
    for _ in range(2):
        for device in (0, 1):
            tunable.launch(*(FakeTensor((256, 1024), torch.bfloat16, device) for _ in range(2)))
    rows = [-(-256 // int(config["tile_m"])) for config in (AT_256, DEFAULT)]
    assert [(one.device, one.grid[0]) for one in driver.launches] == [(0, rows[0]), (1, rows[1])] * 2


def test_b10_two_real_ranks_choose_alike_search_nothing_and_read_no_cache(tmp_path: Path) -> None:
    """B10: with caches of their own, and time for any search."""
    write(tmp_path / "tables", scale_table())
    variables = {name: value for name, value in os.environ.items() if name not in environment.DESCRIPTIONS}
    variables[environment.SEARCH_SECONDS] = "100"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.children.one_rank", str(n), str(tmp_path / "store"),
             str(tmp_path / "tables")],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**variables, environment.CACHE_DIR: str(tmp_path / f"cache{n}")},
        )
        for n in range(2)
    ]  # fmt: skip
    for one in ranks:
        out, err = one.communicate(timeout=120)
        assert one.returncode == 0, err[-2000:]
        told = json.loads(out.splitlines()[-1])
        assert told["equal"]
        assert told["different"] >= 4
        assert told["read"] == []
    assert list(tmp_path.glob("cache*")) == []
