"""Blanks of a declaration that `aot-tune new` began: each holds an example until its author fills it in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from aot_tune.declare.mistakes import Mistake

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration

T = TypeVar("T", bound=Callable[..., Any] | list[Any])

_BLANK = "_blank_of_aot_tune"
"""The attribute of an example that says what should stand in its place."""


class _BlankList(list[Any]):
    """A list that stands as an example."""


def _copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function once more, so that one which is used elsewhere too is not marked there."""
    if not isinstance(function, FunctionType):
        return functools.wraps(function)(lambda *args, **named: function(*args, **named))
    code, names = function.__code__, function.__globals__
    same = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    same.__kwdefaults__ = function.__kwdefaults__
    return same


def blank(what: str, example: T) -> T:
    """A part of a declaration that its author has yet to write; until then the example stands for it.

    The module imports, and `aot-tune doctor` lists the blanks and checks the rest. `tune`, `check` and
    `compile` refuse a declaration that has any. To fill one in, write the right value in place of the whole
    call; where the example is right, that is the example.

    Args:
        what: What should stand there, in words.
        example: A function or a list of the right form.
    """
    marked = _BlankList(example) if isinstance(example, list) else _copy(example)
    setattr(marked, _BLANK, what)
    return cast(T, marked)


def blanks_of(tunable: Declaration) -> Iterator[tuple[str, str]]:
    """The fields of a declaration that are blank, each with what should stand there."""
    for field in tunable.__dataclass_fields__:
        what = getattr(getattr(tunable, field), _BLANK, None)
        if isinstance(what, str):
            yield field, what


def blank_mistakes(tunable: Declaration) -> Iterator[Mistake]:
    """A mistake for each blank: nothing is tuned, checked or compiled by an example."""
    for field, what in blanks_of(tunable):
        yield Mistake(field, f"{field} is blank: {what}; write it in place of blank(...)")
