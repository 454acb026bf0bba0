"""A recorded problem and config in words, for people. Pure."""

from __future__ import annotations

from aot_tune.replay.problem import CONTIGUOUS, Argument, Array, Fixed, Items, Problem, Real, Whole
from aot_tune.replay.table import RecordedEntry
from aot_tune.values.text import shortened

_LONGEST = 60
"""The most characters of one argument."""


def problem_in_words(problem: Problem) -> str:
    """``x=float16[1024] n=1024 factor=float``: arguments that vary with the config are left out."""
    pairs = zip(problem.names, problem.arguments, strict=True)
    told = [(name, _argument(argument)) for name, argument in pairs]
    return " ".join(f"{name}={shortened(text, _LONGEST)}" for name, text in told if text)


def config_in_words(entry: RecordedEntry) -> str:
    """The winner's spelling, then the hints that it was launched with."""
    hints = " ".join(f"{name}={value}" for name, value in entry.hints.items())
    return f"{entry.text}" + (f" ({hints})" if hints else "")


def _argument(argument: Argument) -> str:
    if isinstance(argument, Array):
        sizes = ",".join(map(str, argument.shape))
        layout = "" if argument.layout == CONTIGUOUS else f" strides {argument.layout}"
        return f"{argument.dtype}[{sizes}]{layout}" + ("" if argument.aligned else " unaligned")
    if isinstance(argument, Whole):
        return str(argument.value)
    if isinstance(argument, Fixed):
        return argument.text
    if isinstance(argument, Items):
        return f"({', '.join(_argument(one) for one in argument.items)})"
    return "float" if isinstance(argument, Real) else ""
