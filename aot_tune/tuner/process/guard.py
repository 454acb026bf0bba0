"""Run this process's program in a child, below a guard that leaves no process behind.

The guard is the parent of the program. It is also the *subreaper* of its descendants (prctl(2)): Linux makes
it the parent of each descendant whose own parent has died. So all processes of the program stay below the
guard, even after ``setsid`` or their parent's end. The guard kills such an orphan at once: an orphan's
inherited pipe would look as if its parent were still writing. The guard ends when the program ends, or when
the other end of the lifeline closes because the starting process has died. It then kills all processes below
it and ends with the program's status.
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
"""Seconds between two looks for orphans, whose arrival causes no event."""


def guarded(lifeline: int, others: tuple[int, ...]) -> None:
    """Return in a child process that runs the program, and make this process its guard.

    The child leads a process group and session of its own. It dies with the guard. The caller must have one
    thread only.

    Args:
        lifeline: A descriptor; at its end of file the guard kills the child and its processes.
        others: Descriptors that only the child needs.
    """
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # a program that ignores it cannot tell how its children end
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
    """Wait for the child or the lifeline to end, kill the rest, and return the child's status."""
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
    while True:  # the guard becomes an orphan's parent when its former parent is reaped
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
    """Return the guard's children, including adopted orphans."""
    me = os.getpid()
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]
    children = []  # a kernel without that file
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == me:
                children.append(int(entry.name))
    return children


def _kill(processes: set[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _end_like(status: int) -> None:
    """End this process with another process's wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)
