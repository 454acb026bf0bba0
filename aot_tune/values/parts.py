"""The tensors among launch arguments: an argument may be a tensor, a list of tensors, or absent. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def parts_of(name: str, arg: Any) -> Iterator[tuple[str, Any]]:
    """An argument by its name; each member of a list by its place, ``xs[0]``; nothing of None."""
    if isinstance(arg, list | tuple):
        for place, member in enumerate(arg):
            yield f"{name}[{place}]", member
    elif arg is not None:
        yield name, arg


def named_parts(names: Iterable[str], args: Iterable[Any]) -> dict[str, Any]:
    """All arguments by their names, the members of lists each by its own."""
    return {part: value for name, arg in zip(names, args, strict=True) for part, value in parts_of(name, arg)}


def part_names(names: Iterable[str], named: Mapping[str, Any]) -> list[str]:
    """The names of the parts of some arguments.

    Args:
        names: The names of arguments.
        named: Each argument by its name.
    """
    return [part for name in names for part, _ in parts_of(name, named[name])]


def flat(args: Sequence[Any]) -> list[Any]:
    """The arguments, with the members of a list in its place."""
    return [value for arg in args for value in (arg if isinstance(arg, list | tuple) else (arg,))]
