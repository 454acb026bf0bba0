"""A compilation as a value: what is asked for, what came of it, and where it is kept. Runs no compiler."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from aot_tune.nvidia.cubin import Resources
from aot_tune.nvidia.sass import Loop
from aot_tune.tables import files
from aot_tune.values.arch import Arch


@dataclass(frozen=True, kw_only=True)
class CompileJob:
    """One kernel for one signature, set of hints and arch."""

    key: str
    """Digest of all that the cubin depends on; its file's name."""

    module: str
    """The module that declares the kernel."""

    name: str
    """The kernel's declared name."""

    signature: str
    """What the compiler assumes of the arguments, constants included: `cutile.signature_of`."""

    hints: Mapping[str, int]
    """Compiler hints."""

    arch: Arch
    """Target."""

    symbol: str | None = None
    """What the kernel is called in its cubin; the signature itself where none is given."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A job that gave a cubin."""

    key: str
    """The job's."""

    path: Path
    """The cubin."""

    code: str
    """Digest of its machine code: equal where two cubins do the same."""

    resources: Resources
    """What one block holds."""

    loop: Loop | None
    """Its inner tensor loop, where it has one."""

    seconds: float
    """What compiling took when it was done."""

    cached: bool
    """Whether an earlier run did it."""


@dataclass(frozen=True, kw_only=True)
class CompileFailure:
    """A job that gave none."""

    key: str
    """The job's."""

    message: str
    """What the compiler said, or what became of it."""

    seconds: float
    """How long it ran."""


CompileResult = Compiled | CompileFailure

_PLACE = re.compile(r'^\s*"([^"]+)", lines? (\d+)', re.MULTILINE)
"""How the compiler tells where in the kernel it stopped; of several, the last is the innermost."""


def compiles_nowhere(results: Iterable[CompileResult]) -> str | None:
    """Why no job gave a cubin, in one line with the place in the kernel; None where one did."""
    failures = []
    for result in results:
        if isinstance(result, Compiled):
            return None
        failures.append(result.message)
    if not failures:
        return None
    first = next((line.strip() for line in failures[0].splitlines() if line.strip()), "no message")
    places = _PLACE.findall(failures[0])
    where = f" ({places[-1][0]}, line {places[-1][1]})" if places else ""
    return f"none of its {len(failures)} compilations succeeds: {first}{where}; repair the kernel"


def cached(folder: Path, key: str) -> Compiled | None:
    """What an earlier run compiled under this key; None when nothing, or a damaged file, is there."""
    path, note = folder / f"{key}.cubin", folder / f"{key}.json"
    try:
        told = json.loads(note.read_bytes())
        if hashlib.sha256(path.read_bytes()).hexdigest() != told["sha256"]:
            return None
        return Compiled(
            key=key,
            path=path,
            code=str(told["code"]),
            resources=Resources(**told["resources"]),
            loop=None if told["loop"] is None else Loop(**told["loop"]),
            seconds=float(told["seconds"]),
            cached=True,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(folder: Path, result: Compiled, cubin: bytes) -> None:
    """Put a cubin and what is known of it where `cached` finds them. The note comes last: it vouches.

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
    # Nothing here is synchronised: a cubin that a power failure empties is compiled again.
    files.write_atomic(result.path, cubin, durable=False)
    files.write_atomic(folder / f"{result.key}.json", json.dumps(note).encode(), durable=False)
