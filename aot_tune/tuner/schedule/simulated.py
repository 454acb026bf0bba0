"""A sweep on a simulated clock: which GPU and which core does what, and when. Pure.

The order is that of real sweeps: `TaskQueue` orders tasks and compilations, and `may_begin` says when the
next kernel begins. Durations are given, as a rule those of a journal.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from aot_tune.tuner.schedule.flight import may_begin
from aot_tune.tuner.schedule.queue import TaskQueue, draw_for


@dataclass(frozen=True, kw_only=True)
class Work:
    """One task of a GPU."""

    seconds: float
    """Its duration, seconds."""

    compilations: tuple[float, ...] = ()
    """The duration of each compilation that it waits for, seconds of one core."""

    fresh: bool = False
    """Whether it needs a process that has timed nothing."""


@dataclass(frozen=True, kw_only=True)
class KernelWork:
    """All tasks of one kernel."""

    name: str
    """The kernel's name."""

    steps: tuple[tuple[Work, ...], ...]
    """Tasks that may run at the same time; each step begins when the one before it has ended."""

    planning_s: float = 0.0
    """Time from its beginning until its first tasks are known, seconds."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a sweep runs on, all hosts together."""

    gpus: int
    """Number of GPUs."""

    cores: int
    """Number of cores that compile."""

    start_s: float
    """Time in which a GPU's process starts, seconds."""

    restart_s: float
    """Time in which a fresh process replaces one, seconds."""

    child_s: float = 0.0
    """Time in which a compiling process starts, beyond `start_s`, seconds."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The result of a simulated sweep."""

    seconds: float
    """Its duration, seconds."""

    bounds: dict[str, float]
    """Durations below which no order of the same tasks can come, in words, seconds."""

    idle_s: float
    """Time in which GPUs had no task, summed over all, seconds."""

    starts_s: float
    """Time in which processes of GPUs started, summed over all, seconds."""

    @property
    def bound(self) -> str:
        """What bounds it."""
        return max(self.bounds, key=lambda name: self.bounds[name])

    @property
    def efficiency(self) -> float:
        """The longest of the bounds over the duration."""
        return self.bounds[self.bound] / self.seconds


@dataclass(eq=False)
class _Gpu:
    """A GPU, and whether its process has timed nothing since its last such task."""

    fresh: bool = False


@dataclass(eq=False)
class _Kernel:
    """A kernel in flight."""

    work: KernelWork
    step: int = -1
    left: int = 0


@dataclass(eq=False)
class _Task:
    """A task in the queue."""

    kernel: _Kernel
    work: Work
    compiling: int


@dataclass
class _Sweep:
    """The state of a simulation."""

    machine: Machine
    left: list[KernelWork]
    tasks: TaskQueue[_Task]
    jobs: TaskQueue[tuple[_Task, float]]
    now: float = 0.0
    cores: int = 0
    gpus: list[_Gpu] = field(default_factory=list)
    idle: list[_Gpu] = field(default_factory=list)
    flying: list[_Kernel] = field(default_factory=list)
    idle_s: float = 0.0
    starts_s: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    numbers: count[int] = field(default_factory=count)

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), what))

    def run(self) -> None:
        # What the GPU is must be known before anything can be planned.
        self.after(self.machine.start_s, self.begin)
        while self.events:
            at, _, what = heapq.heappop(self.events)
            self.idle_s += len(self.idle) * (at - self.now)
            self.now = at
            what()
            self.dispatch()

    def dispatch(self) -> None:
        """Begin all that can begin now."""
        while self.left and may_begin(
            in_flight=len(self.flying),
            planned=all(kernel.step >= 0 for kernel in self.flying),
            gpus=self.machine.gpus,
            waiting=len(self.tasks),
            compilers_rest=self.cores > 0 and not len(self.jobs),
        ):
            kernel = _Kernel(self.left.pop(0))
            self.flying.append(kernel)
            self.after(kernel.work.planning_s, partial(self.next_step, kernel))
        while self.cores and (job := self.jobs.draw()) is not None:
            self.cores -= 1
            waiting, seconds = job
            self.after(seconds, partial(self.compiled, waiting))
        rest = False  # what one GPU without a fresh process may not do, no other such GPU may
        for gpu in list(self.idle):
            if rest and not gpu.fresh:
                continue
            task = draw_for(
                self.tasks,
                lambda task: not task.compiling,
                needs_fresh=lambda task: task.work.fresh,
                is_fresh=gpu.fresh,
                fresh=sum(one.fresh for one in self.gpus if one is not gpu),
            )
            if task is not None:
                self.measure(gpu, task)
            elif not gpu.fresh:
                rest = True

    def begin(self) -> None:
        self.idle = list(self.gpus)
        self.starts_s = len(self.gpus) * self.now
        self.after(self.machine.child_s, self.compile)

    def compile(self) -> None:
        self.cores = self.machine.cores

    def compiled(self, task: _Task) -> None:
        self.cores += 1
        task.compiling -= 1

    def measure(self, gpu: _Gpu, task: _Task) -> None:
        self.idle.remove(gpu)
        start_s = self.machine.restart_s if task.work.fresh and not gpu.fresh else 0.0
        gpu.fresh = task.work.fresh
        self.starts_s += start_s

        def measured() -> None:
            self.idle.append(gpu)
            task.kernel.left -= 1
            if not task.kernel.left:
                self.next_step(task.kernel)

        self.after(start_s + task.work.seconds, measured)

    def next_step(self, kernel: _Kernel) -> None:
        kernel.step += 1
        if kernel.step == len(kernel.work.steps):
            self.flying.remove(kernel)
            return
        step = sorted(kernel.work.steps[kernel.step], key=lambda work: -work.seconds)
        kernel.left = len(step)
        for work in step:
            task = _Task(kernel, work, len(work.compilations))
            self.tasks.add(task, kernel.work.name, work.seconds)
            for seconds in work.compilations:
                self.jobs.add((task, seconds), kernel.work.name)
        if not step:
            self.next_step(kernel)


def simulate(kernels: Sequence[KernelWork], machine: Machine) -> Simulated:
    """Simulate a sweep. Of the kernels the first comes first; sweeps begin with the longest."""
    order = [kernel.name for kernel in kernels]
    sweep = _Sweep(machine, list(kernels), TaskQueue(order), TaskQueue(order))
    sweep.gpus = [_Gpu() for _ in range(machine.gpus)]
    sweep.run()
    every = [work for kernel in kernels for step in kernel.steps for work in step]
    return Simulated(
        seconds=sweep.now,
        bounds={
            "measuring, shared by all GPUs, once their processes have started": machine.start_s
            + sum(work.seconds for work in every) / machine.gpus,
            "compiling, shared by all cores, once their processes have started": machine.start_s
            + machine.child_s
            + sum(sum(work.compilations) for work in every) / machine.cores,
            "the longest kernel alone, each of its steps as long as its longest task": max(
                _chain_s(kernel, machine) for kernel in kernels
            ),
        },
        idle_s=sweep.idle_s,
        starts_s=sweep.starts_s,
    )


def _chain_s(kernel: KernelWork, machine: Machine) -> float:
    """The time of a kernel on any number of GPUs and cores."""
    seconds = machine.start_s + max(kernel.planning_s, machine.child_s)
    for step in kernel.steps:
        seconds += max((work.seconds + max(work.compilations, default=0.0) for work in step), default=0.0)
    return seconds
