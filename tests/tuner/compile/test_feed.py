"""The feed's thread ends when it is told, at whatever instant."""

from __future__ import annotations

import threading
from typing import Any

from aot_tune.tuner.compile.feed import CompileFeed


class Idle:
    """A pool without work."""

    unfinished = 0

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
