"""Compare what cubins were compiled from with the code that is here. Runs nothing that a file names."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aot_tune.declare.declaration import Declaration
from aot_tune.declare.fingerprint.source import counts_by_name
from aot_tune.nvidia import cutile

_PLAIN = (bool, int, float, str, type(None))
_ABSENT = object()
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")


FIND_DECLARED = "aot_tune.declare.discovery:declared_kernel"
"""What a compiling process calls to find a declaration's kernel."""


@dataclass(frozen=True, kw_only=True)
class KernelCode:
    """A kernel's code: its name in archives, its hash, and how a compiling process finds it."""

    name: str
    """The name of its section in an archive."""

    module: str = ""
    """The module that a compiling process imports; empty where the kernel is only launched."""

    finder: str = FIND_DECLARED
    """What a compiling process calls to find the kernel, in the form ``module:function``."""

    kernel: Any
    """The ``@ct.kernel``; the first of several, whose name is that of each in its cubin."""

    others: tuple[Any, ...] = ()
    """The other kernels of a declaration that has several."""

    source_hash: Callable[[], str]
    """Hashes all that its cubins depend on but hints and signature; takes 8 to 16 ms."""

    def of_signature(self, signature: str) -> Any:
        """The kernel that a signature is of: it begins with the name of the kernel's function."""
        kernels = (self.kernel, *self.others)
        named = [one for one in kernels if signature.startswith(f"{cutile.symbol_of(one)}_K")]
        return max(named or kernels[:1], key=lambda one: len(cutile.symbol_of(one)))


def declared_code(tunable: Declaration, module: str = "") -> KernelCode:
    """The code of a declaration's kernels.

    Args:
        tunable: The declaration.
        module: The module that declares it; empty where nothing is compiled.
    """

    def source_hash() -> str:
        from aot_tune.declare.fingerprint.hashing import source_hash

        return source_hash(tunable)

    first, *others = tunable.kernels.values()
    return KernelCode(
        name=tunable.name, module=module, kernel=first, others=tuple(others), source_hash=source_hash
    )


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a kernel's cubins were compiled from and with. They serve only where that is the same."""

    source_hash: str
    """The hash of the code: `KernelCode.source_hash`."""

    files: Mapping[str, str]
    """The SHA-256 of the file of every module that contains code of the kernel, by module."""

    values: Mapping[str, str]
    """The printed form of every global value that this code reads, by ``module:name``."""

    complete: bool
    """Whether the code depends on these files and values alone, so that equal ones prove an equal hash."""

    cuda_tile: str
    """Version of cuda-tile."""

    tileiras: str
    """Version of cuTile's compiler."""


def difference(code: KernelCode, origin: Origin) -> str | None:
    """Say what differs between the sources here and those of an archive; None where the code is the same.

    Files and values are compared first, in less than a millisecond. Where one differs, or where they are not
    complete, the source hash decides, which ignores comments and positions and takes 8 to 16 ms.
    """
    changed = _changed(origin)
    if changed is None and origin.complete:
        return None
    now = code.source_hash()
    if now == origin.source_hash:
        return None
    return f"{changed or 'the code'} is not as it was compiled (source {origin.source_hash}, now {now})"


def _changed(origin: Origin) -> str | None:
    for module, digest in origin.files.items():
        if file_digest(module) != digest:
            return f"the file of {module}"
    for place, text in origin.values.items():
        module, _, name = place.partition(":")
        if printed(vars(sys.modules.get(module, object)).get(name, _ABSENT)) != text:
            return f"the value of {name} in {module}"
    return None


def file_digest(module: str) -> str | None:
    """SHA-256 of an imported module's source file; None where it is not imported or has no file."""
    path = getattr(sys.modules.get(module), "__file__", None)
    try:
        return hashlib.sha256(Path(path or "").read_bytes()).hexdigest()
    except OSError:
        return None


def printed(value: object) -> str | None:
    """The text of a plain value, or of a framework's such as a dtype; None where no text identifies it."""
    if type(value) in _PLAIN:
        return repr(value)
    if type(value) is tuple:
        return None if any(printed(part) is None for part in value) else repr(value)
    kind = type(value)
    if (
        kind.__module__ != "builtins"
        and counts_by_name(kind.__module__)
        and kind.__repr__ is not object.__repr__
    ):
        text = repr(value)
        return None if _ADDRESS.search(text) or hasattr(value, "shape") else text
    return None
