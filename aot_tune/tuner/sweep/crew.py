"""The GPUs of a host at work: a thread and a measuring process each, and one queue that all draw from.

A `Task` is what one GPU does without a pause: as a rule one problem. Each GPU draws the longest task that is
ready, of the first kernel that has one. Its process lives for the whole sweep. A GPU that is lost leaves, and
another one does its task from the start. Knows no time and no config.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType

from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import TuneError
from aot_tune.tuner.measure.blame import Strikes
from aot_tune.tuner.measure.request import Session
from aot_tune.tuner.measure.supervise import GpuLostError, MeasuringStopped
from aot_tune.tuner.schedule.queue import TaskQueue, draw_for
from aot_tune.tuner.sweep.report import GpuUse
from aot_tune.values.device import Device

_LOOK_S = 0.1
"""Seconds after which an idle GPU looks again whether a task has become ready."""

_TELL_S = 0.5
"""Seconds after which the thread that waits for the tasks does `meanwhile` again."""

Start = Callable[[FoundKernel, int, Strikes], Session]
"""Opens a session on the GPU at an index, with its first kernel; a kernel's strikes are those of all GPUs."""


class Seat:
    """One GPU of a crew. Its attributes belong to its thread while a task runs.

    Attributes:
        index: The GPU's index, as torch counts.
        gpu: Its uuid, which records name; before its first task empty.
    """

    def __init__(self, index: int, start: Start, strikes: Callable[[FoundKernel], Strikes]) -> None:
        self.index, self.gpu = index, ""
        self._start, self._strikes_of = start, strikes
        self._kernel = ""
        self._stopped = False
        self.checks = False
        """Whether its last task needed a fresh process, which goes on with others of that sort."""
        self._session: Session | None = None
        self._strikes: Strikes | None = None
        self.busy_s = 0.0
        """Seconds spent on tasks so far."""
        self.waited_s = self.idle_s = 0.0
        """Seconds since `rested` was asked in which it waited for a compiler, and in which no task was there.
        """
        self.told_start_s = 0.0
        """Seconds of starts of its processes that journals tell of."""
        self.left_s: float | None = None
        """When the GPU was lost, monotonic seconds; None while it works."""
        self.lost = ""
        """Why the GPU was lost."""

    @property
    def session(self) -> Session:
        """The session, which measures the task's kernel."""
        assert self._session is not None
        return self._session

    @property
    def strikes(self) -> Strikes:
        """The faults of the configs of the task's kernel, on all GPUs."""
        assert self._strikes is not None
        return self._strikes

    def take(self, found: FoundKernel) -> None:
        """Turn to a kernel. The session lives as long as the GPU is in the crew."""
        strikes = self._strikes_of(found)
        if self._session is None:
            self._session = self._start(found, self.index, strikes)
            self.gpu = self._session.identity()["uuid"] or f"cuda-{self.index}"
        elif self._kernel != found.tunable.name:
            self._session.turn_to(found, strikes)
        self._kernel, self._strikes = found.tunable.name, strikes

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

    work: Callable[[Seat], None]
    """Does it. Where its GPU is lost, it is called again for another one."""

    length: float = 0.0
    """How long it takes beside the others, in any unit; the longest is drawn first."""

    owner: str | None = None
    """The uuid of the GPU that must do it while that is in the crew; None for any."""

    fresh: bool = False
    """Whether it needs a process that has timed nothing."""

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

    def over(self, *, stopping: bool) -> bool:
        """Whether nothing of it will run any more."""
        return not self.left or (not self.running and (self.error is not None or stopping))


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


class Crew:
    """The GPUs of a sweep. The threads of several kernels may use it at once.

    Args:
        indexes: The GPUs, as torch counts.
        start: Opens sessions.
        on_event: Receives one line for a person, from any thread.
        order: The kernels' names: the tasks of the first come first.
        choice: How to choose some of the GPUs; braces in it stand for their indexes.
    """

    def __init__(
        self,
        indexes: Sequence[int],
        start: Start,
        on_event: Callable[[str], None],
        order: Sequence[str] = (),
        choice: str = "--gpus {}",
    ) -> None:
        self._on_event, self._choice = on_event, choice
        self._strikes: dict[str, Strikes] = {}
        self._changed = threading.Condition()
        self._queue = TaskQueue[_Entry](order)
        self._begun: set[str] = set()
        self._stopping = False
        self._asking = threading.Lock()
        self._opened: tuple[Device, Mapping[str, str]] | None = None
        self._began = monotonic()
        self.seats = tuple(Seat(index, start, self._strikes_of) for index in indexes)
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
        with self._asking:
            if self._opened is None:
                self._opened = self._ask(found)
            return self._opened

    def _ask(self, found: FoundKernel) -> tuple[Device, Mapping[str, str]]:
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
                f"equal: {self._choice.replace('{}', str(min(devices)))}"
            )
        first = min(devices)
        return devices[first], said.conditions[first]

    def run(self, tasks: Sequence[Task], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Have tasks of a kernel done, the longest first; of equal ones the first.

        Args:
            tasks: The tasks.
            meanwhile: Called now and then while waiting.

        Raises:
            GpuLostError: The last GPU is lost.
            MeasuringStopped: The crew was closed.
            Exception: The first error of a task. Those that ran beside it are done.
        """
        with self._changed:
            self._begun.update(task.kernel.tunable.name for task in tasks)
        self._run([(task, None) for task in tasks], meanwhile)

    def has_begun(self, kernel: str) -> bool:
        """Whether a kernel has had tasks."""
        return kernel in self._begun

    @property
    def size(self) -> int:
        """Number of GPUs that are not lost."""
        return sum(seat.left_s is None for seat in self.seats)

    @property
    def waiting(self) -> int:
        """Number of tasks that no GPU has drawn yet."""
        return len(self._queue)

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
            for task, seat in tasks:
                self._add(_Entry(task=task, batch=batch, seat=seat))
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
        if batch.left:
            raise MeasuringStopped("this crew is closed")

    def _add(self, entry: _Entry) -> None:
        self._queue.add(entry, entry.task.kernel.tunable.name, entry.task.length)

    def _over(self, batch: _Batch) -> bool:
        """Wait a moment for the end of a batch; say whether it has come."""
        with self._changed:
            return self._changed.wait_for(lambda: batch.over(stopping=self._stopping), _TELL_S)

    # The threads of the GPUs --------------------------------------------------------------------------------

    def _strikes_of(self, found: FoundKernel) -> Strikes:
        name = found.tunable.name
        with self._changed:
            told = Strikes(lambda line: self._on_event(f"{name}: {line}"))
            return self._strikes.setdefault(name, told)

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
                others = [one for one in self.seats if one is not seat and one.left_s is None]
                found = draw_for(
                    self._queue,
                    lambda entry: self._may(seat, entry) and entry.task.ready(),
                    needs_fresh=lambda entry: entry.task.fresh,
                    is_fresh=seat.checks,
                    fresh=sum(one.checks for one in others),
                )
                if found is not None:
                    found.batch.running += 1
                    seat.checks = found.task.fresh
                    return found
                mine = any(self._may(seat, entry) for entry in self._queue)
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
                self._add(entry)
                self._check_left(batch, error)
            elif error is not None:
                batch.error = batch.error or error
            else:
                batch.left -= 1
            if batch.error is not None:
                self._queue.drop(lambda one: one.batch is batch)
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
        self._queue.drop(lambda one: one.batch is batch)
