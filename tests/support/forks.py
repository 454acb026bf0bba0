"""Fork a child while a thread of its parent holds a lock."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def right_in_a_fork(lock: AbstractContextManager[Any], child: Callable[[], bool], within_s: int) -> bool:
    """Whether a child that is forked while a thread holds `lock` finds its answer right, in time.

    Args:
        lock: What the thread holds until the child has ended.
        child: Run in the child; says whether what it found is right.
        within_s: Seconds after which the child is killed.
    """
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            go.wait(within_s + 30)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(30)
        forked = os.fork()
        if forked == 0:
            signal.alarm(within_s)
            right = False
            try:
                right = child()
            finally:
                os._exit(0 if right else 1)
        return os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    finally:
        go.set()
        thread.join()
