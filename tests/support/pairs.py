"""Run a table of a product's combinations in which each pair of values occurs; the rest is slow.

Of two parameters a fault depends on both or on one; few depend on three. So a table of pairs finds what the
product finds but for those few, which `make test-slow` finds.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

Row = tuple[Any, ...]


def pairwise(
    first: str, others: Mapping[str, Sequence[Any]], table: Sequence[tuple[Any, ...]]
) -> pytest.MarkDecorator:
    """Parametrize a test with a product, whose combinations are slow but for those of a table.

    Args:
        first: The first parameter. A name such as ``"rows cols"`` has tuples of values for both.
        others: The other parameters, each with its values. Of values such as ``"more=8 swapped=1"`` each
            constant counts as a parameter.
        table: Lines of a value of the first parameter and then combinations of the others with it, each a
            tuple unless there is only one other.

    Raises:
        ValueError: The table lacks a pair, repeats a combination, or has one that is not in the product.
    """
    product = {first: [line[0] for line in table], **others}
    rows = [(line[0], *(one if len(others) > 1 else (one,))) for line in table for one in line[1:]]
    every = list(itertools.product(*product.values()))
    chosen = set(rows)
    if len(chosen) < len(rows) or not chosen <= set(every):
        raise ValueError(f"combinations twice or not of the product: {_odd(rows, every)}")
    if missing := pairs(product, every) - pairs(product, rows):
        raise ValueError(f"the table lacks {len(missing)} values or pairs, first {min(missing)}")
    return pytest.mark.parametrize(
        [name for joined in product for name in joined.split()],
        [
            pytest.param(*_values(product, row), id=_id(row), marks=() if row in chosen else pytest.mark.slow)
            for row in every
        ],
    )


def constants(form: str) -> dict[str, Any]:
    """The constants of a form: ``"more=8 swapped=1"`` has two."""
    return {name: ast.literal_eval(value) for name, _, value in (one.partition("=") for one in form.split())}


def pairs(product: Mapping[str, Sequence[Any]], rows: Iterable[Row]) -> set[str]:
    """The values, and the pairs of two parameters' values, that occur in some combinations, in words."""
    found: set[str] = set()
    for row in rows:
        named = list(zip(product.items(), row, strict=True))
        found.update(f"{name}={value!r}" for (name, _), value in named)
        texts = [text for (name, values), value in named for text in _texts(name, value, values)]
        found.update(f"{one} with {other}" for one, other in itertools.combinations(texts, 2))
    return found


def _texts(name: str, value: Any, values: Sequence[Any]) -> list[str]:
    """A parameter's value in words; of a form each constant's, an absent one's too."""
    if not any(isinstance(one, str) and "=" in one for one in values):
        return [f"{name}={value!r}"]
    own = constants(value)
    return [f"{one}={own.get(one)!r}" for one in dict.fromkeys(c for form in values for c in constants(form))]


def _values(product: Iterable[str], row: Row) -> list[Any]:
    """The values of a combination, one for each name."""
    values: list[Any] = []
    for name, value in zip(product, row, strict=True):
        values += value if " " in name else [value]
    return values


def _odd(rows: Sequence[Row], every: Sequence[Row]) -> list[Row]:
    return [row for row in rows if rows.count(row) > 1 or row not in every]


def _id(row: Row) -> str:
    return "-".join(str(value).replace(" ", "") for value in row)
