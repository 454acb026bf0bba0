"""Values as an analysis of source knows them: what they are equal to and what they come from. Pure."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Value:
    """What is known of an expression's value in a kernel. Values of one key are equal."""

    key: str
    """The expression in a short form, with loops and calls as they are met."""

    sources: frozenset[str] = frozenset()
    """What the value comes from: ``bid 0``, ``num_blocks``, ``loop ...``, ``load x``, ``parameter x``."""

    parameter: str | None = None
    """The kernel's parameter that the value is, or the array that it is a part of."""

    sliced: frozenset[int] = frozenset()
    """Of a part of an array, the axes along which it is one."""

    is_view: bool = False
    """Whether the value is a `tiled_view` of `parameter`, whose tiles have the shape `items`."""

    number: float | None = None
    """A number that is written in the source, a bool among them."""

    items: tuple[Value, ...] | None = None
    """The members of a tuple or list; of a tiled view the sizes of a tile."""

    dimension: tuple[str, int] | None = None
    """The array and the axis whose size the value is."""

    factors: tuple[Value, Value] | None = None
    """The two factors of a product."""

    tiles_of: tuple[Value, Value | None] | None = None
    """Of a count of tiles: the size that is divided into tiles, and the size of a tile."""

    lanes: Value | None = None
    """The length of the `arange` that the value holds, of consecutive offsets into an array."""

    at: Value | None = None
    """Of consecutive offsets, the index of their tile; None where they do not follow tile by tile."""

    step: Value | None = None
    """Of a loop's variable, what it grows by each time."""

    dtype: str | None = None
    """The dtype that the value was cast to by name, or that follows from such casts."""

    function: Function | None = None
    """The function that the value is."""

    known: Any = None
    """The Python object that the value is, of a global of the kernel's module; None where there is none."""

    @property
    def is_array(self) -> bool:
        """Whether the value may be an argument of the kernel, whole or in part."""
        return self.parameter is not None and not self.is_view

    def of_sources(self, start: str) -> frozenset[str]:
        """The rest of the sources that begin with a word: ``of_sources("load")`` are names of arrays."""
        return frozenset(one.partition(" ")[2] for one in self.sources if one.partition(" ")[0] == start)


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function written in Python that a kernel calls."""

    node: ast.FunctionDef | ast.Lambda
    """Its tree."""

    names: Mapping[str, Value] = field(repr=False)
    """The names around it that it may read."""

    outer: Mapping[str, Any] = field(repr=False)
    """The globals and the closure that it may read."""


def number(value: float) -> Value:
    """A number in the source."""
    return Value(key=repr(value), number=value)


def made_of(what: str, parts: Iterable[Value], **more: Any) -> Value:
    """A value that some operation makes of others; of float32 where one of them is."""
    listed = tuple(parts)
    sources = frozenset().union(*(one.sources for one in listed))
    more.setdefault("dtype", next((one.dtype for one in listed if one.dtype == "float32"), None))
    return Value(key=f"{what}({', '.join(short(one.key) for one in listed)})", sources=sources, **more)


_MOST_KEY = 200


def short(key: str) -> str:
    """A key of bounded length: a long one is replaced with its digest."""
    if len(key) <= _MOST_KEY:
        return key
    return "#" + hashlib.blake2s(key.encode()).hexdigest()[:16]
