"""Compare the origin of cubins with the installed code. Runs nothing that a file names."""

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
"""Function that a compiling process calls to find a declaration's kernel."""


@dataclass(frozen=True, kw_only=True)
class KernelCode:
    """A kernel's code: its name in archives, its hash, and how a compiling process finds it."""

    name: str
    """Name of the kernel's section in an archive."""

    module: str = ""
    """Module that a compiling process imports; empty where the kernel is only launched."""

    finder: str = FIND_DECLARED
    """Function that a compiling process calls to find the kernel, in the form ``module:function``."""

    kernel: Any
    """The ``@ct.kernel``; the first of several, whose name all of them have in their cubins."""

    others: tuple[Any, ...] = ()
    """Other kernels of a declaration that has several."""

    source_hash: Callable[[], str]
    """Hashes all that the cubins depend on except hints and signature; takes 8 to 16 ms."""

    def of_signature(self, signature: str) -> Any:
        """Return the kernel of a signature, which begins with the name of the kernel's function."""
        kernels = (self.kernel, *self.others)
        named = [kernel for kernel in kernels if signature.startswith(f"{cutile.symbol_of(kernel)}_K")]
        return max(named or kernels[:1], key=lambda kernel: len(cutile.symbol_of(kernel)))


def declared_code(tunable: Declaration, module: str = "") -> KernelCode:
    """Return the code of a declaration's kernels.

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
    """Sources and compiler of a kernel's cubins. The cubins serve only where both are unchanged."""

    source_hash: str
    """Hash of the code: `KernelCode.source_hash`."""

    files: Mapping[str, str]
    """SHA-256 of the file of every module that contains code of the kernel, by module."""

    values: Mapping[str, str]
    """Printed form of every global value that this code reads, by ``module:name``."""

    complete: bool
    """Whether the code depends on these files and values alone, so that equal ones prove an equal hash."""

    cuda_tile: str
    """Version of cuda-tile."""

    tileiras: str
    """Version of cuTile's compiler."""


def next_step(again: str) -> str:
    """Return what to do about code that is another one: `again`, and what may help without a compiler."""
    if cutile.may_have_compiler():
        return again
    return (
        f"{again}, on a machine with a compiler; if the library asks for the compiler while it is imported, "
        "call aot_tune.install() before that import"
    )


def difference(code: KernelCode, origin: Origin) -> str | None:
    """Describe the first difference of the installed code from an archive's; None where it is the same.

    Files and values are compared first, in less than a millisecond. Where one differs, or where they are not
    complete, the source hash decides. It ignores comments and positions, and takes 8 to 16 ms.
    """
    changed = changed_since(origin)
    if changed is None and origin.complete:
        return None
    now = code.source_hash()
    if now == origin.source_hash:
        return None
    return f"{changed or 'the code'} is not as it was compiled (source {origin.source_hash}, now {now})"


def changed_since(origin: Origin) -> str | None:
    """Return the first file or global value that differs from an archive's; None where none does."""
    for module, digest in origin.files.items():
        if file_digest(module) != digest:
            return f"the file of {module}"
    for place, text in origin.values.items():
        module, _, name = place.partition(":")
        if printed(vars(sys.modules.get(module, object)).get(name, _ABSENT)) != text:
            return f"the value of {name} in {module}"
    return None


def file_digest(module: str) -> str | None:
    """Return the SHA-256 of an imported module's source file; None where not imported or without a file."""
    path = getattr(sys.modules.get(module), "__file__", None)
    try:
        return hashlib.sha256(Path(path or "").read_bytes()).hexdigest()
    except OSError:
        return None


def printed(value: object) -> str | None:
    """Return the text of a plain value or a framework's, such as a dtype; None where none identifies it."""
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
