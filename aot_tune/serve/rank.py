"""Whether this process may search live: it may unless it is a rank or was primed. Imports nothing heavy.

A rank is one of several processes that must all choose the same config.
"""

from __future__ import annotations

import sys

from aot_tune import environment


def is_rank() -> bool:
    """Whether torch.distributed's world size, WORLD_SIZE or AOT_TUNE_RANKED is above one.

    torch.distributed is used only where the program has imported and initialised it.
    """
    if environment.world_size() > 1:
        return True
    distributed = sys.modules.get("torch.distributed")
    try:
        return bool(
            distributed
            and distributed.is_available()
            and distributed.is_initialized()
            and distributed.get_world_size() > 1
        )
    except (AttributeError, RuntimeError):  # it is half imported, or torn down meanwhile
        return False


_primed: list[bool] = []


def is_primed() -> bool:
    """Whether `aot_tune.prime` was called in this process; it makes no live search afterwards."""
    return bool(_primed)


def set_primed(primed: bool) -> None:
    """Set whether this process was primed; a forked child inherits this."""
    _primed[:] = [True] if primed else []
