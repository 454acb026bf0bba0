"""Locks that a forked child gets anew, because their holders are threads that stayed in the parent."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet


class ForkSafe:
    """Holds a lock that no forked child inherits locked: ``with slow_path.lock: ...``."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """The lock of this process. Whoever holds it releases this very object, also in a child."""
        _all.add(self)


_all: WeakSet[ForkSafe] = WeakSet()


def _renew() -> None:
    for one in tuple(_all):
        one.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
