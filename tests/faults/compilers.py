"""Compiling children that fail as planned. `install` lets a sweep's pool use them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from aot_tune.errors import CutileError
from aot_tune.tuner.compile import pool
from aot_tune.tuner.compile.child import Compiler
from aot_tune.tuner.compile.job import CompileJob
from tests.faults import injector

TIMEOUT_S = 3.0
"""A compiler's time limit here, seconds."""


MISSING = {"gone": "/opt/cuda/bin/tileiras", "no cubin": "/tmp/scale_kernel1.cubin"}
"""What a compilation does not find: the compiler, or what it should have written."""


def install() -> None:
    """Start faulty compiling children from here on; the folder forgets what is to fail."""
    submit = pool.CompilePool.submit
    make = pool.CompilePool.__init__

    def made(
        self: pool.CompilePool, workers: int, timeout_s: float = 0.0, folder: Path = Path(), **named: object
    ) -> None:
        named["target"] = f"{__name__}:FaultyCompiler"
        make(self, workers, TIMEOUT_S, folder, **named)  # type: ignore[misc]

    def submitted(self: pool.CompilePool, job: CompileJob) -> None:
        if any(is_of(job, fault.config) for fault in injector.plan().compilers):
            mark = injector.here() / f"forgotten {job.key}"
            if not mark.exists():
                mark.touch()
                for suffix in ("cubin", "json"):
                    (self._folder / f"{job.key}.{suffix}").unlink(missing_ok=True)
        submit(self, job)

    pool._GRACE_SECONDS = 1.0
    pool.CompilePool.__init__ = made  # type: ignore[method-assign]
    pool.CompilePool.submit = submitted  # type: ignore[method-assign]


def is_of(job: CompileJob, config: str) -> bool:
    """Whether a job compiles a config, by its constants in the signature; an empty one is every config."""
    if not config:
        return True
    tile_m, tile_n = config.split("-")
    return job.signature.endswith(f"_I{tile_m}_I{tile_n}")


class FaultyCompiler(Compiler):
    """Fails on the jobs of some configs."""

    def __init__(
        self, report: Callable[[object], None], folder: Path, timeout_s: float, *, yielding: bool
    ) -> None:
        starts = [one for one in injector.plan().compilers if one.phase == "start"]
        if any(injector.happens([one], config=one.config, phase="start") for one in starts):
            os._exit(7)
        super().__init__(report, folder, timeout_s, yielding=yielding)

    def compile(self, job: CompileJob) -> None:
        """Compile, or fail as planned."""
        faults = [
            one for one in injector.plan().compilers if one.phase == "compile" and is_of(job, one.config)
        ]
        for fault in faults:
            if injector.happens([fault], config=fault.config, phase="compile"):
                self._report("compiling")
                self._fail(fault.kind)
        super().compile(job)

    def _fail(self, kind: str) -> None:
        if kind in ("SEGV", "KILL"):
            os.kill(os.getpid(), getattr(signal, f"SIG{kind}"))
        elif kind == "hang":
            time.sleep(600)
        elif kind == "noise":
            sys.stderr.write("x" * (8 << 20))
            raise CutileError("Return code 1: " + "x" * (1 << 20))
        elif kind == "leaves a child":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            os.kill(os.getpid(), signal.SIGSEGV)
        elif kind in MISSING:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), MISSING[kind])
        elif kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            raise CutileError(f"scripted: {kind}")
