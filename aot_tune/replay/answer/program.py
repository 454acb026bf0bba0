"""Run a program in which libraries' searches are replayed, without a change of the program.

The program, and every Python that it starts, calls `begin` at its start: a folder on PYTHONPATH holds a
``sitecustomize`` that does so. Nothing heavy is imported before the program imports it, or makes its first
search under `aot-tune record`: until then it cannot tell how it is run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from aot_tune import environment
from aot_tune.errors import MissWarning, UsageError
from aot_tune.replay.answer.install import install
from aot_tune.replay.answer.places import record_with
from aot_tune.warn import warn

AT_START = Path(__file__).parent / "at_start"
"""Folder that is put on PYTHONPATH."""


def begin() -> None:
    """Install the replay, with the folders that `become` was given, or the recorder that `run` was given."""
    passed = options()
    install(tables=passed.get("tables", ()))
    for folder in passed.get("reports", ()):
        with suppress(OSError):  # the parent may be gone, or the disk full: the program runs
            Path(folder, f"{os.getpid()}.began").touch()
    for function in passed.get("recorder", ()):
        record_with(_recording_by(function, passed))


def options() -> dict[str, list[str]]:
    """Return the options that the parent passed to this program."""
    passed: dict[str, list[str]] = json.loads(os.environ.get(environment.START_OPTIONS, "{}"))
    return passed


def _recording_by(function: str, passed: Mapping[str, list[str]]) -> Callable[[Any], Any]:
    """Make a recorder that is imported at the first call, and whose absence is one warning."""
    made: dict[str, Callable[[Any], Any]] = {}

    def record(call: Any) -> Any:
        try:
            if function not in made:  # no lock: a fork could inherit it locked
                module, _, name = function.partition(":")
                made.setdefault(function, getattr(import_module(module), name)(passed))
        except Exception as error:
            warn(f"searches are not recorded: {type(error).__name__}: {error}", MissWarning)
            record_with(None)
            if isinstance(call, import_module("aot_tune.replay.answer.cubins").LaunchCall):
                return None
            return import_module("aot_tune.replay.answer.searches").answer(call)
        return made[function](call)

    return record


def become(command: Sequence[str], *, tables: Sequence[str]) -> NoReturn:
    """Become a program in which searches are replayed, with its own signals, output and exit code.

    Args:
        command: The program and its arguments.
        tables: Folders of recorded tables, absolute.

    Raises:
        UsageError: There is no such program, it cannot be run, or a variable has a wrong value.
    """
    environment.check()
    environ = _environ(command, {"tables": tables})
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], list(command), environ)
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be run: {error.strerror}") from None


def run(command: Sequence[str], *, stdout: int | None = None, **passed: Sequence[str]) -> tuple[int, str]:
    """Run a program to its end. Pass on every signal that can be.

    Args:
        command: The program and its arguments.
        stdout: The file descriptor that the program prints to; by default this process's stdout.
        passed: Lists of texts that `options` returns in the program. ``recorder`` names a function, as
            ``module:function``, that each Python of the program calls at its first search with all of
            `passed`, and that returns the function that records one.

    Returns:
        The exit code, and the name of the signal by which the program was asked to end, else empty.

    Raises:
        UsageError: There is no such program, or it cannot be run.
    """
    environ = _environ(command, passed)
    try:
        process = subprocess.Popen(command, env=environ, stdout=stdout)
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be run: {error.strerror}") from None
    with _signals_passed_to(process) as received:
        code = process.wait()
    # A shell whose command was ended by a signal ends by itself, with a code that holds the signal.
    numbers = [*received, -code, code - 128, *([signal.SIGTERM] if code == _TIMED_OUT else [])]
    asked = [signal.Signals(number).name for number in numbers if number in ENDING]
    # A program that a signal ended: 128 and the signal's number, as shells report it.
    return (code if code >= 0 else 128 - code), next(iter(asked), "")


_KEPT_SIGNALS = {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGTTIN, signal.SIGTTOU),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP),
    *(signal.SIGPIPE, signal.SIGXFSZ),
}
"""Signals that cannot be handled, or are of this process alone: its child, its terminal, its own faults."""

ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU}
"""Signals of people, terminals and time limits, by which no fault of a program ends it."""

_TIMED_OUT = 124
"""Exit code of the program `timeout` where it ended its command."""

_OF_KEYS = {signal.SIGINT, signal.SIGQUIT}
"""Signals that keys of a terminal send to both processes."""


@contextmanager
def _signals_passed_to(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass on signals, and yield those received. This process stops and goes on with the program."""
    received: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        if number not in _OF_KEYS or not _in_foreground():
            process.send_signal(number)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    former = {number: signal.signal(number, pass_on) for number in signal.valid_signals() - _KEPT_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _in_foreground() -> bool:
    """Whether the keys of a terminal send signals to this process."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # no terminal
        return False


def _environ(command: Sequence[str], passed: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the environment of a program whose Pythons call `begin`."""
    if not command:
        raise UsageError("name the program after --, such as: -- python serve.py")
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no program {command[0]!r} on PATH")
    if os.pathsep in str(AT_START):
        raise UsageError(
            f"aot_tune is installed in {AT_START}, and {os.pathsep!r} would end that folder in PYTHONPATH: "
            "install it in a folder without it"
        )
    path = os.environ.get("PYTHONPATH", "")
    folders = environment.table_folders()
    with suppress(OSError):  # the current folder was removed
        folders = tuple(folder.absolute() for folder in folders)  # the program may change the current folder
    return {
        **os.environ,
        **({environment.TABLES: os.pathsep.join(map(str, folders))} if folders else {}),
        "PYTHONPATH": os.pathsep.join([str(AT_START), *([path] if path else [])]),
        environment.START_OPTIONS: json.dumps({name: list(values) for name, values in passed.items()}),
    }
