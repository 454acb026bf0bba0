"""Blanks of a declaration that `aot-tune new` began: parts that its author has yet to write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from aot_tune.declare.mistakes import Mistake
from aot_tune.errors import DeclarationError

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration

T = TypeVar("T", bound=Callable[..., Any] | Sequence[Any] | Mapping[str, Any])

_BLANK = "_blank_of_aot_tune"
"""Attribute of an example that describes the value to write in its place."""


class _BlankList(list[Any]):
    """List that is an example."""


class _BlankTuple(tuple[Any, ...]):
    """Tuple that is an example."""


class _BlankDict(dict[str, Any]):
    """Dict that is an example."""


def _refusing(what: str, example: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the example's parameters that raises when called."""

    @functools.wraps(example)
    def refuse(*args: object, **named: object) -> NoReturn:
        raise DeclarationError(f"a blank is called: {what}; write it in place of blank(...)")

    return refuse


def blank(what: str, example: T) -> T:
    """Mark a part of a declaration that its author has yet to write.

    The module can be imported, and `aot-tune doctor` lists the blanks. An example computes nothing: while a
    blank is left, the declaration is not checked further, and cannot be launched, tuned or compiled. To fill
    a blank in, write the right value in place of the whole call; the example may be the right value.

    Args:
        what: The value to write, in words.
        example: A function, list, tuple or dict of the right form.
    """
    marked: Any
    if callable(example):
        marked = _refusing(what, example)
    elif isinstance(example, Mapping):
        marked = _BlankDict(example)
    elif isinstance(example, list):
        marked = _BlankList(example)
    else:
        marked = _BlankTuple(cast(Sequence[Any], example))
    setattr(marked, _BLANK, what)
    return cast(T, marked)


def blanks_of(tunable: Declaration) -> Iterator[tuple[str, str]]:
    """Yield the blank fields of a declaration, each with the value to write, in words."""
    for field in tunable.__dataclass_fields__:
        what = getattr(getattr(tunable, field), _BLANK, None)
        if isinstance(what, str):
            yield field, what


def blank_mistakes(tunable: Declaration) -> list[Mistake]:
    """Return a mistake for each blank."""
    return [
        Mistake(field, f"{field} is blank: {what}; write it in place of blank(...)")
        for field, what in blanks_of(tunable)
    ]


def refuse_blanks(*tunables: Declaration) -> None:
    """Refuse to use declarations that have blanks.

    Raises:
        DeclarationError: Names each blank.
    """
    texts = [f"{tunable.name}: {mistake.text}" for tunable in tunables for mistake in blank_mistakes(tunable)]
    if texts:
        raise DeclarationError("\n".join(texts))
