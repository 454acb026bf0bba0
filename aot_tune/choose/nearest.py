"""Find the nearest bucket, by the rule of tables and batches. Pure: takes only sizes.

Two sizes are |log2(size / other)| doublings apart. Of the places at most `within` doublings away on each
axis, the nearest has the least sum of doublings over all axes. Of equally near places the larger is taken, by
the sizes in the order of the axes, then the earlier.

Replays share the distance and the reach (`distance`, `NEAR_DOUBLINGS`) and break ties by a rule of their own:
`_rank` in `aot_tune.replay.answer.records`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from math import log2 as _log2
from typing import Generic, TypeVar

NEAR_DOUBLINGS = 1.0
"""Most doublings on each axis within which a bucket is near; a farther bucket serves only a miss."""

Sizes = tuple[int, ...]
"""Sizes of a bucket on each axis, in the declaration's order. A size of 0 counts as 1."""

Item = TypeVar("Item")


class Places(Generic[Item]):
    """Items by their sizes, prepared for `nearest`: the logarithms are computed once.

    Args:
        places: The sizes of each item, on equal axes, and the item, in the file's order.
    """

    def __init__(self, places: Iterable[tuple[Sizes, Item]]) -> None:
        pairs = tuple(places)
        self.sizes = [sizes for sizes, _ in pairs]
        self.items = [item for _, item in pairs]
        self.columns = [[_log2(size or 1) for size in column] for column in zip(*self.sizes, strict=True)]
        """Base-2 logarithms of the sizes, for each axis."""

    def reach(self, place: int, logs: Sequence[float], within: float) -> bool:
        """Whether a place is at most `within` doublings away on each axis."""
        for log, column in zip(logs, self.columns):  # noqa: B905, SIM110 - for speed
            if not -within <= log - column[place] <= within:
                return False
        return True


def nearest(sizes: Sequence[int], places: Places[Item], within: float = NEAR_DOUBLINGS) -> Item | None:
    """Return the nearest of some places; None where none is in reach.

    Args:
        sizes: The size of a bucket's edge on each axis.
        places: The places to search.
        within: The most doublings on any axis; ``math.inf`` for any distance.
    """
    # Written for speed, since an unseen shape waits for it: for most places the sums decide.
    logs = [_log2(size or 1) for size in sizes]
    sums = [0.0] * len(places.items)
    for log, column in zip(logs, places.columns):  # noqa: B905 - without a place there is no column
        sums = [total + abs(log - other) for total, other in zip(sums, column)]  # noqa: B905 - for speed
    within += _ROUNDED
    limit, chosen = within * len(logs), None
    for place in sorted(range(len(sums)), key=sums.__getitem__):
        if sums[place] > limit:
            break
        if sums[place] > within and not places.reach(place, logs, within):
            continue
        if chosen is None:
            chosen, limit = place, sums[place] + _ROUNDED
        elif places.sizes[place] > places.sizes[chosen]:
            chosen = place
    return None if chosen is None else places.items[chosen]


def distance(one: Sequence[int], other: Sequence[int], within: float = inf) -> float | None:
    """Return the sum of doublings between two lists of sizes; None where one axis exceeds `within`."""
    doublings = [abs(_log2((size or 1) / (another or 1))) for size, another in zip(one, other, strict=True)]
    return sum(doublings) if max(doublings, default=0.0) <= within + _ROUNDED else None


_ROUNDED = 1e-9
"""Difference in doublings that counts as rounding, of logarithms and of sums in another order."""
