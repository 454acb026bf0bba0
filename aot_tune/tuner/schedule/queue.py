"""Order the tasks that all GPUs draw from. Pure: no thread, no clock and no GPU."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class TaskQueue(Generic[T]):
    """Waiting tasks in the order of their kernels in the sweep, so that kernels end one by one.

    The longest task of a kernel comes first, among equal tasks the earliest. Tasks of later kernels fill the
    remaining time.

    Args:
        order: The kernels' names. Kernels without a name here come last. It is read as each task is added, so
            that the caller may still extend it.
    """

    def __init__(self, order: Sequence[str] = ()) -> None:
        self._order = order
        self._numbers = count()
        self._waiting: list[tuple[int, float, int, T]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return (task for *_, task in self._waiting)

    def add(self, task: T, kernel: str, length: float = 0.0) -> None:
        """Add a task of a kernel."""
        rank = self._order.index(kernel) if kernel in self._order else len(self._order)
        insort(self._waiting, (rank, -length, next(self._numbers), task))

    def draw(self, may: Callable[[T], bool] = lambda task: True) -> T | None:
        """Remove and return the first task that passes `may`; None without such a task."""
        for place, (*_, task) in enumerate(self._waiting):
            if may(task):
                del self._waiting[place]
                return task
        return None

    def drop(self, out: Callable[[T], bool]) -> None:
        """Remove all tasks for which `out` is true."""
        self._waiting = [waiting for waiting in self._waiting if not out(waiting[-1])]


FEW = 8
"""Number of tasks for a fresh process that together take about as long as its start."""

MANY = 32
"""Number of such tasks for which another GPU starts a fresh process in spite of other tasks."""


def draw_for(
    queue: TaskQueue[T],
    may: Callable[[T], bool],
    *,
    needs_fresh: Callable[[T], bool],
    is_fresh: bool,
    fresh: int,
) -> T | None:
    """Draw the next task for a GPU, so that few processes are replaced by fresh processes.

    A fresh process has timed nothing. A GPU with a fresh process first does the tasks that need one. Other
    GPUs leave such tasks to these GPUs, unless there are more than `MANY` for each of these GPUs, or more
    than `FEW` and no other task.

    Args:
        queue: The tasks.
        may: Returns whether the GPU may do a task now.
        needs_fresh: Returns whether a task needs a fresh process.
        is_fresh: Whether the GPU's process is fresh.
        fresh: Number of other GPUs with fresh processes.
    """
    if is_fresh:
        task = queue.draw(lambda task: needs_fresh(task) and may(task))
        return task if task is not None else queue.draw(may)
    waiting = sum(map(needs_fresh, queue))
    if waiting > MANY * fresh:
        return queue.draw(may)
    task = queue.draw(lambda task: not needs_fresh(task) and may(task))
    return queue.draw(may) if task is None and waiting > FEW * fresh else task
