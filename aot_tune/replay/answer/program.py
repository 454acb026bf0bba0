"""Run a program in which libraries' searches are replayed, without a change of the program.

The program, and every Python that it starts, calls `begin` at its start: a folder on PYTHONPATH holds a
``sitecustomize`` that does so. Nothing heavy is imported before the program imports it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from aot_tune import environment
from aot_tune.errors import UsageError
from aot_tune.replay.answer.install import install

AT_START = Path(__file__).parent / "at_start"
"""Folder that is put on PYTHONPATH."""


def begin() -> None:
    """Install the replay, with the folders that `become` was given."""
    install(tables=options().get("tables", ()))


def options() -> dict[str, list[str]]:
    """Return the options that the parent passed to this program."""
    passed: dict[str, list[str]] = json.loads(os.environ.get(environment.START_OPTIONS, "{}"))
    return passed


def become(command: Sequence[str], *, tables: Sequence[str]) -> NoReturn:
    """Become a program in which searches are replayed, with its own signals, output and exit code.

    Args:
        command: The program and its arguments.
        tables: Folders of recorded tables, absolute.

    Raises:
        UsageError: There is no such program, it cannot be run, or a variable has a wrong value.
    """
    environment.check()
    environ = _environ(command, "aot_tune.replay.answer.program:begin", {"tables": tables})
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], list(command), environ)
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be run: {error.strerror}") from None


def run(command: Sequence[str], *, start: str, **passed: Sequence[str]) -> int:
    """Run a program to its end, and return its exit code. Pass on signals that ask this process to end.

    Args:
        command: The program and its arguments.
        start: The function that each Python of the program calls first, as ``module:function``.
        passed: Lists of texts that `options` returns in the program.

    Raises:
        UsageError: There is no such program, or it cannot be run.
    """
    environ = _environ(command, start, passed)
    try:
        process = subprocess.Popen(command, env=environ)
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be run: {error.strerror}") from None
    with _signals_for(process):
        code = process.wait()
    # A program that a signal ended: 128 and the signal's number, as shells report it.
    return code if code >= 0 else 128 - code


@contextmanager
def _signals_for(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass on signals that ask this process to end. A terminal sends Ctrl-C to both processes."""

    def pass_on(number: int, frame: object) -> None:
        if number != signal.SIGINT:
            process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    former = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _environ(command: Sequence[str], start: str, passed: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the environment of a program whose Pythons call `start`."""
    if not command:
        raise UsageError("name the program after --, such as: -- python serve.py")
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no program {command[0]!r} on PATH")
    path = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(AT_START), *([path] if path else [])]),
        environment.AT_START: start,
        environment.START_OPTIONS: json.dumps({name: list(values) for name, values in passed.items()}),
    }
