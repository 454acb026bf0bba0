"""An error of the author's code in one line, with its place in the author's file. Imports nothing of ours."""

from __future__ import annotations

import inspect


def told(error: Exception, function: object = None) -> str:
    """Say what was raised; where `function` raised it, with the last line of its file that was reached."""
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
