"""Job queue of a compile pool: waiting jobs, known jobs, results not yet returned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from pathlib import Path
from typing import TypeVar

from aot_tune.errors import StoreError, TuneError
from aot_tune.tuner.compile.job import CompileJob, CompileResult, cached

_Pool = TypeVar("_Pool", bound="JobQueue")


class KernelRefusedError(TuneError):
    """Nothing of a kernel can be compiled, while other kernels can.

    Attributes:
        kernel: Its name in its jobs.
        what: The compiling process's error.
    """

    def __init__(self, kernel: str, what: str) -> None:
        self.kernel, self.what = kernel, what
        super().__init__(f"nothing can be compiled: {what}")


class JobQueue(ABC):
    """The jobs of a pool, without its compilers. For use by one thread.

    Args:
        most: Most jobs that run at a time.
        folder: The folder that keeps each cubin; created for the first compilation.
    """

    def __init__(self, most: int, folder: Path) -> None:
        self._most, self._folder = most, folder
        self._waiting: deque[CompileJob] = deque()
        self._known: set[str] = set()
        self._results: list[CompileResult] = []

    def __enter__(self: _Pool) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def idle(self) -> int:
        """Number of further jobs that could run now."""
        return max(0, self._most - self.unfinished)

    @property
    def unfinished(self) -> int:
        """Number of submitted jobs whose results `poll` has not returned."""
        return len(self._waiting) + len(self._results) + self._at_work()

    def submit(self, job: CompileJob) -> None:
        """Queue a job; skip a job that was submitted before.

        Raises:
            StoreError: The folder cannot be made.
        """
        if job.key in self._known:
            return
        self._known.add(job.key)
        earlier = cached(self._folder, job.key)
        if earlier is None:
            self._make_folder()
            self._waiting.append(job)
            self._fill()
        else:
            self._results.append(earlier)

    @abstractmethod
    def poll(self, timeout_s: float = 0.0) -> list[CompileResult]:
        """Return all results since the last call; wait up to `timeout_s` for the first.

        Raises:
            KernelRefusedError: No job of a kernel can be compiled. Its jobs are dropped, and the pool goes on
                with the others.
            TuneError: No job can be compiled.
        """

    @abstractmethod
    def close(self) -> None:
        """End all compilations. Finished cubins are kept."""

    @abstractmethod
    def _at_work(self) -> int:
        """Return number of jobs that run."""

    @abstractmethod
    def _fill(self) -> None:
        """Begin waiting jobs, as many as may run."""

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{self._folder}: the folder for cubins cannot be created ({error.strerror}); "
                "name another with --cubins"
            ) from error

    def _take_results(self) -> list[CompileResult]:
        """Return the results not yet returned, and clear them."""
        results, self._results = self._results, []
        return results

    def _drop_kernel(self, job: CompileJob) -> None:
        """Forget a job, and all waiting jobs of its kernel."""
        dropped = [job, *(waiting for waiting in self._waiting if same_kernel(waiting, job))]
        self._known.difference_update(gone.key for gone in dropped)
        self._waiting = deque(waiting for waiting in self._waiting if not same_kernel(waiting, job))


def same_kernel(first: CompileJob, second: CompileJob) -> bool:
    """Return whether two jobs belong to the same kernel."""
    return (first.module, first.name) == (second.module, second.name)
