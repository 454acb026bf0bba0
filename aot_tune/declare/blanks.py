"""Blanks of a declaration that `aot-tune new` began: what its author has yet to write."""

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
"""The attribute of an example that says what belongs in its place."""


class _BlankList(list[Any]):
    """A list that is an example."""


class _BlankTuple(tuple[Any, ...]):
    """A tuple that is an example."""


class _BlankDict(dict[str, Any]):
    """A dict that is an example."""


def _refusing(what: str, example: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the example's parameters that computes nothing."""

    @functools.wraps(example)
    def refuse(*args: object, **named: object) -> NoReturn:
        raise DeclarationError(f"a blank is called: {what}; write it in place of blank(...)")

    return refuse


def blank(what: str, example: T) -> T:
    """Mark a part of a declaration that its author has yet to write.

    The module imports, and `aot-tune doctor` lists the blanks. Nothing is computed by an example: until no
    blank is left the declaration is not checked further, and neither launched, tuned nor compiled. To fill
    one in, write the right value in place of the whole call; where the example is right, that is the example.

    Args:
        what: What belongs there, in words.
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
    """The fields of a declaration that are blank, each with what belongs there."""
    for field in tunable.__dataclass_fields__:
        what = getattr(getattr(tunable, field), _BLANK, None)
        if isinstance(what, str):
            yield field, what


def blank_mistakes(tunable: Declaration) -> list[Mistake]:
    """A mistake for each blank."""
    return [
        Mistake(field, f"{field} is blank: {what}; write it in place of blank(...)")
        for field, what in blanks_of(tunable)
    ]


def refuse_blanks(*tunables: Declaration) -> None:
    """Refuse to use declarations that have blanks.

    Raises:
        DeclarationError: Names each blank.
    """
    found = [f"{one.name}: {mistake.text}" for one in tunables for mistake in blank_mistakes(one)]
    if found:
        raise DeclarationError("\n".join(found))
