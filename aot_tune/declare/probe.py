"""Run a declaration's functions on probes instead of tensors. Imports no torch, computes nothing.

The result is the keys that `problem` returns, and the arguments that `args_fn` hands on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

OPERATORS = (
    "getitem", "call", "eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul",
    "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "neg", "pos", "abs",
    "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift", "invert",
)  # fmt: skip
"""Special methods, without their underscores, whose result may be another probe."""

VALUE_METHODS = ("bool", "iter", "contains", "len", "int", "float", "index", "hash", "setitem")
"""Special methods, without their underscores, that need a real value: a function may branch on the result."""

_MOST_ANSWERS = 100
"""Most times in a row that a probe is derived from another; it ends an endless loop."""


class NotFollowedError(Exception):
    """A function's result depends on a tensor's values, or on abilities of a real tensor."""


class _Probe:
    __slots__ = ("_answers", "_root")

    def __init__(self, root: str | None = None, answers: int = 0) -> None:
        if answers > _MOST_ANSWERS:
            raise NotFollowedError
        self._root = root
        self._answers = answers

    def __getattr__(self, name: str) -> _Probe:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Probe(self._root, self._answers + 1)


def _answer(self: _Probe, *args: object, **named: object) -> _Probe:
    return _Probe(self._root, self._answers + 1)


def _refuse(self: _Probe, *args: object) -> object:
    raise NotFollowedError


for _name in OPERATORS:
    setattr(_Probe, f"__{_name}__", _answer)
for _name in VALUE_METHODS:
    setattr(_Probe, f"__{_name}__", _refuse)


def returned(function: Callable[..., object], count: int) -> object:
    """Call a function with `count` probes. In a returned dict only the keys are valid, not the values.

    Raises:
        NotFollowedError: The result cannot be known without real tensors.
    """
    try:
        result = function(*(_Probe() for _ in range(count)))
    except Exception as error:  # a probe is not a tensor, and the author's code may depend on it
        raise NotFollowedError from error
    if isinstance(result, _Probe):
        raise NotFollowedError
    return result


def handed_on(args_fn: Callable[..., object], parameters: Sequence[str]) -> tuple[str | None, ...]:
    """Return the launch argument that `args_fn` makes each kernel argument of; None for others.

    Raises:
        NotFollowedError: The result cannot be known without real tensors.
    """
    try:
        taken = inspect.signature(args_fn).parameters.values()
        named = {parameter.name: _Probe() for parameter in taken if parameter.kind is parameter.KEYWORD_ONLY}
        result = args_fn(_Probe(), *map(_Probe, parameters), **named)
    except Exception as error:  # a probe is not a tensor, and the author's code may depend on it
        raise NotFollowedError from error
    if not isinstance(result, tuple):
        raise NotFollowedError
    return tuple(argument._root if isinstance(argument, _Probe) else None for argument in result)
