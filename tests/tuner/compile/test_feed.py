"""The feed's thread ends when it is told, at whatever instant."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest

from aot_tune.errors import TuneError
from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job import CompileFailure, CompileJob
from aot_tune.tuner.compile.job_queue import KernelRefusedError
from tests.support.samples import SM90


class Idle:
    """A pool without work."""

    unfinished = idle = 0

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Held(threading.Condition):
    """Lets the feed's thread have the lock only after `go`, as an unlucky scheduler does."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def __enter__(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            self.asked.set()
            self.go.wait(10)
        return super().__enter__()


def test_a_feed_that_is_stopped_before_it_waits_does_not_wait() -> None:
    pool: Any = Idle
    feed = CompileFeed(pool)
    held = feed._changed = Held()
    with feed:
        assert held.asked.wait(10)  # it has looked whether to stop, if it looks outside of the lock
        with held:
            feed._stopping = True
            held.notify_all()
        held.go.set()
        feed._thread.join(10)
        stuck = feed._thread.is_alive()
        with held:
            held.notify_all()  # so that a failure of this test is not a hang
    assert not stuck


class OneAtATime:
    """A pool of one child, which compiles what it has been let compile, first come first served."""

    def __init__(self) -> None:
        self.waiting: deque[CompileJob] = deque()
        self.done: list[str] = []
        self.allowed = threading.Semaphore(0)

    def __enter__(self) -> OneAtATime:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def unfinished(self) -> int:
        return len(self.waiting)

    @property
    def idle(self) -> int:
        return max(0, 1 - len(self.waiting))

    def submit(self, job: CompileJob) -> None:
        self.waiting.append(job)

    def poll(self, timeout_s: float) -> list[CompileFailure]:
        if not self.waiting or not self.allowed.acquire(timeout=timeout_s):
            return []
        job = self.waiting.popleft()
        if job.module == "broken":
            raise KernelRefusedError(job.name, f"no module {job.module}")
        key = job.key
        self.done.append(key)
        return [CompileFailure(key=key, message="no", seconds=0.0)]


def _job(key: str, kernel: str = "matmul", module: str = "m") -> CompileJob:
    return CompileJob(key=key, module=module, name=kernel, signature="s", hints={}, arch=SM90)


def _begun(pool: OneAtATime) -> None:
    while not pool.waiting:
        threading.Event().wait(0.01)


def test_the_jobs_of_the_kernel_before_come_first_whenever_they_are_submitted() -> None:
    pool: Any = OneAtATime()
    with CompileFeed(lambda: pool, ["matmul", "rope"]) as feed:
        feed.submit(_job(f"rope {n}", "rope") for n in range(3))
        _begun(pool)
        feed.submit(_job(f"matmul {n}") for n in range(2))
        assert not feed.rests
        for _ in range(5):
            pool.allowed.release()
        feed.wait([f"rope {n}" for n in range(3)], lambda: None)
        assert pool.done == ["rope 0", "matmul 0", "matmul 1", "rope 1", "rope 2"], "one had begun"
        assert feed.counts("matmul") == (2, 2, 2)
        assert feed.counts("rope") == (3, 3, 3)
        feed.submit([_job("rope 1", "rope")])
        assert feed.ready(["rope 1"])
        assert len(pool.done) == 5, "nothing is compiled twice"


def test_what_only_a_dropped_kernel_wanted_is_not_compiled() -> None:
    pool: Any = OneAtATime()
    with CompileFeed(lambda: pool, ["matmul", "rope"]) as feed:
        feed.submit([_job("first"), _job("its own"), _job("both")])
        feed.submit([_job("both", "rope"), _job("last", "rope")])
        _begun(pool)
        feed.drop("matmul")
        for _ in range(3):
            pool.allowed.release()
        feed.wait(["both", "last"], lambda: None)
        assert pool.done == ["first", "both", "last"]


def test_a_kernel_that_no_child_can_load_fails_alone() -> None:
    pool: Any = OneAtATime()
    with CompileFeed(lambda: pool, ["broken", "rope"]) as feed:
        feed.submit([_job("its own", "broken", "broken"), _job("both", "broken", "broken")])
        feed.submit([_job("both", "rope"), _job("last", "rope")])
        for _ in range(3):
            pool.allowed.release()
        with pytest.raises(TuneError, match="nothing can be compiled: no module broken"):
            feed.wait(["its own"], lambda: None)
        feed.submit([_job("later", "broken", "broken")])
        assert feed.ready(["later"]), "it need not be waited for"
        assert feed.wait(["both", "last"], lambda: None).keys() == {"both", "last"}
        assert not feed.ended
