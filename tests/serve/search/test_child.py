"""A search in a process of its own: it is killed in time, and what it answers is checked."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aot_tune.declare.comparison import compare
from aot_tune.declare.declaration import Close
from aot_tune.serve.search import child, child_main
from aot_tune.values.problem import Problem
from tests.support.driver import Driver
from tests.support.samples import DEFAULT, SM90, SPACE, scale
from tests.support.wide_samples import row_sum

ROOT = str(Path(__file__).parents[3])
PROBLEM = Problem({"dtype": "bfloat16", "M": 64, "N": 1024})


def script(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture(autouse=True)
def _no_child(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(child, "_spent_s", [0.0])
    yield
    child._close()


ECHO = "import os, sys\nfor line in sys.stdin: print(os.getpid(), line.upper(), end='', flush=True)"


def ask(code: str, limit_s: float, monkeypatch: pytest.MonkeyPatch) -> bytes | None:
    monkeypatch.setattr(child, "command", lambda: script(code))
    return child._asked(b"abc", limit_s)


@pytest.mark.process
def test_a_child_answers_one_request_after_another_until_its_command_would_be_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert child.few(8.0) == 2
    first = ask(ECHO, 20, monkeypatch)
    assert first is not None
    assert first.endswith(b" ABC\n")
    assert child.few(8.0) == 8, "it has started"
    assert ask(ECHO, 20, monkeypatch) == first
    other = ask(f"{ECHO}  # from another folder", 20, monkeypatch)
    assert other is not None
    assert other != first
    assert _gone(int(first.split()[0]))


@pytest.mark.process
def test_a_fork_starts_a_child_of_its_own_and_leaves_its_parent_s(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ask(ECHO, 20, monkeypatch)
    reader, writer = os.pipe()
    if (fork := os.fork()) == 0:
        try:
            os.write(writer, ask(ECHO, 20, monkeypatch) or b"nothing")
            child._close()
        finally:
            os._exit(0)
    os.waitpid(fork, 0)
    theirs = os.read(reader, 100)
    assert theirs.endswith(b" ABC\n")
    assert theirs != first
    assert ask(ECHO, 20, monkeypatch) == first
    os.close(reader)
    os.close(writer)


@pytest.mark.process
@pytest.mark.parametrize(
    "code",
    [
        "import os; os.abort()",
        "raise SystemExit(1)",
        "print('half', end='')",
        "input(); import os; os.kill(os.getpid(), 9)",
    ],
)
def test_b11_a_child_that_fails_is_no_answer_and_the_next_search_starts_another(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B11: a fault in a config nobody checked ends the child and nothing else."""
    assert ask(code, 20, monkeypatch) is None
    assert (ask(ECHO, 20, monkeypatch) or b"").endswith(b"ABC\n")


@pytest.mark.process
def test_b11_a_child_that_hangs_is_killed_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B11: times out. One that is not killed answers in the end."""
    code = (
        "import subprocess, sys, time, pathlib\n"
        f"one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(one.pid))\n"
        "time.sleep(60); print('late')"
    )
    assert ask(code, 2, monkeypatch) is None
    assert child.seconds_left(15) == 15
    assert 0 < child.seconds_left(121) <= 119, "its time counts"
    grandchild = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if _gone(grandchild):
            return
        time.sleep(0.1)
    pytest.fail("what the child started is still running")


def test_the_searches_of_a_process_take_a_limited_time_together() -> None:
    child._spent_s[0] = 110.0
    assert child.seconds_left(15.0) == 10.0
    assert child.few(child.seconds_left(15.0)) == 4
    assert child.seconds_left(1000.0) == 890.0
    child._spent_s[0] = 125.0
    assert child.seconds_left(15.0) == 0.0


@pytest.mark.process
def test_no_child_is_asked_after_a_wait_of_the_time_limit_or_past_the_process_s_total(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other threads' searches may have taken the time since this one was begun."""
    held, ended = threading.Event(), threading.Event()

    def search() -> None:
        with child._turn.lock:
            held.set()
            ended.wait(20)

    other = threading.Thread(target=search)
    other.start()
    held.wait()
    threading.Timer(0.5, ended.set).start()
    assert ask(ECHO, 0.1, monkeypatch) is None
    other.join()
    child._spent_s[0] = child.TOTAL_S
    assert ask(ECHO, 20, monkeypatch) is None
    assert child._kept == []


@pytest.mark.process
@pytest.mark.parametrize(("limit_s", "code"), [(None, 0), (0.1, -signal.SIGALRM)], ids=["idle", "late"])
def test_a_child_searches_kernel_after_kernel_and_ends_by_itself_where_none_asks_or_it_is_late(
    limit_s: float | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        f"import sys, time; sys.path.insert(0, {ROOT!r})\n"
        "from aot_tune.serve.search import child_main\n"
        "child_main.search = lambda tunable, problem, configs, device: (\n"
        "    time.sleep(60 * device), (configs[-1], len(tunable.name)))[1]\n"
        "child_main._IDLE_S = 1.0\n"
        "child_main.main()"
    )
    monkeypatch.setattr(child, "command", lambda: script(program))
    for tunable in (scale, row_sum):
        problem = tunable.typical_problems[0]
        space = tunable.candidates(SM90, problem)[:3]
        winner = child.fastest(tunable, problem, space, device_index=0, limit_s=60)
        assert winner == (space[-1], len(tunable.name))
    [kept] = child._kept
    if limit_s is not None:
        request = {"module": "tests.support.samples", "kernel": "scale", "device": 1, "problem": {}}
        assert kept.ask(json.dumps({**request, "configs": [], "limit_s": limit_s}).encode(), 30) is None
    assert kept._process.wait(timeout=30) == code
    assert child._running() is None


@pytest.mark.process
def test_a_child_ends_with_its_parent() -> None:
    reader, writer = os.pipe()
    if (parent := os.fork()) == 0:
        ending = os.getpid()
        if os.fork() == 0:
            os.setsid()
            child_main._end_with(ending)
        os._exit(0)
    os.waitpid(parent, 0)
    os.close(writer)  # the child has the other copy
    assert select.select([reader], [], [], 20)[0]
    assert os.read(reader, 1) == b""
    os.close(reader)


def _gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True


@pytest.mark.process
def test_the_child_imports_from_the_parents_path_and_not_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file there that is called like a module would run in the server's name."""
    for name in ("json", "ctypes", "signal", "aot_tune"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [ROOT, *(folder for folder in sys.path if folder)])
    request = json.dumps({"module": "tests.support.samples", "kernel": "scale", "device": 0})
    command = child.command()
    asked = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    assert asked.stderr.strip().endswith("KeyError: 'configs'"), "it read the request, which is incomplete"


@pytest.mark.process
def test_a20_the_childs_compilers_end_is_known_where_the_server_ignores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asks.py").write_text(
        "import pathlib, signal\n"
        "pathlib.Path(__file__).with_name('is').write_text(signal.getsignal(signal.SIGCHLD).name)\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    subprocess.run(
        child.command(), input=json.dumps({"module": "asks", "kernel": "x"}), text=True, check=False,
        capture_output=True, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )  # fmt: skip
    assert (tmp_path / "is").read_text() == "SIG_DFL"


@pytest.mark.process
def test_a_child_starts_whatever_else_sys_path_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [ROOT, tmp_path, b"bytes", None, "", *sys.path])
    assert child.command()[3:5] == [ROOT, str(folder)]
    folder.rmdir()
    path = child.command()[3:]
    assert str(tmp_path) not in path
    assert "" not in path
    monkeypatch.setattr(child, "_START", "print(input())")
    assert child._asked(b"started", 30) == b"started\n"


@pytest.mark.process
@pytest.mark.parametrize(("options", "flag"), [(["-I"], "-I"), (["-E"], "-E"), (["-s"], "-s"), ([], None)])
def test_the_child_ignores_what_its_parent_ignores(options: list[str], flag: str | None) -> None:
    code = (
        f"import sys; sys.path.insert(0, {ROOT!r}); "
        "from aot_tune.serve.search import child; print(child.command())"
    )
    told = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=True)
    command = ast.literal_eval(told.stdout)
    before = command[1 : command.index("-c")]
    assert (flag in before) if flag else before == []


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{}",
        b'{"best": 9, "mean_us": 1.0}',
        b'{"best": 0, "mean_us": NaN}',
        b'{"best": "x", "mean_us": 1}',
        None,
    ],
)
def test_an_answer_that_is_none_is_no_winner(answer: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_asked", lambda *args: answer)
    assert child.fastest(scale, PROBLEM, SPACE[:2], device_index=0, limit_s=1) is None


def test_the_request_names_the_declaring_module_and_the_answer_one_of_the_configs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[Any] = []

    def answer(request: bytes, limit_s: float) -> bytes:
        requests.append(json.loads(request))
        return b'{"best": 1, "mean_us": 7.5}'

    monkeypatch.setattr(child, "_asked", answer)
    assert child.fastest(scale, PROBLEM, SPACE[:2], device_index=1, limit_s=1) == (SPACE[1], 7.5)
    assert requests[0]["module"] == "tests.support.samples"
    assert requests[0]["problem"] == {"dtype": "bfloat16", "M": 64, "N": 1024}
    assert requests[0]["device"] == 1


def test_a_declaration_that_no_other_process_can_import_has_no_child() -> None:
    assert child.fastest(dataclasses.replace(scale), PROBLEM, SPACE[:2], device_index=0, limit_s=60) is None


def test_the_time_limit_says_how_many_candidates_there_are() -> None:
    assert child.few(1.0) == 0
    assert 2 <= child.few(10.0) < 8
    assert child.few(1000.0) == 8


@pytest.mark.parametrize(
    ("value", "close"), [(1.0, True), (1.009, True), (1.03, False), (float("nan"), False)]
)
def test_a_result_is_right_within_its_tolerances(value: float, close: bool) -> None:
    wanted = Close(value=torch.ones(4), rtol=0.01, atol=0.01)
    result = torch.ones(4)
    result[2] = value
    assert (compare("out", result, wanted) is None) is close


def test_b11_a_config_that_computes_a_wrong_result_cannot_win(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B11: only what matches the reference is timed; 16-row tiles write nothing here, 32-row ones half."""
    source = torch.randn(64, 1024)
    args = (source, torch.empty(64, 1024))
    object.__setattr__(
        declared := dataclasses.replace(scale), "make_args", lambda problem, device, seed: args
    )

    def launch(stream: int, grid: Any, kernel: Any, kernel_args: Any) -> None:
        given, target, tile_m, _ = kernel_args
        if tile_m == 32:
            target[:32] = given[:32] * 2
        elif tile_m == 64:
            target[:] = given * 2

    timed: list[Any] = []
    monkeypatch.setattr("cuda.tile.launch", launch)
    monkeypatch.setattr(child_main, "fastest", lambda *a, **o: timed.extend(a[3]) or (a[3][0], 1.0))
    configs = [DEFAULT, *(c for c in SPACE if c["tile_m"] in (32, 64) and c["tile_n"] == 64)]
    best = child_main.search(declared, PROBLEM, configs, 0)
    assert {config["tile_m"] for config in timed} == {64}
    assert best == (timed[0], 1.0)
