"""Tensors among launch arguments: an argument may be a tensor, a list of tensors, or absent. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def parts_of(name: str, arg: Any) -> Iterator[tuple[str, Any]]:
    """Yield an argument with its name, each member of a list with its place, ``xs[0]``; nothing for None."""
    if isinstance(arg, list | tuple):
        for place, member in enumerate(arg):
            yield f"{name}[{place}]", member
    elif arg is not None:
        yield name, arg


def named_parts(names: Iterable[str], args: Iterable[Any]) -> dict[str, Any]:
    """Return the parts of all arguments by their names."""
    return {part: value for name, arg in zip(names, args, strict=True) for part, value in parts_of(name, arg)}


def part_names(names: Iterable[str], named: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts of some arguments.

    Args:
        names: The names of arguments.
        named: Each argument by its name.
    """
    return [part for name in names for part, _ in parts_of(name, named[name])]


def flat(args: Sequence[Any]) -> list[Any]:
    """Return the arguments, with each list replaced by its members."""
    return [value for arg in args for value in (arg if isinstance(arg, list | tuple) else (arg,))]
