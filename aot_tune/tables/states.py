"""The states of a GPU in which times are taken, and how times of several states become one. Pure.

A kernel's time depends on what the L2 cache holds when it begins, on what ran just before and on the GPU's
clocks. A config that is fast in one state may be slow in another. So a config is judged by its worst state:
its time there over the shortest time of any config in the same state.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from aot_tune.tables.table import Point

State = Literal["read", "written", "tight"]
"""A state by its name in tables and journals.

- ``read``: before each launch the L2 cache is filled by reading, as a layer's weights fill it.
- ``written``: before each launch it is filled by writing, as a layer's results fill it. While the launch
  runs, they must go to memory.
- ``tight``: launches of one config follow each other in a tight row, on two sets of arguments in turn. Each
  finds in the L2 cache what the ones before have left there.

The times without a state (`us`, `mean_us`, `default_us`) are taken as ``read``, and for long
kernels under load, at the power cap."""

LOADED = "loaded"
"""The name of the times without a state where ``read`` is among the states: they were taken under load."""

FRAGILE = 1.1
"""A config that is this many times as far behind in its worst state as another one is in its own is not what
others are compared with. In the products that were looked at, such configs were 13 to 61 % behind (H200)."""

States = Mapping[str, Sequence["float | None"]]
"""A state's name to the times of some configs, in one order."""


def first_state(names: Collection[str]) -> str:
    """What the times without a state are called beside those of these states: ``read`` or `LOADED`."""
    return LOADED if "read" in names else "read"


def worst_times(us: Sequence[float | None], states: States) -> tuple[float | None, ...]:
    """Each config's time, lengthened until it is as far behind the fastest as in the config's worst state.

    Args:
        us: The times without a state; None for a config that cannot run.
        states: The times in the other states, in the same order; None where there is none.
    """
    if not states:
        return tuple(us)
    return tuple(None if one is None else one[0] for one in judged([us, *states.values()]))


def judged(rows: Sequence[Sequence[float | None]]) -> list[tuple[float, int] | None]:
    """For each config its time as of `worst_times`, and the row of its worst state.

    The fastest of a state is looked for among the configs that may be chosen: a config whose worst state is
    more than `FRAGILE` behind that of another one is not among them. Else its one good state would make all
    others look equally bad.

    Args:
        rows: The times in each state, one for each config; the first row has those without a state.
    """
    left = [place for place, time in enumerate(rows[0]) if time is not None]
    while left:
        best = [min((row[i] or math.inf for i in left), default=math.inf) for row in rows]
        worst = [_worst(column, best) for column in zip(*rows, strict=True)]
        least = min(one[0] for i in left if (one := worst[i]) is not None)
        robust = [i for i in left if (one := worst[i]) is not None and one[0] <= least * FRAGILE]
        if len(robust) == len(left):
            return [None if one is None else (one[0] * best[0], one[1]) for one in worst]
        left = robust
    return [None for _ in rows[0]]


def _worst(column: Sequence[float | None], best: Sequence[float]) -> tuple[float, int] | None:
    """The largest ratio of a config's times to the best of their states, and the first state that has it."""
    if column[0] is None:
        return None
    ratios = [0.0 if time is None else time / least for time, least in zip(column, best, strict=True)]
    return max(ratios), ratios.index(max(ratios))


def in_worst_state(point: Point) -> Point:
    """A point whose times are those of `worst_times`; the point itself where it has no states."""
    if not point.states:
        return point
    return Point(size=point.size, us=worst_times(point.us, point.states), states=point.states)
