"""Compile while measuring: a thread owns the compile pool, so children never wait for a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from aot_tune.errors import TuneError
from aot_tune.tuner.compile.job import CompileFailure, CompileJob, CompileResult
from aot_tune.tuner.compile.job_queue import JobQueue, KernelRefusedError
from aot_tune.tuner.schedule.queue import TaskQueue

_POLL_SECONDS = 0.1


class CompileFeed:
    """Takes compile jobs from the measuring threads and returns their results by key.

    Jobs run in the order of their kernels in `order`, a kernel's jobs in the order of submission. A kernel
    that no child can load fails alone.

    Args:
        pool: Makes the pool. The feed's own thread calls it and closes the pool.
        order: The kernels' names. Kernels without a name here come last.
    """

    def __init__(self, pool: Callable[[], JobQueue], order: Sequence[str] = ()) -> None:
        self._make = pool
        self._changed = threading.Condition()
        self._queue = TaskQueue[CompileJob](order)
        """Jobs to compile. Handed-over and unwanted jobs stay in it and are skipped."""
        self._wanted: dict[str, dict[str, CompileJob]] = {}
        """The job of each kernel that wants it, by key and kernel."""
        self._handed: set[str] = set()
        self._results: dict[str, CompileResult] = {}
        self._last_s: dict[str, float] = {}
        self._refused: dict[str, str] = {}
        """Reasons why nothing of a kernel can be compiled, by the kernel's name."""
        self._lost: dict[str, str] = {}
        """Such reasons by key, for jobs that no other kernel wants."""
        self._error: BaseException | None = None
        self._stopping = False
        self._rests = True
        self._thread = threading.Thread(target=self._run, name="aot_tune compile feed", daemon=True)

    def __enter__(self) -> CompileFeed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def ended(self) -> bool:
        """Whether an error has stopped the pool: nothing is compiled any more."""
        return self._error is not None

    @property
    def rests(self) -> bool:
        """Whether a compiling process has nothing to do."""
        with self._changed:
            return self._rests and not len(self._queue)

    def submit(self, jobs: Iterable[CompileJob]) -> None:
        """Queue jobs; skip jobs that were submitted before."""
        with self._changed:
            for job in jobs:
                wanting = self._wanted.setdefault(job.key, {})
                if job.name in self._refused and not wanting:
                    self._lost[job.key] = self._refused[job.name]
                elif job.name not in wanting:
                    wanting[job.name] = job
                    self._lost.pop(job.key, None)
                    self._push(job)
            self._changed.notify_all()

    def drop(self, kernel: str) -> None:
        """Drop a kernel's pending jobs, except jobs that another kernel wants too."""
        with self._changed:
            for key in [key for key, wanting in self._wanted.items() if wanting.pop(kernel, None)]:
                if not self._wanted[key] and key not in self._results:
                    del self._wanted[key]

    def counts(self, kernel: str) -> tuple[int, int, int]:
        """Return the numbers of a kernel's jobs done, jobs submitted, and failures."""
        with self._changed:
            keys = [key for key, wanting in self._wanted.items() if kernel in wanting]
            done = [self._results[key] for key in keys if key in self._results]
            return len(done), len(keys), sum(isinstance(result, CompileFailure) for result in done)

    def last_result_s(self, kernel: str) -> float | None:
        """Return the time of a kernel's last result, monotonic seconds; None before the first."""
        return self._last_s.get(kernel)

    def ready(self, keys: Iterable[str]) -> bool:
        """Return whether `wait` for these jobs would return, or raise, at once."""
        with self._changed:
            return self._error is not None or all(key in self._results or key in self._lost for key in keys)

    def wait(self, keys: Iterable[str], progress: Callable[[], None]) -> Mapping[str, CompileResult]:
        """Wait for the results of these jobs.

        Args:
            keys: The keys of jobs that were submitted.
            progress: Called now and then while waiting.

        Raises:
            TuneError: Nothing of their kernel can be compiled.
            Exception: The error that stopped the pool.
        """
        wanted = set(keys)
        while True:
            with self._changed:
                if self._error is not None:
                    raise self._error
                for key in wanted & self._lost.keys():
                    raise TuneError(self._lost[key])
                if wanted <= self._results.keys():
                    return {key: self._results[key] for key in wanted}
                self._changed.wait(_POLL_SECONDS * 5)
            progress()

    def _push(self, job: CompileJob) -> None:
        if job.key not in self._handed:
            self._queue.add(job, job.name)

    def _next(self, most: int) -> list[CompileJob]:
        """Return the jobs to hand over now."""
        jobs: list[CompileJob] = []
        while len(jobs) < most and (job := self._queue.draw()) is not None:
            if job.key not in self._handed and job.name in self._wanted.get(job.key, ()):
                self._handed.add(job.key)
                jobs.append(job)
        return jobs

    def _run(self) -> None:
        try:
            with self._make() as pool:
                while True:
                    with self._changed:
                        self._changed.wait_for(lambda: self._stopping or len(self._queue) or pool.unfinished)
                        if self._stopping:
                            return
                        jobs = self._next(pool.idle)
                    for job in jobs:
                        pool.submit(job)
                    self._rests = pool.idle > 0
                    try:
                        self._take(pool.poll(_POLL_SECONDS))
                    except KernelRefusedError as error:
                        self._refuse(error)
                    self._rests = pool.idle > 0
        except BaseException as error:  # handed to the thread that waits
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take(self, results: list[CompileResult]) -> None:
        if results:
            with self._changed:
                now = time.monotonic()
                for result in results:
                    self._results[result.key] = result
                    self._last_s.update(dict.fromkeys(self._wanted.get(result.key, ()), now))
                self._changed.notify_all()

    def _refuse(self, error: KernelRefusedError) -> None:
        """Let a kernel's jobs fail, except jobs that another kernel wants."""
        with self._changed:
            self._refused[error.kernel] = str(error)
            for key, wanting in self._wanted.items():
                if key in self._results or wanting.pop(error.kernel, None) is None:
                    continue
                self._handed.discard(key)
                if not wanting:
                    self._lost[key] = str(error)
                for job in wanting.values():
                    self._push(job)
            self._changed.notify_all()
