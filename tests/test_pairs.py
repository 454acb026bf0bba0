"""Tables of pairs: what they must hold, and which combinations are left to `make test-slow`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.pairs import pairwise

OTHERS: dict[str, Any] = {"dtype": ("half", "float"), "form": ("", "more=8")}
TABLE = [
    ((1, 2), ("half", ""), ("float", "more=8")),
    ((3, 4), ("half", "more=8"), ("float", "")),
]


def test_the_table_runs_and_the_rest_of_the_product_is_slow() -> None:
    names, cases = pairwise("rows cols", OTHERS, TABLE).args
    assert names == ["rows", "cols", "dtype", "form"]
    assert [case.values for case in cases if not case.marks] == [
        (1, 2, "half", ""),
        (1, 2, "float", "more=8"),
        (3, 4, "half", "more=8"),
        (3, 4, "float", ""),
    ]
    assert [case.values for case in cases if pytest.mark.slow.mark in [one.mark for one in case.marks]] == [
        (1, 2, "half", "more=8"),
        (1, 2, "float", ""),
        (3, 4, "half", ""),
        (3, 4, "float", "more=8"),
    ]


@pytest.mark.parametrize("place", range(4))
def test_a_table_that_lacks_a_pair_is_refused(place: int) -> None:
    rows = [(first, row) for first, *others in TABLE for row in others]
    with pytest.raises(ValueError, match="lacks 3 values or pairs, first "):
        pairwise("rows cols", OTHERS, rows[:place] + rows[place + 1 :])


@pytest.mark.parametrize("row", [((1, 2), ("half", "")), ((1, 2), ("double", ""))])
def test_a_combination_twice_or_not_of_the_product_is_refused(row: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="twice or not of the product"):
        pairwise("rows cols", OTHERS, [*TABLE, row])


def test_a_single_other_parameter_needs_no_tuples() -> None:
    _, cases = pairwise("one", {"other": "ab"}, [(1, "a", "b"), (2, "a", "b")]).args
    assert [(case.values, case.marks) for case in cases] == [
        ((one, other), ()) for one in (1, 2) for other in "ab"
    ]
