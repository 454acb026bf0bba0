"""Show a sweep's progress: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from aot_tune.tuner.choose.times import TIE
from aot_tune.tuner.outcome import Failure
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
"""Least seconds between two plain lines of the same kind: a sweep of minutes then fills one screen of a
log."""

MESSAGE_CHARACTERS = 160
"""Most characters shown of the first line of a failure's message. A compiler's message may fill pages; the
journal keeps more of it."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """A kernel begins."""

    kernel: str
    """Its name."""

    arch: Arch
    """The arch tuned for."""

    problems: int
    """Number of buckets to sweep."""

    jobs: int
    """Number of compilations, each counted once."""

    device: str
    """The name of the GPU, or of the reference device of a prediction."""


@dataclass(frozen=True, kw_only=True)
class Compiling:
    """Further compilations of a kernel have ended."""

    kernel: str
    """The kernel's name."""

    done: int
    """Number of compilations that have ended so far."""

    total: int
    """Number of all compilations."""

    failures: int
    """Number of compilations that ended without a cubin."""


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """A problem is being measured."""

    kernel: str
    """The kernel's name."""

    problem: Problem
    """The problem."""

    done: int
    """Number of the kernel's steps that are complete."""

    total: int
    """Number of all its steps."""


@dataclass(frozen=True, kw_only=True)
class CandidateFailed:
    """A candidate failed on a problem."""

    kernel: str
    """The kernel's name."""

    problem: Problem
    """The problem."""

    failure: Failure
    """The candidate and the reason."""


@dataclass(frozen=True, kw_only=True)
class KernelEnded:
    """A kernel has ended."""

    kernel: str
    """The kernel's name."""


@dataclass(frozen=True)
class Note:
    """A sentence for the user."""

    text: str
    """The sentence."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The sweep is over."""

    rows: Sequence[SweptKernel]
    """The rows of the closing table."""

    gpus: Sequence[GpuUse] = ()
    """The busy and idle time of each GPU."""


Event = Started | Compiling | Measuring | CandidateFailed | KernelEnded | Note | Finished


class Progress(ABC):
    """Shows the events of a sweep. Kernels may overlap; `InTurn` lets several threads call."""

    @abstractmethod
    def show(self, event: Event) -> None:
        """Show an event."""

    def note(self, text: str) -> None:
        """Show a sentence to the user."""
        self.show(Note(text))

    @abstractmethod
    def close(self) -> None:
        """Restore the terminal; afterwards nothing is shown. May be called twice."""


def progress_on(stream: TextIO) -> Progress:
    """Make live bars if `stream` is a terminal, plain lines otherwise."""
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
        self._last: dict[tuple[str, type[Event]], float] = {}

    def show(self, event: Event) -> None:
        """Write a line at once; counts only at intervals and at their end."""
        self._estimate.take(event)
        if isinstance(event, Started):
            now = self._clock()
            self._last |= {(event.kernel, Compiling): now, (event.kernel, Measuring): now}
        text = self._count(event) if isinstance(event, Compiling | Measuring) else text_of(event)
        if text is not None:
            self._stream.write(text + "\n")
            self._stream.flush()  # a pipe is block-buffered, and the line must be seen now

    def close(self) -> None:
        """Do nothing: there is nothing to restore."""

    def _count(self, event: Compiling | Measuring) -> str | None:
        """Return the line of a count; None shortly after another line of its kind."""
        now, kind = self._clock(), (event.kernel, type(event))
        if event.done != event.total and now - self._last.get(kind, -self._every_s) < self._every_s:
            return None
        self._last[kind] = now
        left_s = self._estimate.left_s()
        left = f", about {duration(left_s)} left" if left_s > 0 else ""
        if isinstance(event, Measuring):
            return f"{event.kernel}: measured {event.done}/{event.total}, at {event.problem}{left}"
        failed = f", {event.failures} failed" if event.failures else ""
        return f"{event.kernel}: compiled {event.done}/{event.total}{failed}{left}"


class LiveProgress(Progress):
    """Live bars of each running kernel, compiling and measuring; failures and notes scroll above.

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

    def show(self, event: Event) -> None:
        """Write a line above the bars, or move them; the closing table takes their place."""
        self._estimate.take(event)
        if isinstance(event, Finished):
            self.close()
        if (text := text_of(event)) is not None:
            self._console.print(text, markup=False)
        match event:
            case Started(kernel=kernel):
                self._compiling[kernel] = self._bars.add_task(
                    f"{kernel} compile", total=event.jobs, detail=""
                )
                self._measuring[kernel] = self._bars.add_task(
                    f"{kernel} measure", total=event.problems, detail=""
                )
                self._bars.start()
            case Compiling():
                self._move(self._compiling, event, f"{event.failures} failed" if event.failures else "")
            case Measuring():
                left_s = self._estimate.left_s()
                left = f", about {duration(left_s)} left" if left_s > 0 else ""
                self._move(self._measuring, event, f"{event.problem}{left}")
            case KernelEnded():
                for bars in (self._compiling, self._measuring):
                    if (task := bars.pop(event.kernel, None)) is not None:
                        self._bars.remove_task(task)

    def close(self) -> None:
        """Remove the bars."""
        self._bars.stop()

    def _move(self, bars: Mapping[str, TaskID], event: Compiling | Measuring, detail: str) -> None:
        if event.kernel in bars:
            self._bars.update(bars[event.kernel], completed=event.done, total=event.total, detail=detail)


class InTurn(Progress):
    """Passes on the events of several threads, one after another.

    Args:
        progress: Receives the events.
        brief: Whether of the candidates that spill registers or do not fit only the number is shown, when
            the kernel ends. Large tiles lead to many such candidates, which is no error.
    """

    def __init__(self, progress: Progress, *, brief: bool = False) -> None:
        self._progress, self._brief = progress, brief
        self._lock = threading.RLock()
        self._left_out: dict[str, set[Config]] = {}

    def show(self, event: Event) -> None:
        """Pass on an event, or count it."""
        with self._lock:
            if self._brief and isinstance(event, CandidateFailed) and event.failure.stage == "resources":
                self._left_out.setdefault(event.kernel, set()).add(event.failure.config)
                return
            if isinstance(event, KernelEnded) and (configs := self._left_out.pop(event.kernel, None)):
                self._progress.note(left_out_line(event.kernel, len(configs)))
            self._progress.show(event)

    def close(self) -> None:
        """Pass it on."""
        with self._lock:
            self._progress.close()


class Estimate:
    """Estimates the remaining time of all running kernels: they share GPUs and compilers.

    Compiling and measuring overlap, so the longer of the two counts.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: dict[type[Event], dict[str, tuple[int, int]]] = {Compiling: {}, Measuring: {}}
        """Numbers done and total, by kind and kernel."""
        self._already: dict[tuple[type[Event], str], int] = {}
        self._began: dict[type[Event], float] = {}
        self._lefts: dict[type[Event], tuple[float, float]] = {}

    def take(self, event: Event) -> None:
        """Update the counts by an event; a kernel that ended has nothing left."""
        match event:
            case Compiling() | Measuring():
                self._seen(type(event), event.kernel, event.done, event.total)
            case KernelEnded():
                for kind, counts in self._counts.items():
                    if event.kernel in counts:
                        _, total = counts[event.kernel]
                        self._seen(kind, event.kernel, total, total)

    def left_s(self) -> float:
        """Return the seconds left; 0 while no estimate is possible, and at the end."""
        now = self._clock()
        return max([0.0, *(left - (now - at) for at, left in self._lefts.values())])

    def _seen(self, kind: type[Event], kernel: str, done: int, total: int) -> None:
        now, counts = self._clock(), self._counts[kind]
        # Rates count from the first call on, without the results of a journal or a cache.
        began = self._began.setdefault(kind, now)
        self._already.setdefault((kind, kernel), done)
        counts[kernel] = (done, total)
        fresh = sum(done - self._already[kind, name] for name, (done, _) in counts.items())
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
        """Report the counts if they have changed."""
        counts = self._counts(self._kernel)
        if counts != self._last:
            self._last = counts
            done, total, failures = counts
            self._progress.show(Compiling(kernel=self._kernel, done=done, total=total, failures=failures))


# The lines ------------------------------------------------------------------------------------------------


def prediction_notice(request: SweepRequest, compiler: str | None) -> list[str]:
    """Return the first lines of a prediction: its method, its folder, and the parts left out.

    Args:
        request: The request.
        compiler: The version of cuTile's compiler; None when there is none.
    """
    folder = request.out or PREDICTED_FOLDER
    lines = [
        f"no {request.arch} GPU here: this predicts, and measures nothing. Each candidate is compiled by "
        f"tileiras {compiler or '(not installed)'};",
        "candidates that fail, spill or do not fit are dropped, and a performance model ranks the rest for "
        f"{Device.reference(request.arch).name}.",
        f"Writes {folder / str(request.arch)}/, marked predicted; measured tables stay as they are. "
        f"To use them: AOT_TUNE_TABLES={folder}",
    ]
    return lines + (_left_out(request) if request.first_look else [])


def _left_out(request: SweepRequest) -> list[str]:
    """Describe the parts that a first look leaves out, and the commands that predict everything."""
    declared = sum(len(kernel.tunable.buckets) for kernel in request.kernels)
    chosen = sum(len(request.buckets(kernel)) for kernel in request.kernels)
    installed, checkout = request.commands_for_everything()
    return [
        f"This is a first look at {counted(len(request.kernels), 'kernel')}: it predicts {chosen} of "
        f"{counted(declared, 'bucket')} with at most {FIRST_LOOK_CANDIDATES} candidates each, evenly spread,",
        f"and leaves out {counted(declared - chosen, 'bucket')} and all further candidates.",
        f"To predict everything: {installed}",
        f"or, in a checkout: {checkout}",
    ]


def text_of(event: Event) -> str | None:
    """Return the text of an event; None for a count."""
    match event:
        case Started():
            return (
                f"{event.kernel} {event.arch} on {event.device}: {counted(event.problems, 'problem')}, "
                f"{counted(event.jobs, 'compilation')}"
            )
        case CandidateFailed():
            return failure_line(event)
        case Note():
            return event.text
        case Finished():
            return "\n".join([*closing_table(event.rows), *use_lines(event.gpus)])
    return None


def failure_line(failed: CandidateFailed) -> str:
    """Format a candidate's failure on one line."""
    failure = failed.failure
    first = next((line.strip() for line in failure.message.splitlines() if line.strip()), "")
    if len(first) > MESSAGE_CHARACTERS:
        first = first[: MESSAGE_CHARACTERS - 1] + "…"
    return f"{failed.kernel} {failed.problem}: {failure.stage}: {failure.config}: {first}"


def left_out_line(kernel: str, configs: int) -> str:
    """Format the number of configs that spill registers or do not fit a multiprocessor."""
    return (
        f"{kernel}: {counted(configs, 'config')} left out, whose code spills registers or does not fit a "
        "multiprocessor; -v lists them"
    )


def closing_table(rows: Sequence[SweptKernel]) -> list[str]:
    """Format the closing table, and below it remarks on each kernel.

    Predicted gains are shown with what they are worth. The remarks are the reasons why tables were not
    published, problems without times and disturbed samples.
    """
    predicts = any(row.evidence == "predicted" for row in rows)
    reasons = [f"{row.kernel}: not published: {reason}" for row in rows for reason in row.refusals]
    left_out = [f"{row.kernel}: left out: {problem}" for row in rows for problem in row.left_out]
    left_out += [f"{row.kernel}: no time was left: {bucket}" for row in rows for bucket in row.unreached]
    disturbed = [f"{row.kernel}: disturbed samples: {bucket}" for row in rows for bucket in row.disturbed]
    return [
        *aligned(_table_rows(rows, predicts=predicts)),
        *([_WORTH] if predicts else []),
        *reasons,
        *left_out,
        *disturbed,
    ]


_WORTH = (
    "Nothing was measured. Worth: how the model's choices did at the sizes of a measured table; slower is by "
    f"more than {TIE:.0%}. Where they lose, the default stays."
)


def _table_rows(rows: Sequence[SweptKernel], *, predicts: bool) -> list[tuple[str, ...]]:
    """Return the heads and a row for each kernel."""
    columns: dict[str, Callable[[SweptKernel], str]] = {
        "kernel": lambda row: row.kernel,
        "problems": lambda row: str(row.problems),
    }
    if predicts:
        columns["not default"] = lambda row: str(row.leaves)
        columns["by the model"] = lambda row: f"{row.speedup:.2f}x" if row.leaves else "-"
    else:
        columns["speed-up"] = lambda row: "-" if row.failed else f"{row.speedup:.2f}x"
    columns["failures"] = lambda row: str(row.failures)
    columns["compile s"] = lambda row: f"{row.compile_s:.1f}"
    if not predicts:
        columns["measure s"] = lambda row: f"{row.measure_s:.1f}"
        columns["verify s"] = lambda row: f"{row.verify_s:.1f}"
    columns["table"] = _file
    if predicts:
        columns["worth"] = lambda row: row.worth
    return [tuple(columns), *(tuple(cell(row) for cell in columns.values()) for row in rows)]


def _file(row: SweptKernel) -> str:
    return "not published" if row.path is None else f"{row.path} ({counted(row.changed, 'change')})"


def use_lines(gpus: Sequence[GpuUse]) -> list[str]:
    """Format the busy and idle time of each GPU, one line each; nothing for a single GPU."""
    if len(gpus) < 2:
        return []
    return [
        f"GPU {gpu.index} {gpu.gpu}: busy {gpu.busy_s:.1f} s, idle {gpu.idle_s:.1f} s"
        + (f"; lost: {gpu.lost}" if gpu.lost else "")
        for gpu in gpus
    ]
