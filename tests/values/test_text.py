"""Values as lines for people."""

from __future__ import annotations

import pytest

from aot_tune.values.text import aligned, counted, duration


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert aligned([("a", "bb", "c"), ("aaa", "b", "")]) == ["a    bb  c", "aaa  b"]
    assert aligned([]) == []


def test_one_of_a_thing_is_singular() -> None:
    assert [counted(number, "entry", "entries") for number in (0, 1, 2)] == [
        "0 entries",
        "1 entry",
        "2 entries",
    ]
    assert counted(2, "table") == "2 tables"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "1 s"), (89, "89 s"), (90, "2 min"), (3570, "1 h 0 min"), (3900, "1 h 5 min")],
)
def test_a_duration_is_said_as_a_person_would(seconds: float, said: str) -> None:
    assert duration(seconds) == said
