"""Lines of `aot-tune journal` about a journal of `aot-tune record`: its searches, by key. Imports no kernel.

A record has the place of a config in its library's search space. It names neither the config nor the problem,
which the table that is written at a search's end has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import get_args

from aot_tune.tuner.outcome import Stage
from aot_tune.tuner.sweep.journal import Record
from aot_tune.values.text import aligned, counted


def accepts(record: Record) -> bool:
    """Whether a record is one of a search."""
    place, what = record.get("config"), record.get("what")
    if not isinstance(record.get("search"), str) or type(place) is not int or place < 0:
        return False
    if what == "failed":
        return record.get("stage") in get_args(Stage) and isinstance(record.get("message"), str)
    if what == "timed":
        times = (record.get("mean_us"), record.get("error_margin_us"), record.get("num_samples"))
        return all(map(_is_number, times)) and (record.get("round") is None or type(record["round"]) is int)
    return what in ("begun", "abandoned")


def _is_number(value: object) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer that no float holds
        return False


@dataclass(kw_only=True)
class SearchSummary:
    """One search of a library, by places of configs in its search space."""

    timed: dict[int, float] = field(default_factory=dict)
    """The mean times of the first pass, microseconds."""

    failed: set[int] = field(default_factory=set)
    """Configs that failed."""

    begun: set[int] = field(default_factory=set)
    """Configs that were begun and not abandoned."""

    rounds: int = 0
    """Number of times taken in rounds of the finals."""


def searches_of(records: Iterable[Record]) -> dict[str, SearchSummary]:
    """The searches that records are of, by key, in the journal's order."""
    searches: dict[str, SearchSummary] = {}
    for record in records:
        search, place = searches.setdefault(record["search"], SearchSummary()), record["config"]
        if record["what"] == "begun":
            search.begun.add(place)
        elif record["what"] == "abandoned":
            search.begun.discard(place)
        elif record["what"] == "failed":
            search.failed.add(place)
        elif record["round"] is not None:
            search.rounds += 1
        else:
            search.timed[place] = record["mean_us"]
    return searches


def total_line(records: Iterable[Record]) -> str:
    """What a journal holds, in one line."""
    searches = searches_of(records).values()
    timed = sum(len(search.timed.keys() - search.failed) for search in searches)
    return (
        f"a journal of aot-tune record: {counted(len(searches), 'search', 'searches')}, "
        f"{counted(timed, 'config')} timed, {sum(len(search.failed) for search in searches)} failed"
    )


def search_lines(records: Iterable[Record]) -> list[str]:
    """A row for each search. The fastest config is told by its place in the search space, from 0."""
    heads = ("search", "timed", "failed", "rounds", "unfinished", "fastest us", "place")
    return aligned([heads, *(_row(key, search) for key, search in searches_of(records).items())])


def _row(key: str, search: SearchSummary) -> tuple[str, ...]:
    stands = {place: us for place, us in search.timed.items() if place not in search.failed}
    fastest = min(stands, key=stands.__getitem__, default=None)
    return (
        key,
        str(len(stands)),
        str(len(search.failed)),
        str(search.rounds or "-"),
        str(len(search.begun - search.timed.keys() - search.failed) or "-"),
        "-" if fastest is None else f"{stands[fastest]:.2f}",
        "-" if fastest is None else str(fastest),
    )
