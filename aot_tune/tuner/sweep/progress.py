"""Show a person how far a sweep is: live bars on a terminal, plain lines elsewhere. Measures nothing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from aot_tune.tuner.outcome import Stage
from aot_tune.tuner.sweep.report import (
    FIRST_LOOK_CANDIDATES,
    PREDICTED_FOLDER,
    GpuUse,
    SweepRequest,
    SweptKernel,
)
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from aot_tune.values.text import aligned, counted, duration

if TYPE_CHECKING:
    from rich.progress import TaskID

LINE_EVERY_S = 10.0
"""Least seconds between two plain lines of the same kind, so that a sweep of minutes stays one screen of a
log."""

MESSAGE_CHARACTERS = 160
"""Most characters shown of the first line of a failure's message. A compiler's message may run over pages;
the journal keeps more of it."""


class Progress(Protocol):
    """Receives the events of a sweep, of several kernels at once. `InTurn` lets several threads call."""

    def started(self, *, kernel: str, arch: Arch, problems: int, jobs: int, device: str) -> None:
        """A kernel begins.

        Args:
            kernel: Its name.
            arch: The arch tuned for.
            problems: Number of buckets to sweep.
            jobs: Number of compilations, each counted once.
            device: The GPU's name, or that of the reference device that is predicted for.
        """

    def compiled(self, kernel: str, done: int, total: int, failures: int) -> None:
        """`done` of a kernel's `total` compilations have ended, `failures` of them without a cubin."""

    def measuring(self, kernel: str, problem: Problem, done: int, total: int) -> None:
        """`problem` is being measured; `done` of the kernel's `total` steps are complete."""

    def ended(self, kernel: str) -> None:
        """Nothing more comes of a kernel."""

    def failure(
        self, kernel: str, problem: Problem | None, config: Config, stage: Stage, message: str
    ) -> None:
        """A candidate failed; `problem` is None where it fails for all."""

    def note(self, text: str) -> None:
        """Show one sentence that a person should see."""

    def finished(self, rows: Sequence[SweptKernel], gpus: Sequence[GpuUse] = ()) -> None:
        """The sweep is over: show the closing table, and how long each GPU worked."""

    def close(self) -> None:
        """Leave the terminal as it was; afterwards nothing is shown. May be called twice."""


def progress_on(stream: TextIO) -> Progress:
    """Live bars where `stream` is a terminal, plain lines otherwise."""
    return LiveProgress(stream) if stream.isatty() else PlainProgress(stream)


class PlainProgress(Progress):
    """Plain lines, for logs and pipes.

    Args:
        stream: Receives the lines; stderr by default.
        clock: Monotonic seconds.
        every_s: Least seconds between two lines of the same kind.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = LINE_EVERY_S,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._every_s = every_s
        self._estimate = Estimate(clock)
        self._last: dict[tuple[str, str], float] = {}

    def started(self, *, kernel: str, arch: Arch, problems: int, jobs: int, device: str) -> None:
        """Write one line."""
        self._last |= dict.fromkeys([(kernel, "compiled"), (kernel, "measured")], self._clock())
        self.note(started_line(kernel, arch, problems, jobs, device))

    def compiled(self, kernel: str, done: int, total: int, failures: int) -> None:
        """Write a line now and then, and one when all are done."""
        self._estimate.compiled(kernel, done, total)
        if self._due(kernel, "compiled", last=done == total):
            failed = f", {failures} failed" if failures else ""
            self.note(f"{kernel}: compiled {done}/{total}{failed}{self._left()}")

    def measuring(self, kernel: str, problem: Problem, done: int, total: int) -> None:
        """Write a line now and then, and one when all are done."""
        self._estimate.measured(kernel, done, total)
        if self._due(kernel, "measured", last=done == total):
            self.note(f"{kernel}: measured {done}/{total}, at {problem}{self._left()}")

    def ended(self, kernel: str) -> None:
        """Count nothing more of it as left."""
        self._estimate.ended(kernel)

    def failure(
        self, kernel: str, problem: Problem | None, config: Config, stage: Stage, message: str
    ) -> None:
        """Write one line, at once."""
        self.note(failure_line(kernel, problem, config, stage, message))

    def note(self, text: str) -> None:
        """Write one line, at once."""
        self._stream.write(text + "\n")
        self._stream.flush()  # a pipe is block-buffered, and the line must be seen now

    def finished(self, rows: Sequence[SweptKernel], gpus: Sequence[GpuUse] = ()) -> None:
        """Write the closing table."""
        self.note("\n".join([*closing_table(rows), *use_lines(gpus)]))

    def close(self) -> None:
        """Do nothing: there is nothing to restore."""

    def _due(self, kernel: str, kind: str, *, last: bool) -> bool:
        now = self._clock()
        if not last and now - self._last.get((kernel, kind), -self._every_s) < self._every_s:
            return False
        self._last[kernel, kind] = now
        return True

    def _left(self) -> str:
        left = self._estimate.left_s()
        return f", about {duration(left)} left" if left > 0 else ""


class LiveProgress(Progress):
    """Live bars of each kernel in flight, compiling and measuring; failures and notes scroll above them.

    Args:
        stream: A terminal; stderr by default.
        clock: Monotonic seconds.
    """

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        from rich import progress
        from rich.console import Console

        self._clock = clock
        self._estimate = Estimate(clock)
        stream = stream if stream is not None else sys.stderr
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._bars = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[detail]}", markup=False),  # a config may hold brackets
            console=self._console,
            transient=True,
        )
        self._compiling: dict[str, TaskID] = {}
        self._measuring: dict[str, TaskID] = {}

    def started(self, *, kernel: str, arch: Arch, problems: int, jobs: int, device: str) -> None:
        """Write one line that stays, and show fresh bars."""
        self.note(started_line(kernel, arch, problems, jobs, device))
        self._compiling[kernel] = self._bars.add_task(f"{kernel} compile", total=jobs, detail="")
        self._measuring[kernel] = self._bars.add_task(f"{kernel} measure", total=problems, detail="")
        self._bars.start()

    def compiled(self, kernel: str, done: int, total: int, failures: int) -> None:
        """Move a compiling bar."""
        self._estimate.compiled(kernel, done, total)
        if kernel in self._compiling:
            failed = f"{failures} failed" if failures else ""
            self._bars.update(self._compiling[kernel], completed=done, total=total, detail=failed)

    def measuring(self, kernel: str, problem: Problem, done: int, total: int) -> None:
        """Move a measuring bar; beside it are the problem and the time left of all that has begun."""
        self._estimate.measured(kernel, done, total)
        if kernel in self._measuring:
            left = self._estimate.left_s()
            detail = f"{problem}, about {duration(left)} left" if left > 0 else str(problem)
            self._bars.update(self._measuring[kernel], completed=done, total=total, detail=detail)

    def ended(self, kernel: str) -> None:
        """Remove a kernel's bars."""
        self._estimate.ended(kernel)
        for bars in (self._compiling, self._measuring):
            if (task := bars.pop(kernel, None)) is not None:
                self._bars.remove_task(task)

    def failure(
        self, kernel: str, problem: Problem | None, config: Config, stage: Stage, message: str
    ) -> None:
        """Write one line above the bars."""
        self.note(failure_line(kernel, problem, config, stage, message))

    def note(self, text: str) -> None:
        """Write one line above the bars."""
        self._console.print(text, markup=False)

    def finished(self, rows: Sequence[SweptKernel], gpus: Sequence[GpuUse] = ()) -> None:
        """Write the closing table in place of the bars."""
        self.close()
        self.note("\n".join([*closing_table(rows), *use_lines(gpus)]))

    def close(self) -> None:
        """Remove the bars."""
        self._bars.stop()


class InTurn(Progress):
    """Passes the events of several threads on, one after another.

    Args:
        progress: Receives them.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.RLock()

    def started(self, *, kernel: str, arch: Arch, problems: int, jobs: int, device: str) -> None:
        """Pass it on."""
        with self._lock:
            self._progress.started(kernel=kernel, arch=arch, problems=problems, jobs=jobs, device=device)

    def compiled(self, kernel: str, done: int, total: int, failures: int) -> None:
        """Pass it on."""
        with self._lock:
            self._progress.compiled(kernel, done, total, failures)

    def measuring(self, kernel: str, problem: Problem, done: int, total: int) -> None:
        """Pass it on."""
        with self._lock:
            self._progress.measuring(kernel, problem, done, total)

    def ended(self, kernel: str) -> None:
        """Pass it on."""
        with self._lock:
            self._progress.ended(kernel)

    def failure(
        self, kernel: str, problem: Problem | None, config: Config, stage: Stage, message: str
    ) -> None:
        """Pass it on."""
        with self._lock:
            self._progress.failure(kernel, problem, config, stage, message)

    def note(self, text: str) -> None:
        """Pass it on."""
        with self._lock:
            self._progress.note(text)

    def finished(self, rows: Sequence[SweptKernel], gpus: Sequence[GpuUse] = ()) -> None:
        """Pass it on."""
        with self._lock:
            self._progress.finished(rows, gpus)

    def close(self) -> None:
        """Pass it on."""
        with self._lock:
            self._progress.close()


class Brief(InTurn):
    """Passes the events on, but of the candidates that spill registers or do not fit only their number.

    It is told when the kernel ends. Such candidates are many where tiles are large, and nothing is wrong.

    Args:
        progress: Receives the events.
    """

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress)
        self._left_out: dict[str, set[Config]] = {}

    def failure(
        self, kernel: str, problem: Problem | None, config: Config, stage: Stage, message: str
    ) -> None:
        """Pass it on, or count it."""
        if stage != "resources":
            super().failure(kernel, problem, config, stage, message)
            return
        with self._lock:
            self._left_out.setdefault(kernel, set()).add(config)

    def ended(self, kernel: str) -> None:
        """Say how many there were, and pass it on."""
        with self._lock:
            if configs := self._left_out.pop(kernel, None):
                self.note(left_out_line(kernel, len(configs)))
            super().ended(kernel)


class Estimate:
    """Estimates the time left of all kernels that have begun: they share GPUs and compilers.

    Compiling and measuring overlap, so the longer of the two counts.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: dict[str, dict[str, tuple[int, int]]] = {"compile": {}, "measure": {}}
        """By kind and kernel, the numbers done and in all."""
        self._already: dict[tuple[str, str], int] = {}
        self._began: dict[str, float] = {}
        self._lefts: dict[str, tuple[float, float]] = {}

    def compiled(self, kernel: str, done: int, total: int) -> None:
        """Note that `done` of a kernel's `total` compilations have ended."""
        self._seen("compile", kernel, done, total)

    def measured(self, kernel: str, done: int, total: int) -> None:
        """Note that `done` of a kernel's `total` steps are complete."""
        self._seen("measure", kernel, done, total)

    def ended(self, kernel: str) -> None:
        """Note that nothing is left of a kernel."""
        for kind, counts in self._counts.items():
            if kernel in counts:
                _, total = counts[kernel]
                self._seen(kind, kernel, total, total)

    def left_s(self) -> float:
        """Seconds left; 0 while no estimate is possible, and when nothing is left."""
        now = self._clock()
        return max([0.0, *(left - (now - at) for at, left in self._lefts.values())])

    def _seen(self, kind: str, kernel: str, done: int, total: int) -> None:
        now, counts = self._clock(), self._counts[kind]
        # Rates count from the first call on: what a journal or a cache answered at once does not show them.
        began = self._began.setdefault(kind, now)
        self._already.setdefault((kind, kernel), done)
        counts[kernel] = (done, total)
        fresh = sum(done - self._already[kind, one] for one, (done, _) in counts.items())
        if fresh > 0:
            left = sum(total - done for done, total in counts.values())
            self._lefts[kind] = (now, (now - began) / fresh * left)


class CompileReporter:
    """Reports one kernel's compilations to a `Progress` whenever their counts have changed.

    Args:
        counts: Returns the numbers of a kernel's jobs done, submitted and failed
            (`aot_tune.tuner.compile.feed.CompileFeed.counts`).
        kernel: The kernel's name.
        progress: Receives the counts.
    """

    def __init__(
        self, counts: Callable[[str], tuple[int, int, int]], kernel: str, progress: Progress
    ) -> None:
        self._counts, self._kernel, self._progress = counts, kernel, progress
        self._last = (0, 0, 0)

    def report(self) -> None:
        """Report the counts unless they are those of the last report."""
        counts = self._counts(self._kernel)
        if counts != self._last:
            self._last = counts
            self._progress.compiled(self._kernel, *counts)


# The lines ------------------------------------------------------------------------------------------------


def prediction_notice(request: SweepRequest, compiler: str | None) -> list[str]:
    """The first lines of a sweep that only predicts: how it predicts, where it writes, what it leaves out.

    Args:
        request: The request.
        compiler: The version of cuTile's compiler; None when there is none.
    """
    folder = request.out or PREDICTED_FOLDER
    lines = [
        f"no {request.arch} GPU here: this predicts, and measures nothing. Each candidate is compiled by "
        f"tileiras {compiler or '(not installed)'};",
        "what fails, spills or does not fit is dropped, and a performance model ranks the rest for "
        f"{Device.reference(request.arch).name}.",
        f"Writes {folder / str(request.arch)}/, marked predicted; measured tables stay as they are. "
        f"To use them: AOT_TUNE_TABLES={folder}",
    ]
    return lines + (_left_out(request) if request.first_look else [])


def _left_out(request: SweepRequest) -> list[str]:
    """Lines that say what a first look leaves out, and the commands that predict everything."""
    declared = sum(len(found.tunable.buckets) for found in request.kernels)
    chosen = sum(len(request.buckets(found)) for found in request.kernels)
    installed, checkout = request.commands_for_everything()
    return [
        f"This is a first look at {counted(len(request.kernels), 'kernel')}: it predicts {chosen} of "
        f"{counted(declared, 'bucket')} with at most {FIRST_LOOK_CANDIDATES} candidates each, evenly spread,",
        f"and leaves out {counted(declared - chosen, 'bucket')} and all further candidates.",
        f"To predict everything: {installed}",
        f"or, in a checkout: {checkout}",
    ]


def started_line(kernel: str, arch: Arch, problems: int, jobs: int, device: str) -> str:
    """The line a kernel begins with."""
    return f"{kernel} {arch} on {device}: {counted(problems, 'problem')}, {counted(jobs, 'compilation')}"


def failure_line(kernel: str, problem: Problem | None, config: Config, stage: Stage, message: str) -> str:
    """One candidate's failure on one line."""
    where = f" {problem}" if problem is not None else ""
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    if len(first) > MESSAGE_CHARACTERS:
        first = first[: MESSAGE_CHARACTERS - 1] + "…"
    return f"{kernel}{where}: {stage}: {config}: {first}"


def left_out_line(kernel: str, configs: int) -> str:
    """The line for all candidates whose code spills registers or does not fit a multiprocessor."""
    return (
        f"{kernel}: {counted(configs, 'config')} left out, whose code spills registers or does not fit a "
        "multiprocessor; -v says which"
    )


def _speedup(row: SweptKernel) -> str:
    """The words of a row's speed-up; a prediction that ranked nothing has none."""
    if row.failed:
        return "-"
    if row.evidence != "predicted":
        return f"{row.speedup:.2f}x"
    return f"{row.speedup:.2f}x predicted" if row.ranked else "not ranked"


def closing_table(rows: Sequence[SweptKernel]) -> list[str]:
    """The table at the end of a sweep, aligned; below it what a person must know of each kernel.

    These are the reasons why tables were not published, problems without times and disturbed samples.
    """
    heads = ("kernel", "problems", "speed-up", "failures", "compile s", "measure s", "verify s", "table")
    cells = [
        (
            row.kernel,
            str(row.problems),
            _speedup(row),
            str(row.failures),
            f"{row.compile_s:.1f}",
            f"{row.measure_s:.1f}",
            f"{row.verify_s:.1f}",
            "not published" if row.path is None else f"{row.path} ({counted(row.changed, 'change')})",
        )
        for row in rows
    ]
    reasons = [f"{row.kernel}: not published: {reason}" for row in rows for reason in row.refusals]
    unopened = [f"{row.kernel}: left out: {problem}" for row in rows for problem in row.unopened]
    unopened += [f"{row.kernel}: no time was left: {bucket}" for row in rows for bucket in row.unreached]
    disturbed = [f"{row.kernel}: disturbed samples: {bucket}" for row in rows for bucket in row.disturbed]
    return [*aligned([heads, *cells]), *reasons, *unopened, *disturbed]


def use_lines(gpus: Sequence[GpuUse]) -> list[str]:
    """A line for each GPU of several, below the closing table: how long it worked and how long it waited."""
    if len(gpus) < 2:
        return []
    return [
        f"GPU {gpu.index} {gpu.gpu}: busy {gpu.busy_s:.1f} s, idle {gpu.idle_s:.1f} s"
        + (f"; lost: {gpu.lost}" if gpu.lost else "")
        for gpu in gpus
    ]
