"""The order of the tasks that all GPUs draw from. Pure: knows no thread, no clock and no GPU."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class TaskQueue(Generic[T]):
    """Tasks that wait. The kernel that is first in the sweep comes first: so that kernels end one by one.

    Of one kernel the longest task comes first, of equal ones the one that was added first. What a kernel has
    no task for is left to those behind it.

    Args:
        order: The kernels' names. Those that are not named come last. It is read as each task is added, so
            that who made the list may still fill it.
    """

    def __init__(self, order: Sequence[str] = ()) -> None:
        self._order = order
        self._numbers = count()
        self._waiting: list[tuple[int, float, int, T]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return (one for *_, one in self._waiting)

    def add(self, task: T, kernel: str, length: float = 0.0) -> None:
        """Add a task of a kernel."""
        rank = self._order.index(kernel) if kernel in self._order else len(self._order)
        insort(self._waiting, (rank, -length, next(self._numbers), task))

    def draw(self, may: Callable[[T], bool] = lambda task: True) -> T | None:
        """Remove and return the first task that may be drawn; None where there is none."""
        for place, (*_, task) in enumerate(self._waiting):
            if may(task):
                del self._waiting[place]
                return task
        return None

    def drop(self, out: Callable[[T], bool]) -> None:
        """Remove all tasks of a sort."""
        self._waiting = [one for one in self._waiting if not out(one[-1])]


FEW = 8
"""Tasks that need a fresh process and together take about as long as its start."""

MANY = 32
"""Such tasks for which another GPU starts one although it has something else to do."""


def draw_for(
    queue: TaskQueue[T],
    may: Callable[[T], bool],
    *,
    needs_fresh: Callable[[T], bool],
    is_fresh: bool,
    fresh: int,
) -> T | None:
    """Draw the next task for a GPU, so that few processes are replaced by fresh ones.

    A fresh process has timed nothing. A GPU that has one does what needs one first. The others leave that to
    these GPUs, unless there are `MANY` such tasks for each of them, or `FEW` and nothing else to do.

    Args:
        queue: The tasks.
        may: Whether the GPU may do a task now.
        needs_fresh: Whether a task needs a fresh process.
        is_fresh: Whether the GPU's process is fresh.
        fresh: Number of other GPUs whose processes are.
    """
    if is_fresh:
        found = queue.draw(lambda task: needs_fresh(task) and may(task))
        return found if found is not None else queue.draw(may)
    waiting = sum(map(needs_fresh, queue))
    if waiting > MANY * fresh:
        return queue.draw(may)
    found = queue.draw(lambda task: not needs_fresh(task) and may(task))
    return queue.draw(may) if found is None and waiting > FEW * fresh else found
