"""Run a program in which libraries' searches are replayed, without a change of the program.

The program, and every Python that it starts, calls `begin` when it starts: a folder on PYTHONPATH holds a
``sitecustomize`` that does so. Nothing heavy is imported before the program imports it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from aot_tune import environment
from aot_tune.errors import UsageError
from aot_tune.serve.replay.install import install

AT_START = Path(__file__).parent / "at_start"
"""The folder that is put on PYTHONPATH."""


def begin() -> None:
    """Install the replay, with the folders that `run` was given."""
    install(tables=[Path(one) for one in options().get("tables", ())])


def options() -> dict[str, list[str]]:
    """What the parent told this program."""
    told: dict[str, list[str]] = json.loads(os.environ.get(environment.START_OPTIONS, "{}"))
    return told


def run(
    command: Sequence[str], *, start: str = "aot_tune.serve.replay.program:begin", **told: Sequence[str]
) -> int:
    """Run a program to its end, and return its exit code.

    Args:
        command: The program and its arguments.
        start: What each Python of it calls first, in the form ``module:function``.
        told: Lists of texts that `options` returns there.

    Raises:
        UsageError: There is no such program.
    """
    if not command:
        raise UsageError("name the program after --, such as: -- python serve.py")
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no program {command[0]!r} on PATH")
    done = subprocess.run(command, env={**os.environ, **_added(start, told)}, check=False)
    # A program that a signal ended: 128 and the signal's number, as shells report it.
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def _added(start: str, told: Mapping[str, Sequence[str]]) -> dict[str, str]:
    path = os.environ.get("PYTHONPATH", "")
    return {
        "PYTHONPATH": os.pathsep.join([str(AT_START), *([path] if path else [])]),
        environment.AT_START: start,
        environment.START_OPTIONS: json.dumps({name: list(values) for name, values in told.items()}),
    }
