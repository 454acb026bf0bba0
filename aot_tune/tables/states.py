"""GPU states in which times are taken, and the rule that combines their times. Pure.

A kernel's time depends on the content of the L2 cache at its start, on the launch just before and on the
GPU's clocks. A config that is fast in one state may be slow in another. So a config is judged by its worst
state: its time over the shortest time of any config in the same state.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from aot_tune.tables.table import Entry, Point

State = Literal["read", "written", "tight"]
"""Name of a state in tables and journals.

- ``read``: before each launch the L2 cache is filled by reading, as a layer's weights fill it.
- ``written``: before each launch it is filled by writing, as a layer's results fill it. While the launch
  runs, they must go to memory.
- ``tight``: launches of one config follow each other back to back, on two sets of arguments in turn. The L2
  cache holds what the launches before have left.

The times without a state (`us`, `mean_us`, `default_us`) are taken as ``read``, and for long
kernels under load, at the power cap."""

LOADED = "loaded"
"""Name of the times without a state where ``read`` is among the states: they were taken under load."""

FRAGILE = 1.1
"""Ratio of worst slowdowns from which a config is fragile: other configs are not compared with it.

In the products that were examined, such configs were 13 to 61 % slower (H200)."""

States = Mapping[str, Sequence["float | None"]]
"""Times of some configs, in one order, by the state's name."""


def first_state(names: Collection[str]) -> str:
    """Return the name of the times without a state, given the names of the other states."""
    return LOADED if "read" in names else "read"


def edge_times(entry: Entry) -> dict[str, tuple[float, float]]:
    """Return the times of an entry's config and of the default at the edge, by the GPU's state."""
    others = {name: (times.mean_us, times.default_us) for name, times in entry.states.items()}
    return {first_state(others): (entry.mean_us, entry.default_us), **others}


def worst_times(us: Sequence[float | None], states: States) -> tuple[float | None, ...]:
    """Return each config's time, scaled to its slowdown in its worst state.

    Args:
        us: The times without a state; None for a config that cannot run.
        states: The times in the other states, in the same order; None for a missing time.
    """
    if not states:
        return tuple(us)
    return tuple(None if worst is None else worst[0] for worst in judged([us, *states.values()]))


def judged(rows: Sequence[Sequence[float | None]]) -> list[tuple[float, int] | None]:
    """Return each config's time as of `worst_times`, and the row of its worst state.

    The fastest config of a state is searched among the configs that may be chosen. A config whose worst
    slowdown is more than `FRAGILE` times another config's is not among them: its one good state would make
    all other configs look equally bad.

    Args:
        rows: The times in each state, one for each config; the first row has those without a state.
    """
    left = [place for place, time in enumerate(rows[0]) if time is not None]
    best, ratios, worst = list[float](), list[list[float]](), list[float]()
    while left:
        fastest = [min([row[i] or math.inf for i in left]) for row in rows]
        if fastest == best:
            columns = zip(worst, zip(*ratios, strict=True), rows[0], strict=True)
            return [
                None if time is None else (ratio * best[0], column.index(ratio))
                for ratio, column, time in columns
            ]
        best = fastest
        ratios = [
            [0.0 if time is None else time / least for time in row]
            for row, least in zip(rows, best, strict=True)
        ]
        worst = [*map(max, zip(*ratios, strict=True))]
        limit = min([worst[i] for i in left]) * FRAGILE
        left = [i for i in left if worst[i] <= limit]
    return [None for _ in rows[0]]


def in_worst_state(point: Point) -> Point:
    """Return a point with the times of `worst_times`; the point itself where it has no states."""
    if not point.states:
        return point
    return Point(size=point.size, us=worst_times(point.us, point.states), states=point.states)
