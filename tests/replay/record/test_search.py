"""A library's search, made on CPU tensors by configs that behave as scripted."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda.tile as ct
import pytest
import torch

from aot_tune.errors import NotRecordableError
from aot_tune.nvidia import cutile
from aot_tune.replay.answer.searches import SearchCall
from aot_tune.replay.problem import Fixed, Varying, Whole
from aot_tune.replay.record.journal import SearchJournal
from aot_tune.replay.record.search import LibrarySearch, Searched, as_result, identified, raise_as_cutile
from aot_tune.replay.spelling import texts_of
from aot_tune.tuner.sweep.journal import Journal
from aot_tune.values.device import Device
from tests.support.driver import Driver
from tests.support.samples import SM90
from tests.support.tuned_once import SPACE, scale_kernel
from tests.support.tuned_programs import ROOT

DEVICE = Device.reference(SM90)


@ct.kernel
def add_scaled_kernel(x, out, n, factor, TILE: ct.Constant[int]):
    place = ct.bid(0)
    if place * TILE < n:
        total = ct.load(out, (place,), (TILE,)) + ct.load(x, (place,), (TILE,)) * factor
        ct.store(out, (place,), total)


class Machine:
    """Runs configs on CPU tensors: `wrong`, `idle` and `raises` name tiles; times are by tile."""

    def __init__(self) -> None:
        self.times = {16: 50.0, 32: 20.0, 64: 30.0}
        self.wrong: set[int] = set()
        self.idle: set[int] = set()
        self.raises: set[int] = set()
        self.launched: list[int] = []
        self.timed: list[int] = []

    def launch(self, stream: Any, grid: tuple[int, ...], kernel: Any, args: tuple[Any, ...]) -> None:
        x, out, _n, factor, tile = args
        self.launched.append(tile)
        if tile in self.raises:
            out[0] = 5.0
            raise RuntimeError(f"no room for {tile}")
        if tile in self.idle:
            return
        if cutile.python_function(kernel).__name__ == "scale_kernel":
            out.copy_(x * factor)
        else:
            out.add_(x * factor)  # in place: right only on what the tensor held before
        if tile in self.wrong:
            out[-1] = 7.0

    def search(self, configs: Any, stream: Any, *, args_of: Callable[..., Any], **_: Any) -> Any:
        _x, out, _n, _factor, tile = args_of(configs[0])
        out.add_(1)  # a timed launch leaves what it likes
        self.timed.append(tile)
        best = SimpleNamespace(mean_us=self.times[tile], error_margin_us=0.1, num_samples=5)
        return SimpleNamespace(best=best)


@pytest.fixture
def machine(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(cutile, "launch", machine.launch)
    monkeypatch.setattr(cutile, "search", machine.search)
    return machine


def call(x: torch.Tensor, out: torch.Tensor, space: Any = SPACE, **changes: Any) -> SearchCall:
    values: dict[str, Any] = {
        "space": space,
        "stream": 0,
        "grid_fn": lambda config: (-(-len(x) // config.TILE), 1, 1),
        "kernel": add_scaled_kernel,
        "args_fn": lambda config: (x, out, len(x), 2.0, config.TILE),
        "hints_fn": lambda config: {} if config.occupancy is None else {"occupancy": config.occupancy},
        "options": {},
    }
    return SearchCall(**{**values, **changes})


def run(asked: SearchCall, folder: Path, key: str = "key") -> Searched:
    known = identified(asked, texts_of(asked.space), DEVICE)
    with Journal.open(folder / "journal.jsonl", {"gpu": "x"}) as journal:
        return LibrarySearch(asked, known, SearchJournal(journal, key), 0).run()


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(64.0), torch.full((64,), 3.0)


@ct.kernel
def split_kernel(x, parts, n, PARTS: ct.Constant[int], TILE: ct.Constant[int]):
    """Each block adds its part of every sum, and stores it after the parts of the blocks before."""
    part = ct.bid(0)
    total = ct.full((TILE,), 0.0, dtype=ct.float32)
    for i in range(part, n, PARTS):
        total = total + ct.load(x, (i, 0), (1, TILE)).reshape((TILE,))
    ct.store(parts, (part,), total)


def test_configs_that_store_other_parts_of_the_same_sums_are_right(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(stream: Any, grid: tuple[int, ...], kernel: Any, args: tuple[Any, ...]) -> None:
        x, parts, _n, count, tile = args
        for part in range(count - (count == 3)):  # one forgets its last part
            parts[part * tile : (part + 1) * tile] = x[part::count].sum(0)

    def search(configs: Any, stream: Any, *, args_of: Callable[..., Any], **_: Any) -> Any:
        best = SimpleNamespace(mean_us=1.0 / args_of(configs[0])[3], error_margin_us=1e-6, num_samples=5)
        return SimpleNamespace(best=best)

    monkeypatch.setattr(cutile, "launch", launch)
    monkeypatch.setattr(cutile, "search", search)
    x, workspace = torch.rand(32, 8), torch.zeros(64)
    asked = call(
        x,
        workspace,
        [SimpleNamespace(PARTS=parts) for parts in (2, 1, 8, 3)],
        grid_fn=lambda config: (config.PARTS, 1, 1),
        kernel=split_kernel,
        args_fn=lambda config: (x, workspace, 32, config.PARTS, 8),
        hints_fn=None,
    )
    found = run(asked, tmp_path)
    assert (list(found.wrong), found.winner, found.in_parts) == ([3], 2, {"parts"})


def test_the_problem_is_what_does_not_vary_with_the_config() -> None:
    x, out = tensors()
    known = identified(call(x, out), texts_of(SPACE), DEVICE)
    assert known.problem.varying == (4,)
    assert known.problem.arguments[2:] == (Whole(64), known.problem.arguments[3], Varying())
    assert known.same_launches == 0
    twice = identified(call(x, out, [SPACE[0], SPACE[0], SPACE[1]]), (), DEVICE)
    assert twice.same_launches == 1
    assert twice.problem.arguments[4] == Fixed("16")


def test_the_fastest_wins_and_the_first_of_those_that_tie(machine: Machine, tmp_path: Path) -> None:
    found = run(call(*tensors()), tmp_path)
    assert found.winner == 3
    assert SPACE[found.winner] == SimpleNamespace(TILE=32, occupancy=None)
    machine.times[64] = 19.9
    assert run(call(*tensors()), tmp_path, "again").winner == 3
    machine.times[64] = 15.0
    assert run(call(*tensors()), tmp_path, "once more").winner == 6


def test_tensors_hold_what_they_held_before(machine: Machine, tmp_path: Path) -> None:
    x, out = tensors()
    run(call(x, out), tmp_path)
    assert out.tolist() == [3.0] * 64
    assert x.tolist() == list(range(64))


def test_a_config_that_computes_something_else_cannot_win(machine: Machine, tmp_path: Path) -> None:
    machine.wrong.add(32)
    found = run(call(*tensors()), tmp_path)
    assert sorted(found.wrong) == [3, 4, 5]
    assert "out differs from the first config's by" in found.wrong[3]
    assert SPACE[found.winner].TILE == 64
    result = as_result(call(*tensors()), found)
    assert [one[0].TILE for one in result.failures] == [32, 32, 32]


@pytest.mark.parametrize("held", ["the result", "anything"])
@pytest.mark.parametrize("kernel", [scale_kernel, add_scaled_kernel])
def test_outputs_are_compared_whatever_they_held_before_the_search(
    kernel: Any, held: str, machine: Machine, tmp_path: Path
) -> None:
    x, out = tensors()
    if kernel is add_scaled_kernel:
        x.zero_()  # adds nothing: the first launch changes nothing
    elif held == "the result":
        out.copy_(x * 2)
    before = out.clone()
    machine.wrong.add(32)
    machine.idle.add(64)
    found = run(call(x, out, kernel=kernel), tmp_path)
    assert {SPACE[at].TILE for at in found.wrong} == ({32, 64} if kernel is scale_kernel else {32})
    assert SPACE[found.winner].TILE != 32
    assert torch.equal(out, before)


def test_a_first_config_that_fails_leaves_the_next_what_was_there_before(
    machine: Machine, tmp_path: Path
) -> None:
    machine.raises.add(16)
    x, out = tensors()
    found = run(call(x, out), tmp_path)
    assert (sorted(found.failures), found.wrong) == ([0, 1, 2], {})
    assert out.tolist() == [3.0] * 64


def test_configs_that_fail_are_listed_as_cutile_lists_them(machine: Machine, tmp_path: Path) -> None:
    machine.raises |= {16, 64}
    asked = call(*tensors())
    result = as_result(asked, run(asked, tmp_path))
    assert (result.best.config, result.best.mean_us) == (SPACE[3], 20.0)
    assert len(result.successes) == 3
    assert result.failures[0] == (SPACE[0], RuntimeError, "no room for 16")
    assert "3 succeeded, 6 failed" in result.summary()


def test_a_space_that_fails_whole_raises_as_cutile_does(machine: Machine, tmp_path: Path) -> None:
    machine.raises |= {16, 32, 64}
    asked = call(*tensors())
    found = run(asked, tmp_path)
    with pytest.raises(
        ValueError, match=r"^No valid config found in search space\.\nConfig: .*\nRuntimeError"
    ):
        raise_as_cutile(asked, found.failures)


def test_an_interrupted_search_goes_on_where_it_was(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(call(*tensors()), tmp_path, "whole")
    timed = len(machine.timed)
    x, out = tensors()
    machine.timed.clear()
    search = machine.search

    def stop(*args: Any, **kwargs: Any) -> Any:
        if len(machine.timed) == 5:
            raise KeyboardInterrupt
        return search(*args, **kwargs)

    monkeypatch.setattr(cutile, "search", stop)
    with pytest.raises(KeyboardInterrupt):
        run(call(x, out), tmp_path, "stopped")
    monkeypatch.setattr(cutile, "search", search)
    assert out.tolist() == [3.0] * 64
    assert run(call(x, out), tmp_path, "stopped") == whole
    assert len(machine.timed) == timed


def test_a_config_that_ended_the_process_is_passed_over(machine: Machine, tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal.jsonl", {"gpu": "x"}) as journal:
        SearchJournal(journal, "key").begin(3)
    found = run(call(*tensors()), tmp_path)
    assert found.failures[3][1] == "it ended the process in an earlier run"
    assert found.winner == 4
    machine.launched.clear()
    assert run(call(*tensors()), tmp_path).winner == 4
    assert machine.launched == [16]


TWICE = """
import os, signal, threading
from aot_tune.replay.record.search import _on_termination

lock = threading.Lock()

def abandon():
    with lock:
        os.kill(os.getpid(), signal.SIGTERM)
        print("written", flush=True)

with _on_termination(abandon):
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.process
def test_a_second_sigterm_changes_nothing_while_the_journal_is_written() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWICE], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("written\n", -signal.SIGTERM)


def test_arguments_that_raise_for_one_config_are_its_failure(machine: Machine, tmp_path: Path) -> None:
    x, out = tensors()

    def args(config: Any) -> tuple[Any, ...]:
        if config.TILE == 32:
            raise MemoryError("too large")
        return (x, out, 64, 2.0, config.TILE)

    found = run(call(x, out, args_fn=args), tmp_path)
    assert (SPACE[found.winner].TILE, found.failures[3]) == (64, (MemoryError, "too large"))
    with pytest.raises(NotRecordableError, match="args_fn raises MemoryError: too large, and no"):
        identified(call(x, out, SPACE[3:6], args_fn=args), (), DEVICE)
