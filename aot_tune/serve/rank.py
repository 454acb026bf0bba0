"""Whether this process is a rank: one of several that must all choose alike. Imports nothing heavy."""

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
