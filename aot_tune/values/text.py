"""Values and errors as lines for people: aligned columns, counts, durations. Pure: prints nothing."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from aot_tune.errors import AotTuneError


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with columns padded to their widest cell, two spaces apart."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 problem``, ``2 problems``; `plural` where an s is not enough."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: ``40 s``, ``3 min``, ``1 h 5 min``."""
    whole = max(round(seconds), 1)
    if whole < 90:
        return f"{whole} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def value_in_words(value: object) -> str:
    """A number or a word as it is; of anything else the type: printing a tensor waits for the GPU."""
    return repr(value)[:80] if isinstance(value, str | int | float) else f"a {type(value).__name__}"


def error_in_words(error: Exception) -> str:
    """An error's message, with its type in front where the error is not one of ours."""
    return str(error) if isinstance(error, AotTuneError) else f"{type(error).__name__}: {error}"


def described(error: Exception, function: object = None) -> str:
    """An error of the author's code in one line, with the place where `function` raised it."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}{_place(error, function)}"


def _place(error: Exception, function: object) -> str:
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    if code is None:
        return ""
    line, step = code.co_firstlineno, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == code.co_filename:
            line = step.tb_lineno
        step = step.tb_next
    return f" ({code.co_filename}, line {line})"
