"""Several kernels at once: when the next one begins, and what becomes of the others when one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from aot_tune.tuner.schedule.overlap import EXTRA_KERNELS, may_begin, run_overlapping


class Stopped(Exception):
    """What a kernel raises that was stopped."""


def _run(work: Callable[[str], None], kernels: list[str], stop: Callable[[], None] = lambda: None) -> None:
    """At most two at once."""
    run_overlapping(work, kernels, begins=lambda running: running < 2, stop=stop, stopped=Stopped)


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({}, True),
        ({"waiting": 2}, False),
        ({"waiting": 2, "compilers_rest": True}, True),
        ({"planned": False}, False),
        ({"running": 2 + EXTRA_KERNELS}, False),
        ({"running": 0, "planned": False, "waiting": 9}, True),
    ],
    ids=["gpus rest", "all have work", "compilers rest", "one plans still", "enough", "none in flight"],
)
def test_the_next_kernel_begins_before_a_gpu_or_a_compiler_rests(
    changes: dict[str, int], begins: bool
) -> None:
    values = {"running": 1, "planned": True, "gpus": 2, "waiting": 1, "compilers_rest": False} | changes
    assert may_begin(**values) is begins  # type: ignore[arg-type]


def test_kernels_overlap_and_all_of_them_run() -> None:
    second = threading.Event()
    ended: list[str] = []

    def work(name: str) -> None:
        assert second.wait(20) if name == "a" else not second.set()
        ended.append(name)

    _run(work, ["a", "b", "c"])
    assert sorted(ended) == ["a", "b", "c"]


def test_a_kernel_that_fails_stops_those_in_flight_and_its_error_is_raised() -> None:
    stopped, begun = threading.Event(), threading.Event()
    done: list[str] = []

    def work(name: str) -> None:
        done.append(name)
        if name == "a":
            begun.set()
            assert stopped.wait(20)
            raise Stopped
        assert begun.wait(20)
        raise ValueError("the disk is full")

    with pytest.raises(ValueError, match="the disk is full"):
        _run(work, ["a", "b", "c"], stopped.set)
    assert done == ["a", "b"]


def test_an_interrupted_caller_waits_until_nothing_runs_any_more() -> None:
    stopped = threading.Event()
    ended: list[str] = []

    def work(name: str) -> None:
        assert stopped.wait(20)
        ended.append(name)
        raise Stopped

    def begins(running: int) -> bool:
        if running:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        run_overlapping(work, ["a", "b"], begins=begins, stop=stopped.set, stopped=Stopped)
    assert ended == ["a"]


def test_a_kernel_may_begin_whenever_another_ends() -> None:
    counts: list[int] = []
    done: list[str] = []

    def begins(running: int) -> bool:
        counts.append(running)
        return not running

    run_overlapping(done.append, list("abcd"), begins=begins, stop=lambda: None, stopped=Stopped)
    assert done == list("abcd")
    assert set(counts) <= {0, 1}


def test_the_first_error_in_time_is_raised_whatever_the_order_of_the_kernels() -> None:
    failed = threading.Event()

    def work(name: str) -> None:
        if name == "a":
            assert failed.wait(20)
            raise ValueError("the second")
        raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        _run(work, ["a", "b"], failed.set)
