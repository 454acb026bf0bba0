"""Give a warning at the caller's line, in one way everywhere. A warning never ends a launch."""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress


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
        warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, registry={})
