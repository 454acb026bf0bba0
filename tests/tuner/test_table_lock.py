"""One writer at a time in a folder of tables, over real processes; nothing is left there."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from aot_tune.errors import TuneError
from aot_tune.tuner.publish import locked

HOLDER = """
import sys, time
from pathlib import Path
from aot_tune.tuner.publish import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuned_configs" / "sm90" / "scale.json"


@pytest.mark.process
def test_another_process_keeps_a_second_out_until_it_ends_and_no_file_is_left(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        held = pytest.raises(TuneError, match=r"sm90: another process has held.*the measured times are kept")
        with held, locked(path, 0.2):
            pass
        holder.kill()
    with locked(path, 0.2):
        assert list(path.parent.iterdir()) == []
    assert list(path.parent.iterdir()) == []


def test_a_second_waits_for_the_first(path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with locked(path):
            order.append("second")

    thread = threading.Thread(target=second)
    with locked(path):
        thread.start()
        time.sleep(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_file_system_without_locks_of_folders_is_used_without(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int, operation: int) -> None:
        raise OSError(9, "Bad file descriptor")  # as NFS answers

    monkeypatch.setattr("fcntl.flock", refused)
    with locked(path, 0.0):
        pass


def test_a_folder_that_cannot_be_made_is_an_error_that_says_what_to_do(path: Path) -> None:
    path.parent.parent.write_text("in the way")
    refused = pytest.raises(TuneError, match=r"sm90: cannot be opened to write scale\.json.*--out")
    with refused, locked(path):
        pass
