"""Lay out code: what fits stays on one line, else the last bracket is opened, one item a line. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 100
"""Columns of a line, at most, where it can be broken."""


@dataclass(frozen=True)
class Bracket:
    """Items between brackets."""

    start: str
    """The opening bracket, with what stands right before it."""

    items: tuple[Code, ...]
    """The items."""

    end: str
    """The closing bracket."""

    separator: str = ","
    """What follows each item; nothing in a comprehension, whose parts are its items."""


@dataclass(frozen=True)
class Product:
    """Factors, of which each may have a line of its own between brackets."""

    factors: tuple[str, ...]
    """The factors."""


@dataclass(frozen=True)
class Text:
    """A literal text without quotes in it, which may be broken between words."""

    words: str
    """The text."""


Code = str | Bracket | Product | Text | tuple[Any, ...]
"""A piece of code: itself, items between brackets, a product, a text, or pieces that follow each other."""


def flat(code: Code) -> str:
    """The code on one line."""
    if isinstance(code, str):
        return code
    if isinstance(code, Product):
        return " * ".join(code.factors)
    if isinstance(code, Text):
        return f'"{code.words}"'
    if isinstance(code, Bracket):
        inside = f"{code.separator} ".join(map(flat, code.items))
        alone = "," if code.start == "(" and len(code.items) == 1 else ""
        return f"{code.start}{inside}{alone}{code.end}"
    return "".join(map(flat, code))


def laid_out(code: Code, column: int, indent: int = 0) -> str:
    """The code in lines.

    Args:
        code: The code.
        column: Where its first line begins.
        indent: The indentation of the line on which it begins.
    """
    line = flat(code)
    if column + len(line) < WIDTH or isinstance(code, str):
        return line
    if isinstance(code, Product):
        return f"\n{' ' * indent}* ".join(code.factors)
    if isinstance(code, Text):
        parts = textwrap.wrap(code.words, WIDTH - indent - 4, break_long_words=False)
        lines = [f'"{part}{" " if part is not parts[-1] else ""}"' for part in parts]
        return f"\n{' ' * indent}".join(lines)
    if isinstance(code, Bracket):
        inner = " " * (indent + 4)
        items = [f"{inner}{laid_out(one, len(inner), len(inner))}{code.separator}\n" for one in code.items]
        return f"{code.start}\n{''.join(items)}{' ' * indent}{code.end}"
    last = max((place for place, part in enumerate(code) if not isinstance(part, str)), default=None)
    if last is None:
        return line
    before, after = (flat(code[:last]), flat(code[last + 1 :]))
    if isinstance(code[last], Product):
        inner = " " * (indent + 4)
        return f"{before}(\n{inner}{laid_out(code[last], len(inner), len(inner))}\n{' ' * indent}){after}"
    return before + laid_out(code[last], column + len(before) + len(after), indent) + after


def in_tuple(items: Sequence[Code]) -> Code:
    """A tuple."""
    return Bracket("(", tuple(items), ")")


def in_dict(items: Sequence[tuple[str, Code]]) -> Code:
    """A dict of text keys."""
    return Bracket("{", tuple((f'"{name}": ', value) for name, value in items), "}")


def call(name: str, *items: Code) -> Code:
    """A call."""
    return Bracket(f"{name}(", items, ")")


def product(factors: Sequence[str]) -> Code:
    """A product; of one factor it is that, of none it is 1."""
    return Product(tuple(factors)) if len(factors) > 1 else next(iter(factors), "1")


def function(parameters: Sequence[str], result: Code) -> Code:
    """A lambda."""
    return f"lambda {', '.join(parameters)}: ", result
