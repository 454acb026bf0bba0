"""The GPUs of a host at work: a thread and a measuring process each, and one queue that all draw from.

A `Task` is what one GPU does without a pause: as a rule one problem. Each GPU draws the longest task that is
ready. A GPU that is lost leaves, and another one does its task from the start. Knows no time and no config.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType
from typing import Protocol

from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import TuneError
from aot_tune.tuner.measure.session import MeasureSession
from aot_tune.tuner.measure.supervise import GpuLostError, MeasuringStopped
from aot_tune.tuner.measure.trials import Strikes
from aot_tune.tuner.sweep.report import GpuUse
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

_LOOK_S = 0.1
"""Seconds after which an idle GPU looks again whether a task has become ready."""

_TELL_S = 0.5
"""Seconds after which the thread that waits for the tasks does `meanwhile` again."""

Start = Callable[[FoundKernel, int, Strikes], MeasureSession]
"""Opens a session of a kernel on the GPU at an index; the kernel's sessions share their strikes."""


class Seat:
    """One GPU of a crew. Its attributes belong to its thread while a task runs.

    Attributes:
        measures: Whether it is a GPU of this machine (`aot_tune.tuner.sweep.shards.AbsentSeat` is none).
        index: The GPU's index, as torch counts.
        gpu: Its uuid, which records name; before its first task empty.
    """

    measures = True

    def __init__(self, index: int, start: Callable[[FoundKernel, int], MeasureSession]) -> None:
        self.index, self.gpu = index, ""
        self._start = start
        self._kernel = ""
        self._stopped = False
        self._session: MeasureSession | None = None
        self.busy_s = 0.0
        """Seconds spent on tasks so far."""
        self.waited_s = self.idle_s = 0.0
        """Seconds since `rested` was asked in which it waited for a compiler, and in which no task was there.
        """
        self.left_s: float | None = None
        """When the GPU was lost, monotonic seconds; None while it works."""
        self.lost = ""
        """Why the GPU was lost."""

    @property
    def session(self) -> MeasureSession:
        """The session of the task's kernel."""
        assert self._session is not None
        return self._session

    def take(self, found: FoundKernel) -> None:
        """Open a session of a kernel, unless the one that is open is of it."""
        if self._session is None or self._kernel != found.tunable.name:
            self.close()
            self._session, self._kernel = self._start(found, self.index), found.tunable.name
            self.gpu = self._session.identity()["uuid"] or f"cuda-{self.index}"

    def rested(self) -> tuple[float, float]:
        """`waited_s` and `idle_s`, which begin anew."""
        found = (self.waited_s, self.idle_s)
        self.waited_s = self.idle_s = 0.0
        return found

    def close(self) -> None:
        """Close the session, if there is one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def check(self) -> None:
        """Raise where the crew is closed: called now and then by a task that waits for something else.

        Raises:
            MeasuringStopped: It is closed.
        """
        if self._stopped:
            raise MeasuringStopped

    def interrupt(self) -> None:
        """End what is being measured; called by another thread."""
        self._stopped = True
        if (session := self._session) is not None:
            session.interrupt()


def _at_once() -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one GPU does without a pause."""

    kernel: FoundKernel
    """The kernel whose session it needs."""

    problem: Problem | None = None
    """The problem that it is about; None for one that is about none."""

    work: Callable[[Seat], None]
    """Does it. Where its GPU is lost, it is called again for another one."""

    length: float = 0.0
    """How long it takes beside the others, in any unit; the longest is drawn first."""

    owner: str | None = None
    """The uuid of the GPU that must do it while that is in the crew; None for any."""

    ready: Callable[[], bool] = _at_once
    """Whether it could run now without waiting for a compiler."""


@dataclass(kw_only=True)
class _Batch:
    """Tasks that are waited for together."""

    left: int
    """Number of tasks that are not done."""

    running: int = 0
    """Number of tasks that run."""

    error: BaseException | None = None
    """The first error of a task; none of the others begins any more."""


@dataclass(kw_only=True, eq=False)
class _Entry:
    """A task in the queue."""

    task: Task
    batch: _Batch
    seat: Seat | None = None
    """The only GPU that may draw it while it is in the crew."""


@dataclass(kw_only=True)
class _Opened:
    """What the GPUs said of themselves."""

    devices: dict[int, Device] = field(default_factory=dict)
    conditions: dict[int, dict[str, str]] = field(default_factory=dict)


class RoundOver(Exception):
    """Nothing more can be done here: results of other parts are missing.

    Attributes:
        missing: The problems that they lack.
    """

    def __init__(self, missing: Sequence[Problem]) -> None:
        super().__init__(f"{len(missing)} problems are not measured yet")
        self.missing = tuple(missing)


class Hands(Protocol):
    """What does the tasks of a kernel's sweep: a `Crew`, or a part of one."""

    def takes(self, problem: Problem) -> bool:
        """Whether what is missing of a problem is measured here."""

    def run(self, tasks: Sequence[Task], meanwhile: Callable[[], None] = ...) -> None:
        """Have tasks done; see `Crew.run`.

        Raises:
            RoundOver: Tasks that are done elsewhere lack results; those that are done here are done.
        """


class Crew:
    """The GPUs of a sweep. `run` may be called by one thread at a time.

    Args:
        indexes: The GPUs, as torch counts.
        start: Opens sessions.
        on_event: Receives one line for a person, from any thread.
    """

    def __init__(self, indexes: Sequence[int], start: Start, on_event: Callable[[str], None]) -> None:
        self._begin, self._on_event = start, on_event
        self._strikes: dict[str, Strikes] = {}
        self._changed = threading.Condition()
        self._queue: list[_Entry] = []
        self._stopping = False
        self._opened: tuple[Device, Mapping[str, str]] | None = None
        self._began = monotonic()
        self.seats = tuple(Seat(index, self._session) for index in indexes)
        self._threads = [
            threading.Thread(target=self._serve, args=(seat,), name=f"aot_tune GPU {seat.index}", daemon=True)
            for seat in self.seats
        ]

    def __enter__(self) -> Crew:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop what still runs, and release all GPUs."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for seat, thread in zip(self.seats, self._threads, strict=True):
            while thread.is_alive():
                seat.interrupt()
                thread.join(_LOOK_S)

    def open(self, found: FoundKernel) -> tuple[Device, Mapping[str, str]]:
        """What is measured on: the GPU as grids are computed for it, and the conditions of all times.

        Every GPU is asked, when the first kernel is.

        Raises:
            TuneError: The GPUs differ, or one of them is taken.
            GpuLostError: None of them works.
        """
        if self._opened is not None:
            return self._opened
        said = _Opened()

        def ask(seat: Seat) -> None:
            said.devices[seat.index] = seat.session.device()
            said.conditions[seat.index] = seat.session.identity()

        task = Task(kernel=found, work=ask)
        self._run([(task, seat) for seat in self.seats])
        devices = {index: said.devices[index] for index in sorted(said.devices)}
        if len({(device.name, device.sm_count) for device in devices.values()}) > 1:
            here = "; ".join(
                f"{index}: {device.name}, {device.sm_count} multiprocessors"
                for index, device in devices.items()
            )
            raise TuneError(
                f"the GPUs differ ({here}), and their times cannot be compared; choose those that are "
                f"equal: --gpus {min(devices)}"
            )
        first = min(devices)
        self._opened = devices[first], said.conditions[first]
        return self._opened

    def warm(self, found: FoundKernel) -> None:
        """Let every GPU start the process that a kernel is measured in, while others compile for it."""

        def start(seat: Seat) -> None:
            seat.session.device()

        with self._changed:
            batch = _Batch(left=len(self.seats))
            task = Task(kernel=found, work=start)
            self._queue += [
                _Entry(task=task, batch=batch, seat=seat) for seat in self.seats if seat.left_s is None
            ]
            self._changed.notify_all()

    def takes(self, problem: Problem) -> bool:
        """Every problem is measured here."""
        return True

    def run(self, tasks: Sequence[Task], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Have tasks done, the longest first; of equal ones the first.

        Args:
            tasks: The tasks.
            meanwhile: Called now and then while waiting.

        Raises:
            GpuLostError: The last GPU is lost.
            Exception: The first error of a task. Those that ran beside it are done.
        """
        self._run([(task, None) for task in sorted(tasks, key=lambda task: -task.length)], meanwhile)

    def usage(self) -> tuple[GpuUse, ...]:
        """How long each GPU worked and waited so far."""
        now = monotonic()
        return tuple(
            GpuUse(
                index=seat.index,
                gpu=seat.gpu,
                busy_s=seat.busy_s,
                idle_s=max(0.0, (seat.left_s or now) - self._began - seat.busy_s),
                lost=seat.lost,
            )
            for seat in self.seats
        )

    # The waiting thread -------------------------------------------------------------------------------------

    def _run(
        self,
        tasks: Sequence[tuple[Task, Seat | None]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        batch = _Batch(left=len(tasks))
        with self._changed:
            if self._stopping:
                raise MeasuringStopped("this crew is closed")
            self._queue += [_Entry(task=task, batch=batch, seat=seat) for task, seat in tasks]
            self._check_left(batch)
            self._changed.notify_all()
        try:
            meanwhile()
            while not self._over(batch):
                meanwhile()
        except BaseException:
            self.close()  # before what the tasks write to is closed
            raise
        if batch.error is not None:
            raise batch.error

    def _over(self, batch: _Batch) -> bool:
        """Wait a moment for the end of a batch; say whether it has come."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not batch.left or (batch.error is not None and not batch.running), _TELL_S
            )

    # The threads of the GPUs --------------------------------------------------------------------------------

    def _session(self, found: FoundKernel, index: int) -> MeasureSession:
        with self._changed:
            strikes = self._strikes.setdefault(found.tunable.name, Strikes(self._on_event))
        return self._begin(found, index, strikes)

    def _serve(self, seat: Seat) -> None:
        """Do task after task, until the GPU is lost or the crew is closed."""
        try:
            while seat.left_s is None and (entry := self._drawn(seat)) is not None:
                began = monotonic()
                error: BaseException | None = None
                try:
                    seat.take(entry.task.kernel)
                    entry.task.work(seat)
                except BaseException as raised:  # handed to the thread that waits
                    error = raised
                seat.busy_s += monotonic() - began
                self._ended(seat, entry, error)
        finally:
            seat.close()

    def _drawn(self, seat: Seat) -> _Entry | None:
        """The next task for a GPU, once there is one; None when the crew is closed."""
        with self._changed:
            while not self._stopping:
                mine = [entry for entry in self._queue if self._may(seat, entry)]
                found = next((entry for entry in mine if entry.task.ready()), None)
                if found is not None:
                    self._queue.remove(found)
                    found.batch.running += 1
                    return found
                began = monotonic()
                self._changed.wait(_LOOK_S if mine else None)
                if mine:
                    seat.waited_s += monotonic() - began
                else:
                    seat.idle_s += monotonic() - began
            return None

    def _may(self, seat: Seat, entry: _Entry) -> bool:
        if entry.seat is not None and entry.seat.left_s is None:
            return entry.seat is seat
        here = {one.gpu for one in self.seats if one.left_s is None}
        return entry.task.owner not in here or entry.task.owner == seat.gpu

    def _ended(self, seat: Seat, entry: _Entry, error: BaseException | None) -> None:
        batch = entry.batch
        with self._changed:
            batch.running -= 1
            if isinstance(error, GpuLostError):
                seat.left_s, seat.lost = monotonic(), str(error)
                self._queue.insert(0, entry)
                self._check_left(batch, error)
            elif error is not None:
                batch.error = batch.error or error
            else:
                batch.left -= 1
            if batch.error is not None:
                self._queue = [one for one in self._queue if one.batch is not batch]
            self._changed.notify_all()
        if isinstance(error, GpuLostError) and batch.error is None:
            self._on_event(
                f"GPU {seat.index} ({seat.gpu}) is lost and leaves the sweep: {error}. What it was measuring "
                "is measured anew on another GPU"
            )

    def _check_left(self, batch: _Batch, error: GpuLostError | None = None) -> None:
        """Let a batch fail where no GPU is left."""
        if any(seat.left_s is None for seat in self.seats):
            return
        lost = "; ".join(f"GPU {seat.index}: {seat.lost}" for seat in self.seats)
        batch.error = batch.error or error or GpuLostError(f"no GPU is left: {lost}")
        self._queue = [one for one in self._queue if one.batch is not batch]
