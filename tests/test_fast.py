"""`pytest --fast` leaves out what is marked, and fails what starts a process, compiler or emulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]

STARTS = {
    "a process": "subprocess.run(['true'])",
    "a shell": "os.system('true')",
    "a fork": "os.fork() or os._exit(0)",
    "a pool's process": "multiprocessing.get_context('spawn').Process(target=print).start()",
    "the compiler": "_compile.compile_tile(None, (), None, None)",
    "the emulator": "emulator.run(None, None, None, None)",
}


def _child(*lines: str) -> subprocess.CompletedProcess[str]:
    first = (
        "import multiprocessing, os, subprocess",
        "from cuda.tile import _compile",
        "from tests.support import emulator, fast",
        "fast.install()",
    )
    return subprocess.run(
        [sys.executable, "-c", "\n".join([*first, *lines])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_fast_test_that_starts_something_fails_with_the_marker_it_lacks() -> None:
    """Each start is tried in the same process, since none of them happens."""
    done = _child(
        "import pytest",
        f"for start in {list(STARTS.values())}:",
        "    with pytest.raises(pytest.fail.Exception) as refused, fast.watched():",
        "        exec(start)",
        "    print(refused.value)",
    )
    assert done.returncode == 0, done.stderr
    told = dict(zip(STARTS, done.stdout.splitlines(), strict=True))
    for what, line in told.items():
        assert "a test that needs it has the marker '" in line, what


def test_a_start_is_told_even_where_the_failure_was_hidden() -> None:
    done = _child(
        "with fast.watched() as tried:",
        "    try: subprocess.run(['true'])",
        "    except BaseException: pass",
        "print(*tried)",
    )
    assert done.stdout.startswith("subprocess.Popen: a test that needs it has the marker"), done.stderr


def test_between_tests_anything_may_be_started() -> None:
    done = _child("with fast.watched(): pass", "print(subprocess.run(['true']).returncode)")
    assert done.stdout == "0\n", done.stderr


def test_the_option_leaves_out_what_is_marked() -> None:
    command = [sys.executable, "-m", "pytest", "--fast", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/test_fast.py", "tests/values/test_text.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0
    assert "tests/values/test_text.py::" in done.stdout
    assert "tests/test_fast.py::" not in done.stdout
