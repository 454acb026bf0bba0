"""Compile many kernels at once, in a few killable child processes that see no GPU."""

from __future__ import annotations

import builtins
import errno
import os
import re
import selectors
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aot_tune.errors import TuneError
from aot_tune.tuner.compile.job import CompileFailure, CompileJob, CompileResult, cached
from aot_tune.tuner.compile.job_queue import JobQueue, KernelRefusedError
from aot_tune.tuner.process.worker import (
    START_SECONDS,
    Kind,
    RemoteError,
    Worker,
    WorkerDied,
    ending,
    temporary_file,
)

COMPILE_SECONDS = 120.0
"""A compiler's time limit, seconds. The slowest compilation seen, of 256x256 tiles that spill, took 6 s on 16
cores (H200 host)."""

_GRACE_SECONDS = 15.0
"""Seconds allowed to a child beyond the compiler's limit, which the child enforces: tracing takes up to
1 s."""

_MOST_STARTS = 3
"""Failed starts in a row after which the pool gives up, because the machine is at fault then."""

_OF_THE_KERNEL = frozenset({"UsageError", "DeclarationError"})
"""Errors of a child that concern all jobs of the kernel."""

_OF_ALL = frozenset({"StoreError"})
"""Errors of a child that concern all jobs."""


def usable_cores() -> int:
    """Return the number of cores that this process may use.

    Under `taskset` and in some containers it is less than the machine's.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass
class _Child:
    """A child process and its job."""

    worker: Worker
    """The child."""

    job: CompileJob | None = None
    """The job that it compiles; None while it is idle."""

    since: float = 0.0
    """Start of the job, monotonic seconds."""

    limit: float = 0.0
    """Deadline of the child's next message, monotonic seconds."""

    compiling: bool = False
    """Whether the child has imported the kernel and compiles. Until then slowness is not the job's fault."""


class CompilePool(JobQueue):
    """Up to `workers` children that compile. For use by one thread.

    A compiler that hangs is a failure of its job. A job whose compiler ended by a signal or a system error is
    tried once more, because the system also kills innocent processes when memory is short; then it is a
    failure too. The child and its processes are then killed, and a fresh child takes its place.

    Args:
        workers: Most children; they start when there is work.
        timeout_s: The compiler's limit for one job, seconds.
        folder: The folder that keeps each cubin as ``<key>.cubin`` with a note ``<key>.json``; later runs
            reuse them.
        target: ``package.module:Class`` of the compiler in a child; tests name a faulty one.
        at_once: Whether all children start now, ahead of the jobs.
        yielding: Whether children run at low priority, so that they delay no measuring process.

    Raises:
        TuneError: The system's temporary folder, which the compiler needs, cannot be written.
    """

    def __init__(
        self,
        workers: int,
        timeout_s: float = COMPILE_SECONDS,
        folder: Path = Path("build/cubins"),
        *,
        target: str = "aot_tune.tuner.compile.child:Compiler",
        at_once: bool = False,
        yielding: bool = False,
    ) -> None:
        _check_temporary_folder()
        super().__init__(workers, folder)
        self._timeout_s, self._target = timeout_s, target
        self._yielding = yielding
        self._children: list[_Child] = []
        self._failed_starts = 0
        self._tried_again: set[str] = set()
        for _ in range(workers if at_once else 0):
            self._start()

    def poll(self, timeout_s: float = 0.0) -> list[CompileResult]:
        """Return all results since the last call; wait up to `timeout_s` for the first.

        Raises:
            KernelRefusedError: No job of a kernel can be compiled: a child cannot load it. Its jobs are
                dropped, and the pool goes on with the others.
            TuneError: No job can be compiled here: children do not start, or the folder cannot be written.
        """
        until = time.monotonic() + timeout_s
        while True:
            self._fill()
            self._listen(0.0 if self._results else max(0.0, until - time.monotonic()))
            if self._results or not self.unfinished or time.monotonic() >= until:
                return self._take_results()

    def close(self) -> None:
        """End all children and the processes that they started. Finished cubins are kept."""
        self._waiting.clear()
        for child in self._children:
            child.worker.kill()
        self._children.clear()

    # Children -----------------------------------------------------------------------------------------------

    def _at_work(self) -> int:
        return sum(child.job is not None for child in self._children)

    def _fill(self) -> None:
        """Give waiting jobs to idle children, and start children for the other waiting jobs."""
        for child in self._children:
            if self._waiting and child.job is None and child.worker.ready:
                self._begin(child, self._waiting.popleft())
        starting = sum(not child.worker.ready for child in self._children)
        while len(self._children) < self._most and starting < len(self._waiting):
            self._start()
            starting += 1

    def _start(self) -> None:
        worker = Worker(
            self._target,
            {"folder": self._folder, "timeout_s": self._timeout_s, "yielding": self._yielding},
            environment={"CUDA_VISIBLE_DEVICES": ""},
        )
        self._children.append(_Child(worker=worker, limit=time.monotonic() + START_SECONDS))

    def _begin(self, child: _Child, job: CompileJob) -> None:
        child.job, child.compiling, child.since = job, False, time.monotonic()
        child.limit = child.since + START_SECONDS
        with suppress(WorkerDied):  # it died while idle: `_receive` notices it, and blames no job
            child.worker.send("compile", {"job": job})

    def _listen(self, timeout_s: float) -> None:
        """Receive the children's messages; end children that are dead or late."""
        if not self._children:
            return
        soonest = min((child.limit for child in self._children if self._owes(child)), default=float("inf"))
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.worker, selectors.EVENT_READ, child)
            events = selector.select(max(0.0, min(timeout_s, soonest - time.monotonic())))
        for key, _ in events:
            self._receive(key.data)
        for child in [
            child for child in self._children if self._owes(child) and time.monotonic() > child.limit
        ]:
            self._end(child, f"no answer within {self._timeout_s:g} s: killed")

    @staticmethod
    def _owes(child: _Child) -> bool:
        return child.job is not None or not child.worker.ready

    def _receive(self, child: _Child) -> None:
        try:
            # Until none is left: a selector does not report messages that were read together with the first.
            while child in self._children and (message := child.worker.receive(0.0)) is not None:
                self._take_in(child, *message)
        except WorkerDied as death:
            how = f"the compiling process {death.how}: {death.output[-500:]}".rstrip(": ")
            self._end(child, how, may_pass=death.code is not None and death.code < 0)

    def _take_in(self, child: _Child, kind: Kind, value: Any) -> None:
        if kind == "progress":
            child.compiling, child.limit = True, time.monotonic() + self._timeout_s + _GRACE_SECONDS
        elif kind == "reply" and child.job is not None:
            done = cached(self._folder, child.job.key)
            self._results.append(
                replace(done, cached=False) if done else self._failure(child, "its cubin disappeared")
            )
            child.job, self._failed_starts = None, 0
        elif kind == "error":
            self._refused(child, RemoteError(*value))

    def _refused(self, child: _Child, error: RemoteError) -> None:
        if error.kind in _OF_THE_KERNEL and child.job is not None:
            self._drop(child)  # the remains of a failed import may harm other jobs
            self._drop_kernel(child.job)
            raise KernelRefusedError(child.job.name, error.message) from error
        if error.kind in _OF_ALL or child.job is None:
            self.close()
            raise TuneError(f"nothing can be compiled: {error.message}") from error
        message = error.message if error.kind in ("CutileError", "TuneError") else str(error)
        of_system = issubclass(getattr(builtins, error.kind, object), OSError)
        if of_system and message.endswith(".cubin'"):
            of_system, message = False, _NO_CUBIN
        may_pass = of_system or _SIGNALLED.search(message) is not None
        self._failed(child, in_words(message), may_pass=may_pass)
        child.job = None
        # A compiler that was killed or timed out may have left processes of its own behind: end them.
        if may_pass or "exceeded timeout" in message:
            self._drop(child)

    def _end(self, child: _Child, message: str, *, may_pass: bool = False) -> None:
        """End a child that died or is late; blame its job only if it was compiling."""
        self._drop(child)
        if child.job is not None and child.compiling:
            self._failed(child, message, may_pass=may_pass)
            return
        self._failed_starts += 1
        if child.job is not None:
            self._waiting.appendleft(child.job)
        if self._failed_starts >= _MOST_STARTS:
            self.close()
            raise TuneError(f"no compiling process starts here, tried {_MOST_STARTS} times: {message}")

    def _failed(self, child: _Child, message: str, *, may_pass: bool) -> None:
        """Record a child's failed job; queue it once more after its first failure that may pass.

        Raises:
            TuneError: The machine is to blame: the compiler is gone, or the temporary folder is full or has
                become unwritable.
        """
        assert child.job is not None
        try:
            _check_temporary_folder()
            if os.strerror(errno.ENOSPC) in message:  # though there is room for a smaller file
                raise _unwritable(errno.ENOSPC)
            if may_pass and _GONE.search(message):
                raise TuneError(f"the compiler is gone: {message}; install it again")
        except TuneError:
            self.close()
            raise
        if may_pass and child.job.key not in self._tried_again:
            self._tried_again.add(child.job.key)
            self._waiting.appendleft(child.job)
            return
        self._results.append(self._failure(child, message))

    def _failure(self, child: _Child, message: str) -> CompileFailure:
        assert child.job is not None
        return CompileFailure(key=child.job.key, message=message, seconds=time.monotonic() - child.since)

    def _drop(self, child: _Child) -> None:
        self._children.remove(child)
        child.worker.kill()


def _check_temporary_folder() -> None:
    """Write to the temporary folder that compilers use; Python itself would fall back to another.

    Raises:
        TuneError: It cannot be written.
    """
    try:
        with temporary_file(os.environ.get("TMPDIR") or None) as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        raise _unwritable(error.errno or 0) from error


def _unwritable(number: int) -> TuneError:
    folder = os.environ.get("TMPDIR") or "/tmp"
    return TuneError(
        f"temporary folder {folder} cannot be written ({os.strerror(number)}); set TMPDIR to one that can be"
    )


_GONE = re.compile(r"(tileiras|cuobjdump)'")
"""A part of the compiler in an error of the system, which names it at its end, or in cuTile's words."""

_NO_CUBIN = (
    "the compiler ended without an error and left no cubin, as where it cannot tell how its own processes "
    "ended or is not a compiler"
)
"""Failure in place of the missing file's name."""

_SIGNALLED = re.compile(r"Return code -(\d+)\s*")


def in_words(message: str) -> str:
    """Return a compiler's message with signals' names in place of cuTile's ``Return code -11``."""

    def named(match: re.Match[str]) -> str:
        return f"the compiler {ending(-int(match[1]))}. "

    return _SIGNALLED.sub(named, message).strip()
