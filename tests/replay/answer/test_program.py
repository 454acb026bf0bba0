"""What a program of `aot-tune run` or `record` is, sees and gets: real Pythons, without torch."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aot_tune import environment
from aot_tune.errors import MissWarning, UsageError
from aot_tune.replay.answer import places, program, searches

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.process

BECOME = (
    "import json, sys; from aot_tune.replay.answer.program import become; become(sys.argv[1:], tables=[])"
)

INSTALLED = """
import sys
print(any(type(finder).__module__.startswith("aot_tune.") for finder in sys.meta_path))
"""

BROKEN_REPLAY = "import sys; sys.modules['aot_tune.replay.answer.install'] = None"

ELSEWHERE = """
import sys
class Refuses:
    def find_spec(self, name, path, target=None):
        if name in {refused}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuses())
"""


def outcome(folder: Path, own: str, *, replayed: bool = True, mode: str = "") -> tuple[int, str, str]:
    """Exit code, output and errors of a Python with a `sitecustomize` of its own."""
    (folder / "sitecustomize.py").write_text(own)
    words = [sys.executable, "-c", INSTALLED]
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-S", "-c", BECOME, *words] if replayed else words,
        env={**os.environ, "PYTHONPATH": path, environment.ON_MISS: mode},
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "own", ["raise ValueError('odd')", "import no_such_module", "print('own'); raise ImportError('half')"]
)
def test_b19_an_own_sitecustomize_that_raises_does_so_as_ever(own: str, tmp_path: Path) -> None:
    code, out, err = outcome(tmp_path, own, replayed=False)
    assert "Error in sitecustomize" in err
    assert outcome(tmp_path, own) == (code, out.replace("False", "True"), err)


def test_b19_a_python_that_cannot_replay_says_so_or_does_not_run(tmp_path: Path) -> None:
    line = "aot-tune: this Python {} without replay or recording: ModuleNotFoundError: {}\n"
    broken = "import of aot_tune.replay.answer.install halted; None in sys.modules"
    assert outcome(tmp_path, BROKEN_REPLAY) == (0, "False\n", line.format("runs", broken))
    assert outcome(tmp_path, BROKEN_REPLAY, mode="error") == (1, "", line.format("may not run", broken))
    without = ELSEWHERE.format(refused=["aot_tune"])
    missing = "No module named 'aot_tune'"
    assert outcome(tmp_path, without, mode="error") == (1, "", line.format("may not run", missing))


@pytest.mark.parametrize("mode", ["", "error"])
def test_a_python_of_another_environment_runs_as_ever(mode: str, tmp_path: Path) -> None:
    without = ELSEWHERE.format(refused=["aot_tune", "cuda"])
    assert outcome(tmp_path, without, mode=mode) == (0, "False\n", "")


def test_b19_a_folder_that_pythonpath_would_cut_in_two_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "AT_START", Path("/opt/a:b/aot_tune"))
    with pytest.raises(
        UsageError, match=r"installed in /opt/a:b/aot_tune, .*: install it in a folder without it"
    ):
        program.run([sys.executable, "-c", ""])


def test_a_program_that_changes_its_folder_reads_the_same_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(environment.TABLES, os.pathsep.join(["ours", "/theirs"]))
    (tmp_path / "below").mkdir()
    reads = "import os; os.chdir('below'); print(os.environ['AOT_TUNE_TABLES'])"
    become = "from aot_tune.replay.answer.program import become; become"
    done = subprocess.run(
        [sys.executable, "-c", f"{become}({[sys.executable, '-c', reads]}, tables=[])"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == f"{tmp_path / 'ours'}{os.pathsep}/theirs\n"


def test_a_recorder_that_cannot_be_imported_is_one_warning_and_searches_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(searches, "answer", lambda call: f"the answer to {call}")
    record = program._recording_by("no_such_module:recorder", {})
    places.record_with(record)
    with pytest.warns(MissWarning, match=r"^searches are not recorded: ModuleNotFoundError: ") as warned:
        assert record("a search") == "the answer to a search"
    assert (len(warned), places.recorder()) == (1, None)


LISTENING = """
import os, signal, sys

def hear(number, frame):
    os.write(1, b"%d\\n" % number)
    if number == signal.SIGTERM:
        sys.exit(7)

for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    signal.signal(number, hear)
os.write(1, b"ready\\n")
while True:
    signal.pause()
"""
RUN = "import sys; from aot_tune.replay.answer.program import run; sys.exit(run(sys.argv[1:])[0])"


def test_every_signal_that_can_be_passed_on_reaches_the_program() -> None:
    names = ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "CONT", "WINCH", "ABRT", "URG", "RTMIN")
    numbers = [int(getattr(signal, f"SIG{name}")) for name in names]
    with subprocess.Popen(
        [sys.executable, "-c", RUN, sys.executable, "-c", LISTENING],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in (*numbers, signal.SIGTSTP):
            process.send_signal(number)
            assert process.stdout.readline() == f"{int(number)}\n"
        stopped = os.waitpid(process.pid, os.WUNTRACED)[1]
        assert os.WIFSTOPPED(stopped)
        for number in (signal.SIGCONT, signal.SIGTERM):
            process.send_signal(number)
            assert process.stdout.readline() == f"{int(number)}\n"
    assert process.returncode == 7


@pytest.mark.parametrize(
    ("ending", "asked"),
    [("exit 3", ""), ("kill -TERM $$", "SIGTERM"), ("sh -c 'kill -INT $$'; exit $?", "SIGINT"),
     ("kill -SEGV $$", ""), ("sh -c 'kill -SEGV $$'; exit $?", ""), ("timeout 0.1 sleep 60", "SIGTERM")],
)  # fmt: skip
def test_a_signal_that_ended_a_shell_s_command_is_an_interruption_too(ending: str, asked: str) -> None:
    assert program.run(["sh", "-c", ending])[1] == asked


def test_a_key_of_the_terminal_reaches_the_program_once() -> None:
    """The terminal sends the signal to both processes."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", RUN, sys.executable, "-c", LISTENING])
    with os.fdopen(terminal, "rb", buffering=0) as screen:
        assert screen.readline().strip() == b"ready"
        heard = []
        for _ in range(3):
            os.write(terminal, b"\x1c")  # the terminal prints it too, as ^\
            heard.append(screen.readline().strip().removeprefix(b"^\\"))
        os.kill(child, signal.SIGTERM)
        heard.append(screen.readline().strip())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert heard == [b"%d" % number for number in [*[signal.SIGQUIT] * 3, signal.SIGTERM]]
