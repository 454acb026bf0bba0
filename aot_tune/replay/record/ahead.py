"""Before a library's process runs a config: compile all at once, and launch each in a child process.

A config that ends the child, hangs there or leaves its CUDA context broken would have done so to the library,
and is passed over. The others are launched by the library's process from the cubins that were made here.

The child imports the kernel by its module and name, and gets arguments like the library's
(`arguments.described`). Where that is not possible nothing is tried ahead, and the reason is reported.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from aot_tune.errors import AotTuneError, NotRecordableError
from aot_tune.nvidia import cutile
from aot_tune.replay.answer.searches import SearchCall
from aot_tune.replay.fit import recorded_code
from aot_tune.replay.record.arguments import described
from aot_tune.tuner.compile.job import Compiled, CompileJob
from aot_tune.tuner.compile.pool import COMPILE_SECONDS, CompilePool, usable_cores
from aot_tune.tuner.process.worker import START_SECONDS, RemoteError, Worker, WorkerDied, WorkerTimeout
from aot_tune.values.arch import Arch

LAUNCH_SECONDS = 20.0
"""The longest launch in the child, seconds. The largest products take 0.1 s."""

_TOO_LONG = "exceeded timeout", "no answer within"
"""Words of a compilation that was ended because it took too long."""

_POLL_SECONDS = 1.0
"""Longest wait for the next cubins, seconds."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What is known of a config before the library's process runs it."""

    cubin: cutile.Cubin | None
    """Its code; None where it took the compiler too long."""

    passed_over: str = ""
    """Why it is not run: how the child that launched it ended, or that it compiles too slowly; else empty."""


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A config that can be compiled and launched elsewhere."""

    at: int
    name: str
    """The qualified name of the kernel's function."""
    job: CompileJob
    grid: tuple[int, ...]
    args: list[dict[str, Any]] | None
    """The arguments as plain values; None where no other process can be given them."""


class Ahead:
    """Tries configs ahead on one GPU. Its children live until `close`, or until this process ends.

    Args:
        device: The GPU's number.
        folder: Where cubins are kept for the next run.
        launcher: ``package.module:Class`` of what launches in the child; tests name a scripted one.
    """

    def __init__(
        self, device: int, folder: Path, *, launcher: str = "aot_tune.replay.record.ahead_child:Launcher"
    ) -> None:
        self._device, self._folder, self._launcher = device, folder, launcher
        self._pool: CompilePool | None = None
        self._limit_s = COMPILE_SECONDS
        self._child: Worker | None = None

    def tried(
        self, call: SearchCall, kernel: Any, digest: str, arch: Arch, places: Sequence[int]
    ) -> dict[int, Tried]:
        """Compile configs and launch each.

        Args:
            call: What the library asked for.
            kernel: Its kernel.
            digest: The kernel's source hash in this process.
            arch: The GPU's arch.
            places: The configs, by their place in the search space.

        Returns:
            What is known, by place. A config that does not compile, or cannot be sent, is left out.

        Raises:
            NotRecordableError: Nothing can be tried ahead; the message says why.
        """
        function = cutile.python_function(kernel)
        module, name = function.__module__, function.__qualname__
        if module == "__main__" or "<locals>" in name:
            raise NotRecordableError(f"no other process can import {name} from {module}")
        contents: dict[str, torch.Tensor] = {}
        prepared = [
            one for at in places if (one := _prepared(call, kernel, digest, arch, at, contents)) is not None
        ]
        if not prepared:
            return {}
        with tempfile.TemporaryDirectory(prefix="aot-tune-ahead-") as folder:
            path = Path(folder, "contents")
            torch.save(contents, path)
            try:
                return self._tried(prepared, digest, path)
            except AotTuneError as error:
                self.close()
                raise NotRecordableError(str(error).splitlines()[0]) from error
            except BaseException:
                self.close()
                raise

    def _tried(self, prepared: Sequence[_Prepared], digest: str, contents: Path) -> dict[int, Tried]:
        pool = self._compilers()
        by_key: dict[str, list[_Prepared]] = {}
        for one in prepared:
            by_key.setdefault(one.job.key, []).append(one)
        results = {}
        for one in prepared:  # they compile while the child starts
            pool.submit(one.job)
        self._same_code(prepared[0], digest)
        while pool.unfinished:
            for result in pool.poll(_POLL_SECONDS):
                for one in by_key.get(result.key, ()):
                    if isinstance(result, Compiled):
                        results[one.at] = self._launched(one, result, contents)
                    elif any(words in result.message for words in _TOO_LONG):
                        slow = f"it does not compile within {self._limit_s:g} s"
                        results[one.at] = Tried(cubin=None, passed_over=slow)
        return results

    def _compilers(self) -> CompilePool:
        """The compiling children, whose limit is the library's where it has set one."""
        limit_s = cutile.compiler_limit() or COMPILE_SECONDS
        if self._pool is not None and self._limit_s != limit_s:
            self._pool.close()
            self._pool = None
        if self._pool is None:
            self._limit_s = limit_s
            self._pool = CompilePool(usable_cores(), limit_s, self._folder)
        return self._pool

    def _same_code(self, one: _Prepared, digest: str) -> None:
        """Make sure that the child, and so the compiling ones, import the code that is searched here.

        Raises:
            NotRecordableError: They do not.
        """
        module = one.job.module
        found = self._running().request("hash_of", {"module": module, "name": one.name}, START_SECONDS)
        if found != digest:
            raise NotRecordableError(f"importing {module} elsewhere gives other code of {one.name}")

    def _running(self) -> Worker:
        if self._child is None:
            self._child = Worker(self._launcher, {"device": self._device})
        return self._child

    def _launched(self, one: _Prepared, compiled: Compiled, contents: Path) -> Tried:
        cubin = cutile.Cubin(compiled.path.read_bytes(), one.job.signature)
        if one.args is None:
            return Tried(cubin=cubin)
        request = {
            "module": one.job.module, "name": one.name, "hints": one.job.hints, "cubin": compiled.path,
            "symbol": one.job.signature, "grid": one.grid, "args": one.args, "contents": contents,
        }  # fmt: skip
        child = self._running()
        child.wait_ready()  # one that does not start is not the config's fault
        try:
            child.request("launch", request, LAUNCH_SECONDS)
        except RemoteError:  # such as no memory for a second copy: the library's process finds out itself
            return Tried(cubin=cubin)
        except WorkerTimeout:
            killed = f"it had not ended after {LAUNCH_SECONDS:g} s in a process that tried it first"
        except WorkerDied as death:
            last = death.said.splitlines()[-1:] or [death.how]
            killed = f"it ended the process that tried it first: {last[0]}"
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


def _prepared(
    call: SearchCall, kernel: Any, digest: str, arch: Arch, at: int, contents: dict[str, torch.Tensor]
) -> _Prepared | None:
    """A config as values; None where it cannot be told before it is launched, or has another kernel."""
    config = call.space[at]
    try:
        own, hints = call.kernel_of(config), call.hints_fn(config) if call.hints_fn else {}
        args, grid = tuple(call.args_fn(config)), tuple(map(int, call.grid_fn(config)))
        if cutile.python_function(own) is not cutile.python_function(kernel):
            return None
        flat = cutile.hints_of(cutile.with_hints(own, hints), arch)
        signature = cutile.signature_of(own, args)
    except Exception:  # it fails in the search too, and is listed there
        return None
    try:
        plain: list[dict[str, Any]] | None = described(args, contents)
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
