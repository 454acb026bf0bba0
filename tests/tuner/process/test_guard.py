"""The guard of a worker's process: it ends as its child does, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.process

PROGRAM = """
import os, signal, subprocess, sys, time
from aot_tune.tuner.process.guard import guarded
guarded(int(sys.argv[1]), ())
print(os.getpid(), flush=True)
{}
"""


def started(program: str, before: Callable[[], object] | None = None) -> tuple[subprocess.Popen[str], int]:
    """A guard below which `program` runs, and the other end of its lifeline."""
    theirs, ours = os.pipe()
    guard = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(program), str(theirs)],
        preexec_fn=before,
        pass_fds=[theirs],
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    return guard, ours


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("signal.signal(13, signal.SIG_DFL); os.kill(os.getpid(), 13)", -signal.SIGPIPE),
        ("subprocess.run(['true']); sys.exit(0)", 0),
    ],
)  # fmt: skip
def test_it_ends_as_its_child_ended(program: str, code: int) -> None:
    guard, lifeline = started(program)
    with guard:
        assert guard.wait(30) == code
    os.close(lifeline)


def test_the_ends_of_a_program_s_children_are_known_where_the_parent_ignores_them() -> None:
    program = "sys.exit(subprocess.run(['sh', '-c', 'exit 3']).returncode)"
    guard, lifeline = started(program, lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    with guard:
        assert guard.wait(30) == 3
    os.close(lifeline)


def test_the_end_of_the_lifeline_ends_a_whole_tree() -> None:
    tree = "subprocess.Popen(['sh', '-c', 'setsid sleep 600 & sleep 600'])\ntime.sleep(600)"
    guard, lifeline = started(tree)
    with guard:
        assert guard.stdout is not None
        child = int(guard.stdout.readline())
        os.close(lifeline)
        assert guard.wait(30) == -signal.SIGKILL
        assert guard.stdout.read() == ""  # at its end: nobody below holds it any more
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_the_child_dies_with_its_guard() -> None:
    guard, lifeline = started("time.sleep(600)")
    with guard:
        assert guard.stdout is not None
        guard.stdout.readline()
        guard.kill()
        guard.wait(30)
        assert guard.stdout.read() == ""
    os.close(lifeline)
