"""Compile on a node for a driver elsewhere: the body of a Ray task. Knows no Ray.

A process of Ray does one task after another. Each keeps a compiling child of its own between them, so that it
imports once; the child is killed after the same limits as on a single machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aot_tune.errors import AotTuneError, StoreError, TuneError
from aot_tune.tuner.compile.job import Compiled, CompileJob, CompileResult
from aot_tune.tuner.compile.job_queue import KernelRefusedError
from aot_tune.tuner.compile.pool import CompilePool
from aot_tune.tuner.ray.folder import node_folder

_LOOK_S = 1.0
"""Seconds for which a process waits for its child at a time."""


@dataclass(frozen=True, kw_only=True)
class CompiledThere:
    """What became of a job on a node."""

    result: CompileResult | None = None
    """The result, with the cubin's path on that node; None where nothing can be compiled there."""

    cubin: bytes = b""
    """The machine code; empty where there is none."""

    refusal: str = ""
    """Why nothing can be compiled there."""

    of_kernel: bool = False
    """Whether that holds of the job's kernel alone."""


class _Child:
    """A pool of one child, which is made anew for a job that it has seen before."""

    def __init__(self, pool: Callable[[], CompilePool]) -> None:
        self._make = pool
        self._pool: CompilePool | None = None
        self._seen: set[str] = set()

    def compile(self, job: CompileJob) -> CompiledThere:
        """Compile one job."""
        try:
            if self._pool is None or job.key in self._seen:
                self.close()
                self._pool = self._make()
            self._seen.add(job.key)
            self._pool.submit(job)
            while not (results := self._pool.poll(_LOOK_S)):
                pass
            (result,) = results
            cubin = result.path.read_bytes() if isinstance(result, Compiled) else b""
            return CompiledThere(result=result, cubin=cubin)
        except KernelRefusedError as error:
            return CompiledThere(refusal=error.what, of_kernel=True)
        except (TuneError, StoreError) as error:
            self.close()
            return CompiledThere(refusal=str(error))
        except OSError as error:
            return CompiledThere(refusal=f"the cubin of {job.name} cannot be read: {error}")

    def close(self) -> None:
        """End the child."""
        if self._pool is not None:
            self._pool.close()
        self._pool, self._seen = None, set()


_child = _Child(lambda: CompilePool(1, folder=node_folder()))


def compile_there(job: CompileJob) -> CompiledThere:
    """Compile one job in this process's child."""
    try:
        return _child.compile(job)
    except AotTuneError as error:
        return CompiledThere(refusal=str(error))
