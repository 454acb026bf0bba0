"""Whether this process may search live, or compile. Imports nothing heavy.

A rank is one of several processes that must all choose the same config.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aot_tune import environment

_VARIABLES: Any = getattr(os.environ, "_data", os.environ)
"""Mapping in which `os.environ` keeps the variables, where it has that attribute. A look-up takes 0.02 us in
the mapping and 0.7 us in `os.environ`."""

_RANKED, _WORLD_SIZE = (
    name if _VARIABLES is os.environ else os.fsencode(name) for name in (environment.RANKED, "WORLD_SIZE")
)


def is_rank() -> bool:
    """Whether this process is one of several, as `ranked_by` says."""
    return ranked_by() is not None


def ranked_by() -> str | None:
    """Return what makes this process a rank, as ``WORLD_SIZE=8``; None where it is none.

    That is AOT_TUNE_RANKED alone where it is set; else a variable of a launcher (`environment.LAUNCHERS`) or
    torch.distributed, which is used only where the program has imported and initialised it.
    """
    name, size = environment.world_size()
    if size > 1:
        return f"{name}={size}"
    distributed = sys.modules.get("torch.distributed")
    try:
        if (
            distributed is None
            or name == environment.RANKED
            or not (distributed.is_available() and distributed.is_initialized())
        ):
            return None
        size = distributed.get_world_size()
        return f"a torch.distributed world of {size}" if size > 1 else None
    except (AttributeError, RuntimeError):  # it is half imported, or torn down meanwhile
        return None


def rank_in_words() -> str | None:
    """Return a sentence on what makes this process a rank, and how to change it; None where it is none."""
    by = ranked_by()
    advice = f"set {environment.RANKED}=1 if it is not one of several"
    return by and f"this process is a rank by {by}, and searches nothing: {advice}"


def evidence() -> tuple[object, ...]:
    """Return all that may change of what `is_rank` depends on, to be compared with a later return.

    It takes 0.2 us, where `is_rank` takes 5 us. Launchers set their other variables before a process starts.
    """
    distributed = sys.modules.get("torch.distributed")
    try:
        size = distributed.get_world_size() if distributed and distributed.is_initialized() else None
    except (AttributeError, RuntimeError):  # as in `is_rank`
        size = None
    return _VARIABLES.get(_RANKED), _VARIABLES.get(_WORLD_SIZE), size


_primed: list[bool] = []


def is_primed() -> bool:
    """Whether `aot_tune.prime` was called in this process: no live search is made afterwards."""
    return bool(_primed)


def set_primed(primed: bool) -> None:
    """Set whether this process was primed; a forked child inherits this."""
    _primed[:] = [True] if primed else []


_priming: list[bool] = []
"""One item for each running `aot_tune.prime`."""


@contextmanager
def priming() -> Iterator[None]:
    """Mark this process as being primed, so that it may compile."""
    _priming.append(True)
    try:
        yield
    finally:
        _priming.pop()


_replaying: list[bool] = []


def is_replaying() -> bool:
    """Whether this process answers searches of libraries, whose kernels no declaration names."""
    return bool(_replaying)


def set_replaying(replaying: bool) -> None:
    """Set whether this process answers searches of libraries; a forked child inherits this."""
    _replaying[:] = [True] if replaying else []


def may_compile() -> bool:
    """Whether code may be compiled: not after `aot_tune.prime` where AOT_TUNE_ON_MISS is ``error``."""
    return not is_primed() or bool(_priming) or environment.on_miss() != "error"
