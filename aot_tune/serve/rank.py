"""Whether this process may search live: not a rank, and not one that was primed. Imports nothing heavy.

A rank is one of several processes that must all choose alike.
"""

from __future__ import annotations

import sys

from aot_tune import environment


def is_rank() -> bool:
    """Whether torch.distributed's world size, WORLD_SIZE or AOT_TUNE_RANKED is above one.

    torch.distributed is asked only where the program has imported and initialised it.
    """
    if environment.world_size() > 1:
        return True
    distributed = sys.modules.get("torch.distributed")
    try:
        return bool(
            distributed and distributed.is_available() and distributed.is_initialized()
            and distributed.get_world_size() > 1
        )  # fmt: skip
    except (AttributeError, RuntimeError):  # half imported, or torn down while we ask
        return False


_primed: list[bool] = []


def is_primed() -> bool:
    """Whether `aot_tune.prime` was called here, after which nothing is searched live."""
    return bool(_primed)


def set_primed(primed: bool) -> None:
    """Say whether this process was primed; a child that is forked from it was as well."""
    _primed[:] = [True] if primed else []
