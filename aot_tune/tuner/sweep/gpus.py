"""The GPUs of a sweep: a thread and a measuring process for each, and one queue of tasks.

A `Task` is a GPU's work without a pause, as a rule one problem. Each GPU draws the longest ready task of the
first kernel with a ready task. Its process lives for the whole sweep. A GPU that is lost leaves, and another
GPU does its task from the start. Handles no times and no configs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import TuneError
from aot_tune.tuner.measure.blame import FaultCounts
from aot_tune.tuner.measure.request import Session
from aot_tune.tuner.measure.supervise import GpuLostError, MeasuringStopped
from aot_tune.tuner.schedule.queue import TaskQueue, draw_for
from aot_tune.tuner.sweep.report import GpuUse
from aot_tune.values.device import Device

_LOOK_S = 0.1
"""Seconds between two checks of an idle GPU for a ready task."""

_TELL_S = 0.5
"""Seconds between two calls of `meanwhile` by the thread that waits for the tasks."""

Start = Callable[[FoundKernel, int, FaultCounts], Session]
"""Opens a session with its first kernel on the GPU at an index. All GPUs share a kernel's fault counts."""


class GpuSlot:
    """One GPU slot of a pool. Its attributes belong to its thread while a task runs.

    Attributes:
        index: The GPU's index, as torch counts.
        gpu: Its uuid, as in the journal's records; empty before its first task.
    """

    def __init__(self, index: int, start: Start, fault_counts: Callable[[FoundKernel], FaultCounts]) -> None:
        self.index, self.gpu = index, ""
        self._start, self._fault_counts_of = start, fault_counts
        self._kernel = ""
        self._stopped = False
        self.checks = False
        """Whether its last task needed a fresh process, which continues with such tasks."""
        self._session: Session | None = None
        self._fault_counts: FaultCounts | None = None
        self.busy_s = 0.0
        """Seconds spent on tasks so far."""
        self.waited_s = self.idle_s = 0.0
        """Seconds of waiting for a compiler, and without a task, since the last call of `rested`."""
        self.recorded_start_s = 0.0
        """Seconds of starts of its processes that journals have recorded."""
        self.left_s: float | None = None
        """Time of the GPU's loss, monotonic seconds; None while it works."""
        self.lost = ""
        """The reason of the GPU's loss."""

    @property
    def session(self) -> Session:
        """The session, which measures the task's kernel."""
        assert self._session is not None
        return self._session

    @property
    def fault_counts(self) -> FaultCounts:
        """The faults of the configs of the task's kernel, on all GPUs."""
        assert self._fault_counts is not None
        return self._fault_counts

    def take(self, kernel: FoundKernel) -> None:
        """Turn to a kernel. The session lives as long as the GPU is in the pool."""
        fault_counts = self._fault_counts_of(kernel)
        if self._session is None:
            self._session = self._start(kernel, self.index, fault_counts)
            self.gpu = self._session.identity()["uuid"] or f"cuda-{self.index}"
        elif self._kernel != kernel.tunable.name:
            self._session.turn_to(kernel, fault_counts)
        self._kernel, self._fault_counts = kernel.tunable.name, fault_counts

    def rested(self) -> tuple[float, float]:
        """Return `waited_s` and `idle_s`, and reset them."""
        rested = (self.waited_s, self.idle_s)
        self.waited_s = self.idle_s = 0.0
        return rested

    def close(self) -> None:
        """Close the session, if any."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def check(self) -> None:
        """Raise if the pool is closed; called repeatedly by waiting tasks.

        Raises:
            MeasuringStopped: The pool is closed.
        """
        if self._stopped:
            raise MeasuringStopped

    def interrupt(self) -> None:
        """End the measurement; called from another thread."""
        self._stopped = True
        if (session := self._session) is not None:
            session.interrupt()


def _at_once() -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Task:
    """A GPU's work without a pause."""

    kernel: FoundKernel
    """The kernel that the session must be turned to."""

    work: Callable[[GpuSlot], None]
    """Does the task; called again for another GPU where the first is lost."""

    length: float = 0.0
    """Relative length, in any unit; the longest task is drawn first."""

    owner: str | None = None
    """Uuid of the only GPU that may do it while that GPU is in the pool; None for any GPU."""

    fresh: bool = False
    """Whether it needs a process that has timed nothing."""

    ready: Callable[[], bool] = _at_once
    """Returns whether it could run now without waiting for a compiler."""


@dataclass(kw_only=True)
class _Batch:
    """Tasks that a thread waits for together."""

    left: int
    """Number of unfinished tasks."""

    running: int = 0
    """Number of running tasks."""

    error: BaseException | None = None
    """The first error of a task, after which no other task begins."""

    def over(self, *, stopping: bool) -> bool:
        """Return whether none of its tasks will run any more."""
        return not self.left or (not self.running and (self.error is not None or stopping))


@dataclass(kw_only=True, eq=False)
class _Entry:
    """A task in the queue."""

    task: Task
    batch: _Batch
    slot: GpuSlot | None = None
    """The only GPU that may draw it while that GPU is in the pool."""


class GpuPool:
    """The pool of a sweep's GPUs. The threads of several kernels may use it at once.

    Args:
        indexes: The GPUs, as torch counts.
        start: Opens sessions.
        on_event: Receives one line for the user, from any thread.
        order: The kernels' names in the order of their tasks.
        choice: Advice how to choose some of the GPUs; braces in it stand for their indexes.
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
        self._fault_counts: dict[str, FaultCounts] = {}
        self._changed = threading.Condition()
        self._queue = TaskQueue[_Entry](order)
        self._begun: set[str] = set()
        self._stopping = False
        self._asking = threading.Lock()
        self._opened: tuple[Device, Mapping[str, str]] | None = None
        self._began = monotonic()
        self.slots = tuple(GpuSlot(index, start, self._fault_counts_of) for index in indexes)
        self._threads = [
            threading.Thread(target=self._serve, args=(slot,), name=f"aot_tune GPU {slot.index}", daemon=True)
            for slot in self.slots
        ]

    def __enter__(self) -> GpuPool:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop running tasks and release all GPUs."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for slot, thread in zip(self.slots, self._threads, strict=True):
            while thread.is_alive():
                slot.interrupt()
                thread.join(_LOOK_S)

    def open(self, kernel: FoundKernel) -> tuple[Device, Mapping[str, str]]:
        """Return the GPU as grids are computed for it, and the conditions of all times.

        The first call asks every GPU.

        Raises:
            TuneError: The GPUs differ, or one of them is taken.
            GpuLostError: None of them works.
        """
        with self._asking:
            if self._opened is None:
                self._opened = self._ask(kernel)
            return self._opened

    def _ask(self, kernel: FoundKernel) -> tuple[Device, Mapping[str, str]]:
        answers: dict[int, tuple[Device, Mapping[str, str]]] = {}

        def ask(slot: GpuSlot) -> None:
            answers[slot.index] = slot.session.device(), slot.session.identity()

        task = Task(kernel=kernel, work=ask)
        self._run([(task, slot) for slot in self.slots])
        devices = {index: answers[index][0] for index in sorted(answers)}
        if len({(device.name, device.sm_count) for device in devices.values()}) > 1:
            described = "; ".join(
                f"{index}: {device.name}, {device.sm_count} multiprocessors"
                for index, device in devices.items()
            )
            raise TuneError(
                f"the GPUs differ ({described}), and their times cannot be compared; choose equal GPUs: "
                f"{self._choice.replace('{}', str(min(devices)))}"
            )
        return answers[min(answers)]

    def run(self, tasks: Sequence[Task], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Let the GPUs do a kernel's tasks, the longest first, equal tasks in their order.

        Args:
            tasks: The tasks.
            meanwhile: Called repeatedly while waiting.

        Raises:
            GpuLostError: The last GPU is lost.
            MeasuringStopped: The pool was closed.
            Exception: The first error of a task. Tasks that were running then have ended.
        """
        with self._changed:
            self._begun.update(task.kernel.tunable.name for task in tasks)
        self._run([(task, None) for task in tasks], meanwhile)

    def has_begun(self, kernel: str) -> bool:
        """Return whether a kernel has had tasks."""
        return kernel in self._begun

    @property
    def size(self) -> int:
        """Number of GPUs that are not lost."""
        return sum(slot.left_s is None for slot in self.slots)

    @property
    def waiting(self) -> int:
        """Number of tasks that no GPU has drawn yet."""
        return len(self._queue)

    def usage(self) -> tuple[GpuUse, ...]:
        """Return each GPU's busy and idle time so far."""
        now = monotonic()
        return tuple(
            GpuUse(
                index=slot.index,
                gpu=slot.gpu,
                busy_s=slot.busy_s,
                idle_s=max(0.0, (slot.left_s or now) - self._began - slot.busy_s),
                lost=slot.lost,
            )
            for slot in self.slots
        )

    # The waiting thread -------------------------------------------------------------------------------------

    def _run(
        self,
        tasks: Sequence[tuple[Task, GpuSlot | None]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        batch = _Batch(left=len(tasks))
        with self._changed:
            if self._stopping:
                raise MeasuringStopped("the GPU pool is closed")
            for task, slot in tasks:
                self._add(_Entry(task=task, batch=batch, slot=slot))
            self._check_left(batch)
            self._changed.notify_all()
        try:
            meanwhile()
            while not self._over(batch):
                meanwhile()
        except BaseException:
            self.close()  # before the tasks' journal is closed
            raise
        if batch.error is not None:
            raise batch.error
        if batch.left:
            raise MeasuringStopped("the GPU pool is closed")

    def _add(self, entry: _Entry) -> None:
        self._queue.add(entry, entry.task.kernel.tunable.name, entry.task.length)

    def _over(self, batch: _Batch) -> bool:
        """Wait a moment for the end of a batch; return whether it has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: batch.over(stopping=self._stopping), _TELL_S)

    # The threads of the GPUs --------------------------------------------------------------------------------

    def _fault_counts_of(self, kernel: FoundKernel) -> FaultCounts:
        name = kernel.tunable.name
        with self._changed:
            new = FaultCounts(lambda line: self._on_event(f"{name}: {line}"))
            return self._fault_counts.setdefault(name, new)

    def _serve(self, slot: GpuSlot) -> None:
        """Do task after task, until the GPU is lost or the pool is closed."""
        try:
            while slot.left_s is None and (entry := self._drawn(slot)) is not None:
                began = monotonic()
                error: BaseException | None = None
                try:
                    slot.take(entry.task.kernel)
                    entry.task.work(slot)
                except BaseException as raised:  # handed to the thread that waits
                    error = raised
                slot.busy_s += monotonic() - began
                self._ended(slot, entry, error)
        finally:
            slot.close()

    def _drawn(self, slot: GpuSlot) -> _Entry | None:
        """Wait for the next task of a GPU; None when the pool is closed."""
        with self._changed:
            while not self._stopping:
                others = [other for other in self.slots if other is not slot and other.left_s is None]
                drawn = draw_for(
                    self._queue,
                    lambda entry: self._may(slot, entry) and entry.task.ready(),
                    needs_fresh=lambda entry: entry.task.fresh,
                    is_fresh=slot.checks,
                    fresh=sum(other.checks for other in others),
                )
                if drawn is not None:
                    drawn.batch.running += 1
                    slot.checks = drawn.task.fresh
                    return drawn
                waits_for_compiler = any(self._may(slot, entry) for entry in self._queue)
                began = monotonic()
                self._changed.wait(_LOOK_S if waits_for_compiler else None)
                if waits_for_compiler:
                    slot.waited_s += monotonic() - began
                else:
                    slot.idle_s += monotonic() - began
            return None

    def _may(self, slot: GpuSlot, entry: _Entry) -> bool:
        if entry.slot is not None and entry.slot.left_s is None:
            return entry.slot is slot
        working = {other.gpu for other in self.slots if other.left_s is None}
        return entry.task.owner not in working or entry.task.owner == slot.gpu

    def _ended(self, slot: GpuSlot, entry: _Entry, error: BaseException | None) -> None:
        batch = entry.batch
        with self._changed:
            batch.running -= 1
            if isinstance(error, GpuLostError):
                slot.left_s, slot.lost = monotonic(), str(error)
                self._add(entry)
                self._check_left(batch, error)
            elif error is not None:
                batch.error = batch.error or error
            else:
                batch.left -= 1
            if batch.error is not None:
                self._queue.drop(lambda waiting: waiting.batch is batch)
            self._changed.notify_all()
        if isinstance(error, GpuLostError) and batch.error is None:
            self._on_event(
                f"GPU {slot.index} ({slot.gpu}) is lost and leaves the sweep: {error}. Its unfinished "
                "problem is measured again on another GPU"
            )

    def _check_left(self, batch: _Batch, error: GpuLostError | None = None) -> None:
        """Let a batch fail where no GPU is left."""
        if any(slot.left_s is None for slot in self.slots):
            return
        lost = "; ".join(f"GPU {slot.index}: {slot.lost}" for slot in self.slots)
        batch.error = batch.error or error or GpuLostError(f"no GPU is left: {lost}")
        self._queue.drop(lambda waiting: waiting.batch is batch)
