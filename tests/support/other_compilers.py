"""Compiling children that fail on purpose, or use another compiler, for tests of the compile pool."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from aot_tune.errors import CutileError
from aot_tune.tuner.compile.child import Compiler
from aot_tune.tuner.compile.job import CompileJob


class CompilerOnPath(Compiler):
    """Takes the first ``tileiras`` on PATH, and not the installed package's."""

    def __init__(
        self, report: Callable[[object], None], folder: Path, timeout_s: float, *, yielding: bool
    ) -> None:
        from cuda.tile import _compile

        _compile._find_pip_tileiras = lambda: None
        super().__init__(report, folder, timeout_s, yielding=yielding)


class DiesAtOccupancyTwo(Compiler):
    """The compiling process itself is killed, as for memory, on some jobs."""

    def compile(self, job: CompileJob) -> None:
        if job.hints.get("occupancy") == 2:
            self._report("compiling")
            os.kill(os.getpid(), signal.SIGKILL)
        super().compile(job)


class DiesOnce(Compiler):
    """The compiling process itself is killed, the first time."""

    def compile(self, job: CompileJob) -> None:
        once = self._folder / "once"
        if not once.exists():
            once.write_text("")
            self._report("compiling")
            os.kill(os.getpid(), signal.SIGKILL)
        super().compile(job)


class HangsAtOccupancyTwo(Compiler):
    """Tracing a kernel never ends, on some jobs: no time limit of the compiler's helps."""

    def compile(self, job: CompileJob) -> None:
        if job.hints.get("occupancy") == 2:
            self._report("compiling")
            time.sleep(1000)
        super().compile(job)


class RefusesInOneBreath(Compiler):
    """All that it says of a job arrives at once."""

    def compile(self, job: CompileJob) -> None:
        for _ in range(200):
            self._report("compiling")
        raise CutileError("not with me")


class StartsTheThirdTime(Compiler):
    """The first two children die before they are ready."""

    def __init__(
        self, report: Callable[[object], None], folder: Path, timeout_s: float, *, yielding: bool
    ) -> None:
        starts = folder / "starts"
        with starts.open("a") as file:
            file.write("x")
        if starts.stat().st_size < 3:
            os._exit(7)
        super().__init__(report, folder, timeout_s, yielding=yielding)


class NeverStarts(Compiler):
    """No child becomes ready."""

    def __init__(
        self, report: Callable[[object], None], folder: Path, timeout_s: float, *, yielding: bool
    ) -> None:
        os._exit(7)


class TellsItsGpus(Compiler):
    """Writes down which GPUs it may see."""

    def compile(self, job: CompileJob) -> None:
        (self._folder / "gpus").write_text(repr(os.environ.get("CUDA_VISIBLE_DEVICES")))
        super().compile(job)


def other(name: str) -> str:
    """The name by which a pool starts a compiler of this module in its children."""
    return f"{__name__}:{name}"
