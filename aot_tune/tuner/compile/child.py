"""The compiling child process: compiles one job at a time, without a GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from aot_tune.nvidia import cubin, cutile
from aot_tune.nvidia.sass import inner_loop
from aot_tune.tuner.compile.job import Compiled, CompileJob, Finder, keep

_NICENESS = 10
"""Added to the niceness of a low-priority process. It gets a tenth of a core that another process wants,
unless the system schedules whole sessions first."""


class Compiler:
    """Answers the pool's requests.

    Args:
        report: Sends a progress message to the pool.
        folder: The folder where cubins are kept.
        timeout_s: The compiler's limit for one job, seconds.
        yielding: Whether this process and its compiler run at low priority.
    """

    def __init__(
        self, report: Callable[[object], None], folder: Path, timeout_s: float, *, yielding: bool = False
    ) -> None:
        self._report, self._folder, self._timeout_s = report, folder, timeout_s
        if yielding and hasattr(os, "nice"):
            os.nice(_NICENESS)
        cubin.find_tool()

    def compile(self, job: CompileJob) -> None:
        """Compile one job and keep the cubin with its resources and inner loop.

        Raises:
            CutileError: The compiler refused the kernel, crashed or ran too long.
            TuneError: The cubin cannot be read.
            StoreError: The cubin cannot be written.
            UsageError: The job's module does not have the kernel.
        """
        kernel = _finder(job.finder)(job.module, job.name, job.kernel)
        self._report("compiling")  # the import is over: from here on the job is to blame for slowness
        begun = time.monotonic()
        data = cutile.compile_cubin(
            kernel, job.hints, job.signature, job.arch, timeout_s=self._timeout_s, symbol=job.symbol
        )
        result = Compiled(
            key=job.key,
            path=self._folder / f"{job.key}.cubin",
            code=cubin.code_digest(data),
            resources=cubin.resources(data),
            loop=inner_loop(cubin.machine_code(data)),
            seconds=time.monotonic() - begun,
            cached=False,
        )
        keep(self._folder, result, data)


def _finder(place: str) -> Finder:
    module, _, function = place.partition(":")
    finder: Finder = getattr(import_module(module), function)
    return finder
