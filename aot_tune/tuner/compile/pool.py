"""Compile many kernels at once, in a few killable child processes that see no GPU. Knows no candidate."""

from __future__ import annotations

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
"""A compiler's time limit, seconds. The slowest seen, 256x256 tiles that spill, took 6 s on 16 cores (H200
host)."""

_GRACE_SECONDS = 15.0
"""Seconds of a child beyond the compiler's limit: it times the compiler itself, and tracing takes up to 1
s."""

_MOST_STARTS = 3
"""Failed starts in a row after which the pool gives up, because the machine is at fault then."""

_OF_THE_KERNEL = frozenset({"UsageError", "DeclarationError"})
"""Errors of a child that every other job of its kernel would meet as well."""

_OF_ALL = frozenset({"StoreError"})
"""Errors of a child that every other job would meet as well."""


def usable_cores() -> int:
    """The cores that this process may use: fewer than the machine's under `taskset` or in some containers."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass
class _Seat:
    """A child process and its job."""

    worker: Worker
    """The child."""

    job: CompileJob | None = None
    """The job that it compiles; None while it is idle."""

    since: float = 0.0
    """Start of the job, monotonic seconds."""

    limit: float = 0.0
    """Time by which the child must have sent a message, monotonic seconds."""

    compiling: bool = False
    """Whether the child has imported the kernel and begun. Before that, slowness is not the job's fault."""


class CompilePool(JobQueue):
    """Up to `workers` children that compile. For use by one thread.

    A compiler that hangs is a failure of its job. One that a signal ended is tried once more, because the
    system kills also what is innocent when memory is short; then it is a failure too. The child and all that
    it started are then killed, and a fresh child takes its place.

    Args:
        workers: Most children; they start when there is work.
        timeout_s: The compiler's limit for one job, seconds.
        folder: The folder that keeps each cubin as ``<key>.cubin`` with a note ``<key>.json``; later runs
            reuse them.
        target: ``package.module:Class`` of the compiler in a child; tests name a faulty one.
        at_once: Whether all children start now, for jobs that are on their way.
        yielding: Whether children run at a low priority, so that they hold up no process that measures.

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
        self._seats: list[_Seat] = []
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
        for seat in self._seats:
            seat.worker.kill()
        self._seats.clear()

    # Seats --------------------------------------------------------------------------------------------------

    def _at_work(self) -> int:
        return sum(seat.job is not None for seat in self._seats)

    def _fill(self) -> None:
        """Give waiting jobs to idle children, and start children while more jobs wait than children start."""
        for seat in self._seats:
            if self._waiting and seat.job is None and seat.worker.ready:
                self._begin(seat, self._waiting.popleft())
        starting = sum(not seat.worker.ready for seat in self._seats)
        while len(self._seats) < self._most and starting < len(self._waiting):
            self._start()
            starting += 1

    def _start(self) -> None:
        worker = Worker(
            self._target,
            {"folder": self._folder, "timeout_s": self._timeout_s, "yielding": self._yielding},
            environment={"CUDA_VISIBLE_DEVICES": ""},
        )
        self._seats.append(_Seat(worker=worker, limit=time.monotonic() + START_SECONDS))

    def _begin(self, seat: _Seat, job: CompileJob) -> None:
        seat.job, seat.compiling, seat.since = job, False, time.monotonic()
        seat.limit = seat.since + START_SECONDS
        with suppress(WorkerDied):  # it died while idle: `_hear` notices it, and blames no job
            seat.worker.send("compile", {"job": job})

    def _listen(self, timeout_s: float) -> None:
        """Receive the children's messages, and deal with children that are dead or late."""
        if not self._seats:
            return
        soonest = min((seat.limit for seat in self._seats if self._owes(seat)), default=float("inf"))
        with selectors.DefaultSelector() as selector:
            for seat in self._seats:
                selector.register(seat.worker, selectors.EVENT_READ, seat)
            events = selector.select(max(0.0, min(timeout_s, soonest - time.monotonic())))
        for key, _ in events:
            self._hear(key.data)
        for seat in [seat for seat in self._seats if self._owes(seat) and time.monotonic() > seat.limit]:
            self._end(seat, f"no answer within {self._timeout_s:g} s: killed")

    @staticmethod
    def _owes(seat: _Seat) -> bool:
        return seat.job is not None or not seat.worker.ready

    def _hear(self, seat: _Seat) -> None:
        try:
            # Until none is left: a selector does not report messages that were read together with the first.
            while seat in self._seats and (message := seat.worker.receive(0.0)) is not None:
                self._take_in(seat, *message)
        except WorkerDied as death:
            how = f"the compiling process {death.how}: {death.said[-500:]}".rstrip(": ")
            self._end(seat, how, signalled=death.code is not None and death.code < 0)

    def _take_in(self, seat: _Seat, kind: Kind, value: Any) -> None:
        if kind == "progress":
            seat.compiling, seat.limit = True, time.monotonic() + self._timeout_s + _GRACE_SECONDS
        elif kind == "reply" and seat.job is not None:
            done = cached(self._folder, seat.job.key)
            self._results.append(
                replace(done, cached=False) if done else self._failure(seat, "its cubin disappeared")
            )
            seat.job, self._failed_starts = None, 0
        elif kind == "error":
            self._refused(seat, RemoteError(*value))

    def _refused(self, seat: _Seat, error: RemoteError) -> None:
        if error.kind in _OF_THE_KERNEL and seat.job is not None:
            self._drop(seat)  # what a failed import has left there may harm the others
            self._drop_kernel(seat.job)
            raise KernelRefusedError(seat.job.name, error.message) from error
        if error.kind in _OF_ALL or seat.job is None:
            self.close()
            raise TuneError(f"nothing can be compiled: {error.message}") from error
        message = error.message if error.kind in ("CutileError", "TuneError") else str(error)
        signalled = _SIGNALLED.search(message) is not None
        self._failed(seat, in_words(message), signalled=signalled)
        seat.job = None
        # A compiler that was killed or timed out may have left processes of its own behind: end them.
        if signalled or "exceeded timeout" in message:
            self._drop(seat)

    def _end(self, seat: _Seat, message: str, *, signalled: bool = False) -> None:
        """Deal with a child that died or is late; its job is to blame only if it was compiling."""
        self._drop(seat)
        if seat.job is not None and seat.compiling:
            self._failed(seat, message, signalled=signalled)
            return
        self._failed_starts += 1
        if seat.job is not None:
            self._waiting.appendleft(seat.job)
        if self._failed_starts >= _MOST_STARTS:
            self.close()
            raise TuneError(f"no compiling process starts here, tried {_MOST_STARTS} times: {message}")

    def _failed(self, seat: _Seat, message: str, *, signalled: bool) -> None:
        """Record that a seat's job failed, or queue it once more where a signal ended it the first time.

        Raises:
            TuneError: The temporary folder is to blame: it is full, or has become unwritable.
        """
        assert seat.job is not None
        try:
            _check_temporary_folder()
        except TuneError:
            self.close()
            raise
        if signalled and seat.job.key not in self._tried_again:
            self._tried_again.add(seat.job.key)
            self._waiting.appendleft(seat.job)
            return
        self._results.append(self._failure(seat, message))

    def _failure(self, seat: _Seat, message: str) -> CompileFailure:
        assert seat.job is not None
        return CompileFailure(key=seat.job.key, message=message, seconds=time.monotonic() - seat.since)

    def _drop(self, seat: _Seat) -> None:
        self._seats.remove(seat)
        seat.worker.kill()


def _check_temporary_folder() -> None:
    """Write to the temporary folder that compilers use: Python goes to another one where TMPDIR is unusable.

    Raises:
        TuneError: It cannot be written.
    """
    folder = os.environ.get("TMPDIR") or None
    try:
        with temporary_file(folder) as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        raise TuneError(
            f"temporary folder {folder or '/tmp'} cannot be written ({error.strerror}); "
            "set TMPDIR to one that can be"
        ) from error


_SIGNALLED = re.compile(r"Return code -(\d+)\s*")


def in_words(message: str) -> str:
    """A compiler's message with the signal's name where cuTile says ``Return code -11``."""

    def named(found: re.Match[str]) -> str:
        return f"the compiler {ending(-int(found[1]))}. "

    return _SIGNALLED.sub(named, message).strip()
