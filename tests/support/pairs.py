"""Run a table of a product's combinations in which each pair of values occurs; the rest is slow.

Of two parameters a fault depends on both or on one; few depend on three. So a table of pairs finds what the
product finds but for those few, which `make test-slow` finds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

Row = tuple[Any, ...]


def pairwise(product: Mapping[str, Sequence[Any]], table: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrize a test with a product, whose combinations are slow but for those of a table.

    Args:
        product: Parameter to its values. A name such as ``"rows cols"`` has tuples of values for both. The
            constants of a value that is a dictionary count as parameters of their own.
        table: Lines of a value of the first parameter and then combinations of the others with it, each a
            tuple unless there is only one other.

    Raises:
        ValueError: The table lacks a pair, repeats a combination, or has one that is not in the product.
    """
    rows = [
        (first, *(others if len(product) > 2 else (others,))) for first, *each in table for others in each
    ]
    every = list(itertools.product(*product.values()))
    keys = list(map(repr, every))
    chosen = set(map(repr, rows))
    if len(chosen) < len(rows) or not chosen <= set(keys):
        raise ValueError(f"combinations twice or not of the product: {_odd(rows, keys)}")
    if missing := pairs(product, every) - pairs(product, rows):
        raise ValueError(f"the table lacks {len(missing)} values or pairs, first {min(missing)}")
    names = [name for joined in product for name in joined.split()]
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(*_values(product, row), id=_id(row), marks=() if key in chosen else pytest.mark.slow)
            for row, key in zip(every, keys, strict=True)
        ],
    )


def pairs(product: Mapping[str, Sequence[Any]], rows: Iterable[Row]) -> set[str]:
    """The values, and the pairs of two parameters' values, that occur in some combinations, in words."""
    found: set[str] = set()
    for row in rows:
        found.update(f"{name}={value!r}" for name, value in zip(product, row, strict=True))
        texts = [
            text
            for (name, values), value in zip(product.items(), row, strict=True)
            for text in _texts(name, value, values)
        ]
        found.update(f"{one} with {other}" for one, other in itertools.combinations(texts, 2))
    return found


def _texts(name: str, value: Any, every: Sequence[Any]) -> list[str]:
    """A parameter's value in words; of a dictionary each constant's, an absent one's too."""
    if not isinstance(value, dict):
        return [f"{name}={value!r}"]
    constants = dict.fromkeys(constant for each in every for constant in each)
    return [f"{constant}={value.get(constant)!r}" for constant in constants]


def _values(product: Iterable[str], row: Row) -> list[Any]:
    """The values of a combination, one for each name."""
    values: list[Any] = []
    for name, value in zip(product, row, strict=True):
        values += value if " " in name else [value]
    return values


def _odd(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    counts = [repr(row) for row in rows]
    return [row for row, key in zip(rows, counts, strict=True) if counts.count(key) > 1 or key not in keys]


def _id(row: Row) -> str:
    return "-".join(str(value).replace(" ", "") for value in row)
