"""Compile while measuring: a thread owns the compile pool, so that no child waits for a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType

from aot_tune.tuner.compile.job import CompileFailure, CompileJob, CompileResult
from aot_tune.tuner.compile.pool import CompilePool

_POLL_SECONDS = 0.1


class CompileFeed:
    """Takes compile jobs from the measuring threads and hands their results back by key.

    Args:
        pool: Makes the pool; it is called, and the pool closed, in the feed's own thread.

    Attributes:
        last_result_s: Monotonic seconds at which the last result came.
    """

    def __init__(self, pool: Callable[[], CompilePool]) -> None:
        self._make = pool
        self._changed = threading.Condition()
        self._asked: list[CompileJob] = []
        self._keys: set[str] = set()
        self._later: dict[str, CompileJob] = {}
        self._results: dict[str, CompileResult] = {}
        self._error: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="aot_tune compile feed", daemon=True)
        self.last_result_s = time.monotonic()

    def __enter__(self) -> CompileFeed:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def submit(self, jobs: Iterable[CompileJob]) -> None:
        """Queue jobs; a job that was submitted before is not done again."""
        with self._changed:
            for job in jobs:
                if job.key not in self._keys:
                    self._keys.add(job.key)
                    self._later.pop(job.key, None)
                    self._asked.append(job)
            self._changed.notify_all()

    def submit_later(self, jobs: Iterable[CompileJob]) -> None:
        """Have jobs compiled where a process has nothing else to do. They count once they are submitted."""
        with self._changed:
            self._later.update((job.key, job) for job in jobs if job.key not in self._keys)
            self._changed.notify_all()

    def counts(self) -> tuple[int, int, int]:
        """The numbers of jobs done, of jobs submitted, and of failures among those done."""
        with self._changed:
            done = [self._results[key] for key in self._keys if key in self._results]
            return len(done), len(self._keys), sum(isinstance(one, CompileFailure) for one in done)

    def ready(self, keys: Iterable[str]) -> bool:
        """Whether `wait` for these jobs would return, or raise, at once."""
        with self._changed:
            return self._error is not None or all(key in self._results for key in keys)

    def wait(self, keys: Iterable[str], progress: Callable[[], None]) -> Mapping[str, CompileResult]:
        """Wait for the results of these jobs.

        Args:
            keys: The keys of jobs that were submitted.
            progress: Called now and then while waiting.

        Raises:
            Exception: The error that stopped the pool.
        """
        wanted = set(keys)
        while True:
            with self._changed:
                if self._error is not None:
                    raise self._error
                if wanted <= self._results.keys():
                    return {key: self._results[key] for key in wanted}
                self._changed.wait(_POLL_SECONDS * 5)
            progress()

    def _run(self) -> None:
        try:
            with self._make() as pool:
                while True:
                    with self._changed:
                        self._changed.wait_for(
                            lambda: self._stopping or self._asked or self._later or pool.unfinished
                        )
                        if self._stopping:
                            return
                        asked, self._asked = self._asked, []
                        room = pool.idle - len(asked)
                        later = [self._later.pop(key) for key in list(self._later)[: max(0, room)]]
                    for job in asked:
                        pool.submit(job)
                    for job in later:
                        pool.submit(job, ahead=True)
                    self._take(pool.poll(_POLL_SECONDS))
        except BaseException as error:  # handed to the thread that waits
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take(self, results: list[CompileResult]) -> None:
        if results:
            with self._changed:
                self._results.update((result.key, result) for result in results)
                self.last_result_s = time.monotonic()
                self._changed.notify_all()
