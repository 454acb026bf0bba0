"""The feed's thread ends when it is told, at whatever instant."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from aot_tune.tuner.compile.feed import CompileFeed
from aot_tune.tuner.compile.job import CompileFailure, CompileJob
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

    def submit(self, job: CompileJob, *, ahead: bool = False) -> None:
        if job.key not in self.done:
            self.waiting.append(job)

    def poll(self, timeout_s: float) -> list[CompileFailure]:
        if not self.waiting or not self.allowed.acquire(timeout=timeout_s):
            return []
        key = self.waiting.popleft().key
        self.done.append(key)
        return [CompileFailure(key=key, message="no", seconds=0.0)]


def _job(key: str) -> CompileJob:
    return CompileJob(key=key, module="m", name="n", signature="s", hints={}, arch=SM90)


def test_jobs_for_later_fill_idle_processes_and_count_once_they_are_needed() -> None:
    pool: Any = OneAtATime()
    feed = CompileFeed(lambda: pool)
    with feed:
        feed.submit_later(map(_job, ("later 1", "later 2", "later 3")))
        while not pool.waiting:
            threading.Event().wait(0.01)
        feed.submit(map(_job, ("now 1", "now 2")))
        for _ in range(5):
            pool.allowed.release()
        feed.wait(["now 1", "now 2"], lambda: None)
        feed.submit([_job("later 2")])
        feed.wait(["later 2"], lambda: None)
        assert pool.done.index("now 2") < pool.done.index("later 2")
        assert pool.done[0] == "later 1", "a process was idle"
        assert feed.counts() == (3, 3, 3)
        assert feed.ready(["later 2"])
        assert len(pool.done) == len(set(pool.done)), "nothing is compiled twice"
