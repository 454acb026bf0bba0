"""The order in which GPUs draw tasks."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from aot_tune.tuner.schedule.queue import FEW, MANY, TaskQueue, draw_for


def filled(tasks: Iterable[tuple[str, str, float]], order: tuple[str, ...] = ("a", "b")) -> TaskQueue[str]:
    queue = TaskQueue[str](order)
    for task, kernel, length in tasks:
        queue.add(task, kernel, length)
    return queue


def drawn(queue: TaskQueue[str]) -> list[str]:
    return [task for _ in range(len(queue)) if (task := queue.draw()) is not None]


def test_the_first_kernel_comes_first_and_of_it_the_longest_task() -> None:
    tasks = [("b1", "b", 9), ("z", "unnamed", 99), ("a1", "a", 1), ("a2", "a", 2), ("a3", "a", 2)]
    assert drawn(filled(tasks)) == ["a2", "a3", "a1", "b1", "z"]


def test_what_may_not_be_drawn_keeps_its_place() -> None:
    queue = filled([("a1", "a", 2), ("a2", "a", 1)])
    assert queue.draw(lambda task: task == "a2") == "a2"
    assert queue.draw(lambda task: task == "a2") is None
    assert drawn(queue) == ["a1"]


def test_dropped_tasks_are_gone() -> None:
    queue = filled([("a1", "a", 2), ("b1", "b", 1)])
    queue.drop(lambda task: task.startswith("a"))
    assert drawn(queue) == ["b1"]


@pytest.mark.parametrize(
    ("needing", "others", "is_fresh", "fresh", "expected"),
    [
        (1, 1, True, 0, "fresh"),  # a fresh process does first what needs one
        (0, 1, True, 0, "other"),
        (1, 1, False, 1, "other"),  # any other process leaves it that
        (FEW, 0, False, 1, None),  # also where nothing else is to do, while they are few
        (FEW + 1, 0, False, 1, "fresh"),
        (1, 0, False, 0, "fresh"),  # no process is fresh: one is replaced
        (MANY, 1, False, 1, "other"),
        (MANY + 1, 1, False, 1, "fresh"),
    ],
)
def test_few_processes_are_replaced_by_fresh_ones(
    needing: int, others: int, is_fresh: bool, fresh: int, expected: str | None
) -> None:
    queue = filled([("fresh", "a", 2)] * needing + [("other", "a", 1)] * others)
    assert (
        draw_for(
            queue,
            lambda task: True,
            needs_fresh=lambda task: task == "fresh",
            is_fresh=is_fresh,
            fresh=fresh,
        )
        == expected
    )
