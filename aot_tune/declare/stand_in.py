"""Run `problem` on stand-ins for tensors, to see what it returns. Needs no torch, and computes nothing."""

from __future__ import annotations

from collections.abc import Callable

_ANSWERED = (
    "getitem", "call", "eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul",
    "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "neg", "pos", "abs",
    "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift", "invert",
)  # fmt: skip
"""What Python may ask of a stand-in; the answer is another."""

_UNKNOWN = ("bool", "iter", "contains", "len", "int", "float", "index", "hash", "setitem")
"""What would need a value: the function may go this way or that from there on, and is not followed."""

_MOST_ASKED = 100
"""Answers of answers: ends a loop that walks from one to the next."""


class NotFollowedError(Exception):
    """What the function returns depends on values, or on what a tensor alone can do."""


class _StandIn:
    __slots__ = ("_asked",)

    def __init__(self, asked: int = 0) -> None:
        if asked > _MOST_ASKED:
            raise NotFollowedError
        self._asked = asked

    def __getattr__(self, name: str) -> _StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(self._asked + 1)


def _answer(self: _StandIn, *args: object, **named: object) -> _StandIn:
    return _StandIn(self._asked + 1)


def _refuse(self: _StandIn, *args: object) -> object:
    raise NotFollowedError


for _name in _ANSWERED:
    setattr(_StandIn, f"__{_name}__", _answer)
for _name in _UNKNOWN:
    setattr(_StandIn, f"__{_name}__", _refuse)


def returned(function: Callable[..., object], count: int) -> object:
    """What a function returns for `count` tensors, whatever these are. A dict's keys are right, no value is.

    Raises:
        NotFollowedError: That cannot be told without the tensors.
    """
    try:
        result = function(*(_StandIn() for _ in range(count)))
    except Exception as error:  # a stand-in is no tensor, and the author's code may mind
        raise NotFollowedError from error
    if isinstance(result, _StandIn):
        raise NotFollowedError
    return result
