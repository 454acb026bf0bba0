"""The GPUs of a host draw tasks from one queue: which one does what, and what becomes of those that fail."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from aot_tune.errors import TuneError
from aot_tune.tuner.measure.supervise import GpuLostError, MeasuringStopped
from aot_tune.tuner.sweep.gpus import GpuPool, GpuSlot, Task
from aot_tune.values.arch import Arch
from aot_tune.values.device import Device

FOUND: Any = SimpleNamespace(tunable=SimpleNamespace(name="scale"))
OTHER: Any = SimpleNamespace(tunable=SimpleNamespace(name="other"))


class Session:
    """A session that only says which GPU it is on."""

    def __init__(self, found: Any, index: int) -> None:
        self.index, self.stopped = index, threading.Event()
        self.name = found.tunable.name

    def turn_to(self, found: Any, fault_counts: Any) -> None:
        self.name = found.tunable.name

    def identity(self) -> dict[str, str]:
        return {"uuid": f"GPU-{self.index}"}

    def device(self) -> Device:
        return Device.reference(Arch.parse("sm90"))

    def close(self) -> None:
        closed.append((self.name, self.index))

    def interrupt(self) -> None:
        self.stopped.set()


said: list[str] = []
closed: list[tuple[str, int]] = []


@pytest.fixture
def gpu_pool() -> Iterator[GpuPool]:
    said.clear()
    closed.clear()
    start: Any = lambda found, index, fault_counts: Session(found, index)  # noqa: E731
    with GpuPool((0, 1), start, said.append, ["scale", "other"]) as gpu_pool:
        gpu_pool.open(FOUND)
        yield gpu_pool


def _task(work: Callable[[GpuSlot], None], **values: Any) -> Task:
    return Task(kernel=values.pop("kernel", FOUND), work=work, **values)


def test_the_longest_task_is_drawn_first(gpu_pool: GpuPool) -> None:
    done: list[float] = []
    tasks = [
        _task(lambda slot, length=length: done.append(length), length=length, owner="GPU-0")
        for length in (1.0, 5.0, 3.0, 5.5)
    ]
    gpu_pool.run(tasks)
    assert done == [5.5, 5.0, 3.0, 1.0]


def test_two_gpus_work_at_the_same_time_each_in_its_session(gpu_pool: GpuPool) -> None:
    both, seen = threading.Barrier(2, timeout=20), []

    def work(slot: GpuSlot) -> None:
        both.wait()
        seen.append((slot.gpu, slot.session.index))

    gpu_pool.run([_task(work), _task(work)])
    assert sorted(seen) == [("GPU-0", 0), ("GPU-1", 1)]


def test_a_task_that_is_not_ready_does_not_keep_a_gpu_from_others(gpu_pool: GpuPool) -> None:
    done: list[str] = []
    tasks = [
        _task(lambda slot: done.append("long"), length=9.0, ready=lambda: "short" in done),
        _task(lambda slot: done.append("short"), length=1.0),
    ]
    gpu_pool.run(tasks)
    assert done == ["short", "long"]


def test_a_task_with_an_owner_goes_to_that_gpu_while_it_is_there(gpu_pool: GpuPool) -> None:
    done: list[str] = []
    gpu_pool.run([_task(lambda slot: done.append(slot.gpu), owner="GPU-1") for _ in range(5)])
    gpu_pool.run([_task(lambda slot: done.append("any"), owner="GPU-7")])
    assert done == ["GPU-1"] * 5 + ["any"]


def test_the_task_of_a_lost_gpu_is_done_by_another_from_the_start(gpu_pool: GpuPool) -> None:
    done: list[str] = []

    def work(slot: GpuSlot) -> None:
        done.append(slot.gpu)
        if slot.gpu == "GPU-1":
            raise GpuLostError("it does not answer")

    gpu_pool.run([_task(work, owner="GPU-1"), _task(work, owner="GPU-0")])
    assert sorted(done) == ["GPU-0", "GPU-0", "GPU-1"]
    gpu_pool.run([_task(work, owner="GPU-1")])
    assert done[-1] == "GPU-0", "it does not come back"
    (line,) = said
    assert line.startswith("GPU 1 (GPU-1) is lost and leaves the sweep: it does not answer.")
    assert [use.lost for use in gpu_pool.usage()] == ["", "it does not answer"]
    assert ("scale", 1) in closed


def test_when_no_gpu_is_left_the_last_error_is_raised_now_and_later(gpu_pool: GpuPool) -> None:
    def work(slot: GpuSlot) -> None:
        raise GpuLostError(f"{slot.gpu} does not answer")

    with pytest.raises(GpuLostError, match="does not answer"):
        gpu_pool.run([_task(work) for _ in range(4)])
    with pytest.raises(GpuLostError, match="GPU 0: GPU-0 does not answer; GPU 1: GPU-1 does not"):
        gpu_pool.run([_task(work)])


def test_an_error_ends_the_batch_once_what_runs_is_done_and_no_other_batch(gpu_pool: GpuPool) -> None:
    done: list[str] = []
    begun = threading.Event()

    def wrong(slot: GpuSlot) -> None:
        begun.wait(20)
        raise TuneError("the kernel is wrong")

    def long(slot: GpuSlot) -> None:
        begun.set()
        time.sleep(0.2)
        done.append("long")

    def never(slot: GpuSlot) -> None:
        done.append("never")

    with pytest.raises(TuneError, match="the kernel is wrong"):
        gpu_pool.run(
            [
                _task(wrong, owner="GPU-0", length=9),
                _task(long, owner="GPU-1", length=9),
                _task(never, owner="GPU-0"),
            ]
        )
    assert done == ["long"]
    gpu_pool.run([_task(lambda slot: done.append("next"))])
    assert done == ["long", "next"]


def test_a_gpus_session_lives_on_and_turns_to_the_kernel_of_each_task(gpu_pool: GpuPool) -> None:
    seen: list[tuple[str, Any]] = []
    for kernel in (FOUND, OTHER, FOUND):
        gpu_pool.run(
            [_task(lambda slot: seen.append((slot.session.name, slot.session)), kernel=kernel, owner="GPU-0")]
        )
    assert [name for name, _ in seen] == ["scale", "other", "scale"]
    assert len({id(session) for _, session in seen}) == 1
    assert closed == []


def _beside(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_the_kernel_before_comes_first_and_the_next_one_fills_what_it_leaves(gpu_pool: GpuPool) -> None:
    done: list[str] = []
    hold, waits = threading.Event(), threading.Event()
    blocker = _beside(lambda: gpu_pool.run([_task(lambda slot: waits.set() or hold.wait(20), owner="GPU-0")]))
    assert waits.wait(20)

    def work(name: str) -> Callable[[GpuSlot], None]:
        return lambda slot: done.append(name)

    long = [_task(work("other"), kernel=OTHER, length=9, owner="GPU-0")]
    short = [_task(work("scale"), length=1, owner="GPU-0")]
    threads = [_beside(lambda: gpu_pool.run(long)), _beside(lambda: gpu_pool.run(short))]
    while gpu_pool.waiting < 2:
        time.sleep(0.01)
    gpu_pool.run([_task(work("beside"), kernel=OTHER, owner="GPU-1")])
    hold.set()
    for thread in (blocker, *threads):
        thread.join(20)
    assert done == ["beside", "scale", "other"]


def test_an_error_of_one_kernel_leaves_another_that_waits_at_the_same_time(gpu_pool: GpuPool) -> None:
    done: list[str] = []
    begun = threading.Event()

    def long(slot: GpuSlot) -> None:
        begun.set()
        time.sleep(0.3)
        done.append("other")

    other = _beside(lambda: gpu_pool.run([_task(long, kernel=OTHER, owner="GPU-0")]))
    assert begun.wait(20)

    def wrong(slot: GpuSlot) -> None:
        raise TuneError("the kernel is wrong")

    with pytest.raises(TuneError, match="the kernel is wrong"):
        gpu_pool.run([_task(wrong, owner="GPU-1")])
    other.join(20)
    assert done == ["other"]


def test_who_waits_for_tasks_is_told_when_the_crew_is_closed(gpu_pool: GpuPool) -> None:
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            gpu_pool.run([_task(lambda slot: None, ready=lambda: False)])
        except MeasuringStopped as error:
            raised.append(error)

    waiting = _beside(wait)
    while not gpu_pool.waiting:
        time.sleep(0.01)
    gpu_pool.close()
    waiting.join(20)
    assert len(raised) == 1


def test_seconds_of_waiting_for_a_compiler_are_told_from_idle_ones(gpu_pool: GpuPool) -> None:
    asked: list[float] = []
    told: list[tuple[float, float]] = []

    def ready() -> bool:
        asked.append(time.monotonic())
        return asked[-1] - asked[0] > 0.4

    gpu_pool.run([_task(lambda slot: told.append(slot.rested()), owner="GPU-0", ready=ready)])
    gpu_pool.run([_task(lambda slot: None, owner="GPU-1")])
    time.sleep(0.3)
    gpu_pool.run([_task(lambda slot: told.append(slot.rested()), owner="GPU-0")])
    (waited, _), (again, idle) = told
    assert waited > 0.2
    assert again == 0.0
    assert idle > 0.2


def test_an_interrupt_stops_what_runs_before_it_goes_on(gpu_pool: GpuPool) -> None:
    stopped: list[int] = []
    begun = threading.Semaphore(0)

    def hang(slot: GpuSlot) -> None:
        begun.release()
        assert slot.session.stopped.wait(20)
        stopped.append(slot.index)
        raise MeasuringStopped

    def interrupted() -> None:
        for _ in range(2):
            assert begun.acquire(timeout=20)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gpu_pool.run([_task(hang), _task(hang)], interrupted)
    assert sorted(stopped) == [0, 1]
    assert len(closed) == 2, "their sessions are closed"
    with pytest.raises(MeasuringStopped):
        gpu_pool.run([_task(hang)])


def test_idle_seconds_are_those_in_which_a_gpu_had_no_task(gpu_pool: GpuPool) -> None:
    gpu_pool.run([_task(lambda slot: time.sleep(0.5), owner="GPU-0")])
    first, second = gpu_pool.usage()
    assert first.busy_s >= 0.5 > second.busy_s
    assert second.idle_s >= 0.5


def test_gpus_with_other_multiprocessor_counts_are_refused_together() -> None:
    class Smaller(Session):
        def device(self) -> Device:
            device = super().device()
            return dataclasses.replace(device, sm_count=78) if self.index else device

    start: Any = lambda found, index, fault_counts: Smaller(found, index)  # noqa: E731
    with (
        GpuPool((0, 1), start, said.append) as gpu_pool,
        pytest.raises(
            TuneError, match=r"0: NVIDIA H\w+.*, 132 multiprocessors; 1: .*78 multi.*choose.*--gpus 0"
        ),
    ):
        gpu_pool.open(FOUND)
