"""`pytest --fast` proves its marks: a test without one that starts a process, compiler or emulator fails.

Not a test itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

LEFT_OUT = ("process", "emulated", "long", "slow")
"""Markers of the tests that `--fast` leaves out."""

_STARTS = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"}
"""Python's audit events of a process that starts."""

_watched: list[list[str]] = []
"""What each test that runs now has started, against the rule; no more than one."""


def install() -> None:
    """Watch processes, cuTile's compiler and the emulator from here on, for good."""
    from cuda.tile import _compile

    from aot_tune.nvidia import cutile
    from tests.support import emulator

    cutile.compiler_version()  # Many tests ask for it; the answer is kept, so that none starts a process.
    sys.addaudithook(lambda event, arguments: _refuse(event, "process") if event in _STARTS else None)
    _replace(BaseProcess, "start", "process")
    _replace(_compile, "compile_tile", "process")
    _replace(emulator, "run", "emulated")


@contextmanager
def watched() -> Iterator[list[str]]:
    """Refuse what a fast test may not start; gives what it tried, where a thread or `except` hid it too."""
    tried: list[str] = []
    _watched.append(tried)
    try:
        yield tried
    finally:
        _watched.remove(tried)


def _refuse(what: str, marker: str) -> None:
    if _watched:
        reason = f"{what}: a test that needs it has the marker {marker!r}, and --fast leaves it out"
        _watched[-1].append(reason)
        pytest.fail(reason)


def _replace(owner: Any, name: str, marker: str) -> None:
    """Let a function refuse while a test is watched."""
    kept: Callable[..., Any] = getattr(owner, name)

    def refusing(*args: Any, **kwargs: Any) -> Any:
        _refuse(f"{owner.__name__}.{name}", marker)
        return kept(*args, **kwargs)

    setattr(owner, name, refusing)
