"""A Worker over real child processes: answers, progress, silence, crashes; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aot_tune import environment
from aot_tune.errors import TuneError
from aot_tune.serve.rank import is_rank
from aot_tune.tuner.process.worker import (
    RemoteError,
    Report,
    Worker,
    WorkerDied,
    WorkerSlowStart,
    WorkerTimeout,
)

pytestmark = pytest.mark.process

HERE = __name__


class Target:
    """What the tests talk to in the child."""

    def __init__(self, report: Report, *, greeting: str = "hello") -> None:
        self.report = report
        self.greeting = greeting

    def greet(self, name: str) -> str:
        return f"{self.greeting} {name}"

    def count(self, upto: int, pause_s: float) -> int:
        for number in range(upto):
            time.sleep(pause_s)
            self.report(number)
        return upto

    def fail(self) -> None:
        raise ValueError("no such thing")

    def hang(self) -> None:
        time.sleep(600)

    def crash(self, number: int) -> None:
        print("about to crash", file=sys.stderr, flush=True)
        os.kill(os.getpid(), number)

    def leave(self, code: int) -> None:
        os._exit(code)

    def start_a_child(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    def print_a_lot(self) -> str:
        print("x" * 200_000)
        return "done"

    def write(self, data: str) -> None:
        """Write to the pipe what is no message, as a kernel with a wild pointer may."""
        pipe = self.report.__closure__[0].cell_contents  # type: ignore[attr-defined]
        pipe.write(bytes.fromhex(data))
        pipe.flush()
        time.sleep(600)

    def close_its_pipe(self) -> None:
        pipe = self.report.__closure__[0].cell_contents  # type: ignore[attr-defined]
        os.close(pipe.fileno())
        time.sleep(600)

    def start_a_child_of_its_own_session(self) -> int:
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    def start_an_orphan(self) -> int:
        """A grandchild whose parent has ended, in a session of its own."""
        script = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
        return int(subprocess.check_output([sys.executable, "-c", script], stderr=subprocess.DEVNULL))

    def wait_for_a_crash_that_leaves_a_child(self) -> int:
        """What cuTile does with a compiler: read its output to the end."""
        script = "import os, subprocess; subprocess.Popen(['sleep', '600']); os.kill(os.getpid(), 11)"
        return subprocess.run([sys.executable, "-c", script], capture_output=True).returncode

    def something_else(self) -> object:
        return lambda: None

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def rank_or_searching(self) -> list[bool]:
        return [is_rank(), not environment.search_disabled()]

    def big(self, size: int) -> str:
        return "x" * size


class SlowToBuild:
    def __init__(self, report: Report) -> None:
        time.sleep(600)


class CannotBeBuilt:
    def __init__(self, report: Report) -> None:
        raise OSError("no driver here")


class DiesAtStart:
    def __init__(self, report: Report) -> None:
        os._exit(7)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(f"{HERE}:Target", {"greeting": "good day"}) as running:
        yield running


def gone(pid: int, within_s: float = 5.0) -> bool:
    """Whether a process ends, or is a zombie that only init has not collected, within the time."""
    limit = time.monotonic() + within_s
    while time.monotonic() < limit:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_a_request_is_answered_by_the_target_built_with_init(worker: Worker) -> None:
    assert worker.request("greet", {"name": "world"}, 30) == "good day world"
    assert worker.pid != os.getpid()


def test_progress_arrives_in_order_before_the_reply(worker: Worker) -> None:
    seen: list[int] = []
    assert worker.request("count", {"upto": 3, "pause_s": 0.0}, 30, seen.append) == 3
    assert seen == [0, 1, 2]


def test_each_progress_message_starts_the_silence_anew(worker: Worker) -> None:
    assert worker.request("count", {"upto": 4, "pause_s": 0.3}, 1.0) == 4  # 1.2 s in all, never 1 s silent


def test_a_message_larger_than_a_pipe_arrives_whole(worker: Worker) -> None:
    assert len(worker.request("big", {"size": 3_000_000}, 30)) == 3_000_000


def test_an_exception_of_the_target_is_reported_and_the_child_lives_on(worker: Worker) -> None:
    with pytest.raises(RemoteError, match="ValueError: no such thing") as caught:
        worker.request("fail", {}, 30)
    assert caught.value.kind == "ValueError"
    assert "in fail" in caught.value.where
    assert worker.request("greet", {"name": "again"}, 30) == "good day again"


def test_an_answer_that_cannot_be_sent_is_an_error_and_not_a_dead_child(worker: Worker) -> None:
    with pytest.raises(RemoteError):
        worker.request("something_else", {}, 30)
    assert worker.request("greet", {"name": "x"}, 30) == "good day x"


def test_what_the_target_prints_does_not_mix_with_the_messages(worker: Worker) -> None:
    assert worker.request("print_a_lot", {}, 30) == "done"


def test_a_silent_child_is_a_timeout_and_killing_it_ends_it(worker: Worker) -> None:
    with pytest.raises(WorkerTimeout, match=r"no answer to hang within 0\.3 s"):
        worker.request("hang", {}, 0.3)
    assert worker.running()
    worker.kill()
    assert gone(worker.pid)


def test_a_crash_names_the_signal_and_repeats_what_the_child_said(worker: Worker) -> None:
    with pytest.raises(WorkerDied, match=r"was killed by SIGSEGV: about to crash") as caught:
        worker.request("crash", {"number": signal.SIGSEGV}, 30)
    assert caught.value.code == -signal.SIGSEGV


def test_an_exit_names_the_code(worker: Worker) -> None:
    with pytest.raises(WorkerDied, match="ended with exit code 3"):
        worker.request("leave", {"code": 3}, 30)


def greet_until_it_dies(worker: Worker) -> None:
    for _ in range(1000):  # the child dies a moment after its guard, and may answer before
        worker.request("greet", {"name": "x"}, 30)


def test_a_child_that_closes_its_pipe_and_lives_is_killed(worker: Worker) -> None:
    with pytest.raises(WorkerDied, match="closed its pipe and was killed by SIGKILL"):
        worker.request("close_its_pipe", {}, 30)
    assert gone(worker.pid)


def test_talking_to_a_dead_child_says_that_it_died(worker: Worker) -> None:
    worker.wait_ready()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="was killed by SIGKILL"):
        greet_until_it_dies(worker)


def test_killing_takes_along_what_the_child_started(worker: Worker) -> None:
    grandchild = worker.request("start_a_child", {}, 30)
    assert not gone(grandchild, 0.1)
    worker.kill()
    assert gone(grandchild)


def test_what_a_crashed_child_started_is_killed_too(worker: Worker) -> None:
    grandchild = worker.request("start_a_child", {}, 30)
    with pytest.raises(WorkerDied):
        worker.request("crash", {"number": signal.SIGABRT}, 30)
    worker.kill()
    assert gone(grandchild)


def test_a_child_of_a_child_in_a_session_of_its_own_is_killed_too(worker: Worker) -> None:
    grandchild = worker.request("start_a_child_of_its_own_session", {}, 30)
    assert not gone(grandchild, 0.1)
    worker.kill()
    assert gone(grandchild)


def test_what_a_crashed_child_started_in_another_session_is_killed(worker: Worker) -> None:
    grandchild = worker.request("start_a_child_of_its_own_session", {}, 30)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        worker.request("crash", {"number": signal.SIGKILL}, 30)
    assert gone(grandchild)


def test_an_orphan_is_killed_while_the_worker_goes_on(worker: Worker) -> None:
    assert gone(worker.request("start_an_orphan", {}, 30))
    assert worker.request("greet", {"name": "x"}, 30) == "good day x"


def test_a_crash_that_leaves_a_child_is_noticed_at_once(worker: Worker) -> None:
    # Else the request takes as long as what was left, which is longer than it may.
    assert worker.request("wait_for_a_crash_that_leaves_a_child", {}, 60) == -signal.SIGSEGV


@pytest.mark.parametrize(
    "data",
    [
        "ff" * 8,  # a length beyond all bounds
        "0500000000000000" + b"hello".hex(),
        "0400000000000000" + b"null".hex(),
        "0e00000000000000" + b'["reply",{"is"'.hex(),
        "0c00000000000000" + b'["error",[]]'.hex(),
        "0400000000000000" + "80049500",  # how a pickle begins
    ],
)
def test_what_is_no_message_is_the_childs_death_with_a_reason(worker: Worker, data: str) -> None:
    with pytest.raises(WorkerDied, match="the worker process sent an invalid message and was killed"):
        worker.request("write", {"data": data}, 30)
    assert not worker.running()


def test_half_a_message_is_a_silence_and_no_traceback(worker: Worker) -> None:
    with pytest.raises(WorkerTimeout):
        worker.request("write", {"data": "0500000000000000" + b"he".hex()}, 0.5)


def test_the_longest_silence_may_change_from_message_to_message(worker: Worker) -> None:
    worker.wait_ready()
    limits = iter([30.0, 30.0, 0.1])
    with pytest.raises(WorkerTimeout, match=r"within 0\.1 s"):
        worker.request("count", {"upto": 9, "pause_s": 0.5}, lambda: next(limits))


def test_a_temporary_folder_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(TuneError, match=r"temporary folder .*/none cannot be written.*set TMPDIR"):
        Worker(f"{HERE}:Target")


def test_killing_twice_is_no_error(worker: Worker) -> None:
    worker.kill()
    worker.kill()


def test_a_slow_start_is_told_apart_from_a_slow_answer() -> None:
    with Worker(f"{HERE}:SlowToBuild") as worker, pytest.raises(WorkerSlowStart):
        worker.wait_ready(1.0)


def test_a_target_that_cannot_be_built_says_why() -> None:
    with (
        Worker(f"{HERE}:CannotBeBuilt") as worker,
        pytest.raises(RemoteError, match="OSError: no driver here"),
    ):
        worker.wait_ready(30)


def test_a_child_that_dies_while_starting_is_reported() -> None:
    with Worker(f"{HERE}:DiesAtStart") as worker, pytest.raises(WorkerDied, match="exit code 7"):
        worker.wait_ready(30)


def test_variables_reach_the_child_beside_the_parents_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_THE_PARENT", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    with Worker(f"{HERE}:Target", environment={"CUDA_VISIBLE_DEVICES": ""}) as worker:
        assert worker.request("variable", {"name": "CUDA_VISIBLE_DEVICES"}, 30) == ""
        assert worker.request("variable", {"name": "FROM_THE_PARENT"}, 30) == "1"
        assert worker.request("rank_or_searching", {}, 30) == [False, False], "whatever launched the parent"


ORPHANS = f"""
import sys
from aot_tune.tuner.process.worker import Worker
worker = Worker("{HERE}:Target")
print(worker.pid, worker.request("start_a_child", {{}}, 30), flush=True)
worker.send("hang", {{}})
sys.stdin.read()
"""


def test_a_parent_killed_with_kill_9_leaves_no_process_behind() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert parent.stdout is not None
    child, grandchild = map(int, parent.stdout.readline().split())
    assert not gone(child, 0.1)
    assert not gone(grandchild, 0.1)
    parent.kill()
    parent.wait()
    assert gone(child)
    assert gone(grandchild)
    parent.stdout.close()
    assert parent.stdin is not None
    parent.stdin.close()
