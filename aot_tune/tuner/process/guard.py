"""Run this process's program in a child, below a guard that leaves no process behind. Knows no program.

The guard is the parent of the program. All that the program starts stays below the guard, also what calls
``setsid`` or outlives its own parent, because the guard is the *subreaper* of its descendants (prctl(2)):
Linux gives it those whose parent has died. It kills such an orphan at once. Nothing may wait for one, and a
pipe that it inherited would look as if its parent were still writing. When the program ends, or when the
other end of the lifeline closes because the process that started all this has died, it kills everything below
it and ends as the program did.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
from contextlib import suppress
from pathlib import Path

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
"""The operations of prctl(2)."""

_LOOK_SECONDS = 0.5
"""Seconds between two looks for orphans, whose coming nothing tells."""


def guarded(lifeline: int, others: tuple[int, ...]) -> None:
    """Return in a child process, which goes on with the program; the caller's process becomes the guard.

    The child leads a process group and session of its own. It dies with the guard. The caller must have one
    thread only.

    Args:
        lifeline: A descriptor; at its end of file the guard kills the child and all that it started.
        others: Descriptors that the child alone needs.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    guard = os.getpid()
    child = os.fork()
    if not child:
        os.setsid()
        libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:  # it died before the line above
            os._exit(1)
        os.close(lifeline)
        return
    status = 1
    try:
        status = _watch(child, lifeline, others)
    finally:
        _end_like(status)


def _watch(child: int, lifeline: int, others: tuple[int, ...]) -> int:
    """Wait for the end of the child or of the lifeline, kill what is left; return the child's status."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)  # before the handler, so that no death goes unnoticed
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for descriptor in (0, 1, 2, *others):
        os.close(descriptor)
    while (status := _reaped(child)) is None:
        readable, _, _ = select.select([lifeline, woken], [], [], _LOOK_SECONDS)
        if lifeline in readable:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            break
        if woken in readable:
            os.read(woken, 4096)
        _kill(set(_children()) - {child})
    while True:  # an orphan comes to the guard when its parent is reaped
        _kill(set(_children()))
        try:
            process, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        if process == child:
            status = ended
    return 1 if status is None else status


def _reaped(child: int) -> int | None:
    """Reap all dead children; return the status of `child` if it is one of them."""
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 1
        if process == child:
            return status
        if not process:
            return None


def _children() -> list[int]:
    """The guard's children, adopted ones included."""
    me = os.getpid()
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]
    found = []  # a kernel without that file
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == me:
                found.append(int(entry.name))
    return found


def _kill(processes: set[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _end_like(status: int) -> None:
    """End this process as another one ended whose status this is."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)
