"""Try configs ahead of a library's process: compile all at once, and launch each in a child process.

They compile before this process's turn on the GPU, so that the searches of several processes compile at once.

A config that ends the child, hangs or leaves its CUDA context broken would do the same to the library, and is
skipped. The library's process launches the other configs from the cubins that were compiled here.

The child imports the kernel by its module and name, and gets arguments like the library's
(`arguments.described`). Where that is not possible nothing is tried ahead, and the reason is reported.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from aot_tune.errors import AotTuneError, NotRecordableError
from aot_tune.nvidia import cutile
from aot_tune.replay.answer.program import ENDING
from aot_tune.replay.answer.searches import SearchCall
from aot_tune.replay.fit import recorded_code
from aot_tune.replay.record.arguments import described
from aot_tune.tuner.compile.job import Compiled, CompileJob, CompileResult
from aot_tune.tuner.compile.pool import COMPILE_SECONDS, CompilePool, usable_cores
from aot_tune.tuner.process.worker import START_SECONDS, RemoteError, Worker, WorkerDied, WorkerTimeout
from aot_tune.values.arch import Arch

LAUNCH_SECONDS = 20.0
"""Longest launch in the child, seconds. The largest products take 0.1 s."""

_TOO_LONG = "exceeded timeout", "no answer within"
"""Words in the message of a compilation that took too long."""

_POLL_SECONDS = 1.0
"""Longest wait for the next cubins, seconds."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Result of trying a config ahead."""

    cubin: cutile.Cubin | None
    """Machine code; None where the config compiles too slowly."""

    passed_over: str = ""
    """Why the config is skipped: how it ended the child, or that it compiles too slowly. Else empty."""


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """Config as values that other processes can compile and launch."""

    at: int
    """Place in the search space."""

    name: str
    """Qualified name of the kernel's function."""

    job: CompileJob
    """Compilation of the config."""

    grid: tuple[int, ...]
    """Grid of the launch."""

    args: list[dict[str, Any]] | None
    """Arguments as plain values; None where another process cannot make such arguments."""


class Ahead:
    """Tries configs ahead on one GPU. Its children live until `close`, or until this process ends.

    Args:
        device: The GPU's number.
        folder: The folder where cubins are kept for the next run.
        launcher: ``package.module:Class`` of the child's launcher. Tests name a scripted one.
    """

    def __init__(
        self, device: int, folder: Path, *, launcher: str = "aot_tune.replay.record.ahead_child:Launcher"
    ) -> None:
        self._device, self._folder, self._launcher = device, folder, launcher
        self._pool: CompilePool | None = None
        self._limit_s = COMPILE_SECONDS
        self._compiled: dict[str, CompileResult] = {}
        """Results of the compilers by job, which they give once."""
        self._child: Worker | None = None
        self._lock = threading.Lock()  # the children of both kinds are for one thread at a time

    def compile(self, call: SearchCall, kernel: Any, digest: str, arch: Arch, places: Sequence[int]) -> None:
        """Compile configs into the folder, from which `tried` takes them. The arguments are those of `tried`.

        Raises:
            NotRecordableError: They cannot be compiled here. The message gives the reason.
        """
        _check_importable(kernel)
        prepared = _prepared(call, kernel, digest, arch, places)
        if not prepared:
            return
        with self._lock, self._closing():
            self._submit(prepared)
            self._running()  # it starts meanwhile
            for _ in self._results(prepared):
                pass

    def tried(
        self, call: SearchCall, kernel: Any, digest: str, arch: Arch, places: Sequence[int]
    ) -> dict[int, Tried]:
        """Compile configs and launch each.

        Args:
            call: The library's search.
            kernel: The library's kernel.
            digest: The kernel's source hash in this process.
            arch: The GPU's arch.
            places: The configs' places in the search space.

        Returns:
            The results by place. A config that does not compile, or cannot be sent, is left out.

        Raises:
            NotRecordableError: Nothing can be tried ahead. The message gives the reason.
        """
        _check_importable(kernel)
        contents: dict[str, torch.Tensor] = {}
        prepared = _prepared(call, kernel, digest, arch, places, contents)
        if not prepared:
            return {}
        with tempfile.TemporaryDirectory(prefix="aot-tune-ahead-") as folder:
            path = Path(folder, "contents")
            torch.save(contents, path)
            with self._lock, self._closing():
                return self._tried(prepared, digest, path)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """End the children where the block fails.

        Raises:
            NotRecordableError: In place of our own errors. The message is their first line.
        """
        try:
            yield
        except AotTuneError as error:
            self.close()
            raise NotRecordableError(str(error).splitlines()[0]) from error
        except BaseException:
            self.close()
            raise

    def _tried(self, prepared: Sequence[_Prepared], digest: str, contents: Path) -> dict[int, Tried]:
        self._submit(prepared)  # they compile while the child starts
        self._check_code(prepared[0], digest)
        results = {}
        for config, result in self._results(prepared):
            if isinstance(result, Compiled):
                results[config.at] = self._launched(config, result, contents)
            elif any(words in result.message for words in _TOO_LONG):
                slow = f"it does not compile within {self._limit_s:g} s"
                results[config.at] = Tried(cubin=None, passed_over=slow)
        return results

    def _submit(self, prepared: Sequence[_Prepared]) -> None:
        pool = self._compilers()
        for config in prepared:
            if config.job.key not in self._compiled:
                pool.submit(config.job)

    def _results(self, prepared: Sequence[_Prepared]) -> Iterator[tuple[_Prepared, CompileResult]]:
        """Yield submitted configs with their results, as the compilers end."""
        pool, waiting = self._compilers(), list(prepared)
        while True:
            for config in [config for config in waiting if config.job.key in self._compiled]:
                waiting.remove(config)
                yield config, self._compiled[config.job.key]
            if not pool.unfinished:
                return
            self._compiled |= {result.key: result for result in pool.poll(_POLL_SECONDS)}

    def _compilers(self) -> CompilePool:
        """Return the compiling children, with the library's time limit where it sets one."""
        limit_s = cutile.compiler_limit() or COMPILE_SECONDS
        if self._pool is not None and self._limit_s != limit_s:
            self._pool.close()
            self._pool = None
        if self._pool is None:
            self._limit_s = limit_s
            self._compiled.clear()  # under another limit
            self._pool = CompilePool(usable_cores(), limit_s, self._folder, yielding=True)
        return self._pool

    def _check_code(self, config: _Prepared, digest: str) -> None:
        """Check that a child imports the code that is searched here.

        Raises:
            NotRecordableError: The child imports other code.
        """
        module, name = config.job.module, config.name
        imported = self._running().request("hash_of", {"module": module, "name": name}, START_SECONDS)
        if imported != digest:
            raise NotRecordableError(f"another process that imports {module} gets other code of {name}")

    def _running(self) -> Worker:
        if self._child is None:
            self._child = Worker(self._launcher, {"device": self._device})
        return self._child

    def _launched(self, config: _Prepared, compiled: Compiled, contents: Path) -> Tried:
        cubin = cutile.Cubin(compiled.path.read_bytes(), config.job.signature)
        if config.args is None:
            return Tried(cubin=cubin)
        request = {
            "module": config.job.module, "name": config.name, "hints": config.job.hints,
            "cubin": compiled.path, "symbol": config.job.signature, "grid": config.grid,
            "args": config.args, "contents": contents,
        }  # fmt: skip
        child = self._running()
        child.wait_ready()  # a child that does not start is not the config's fault
        try:
            child.request("launch", request, LAUNCH_SECONDS)
        except RemoteError:  # such as no memory for a second copy: the library's process will see
            return Tried(cubin=cubin)
        except WorkerTimeout:
            killed = f"it had not ended after {LAUNCH_SECONDS:g} s in a process that tried it first"
        except WorkerDied as death:
            last = death.output.splitlines()[-1:] or [death.how]
            killed = f"it ended the process that tried it first: {last[0]}"
            if -(death.code or 0) in ENDING:  # a job's time limit ends all of its processes
                killed = ""
        else:
            return Tried(cubin=cubin)
        child.kill()
        self._child = None
        return Tried(cubin=cubin, passed_over=killed)

    def close(self) -> None:
        """End the children. The next search starts them anew."""
        if self._child is not None:
            self._child.kill()
            self._child = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _check_importable(kernel: Any) -> None:
    """Check that a kernel has a module and a name.

    Raises:
        NotRecordableError: It is of the main program or of a function's body.
    """
    function = cutile.python_function(kernel)
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<locals>" in name:
        raise NotRecordableError(f"no other process can import {name} from {module}")


def _prepared(
    call: SearchCall,
    kernel: Any,
    digest: str,
    arch: Arch,
    places: Sequence[int],
    contents: dict[str, torch.Tensor] | None = None,
) -> list[_Prepared]:
    """Return configs as values, without those that cannot be sent. Without `contents` they only compile."""
    configs = (_one_prepared(call, kernel, digest, arch, at, contents) for at in places)
    return [config for config in configs if config is not None]


def _one_prepared(
    call: SearchCall, kernel: Any, digest: str, arch: Arch, at: int, contents: dict[str, torch.Tensor] | None
) -> _Prepared | None:
    """Return a config as values; None where the library's functions fail, or give another kernel."""
    config = call.space[at]
    try:
        own, hints = call.kernel_of(config), call.hints_fn(config) if call.hints_fn else {}
        args, grid = call.args_of(config), tuple(map(int, call.grid_fn(config)))
        if cutile.python_function(own) is not cutile.python_function(kernel):
            return None
        flat = cutile.hints_of(cutile.with_hints(own, hints), arch)
        signature = cutile.signature_of(own, args)
    except Exception:  # the search fails too, and lists the config
        return None
    try:
        plain: list[dict[str, Any]] | None = None if contents is None else described(args, contents)
    except NotRecordableError:
        plain = None
    code, name = recorded_code(kernel), cutile.python_function(kernel).__qualname__
    versions = [cutile.version(), cutile.compiler_version() or "", str(arch)]
    parts = ["recording", code.name, digest, *versions, signature, sorted(flat.items())]
    job = CompileJob(
        key=sha256(json.dumps(parts).encode()).hexdigest(),
        module=code.module,
        name=code.name,
        signature=signature,
        hints=flat,
        arch=arch,
        finder=code.finder,
    )
    return _Prepared(at=at, name=name, job=job, grid=grid, args=plain)
