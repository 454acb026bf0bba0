"""Compile on the CPUs of all nodes: the driver's compile pool. Imports no Ray.

Cubins arrive with the results and are kept in the driver's folder for later sweeps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from aot_tune.errors import TuneError
from aot_tune.tuner.compile.job import Compiled, CompileFailure, CompileJob, CompileResult, keep
from aot_tune.tuner.compile.job_queue import JobQueue, KernelRefusedError, same_kernel
from aot_tune.tuner.ray.compiler import RemoteResult


class TaskLostError(Exception):
    """A task was tried repeatedly, and its process or node ended each time."""


class Tasks(Protocol):
    """Runs `aot_tune.tuner.ray.compiler.compile_on_node` somewhere; a task is any object."""

    def begin(self, job: CompileJob) -> Any:
        """Begin a task."""

    def wait(self, tasks: Sequence[Any], timeout_s: float) -> list[Any]:
        """Return the ended tasks among some tasks; wait up to `timeout_s` for the first."""

    def result(self, task: Any) -> RemoteResult:
        """Return the result of an ended task.

        Raises:
            TaskLostError: The task has no result.
        """

    def cancel(self, task: Any) -> None:
        """End a task."""


class RemotePool(JobQueue):
    """Compiles jobs on nodes, in place of an `aot_tune.tuner.compile.pool.CompilePool`.

    Args:
        tasks: Runs the tasks.
        most: Most tasks at a time.
        folder: The folder that keeps each cubin.
    """

    def __init__(self, tasks: Tasks, most: int, folder: Path) -> None:
        super().__init__(most, folder)
        self._tasks = tasks
        self._running: dict[Any, tuple[CompileJob, float]] = {}

    def poll(self, timeout_s: float = 0.0) -> list[CompileResult]:
        """Return all results since the last call; wait up to `timeout_s` for the first.

        Raises:
            KernelRefusedError: No job of a kernel can be compiled. Its jobs are dropped.
            TuneError: A node reports that no job can be compiled.
        """
        self._fill()
        if self._running:
            wait_s = 0.0 if self._results else timeout_s
            for task in self._tasks.wait(list(self._running), wait_s):
                self._take(task)
        self._fill()
        return self._take_results()

    def close(self) -> None:
        """End all tasks. Finished cubins are kept."""
        self._waiting.clear()
        for task in self._running:
            self._tasks.cancel(task)
        self._running.clear()

    def _at_work(self) -> int:
        return len(self._running)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._most:
            job = self._waiting.popleft()
            self._running[self._tasks.begin(job)] = (job, time.monotonic())

    def _take(self, task: Any) -> None:
        job, since = self._running.pop(task)
        try:
            remote = self._tasks.result(task)
        except TaskLostError as lost:
            message = f"the compiling task was killed by its node's end: {lost}"
            self._results.append(
                CompileFailure(key=job.key, message=message, seconds=time.monotonic() - since)
            )
            return
        if isinstance(remote.result, Compiled):
            result = replace(remote.result, path=self._folder / f"{job.key}.cubin")
            keep(self._folder, result, remote.cubin)
            self._results.append(result)
        elif remote.result is not None:
            self._results.append(remote.result)
        elif remote.of_kernel:
            self._drop_kernel(job)
            raise KernelRefusedError(job.name, remote.refusal)
        else:
            self.close()
            raise TuneError(remote.refusal)

    def _drop_kernel(self, job: CompileJob) -> None:
        """Forget a job, and all unfinished jobs of its kernel."""
        for task, (running, _) in list(self._running.items()):
            if same_kernel(running, job):
                self._tasks.cancel(task)
                del self._running[task]
                self._known.discard(running.key)
        super()._drop_kernel(job)
