"""Write recorded problems and configs as text for the user. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from aot_tune.replay.problem import CONTIGUOUS, Argument, Array, Fixed, Items, Problem, Real, Whole
from aot_tune.replay.table import RecordedEntry
from aot_tune.values.text import shortened

_LONGEST = 60
"""Most characters of one argument."""


def problem_in_words(problem: Problem) -> str:
    """Return ``x=float16[1024] n=1024 factor=float``, without arguments that vary with the config."""
    pairs = zip(problem.names, problem.arguments, strict=True)
    texts = [(name, _argument(argument)) for name, argument in pairs]
    return " ".join(f"{name}={shortened(text, _LONGEST)}" for name, text in texts if text)


def difference_in_words(recorded: Problem, asked: Problem, places: Sequence[int]) -> str:
    """Return ``N=64 is N=65 here, and compiled in``: the arguments at some places of two problems."""
    parts = []
    for at in places:
        name, old, new = asked.names[at], recorded.arguments[at], asked.arguments[at]
        texts = (f"{name}={shortened(_argument(argument), _LONGEST)}" for argument in (old, new))
        compiled_in = isinstance(new, Fixed) and new.text.removeprefix("-").isdecimal()
        parts.append(" is ".join(texts) + " here" + (", and compiled in" if compiled_in else ""))
    if recorded.sm_count != asked.sm_count:
        parts.append(f"its GPU had {recorded.sm_count} multiprocessors, this one {asked.sm_count}")
    return "; ".join(parts)


def config_in_words(entry: RecordedEntry) -> str:
    """Return the winner's spelling, then the hints that it was launched with."""
    hints = " ".join(f"{name}={value}" for name, value in entry.hints.items())
    return entry.text + (f" ({hints})" if hints else "")


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
        return f"({', '.join(map(_argument, argument.items))})"
    return "float" if isinstance(argument, Real) else ""
