"""Run a declaration's functions on stand-ins for tensors. Needs no torch, computes nothing.

So it is known which keys `problem` returns, and what `args_fn` hands on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

OPERATORS = (
    "getitem", "call", "eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul",
    "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "neg", "pos", "abs",
    "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift", "invert",
)  # fmt: skip
"""Special methods, without their underscores, whose result may be another stand-in."""

VALUE_METHODS = ("bool", "iter", "contains", "len", "int", "float", "index", "hash", "setitem")
"""Special methods, without their underscores, that need a real value: a function may branch on the result."""

_MOST_ANSWERS = 100
"""A stand-in may be derived from another at most this often in a row; it ends a loop that would not end."""


class NotFollowedError(Exception):
    """The function's result depends on a tensor's values, or on what only a real tensor can do."""


class _StandIn:
    __slots__ = ("_answers", "_root")

    def __init__(self, root: str | None = None, answers: int = 0) -> None:
        if answers > _MOST_ANSWERS:
            raise NotFollowedError
        self._root = root
        self._answers = answers

    def __getattr__(self, name: str) -> _StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(self._root, self._answers + 1)


def _answer(self: _StandIn, *args: object, **named: object) -> _StandIn:
    return _StandIn(self._root, self._answers + 1)


def _refuse(self: _StandIn, *args: object) -> object:
    raise NotFollowedError


for _name in OPERATORS:
    setattr(_StandIn, f"__{_name}__", _answer)
for _name in VALUE_METHODS:
    setattr(_StandIn, f"__{_name}__", _refuse)


def returned(function: Callable[..., object], count: int) -> object:
    """Call a function with `count` stand-ins. Of a dict that it returns only the keys are right, no values.

    Raises:
        NotFollowedError: The result cannot be known without real tensors.
    """
    try:
        result = function(*(_StandIn() for _ in range(count)))
    except Exception as error:  # a stand-in is not a tensor, and the author's code may depend on that
        raise NotFollowedError from error
    if isinstance(result, _StandIn):
        raise NotFollowedError
    return result


def handed_on(args_fn: Callable[..., object], parameters: Sequence[str]) -> tuple[str | None, ...]:
    """For each argument of the kernel, the launch argument that `args_fn` makes it of; None for any other.

    Raises:
        NotFollowedError: It cannot be known without real tensors.
    """
    try:
        taken = inspect.signature(args_fn).parameters.values()
        named = {one.name: _StandIn() for one in taken if one.kind is one.KEYWORD_ONLY}
        result = args_fn(_StandIn(), *map(_StandIn, parameters), **named)
    except Exception as error:  # a stand-in is not a tensor, and the author's code may depend on that
        raise NotFollowedError from error
    if not isinstance(result, tuple):
        raise NotFollowedError
    return tuple(one._root if isinstance(one, _StandIn) else None for one in result)
