"""Renew locks in a forked child: the threads that hold them stay in the parent."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet


class ForkSafe:
    """Holds a lock that no forked child inherits locked: ``with slow_path.lock: ...``."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Lock of this process. A holder releases the object that it acquired, also in a child."""
        _all.add(self)


_all: WeakSet[ForkSafe] = WeakSet()


def _renew() -> None:
    for fork_safe in tuple(_all):
        fork_safe.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
