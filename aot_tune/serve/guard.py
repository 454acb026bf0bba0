"""The lock of the serve side's slow path, which a fork renews. Knows nothing of what it guards."""

from __future__ import annotations

import os
import threading


class Guard:
    """The lock of the slow path; a forked child gets a fresh one, since its holder stayed in the parent."""

    lock = threading.RLock()

    @classmethod
    def renew(cls) -> None:
        """Take a new lock."""
        cls.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Guard.renew)
