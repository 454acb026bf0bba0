"""The states of a GPU in which times are taken, and how times of several states become one. Pure.

A kernel's time depends on what the L2 cache holds when it begins, on what ran just before and on the GPU's
clocks. A config that is fast in one state may be slow in another. So a config is judged by its worst state:
its time there over the shortest time of any config in the same state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from aot_tune.tables.table import Point

State = Literal["read", "written", "tight"]
"""A state by its name in tables and journals. Before each launch the L2 cache is filled by reading (``read``),
as a layer's weights fill it, or by writing (``written``), as its results do: the launch then waits while they
go to memory. Or launches of one config follow each other in a tight row (``tight``), on two sets of
arguments in turn, and each finds in the L2 cache what the ones before have left there.

The times without a state (`us`, `mean_us`, `default_us`) are those of schema 1: as ``read``, and for long
kernels under load, at the power cap."""

LOADED = "loaded"
"""What the times without a state are called where ``read`` is among the states: they were taken under load."""

States = Mapping[str, Sequence["float | None"]]
"""A state's name to the times of some configs, in one order."""


def first_state(names: Mapping[str, object]) -> str:
    """What the times without a state are called beside those of these states: ``read`` or `LOADED`."""
    return LOADED if "read" in names else "read"


def worst_times(us: Sequence[float | None], states: States) -> tuple[float | None, ...]:
    """Each config's time, lengthened until it is as far behind the fastest as in the config's worst state.

    Args:
        us: The times without a state; None for a config that cannot run.
        states: The times in the other states, in the same order; None where there is none.
    """
    known = [time for time in us if time is not None]
    if not states or not known:
        return tuple(us)
    fastest = min(known)
    worst = [None if time is None else time / fastest for time in us]
    for times in states.values():
        best = min((time for time in times if time is not None), default=None)
        for place, time in enumerate(times):
            ratio = worst[place]
            if best is not None and time is not None and ratio is not None and time > ratio * best:
                worst[place] = time / best
    return tuple(None if ratio is None else ratio * fastest for ratio in worst)


def in_worst_state(point: Point) -> Point:
    """A point whose times are those of `worst_times`; the point itself where it has no states."""
    if not point.states:
        return point
    return Point(size=point.size, us=worst_times(point.us, point.states), states=point.states)
