"""Compile jobs, their results, and the folder that keeps results. Runs no compiler."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aot_tune.cubins.origin import FIND_DECLARED
from aot_tune.nvidia.cubin import Resources
from aot_tune.nvidia.sass import Loop
from aot_tune.tables import files
from aot_tune.tuner.process.codec import message
from aot_tune.values.arch import Arch

Finder = Callable[[str, str, str | None], Any]
"""Finds a kernel again by `CompileJob.module`, `CompileJob.name` and `CompileJob.kernel`."""

_PATIENCE_S = 60.0
"""Longest wait for another process that keeps a cubin, seconds; then it is written without the lock."""


@message
@dataclass(frozen=True, kw_only=True)
class CompileJob:
    """One kernel for one signature, set of hints and arch."""

    key: str
    """Digest of all inputs of the cubin; also the name of its file."""

    module: str
    """The module that a child process imports to find the kernel."""

    name: str
    """The kernel's name, in its declaration and its section of an archive."""

    signature: str
    """The compiler's assumptions about the arguments, constants included (`cutile.signature_of`)."""

    hints: Mapping[str, int]
    """Compiler hints."""

    arch: Arch
    """The target."""

    symbol: str | None = None
    """The kernel's name in its cubin; the signature itself when None."""

    kernel: str | None = None
    """The kernel's name in configs, where the declaration has several kernels."""

    finder: str = FIND_DECLARED
    """The `Finder` that a child process calls, in the form ``module:function``."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The result of a job that produced a cubin."""

    key: str
    """The job's key."""

    path: Path
    """The cubin's file."""

    code: str
    """Digest of the machine code; equivalent cubins have the same digest."""

    resources: Resources
    """The resources that one block holds."""

    loop: Loop | None
    """The inner tensor loop; None where the code has none."""

    seconds: float
    """Duration of the compilation when it ran, seconds."""

    cached: bool
    """Whether an earlier run compiled it."""


@dataclass(frozen=True, kw_only=True)
class CompileFailure:
    """The result of a job that produced no cubin."""

    key: str
    """The job's key."""

    message: str
    """The compiler's message, or the manner of its end."""

    seconds: float
    """Duration of the compilation, seconds."""


CompileResult = Compiled | CompileFailure

_PLACE = re.compile(r'^\s*"([^"]+)", lines? (\d+)', re.MULTILINE)
"""A place in the kernel in a compiler's message; the last of several is the innermost."""


_TRANSIENT = re.compile(
    r"was killed by |out of memory|cannot allocate|bad_alloc|MemoryError|disappeared|\[Errno |left no cubin",
    re.IGNORECASE,
)
"""Words of failures that may pass: the compiler was killed, memory was short, or the system failed."""


def is_transient(result: CompileResult) -> bool:
    """Return whether another run should compile this job again: the machine is to blame, not the kernel."""
    return isinstance(result, CompileFailure) and _TRANSIENT.search(result.message) is not None


def compiles_nowhere(results: Iterable[CompileResult]) -> str | None:
    """Return why no job produced a cubin, with the place in the kernel; None where any did."""
    failures: list[CompileFailure] = []
    for result in results:
        if isinstance(result, Compiled):
            return None
        failures.append(result)
    if not failures:
        return None
    shown = next((failure for failure in failures if not is_transient(failure)), failures[0])
    first = next((line.strip() for line in shown.message.splitlines() if line.strip()), "no message")
    places = _PLACE.findall(shown.message)
    where = f" ({places[-1][0]}, line {places[-1][1]})" if places else ""
    step = "cure that and run the command again" if is_transient(shown) else "repair the kernel"
    return f"none of its {len(failures)} compilations succeeds: {first}{where}; {step}"


def cached(folder: Path, key: str) -> Compiled | None:
    """Return an earlier run's result by its key; None where it is missing or damaged."""
    path, note = folder / f"{key}.cubin", folder / f"{key}.json"
    try:
        facts = json.loads(note.read_bytes())
        if hashlib.sha256(path.read_bytes()).hexdigest() != facts["sha256"]:
            return None
        return Compiled(
            key=key,
            path=path,
            code=str(facts["code"]),
            resources=Resources(**facts["resources"]),
            loop=None if facts["loop"] is None else Loop(**facts["loop"]),
            seconds=float(facts["seconds"]),
            cached=True,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(folder: Path, result: Compiled, cubin: bytes) -> None:
    """Write a cubin and its note for `cached`, unless another process already has.

    The compiler may make other code of the same input, so that two processes' files would not fit together.
    The note comes last, because it vouches for the cubin.

    Raises:
        StoreError: The folder cannot be written.
    """
    note = {
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "code": result.code,
        "seconds": round(result.seconds, 3),
        "resources": asdict(result.resources),
        "loop": None if result.loop is None else asdict(result.loop),
    }
    with files.locked_folder(folder, _PATIENCE_S):
        if cached(folder, result.key) is None:
            # Neither file is synchronised: a cubin that a power failure empties is compiled again.
            files.write_atomic(result.path, cubin, durable=False)
            files.write_atomic(folder / f"{result.key}.json", json.dumps(note).encode(), durable=False)
