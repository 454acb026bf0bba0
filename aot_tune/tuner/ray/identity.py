"""Compare the nodes' software: aot_tune, the declarations and the compiler. Imports no Ray."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import aot_tune
from aot_tune.declare.discovery import load
from aot_tune.declare.fingerprint.hashing import check_hash, source_hash, unhashable
from aot_tune.errors import AotTuneError
from aot_tune.nvidia import cutile

Named = tuple[str, str]
"""A kernel's declaring module and its name."""


def described(kernels: Sequence[Named]) -> dict[str, str]:
    """Describe this process's aot_tune, compiler and declarations, by names for messages.

    Args:
        kernels: The kernels to be swept.
    """
    software = {
        "aot_tune": aot_tune.__version__,
        "the source of aot_tune": _source(),
        "cuda-tile": cutile.version() or "not installed",
        "tileiras": cutile.compiler_version() or "not installed",
    }
    for module, name in kernels:
        try:
            tunable = load(module, name)
            # A hash that differs at every call would refuse every node; publishing reports the obstacle.
            source = "cannot be hashed" if unhashable(tunable) else source_hash(tunable)
            software[f"the source of {name}"] = source
            software[f"the check of {name}"] = check_hash(tunable)
        except AotTuneError as error:
            software[f"the source of {name}"] = f"not available ({error})"
    return software


def differences(here: Mapping[str, str], node: Mapping[str, str]) -> str:
    """Describe the differences between a node and the driver; empty where they agree."""
    return "; ".join(
        f"{name} is {node.get(name, 'unknown')} there and {here.get(name, 'unknown')} here"
        for name in dict.fromkeys((*here, *node))
        if here.get(name) != node.get(name)
    )


@cache
def _source() -> str:
    """Return a digest of all modules of aot_tune, by their paths and bytes."""
    folder = Path(aot_tune.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
