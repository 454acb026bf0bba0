"""Compile on a node for a driver elsewhere: the body of a Ray task. Imports no Ray.

A process of Ray does one task after another. Each process keeps a compiling child of its own between tasks,
so that the child imports once; it is killed after the same limits as on a single machine.
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
"""Longest wait of a process for its child at a time, seconds."""


@dataclass(frozen=True, kw_only=True)
class RemoteResult:
    """The outcome of a job on a node."""

    result: CompileResult | None = None
    """The result, with the cubin's path on the node; None where the node cannot compile the job."""

    cubin: bytes = b""
    """The machine code; empty without any."""

    refusal: str = ""
    """The reason why the node cannot compile the job."""

    of_kernel: bool = False
    """Whether the refusal concerns only the job's kernel."""


class _Child:
    """A pool of one child, which is replaced for a repeated job."""

    def __init__(self, pool: Callable[[], CompilePool]) -> None:
        self._make = pool
        self._pool: CompilePool | None = None
        self._seen: set[str] = set()

    def compile(self, job: CompileJob) -> RemoteResult:
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
            return RemoteResult(result=result, cubin=cubin)
        except KernelRefusedError as error:
            return RemoteResult(refusal=error.what, of_kernel=True)
        except (TuneError, StoreError) as error:
            self.close()
            return RemoteResult(refusal=str(error))
        except OSError as error:
            return RemoteResult(refusal=f"the cubin of {job.name} cannot be read: {error}")

    def close(self) -> None:
        """End the child."""
        if self._pool is not None:
            self._pool.close()
        self._pool, self._seen = None, set()


_child = _Child(lambda: CompilePool(1, folder=node_folder()))


def compile_on_node(job: CompileJob) -> RemoteResult:
    """Compile one job in this process's child."""
    try:
        return _child.compile(job)
    except AotTuneError as error:
        return RemoteResult(refusal=str(error))
