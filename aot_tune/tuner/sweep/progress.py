"""How far a sweep is, for a person: live bars on a terminal, plain lines elsewhere. Measures nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from aot_tune.tuner.outcome import Stage
from aot_tune.tuner.sweep.progress_text import closing_table, failure_line, started_line
from aot_tune.tuner.sweep.report import KernelReport
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import duration

if TYPE_CHECKING:
    from rich.progress import TaskID

LINE_EVERY_S = 10.0
"""Plain lines come at most this often: a sweep of minutes stays one screen of a CI log."""


class Progress(Protocol):
    """What a sweep tells while it runs. Calls come from one thread, kernel after kernel."""

    def started(self, *, kernel: str, arch: Arch, problems: int, jobs: int, device: str) -> None:
        """A kernel begins.

        Args:
            kernel: Its name.
            arch: The arch tuned for.
            problems: Buckets to sweep.
            jobs: Compilations to do, duplicates and cached ones left out.
            device: The GPU's name, or what is predicted for.
        """

    def compiled(self, done: int, total: int, failures: int) -> None:
        """`done` of `total` compilations have ended, `failures` of them without a cubin."""

    def measuring(self, problem: Problem, done: int, total: int) -> None:
        """`problem` is being measured (or predicted); `done` of `total` steps are complete."""

    def failure(
        self, kernel: str, problem: Problem | None, config: Config, stage: Stage, message: str
    ) -> None:
        """A candidate failed; `problem` is None where it fails for all."""

    def note(self, text: str) -> None:
        """One sentence that a person should see."""

    def finished(self, rows: Sequence[KernelReport]) -> None:
        """The sweep is over: the closing table."""

    def close(self) -> None:
        """Leave the terminal as it was; after it nothing is shown. May be called twice."""


def progress_on(stream: TextIO) -> Progress:
    """Live bars where `stream` is a terminal, plain lines otherwise."""
    return LiveProgress(stream) if stream.isatty() else PlainProgress(stream)


class PlainProgress(Progress):
    """Plain lines, for logs and pipes.

    Args:
        stream: Where the lines go; stderr by default.
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
        self._kernel = ""
        self._estimate = Estimate(clock)
        self._last = {"compiled": -every_s, "measured": -every_s}

    def started(self, *, kernel: str, arch: Arch, problems: int, jobs: int, device: str) -> None:
        """One line; the lines that follow are the kernel's."""
        self._kernel = kernel
        self._estimate = Estimate(self._clock)
        self._last = dict.fromkeys(self._last, self._clock())
        self.note(started_line(kernel, arch, problems, jobs, device))

    def compiled(self, done: int, total: int, failures: int) -> None:
        """A line now and then, and one when all are done."""
        self._estimate.compiled(done, total)
        if self._due("compiled", last=done == total):
            failed = f", {failures} failed" if failures else ""
            self.note(f"{self._kernel}: compiled {done}/{total}{failed}{self._left()}")

    def measuring(self, problem: Problem, done: int, total: int) -> None:
        """A line now and then, and one when all are done."""
        self._estimate.measured(done, total)
        if self._due("measured", last=done == total):
            self.note(f"{self._kernel}: measured {done}/{total}, at {problem}{self._left()}")

    def failure(
        self, kernel: str, problem: Problem | None, config: Config, stage: Stage, message: str
    ) -> None:
        """One line, at once."""
        self.note(failure_line(kernel, problem, config, stage, message))

    def note(self, text: str) -> None:
        """One line, at once."""
        self._stream.write(text + "\n")
        self._stream.flush()  # a pipe is block-buffered: a line must be seen when it is said

    def finished(self, rows: Sequence[KernelReport]) -> None:
        """The closing table."""
        self.note("\n".join(closing_table(rows)))

    def close(self) -> None:
        """Nothing to restore."""

    def _due(self, kind: str, *, last: bool) -> bool:
        now = self._clock()
        if not last and now - self._last[kind] < self._every_s:
            return False
        self._last[kind] = now
        return True

    def _left(self) -> str:
        left = self._estimate.left_s()
        return f", about {duration(left)} left" if left > 0 else ""


class LiveProgress(Progress):
    """Two live bars, compiling and measuring, with failures and notes scrolling above them.

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
        self._compiling: TaskID | None = None
        self._measuring: TaskID | None = None

    def started(self, *, kernel: str, arch: Arch, problems: int, jobs: int, device: str) -> None:
        """One line that stays, and fresh bars."""
        for task in self._bars.task_ids:
            self._bars.remove_task(task)
        self._estimate = Estimate(self._clock)
        self.note(started_line(kernel, arch, problems, jobs, device))
        self._compiling = self._bars.add_task(f"{kernel} compile", total=jobs, detail="")
        self._measuring = self._bars.add_task(f"{kernel} measure", total=problems, detail="")
        self._bars.start()

    def compiled(self, done: int, total: int, failures: int) -> None:
        """Move the compiling bar."""
        self._estimate.compiled(done, total)
        if self._compiling is not None:
            failed = f"{failures} failed" if failures else ""
            self._bars.update(self._compiling, completed=done, total=total, detail=failed)

    def measuring(self, problem: Problem, done: int, total: int) -> None:
        """Move the measuring bar; beside it what is measured, and how long still."""
        self._estimate.measured(done, total)
        if self._measuring is not None:
            left = self._estimate.left_s()
            detail = f"{problem}, about {duration(left)} left" if left > 0 else str(problem)
            self._bars.update(self._measuring, completed=done, total=total, detail=detail)

    def failure(
        self, kernel: str, problem: Problem | None, config: Config, stage: Stage, message: str
    ) -> None:
        """One line above the bars."""
        self.note(failure_line(kernel, problem, config, stage, message))

    def note(self, text: str) -> None:
        """One line above the bars."""
        self._console.print(text, markup=False)

    def finished(self, rows: Sequence[KernelReport]) -> None:
        """The closing table in place of the bars."""
        self.close()
        self.note("\n".join(closing_table(rows)))

    def close(self) -> None:
        """Take the bars away."""
        self._bars.stop()


class Estimate:
    """How long still. Compiling and measuring overlap, so the longer of the two counts.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._firsts: dict[str, tuple[float, int]] = {}
        self._lefts: dict[str, tuple[float, float]] = {}

    def compiled(self, done: int, total: int) -> None:
        """Take note of compilations done."""
        self._seen("compile", done, total)

    def measured(self, done: int, total: int) -> None:
        """Take note of problems measured."""
        self._seen("measure", done, total)

    def left_s(self) -> float:
        """Seconds left; 0 where nothing can be said yet or nothing is left."""
        now = self._clock()
        return max([0.0, *(left - (now - at) for at, left in self._lefts.values())])

    def _seen(self, kind: str, done: int, total: int) -> None:
        now = self._clock()
        # What a journal answered at once says nothing of the rest: rates count from the first call.
        began, already = self._firsts.setdefault(kind, (now, done))
        fresh = done - already
        if fresh > 0:
            self._lefts[kind] = (now, (now - began) / fresh * (total - done))
