"""The process that forks workers: real children, their environments, and the ends of both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from aot_tune.tuner.process.worker import Report, Worker, WorkerDied
from tests.support.marks import forking

pytestmark = pytest.mark.process


class Place:
    """Says where it is, in the child."""

    def __init__(self, report: Report) -> None:
        pass

    def about(self) -> dict[str, object]:
        descriptors = len(os.listdir("/proc/self/fd"))
        return {"folder": os.getcwd(), "path": sys.path, "mine": os.environ.get("MINE"), "open": descriptors,
                "torch": "torch" in sys.modules, "threads": threading.active_count()}  # fmt: skip

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _about(**variables: str) -> dict[str, object]:
    with Worker(f"{__name__}:Place", environment=variables) as worker:
        about: dict[str, object] = worker.request("about", {}, 60.0)
        return about


def test_each_child_has_its_own_variables_folder_and_path_and_no_pipe_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _about(MINE="one")
    server = forking()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with Worker(f"{__name__}:Place"):
        second = _about()
    assert forking() == server
    assert (first["mine"], second["mine"]) == ("one", None)
    assert second["folder"] == str(tmp_path)
    assert second["path"] == sys.path
    assert first["torch"]
    assert first["open"] == second["open"]
    assert first["threads"] == 1


def test_a_variable_that_is_read_at_the_start_is_given_to_another_server() -> None:
    _about()
    before = forking()
    _about(OMP_NUM_THREADS="7")
    assert forking() not in (before, None)


def test_a_server_that_was_killed_is_replaced_and_its_children_count_as_killed() -> None:
    with Worker(f"{__name__}:Place") as worker:
        worker.wait_ready()
        before = forking()
        assert before is not None
        os.kill(before, signal.SIGKILL)
        assert worker.request("about", {}, 60.0)["torch"], "the child lives on"
        with pytest.raises(WorkerDied, match="SIGKILL"):
            worker.request("die", {}, 60.0)
    assert _about()["torch"]
    assert forking() != before


def test_the_server_ends_with_the_process_that_asked() -> None:
    script = (
        "from tests.support.marks import forking; from aot_tune.tuner.process.worker import Worker\n"
        f"Worker('{__name__}:Place').wait_ready(); print(forking(), flush=True); input()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        process.kill()
    until = time.monotonic() + 20
    while Path(f"/proc/{server}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{server}").exists()
