"""Format values and errors as text: aligned columns, counts, durations. Pure: it prints nothing."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from aot_tune.errors import AotTuneError


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines whose columns are padded to their widest cell, two spaces apart."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def shortened(text: str, most: int = 200) -> str:
    """Cut a text to at most `most` characters, for messages that quote a file."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def counted(number: int, noun: str, plural: str = "") -> str:
    """Format a number with its noun: ``1 problem``, ``2 problems``; `plural` where adding an s is wrong."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def duration(seconds: float) -> str:
    """Format seconds in a readable unit: ``40 s``, ``3 min``, ``1 h 5 min``."""
    whole = max(round(seconds), 1)
    if whole < 90:
        return f"{whole} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def value_in_words(value: object) -> str:
    """Format a number or str. Other values give their type alone: printing a tensor waits for the GPU."""
    return repr(value)[:80] if isinstance(value, str | int | float) else f"a {type(value).__name__}"


def error_in_words(error: Exception) -> str:
    """Return an error's message, preceded by its type where aot_tune did not raise it."""
    return str(error) if isinstance(error, AotTuneError) else f"{type(error).__name__}: {error}"


def described(error: Exception, function: object = None) -> str:
    """Format an error of the author's code in one line, with the file and line where `function` raised it."""
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
