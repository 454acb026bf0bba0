"""Give a warning at the caller's line, in one way everywhere. A warning never ends a launch."""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from functools import lru_cache

_CONTROL = {number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160)) if number not in b"\t\n"}
"""Control characters, which a path or a file may hold, and how they are written: a terminal obeys them."""


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line outside of aot_tune that led here.

    Python's registry of warnings is not used, because it would keep every text: who warns sees to it that it
    is done once. A warning that cannot be written is no error, since stderr may be closed or a full disk. One
    that a filter makes an error is raised.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("aot_tune."):
        frame = frame.f_back
    with suppress(OSError, ValueError):
        text = message.translate(_CONTROL)
        warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, registry={})


@lru_cache(maxsize=1024)
def warn_once(message: str, category: type[Warning]) -> None:
    """Warn as `warn` does, once a process for each message."""
    warn(message, category)
