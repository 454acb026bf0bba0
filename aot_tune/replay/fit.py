"""Check whether a recorded table fits a kernel, and import the kernel of a table."""

from __future__ import annotations

from importlib import metadata
from secrets import token_hex
from typing import Any

from aot_tune.cubins.origin import KernelCode
from aot_tune.declare.discovery import imported
from aot_tune.declare.fingerprint.hashing import HEX_DIGITS, kernel_hash
from aot_tune.errors import UsageError
from aot_tune.nvidia import cutile
from aot_tune.replay.table import Library, RecordedTable, name_of
from aot_tune.values.arch import Arch


def misfit(
    table: RecordedTable, kernel: Any, arch: Arch, now: str, *, any_version: bool = False
) -> str | None:
    """Return why a table is not for a kernel, in words; None where it is.

    Args:
        table: The table.
        kernel: The ``@ct.kernel``.
        arch: The GPU's arch.
        now: The kernel's source hash; empty where it cannot be hashed.
        any_version: Whether any version of the library will do whose code is the same.
    """
    function = cutile.python_function(kernel)
    if (table.module, table.kernel) != (function.__module__, function.__qualname__):
        return f"it is of {name_of(table.module, table.kernel)}"
    if table.arch != arch:
        return f"it is for {table.arch}"
    return (None if any_version else other_library(table.library)) or _other_code(table, now)


def other_library(library: Library) -> str | None:
    """Return why a table is for another version of its library, in words; None where it is not."""
    if not library.name:
        return None
    recorded = f"it was recorded with {library.name} {library.version}"
    try:
        version = metadata.version(library.name)
    except metadata.PackageNotFoundError:
        return f"{recorded}, which is not installed"
    return None if version == library.version else f"{recorded}, and {version} is installed"


def _other_code(table: RecordedTable, now: str) -> str | None:
    if not now:
        return f"the code of {table.kernel} cannot be hashed, so it may differ from the recorded code"
    if table.source_hash != now:
        return f"the code of {table.kernel} changed since it was recorded ({table.source_hash})"
    return None


def hash_now(kernel: Any) -> str:
    """Return a kernel's source hash; empty where it cannot be hashed."""
    digest, obstacles = kernel_hash(kernel)
    return "" if obstacles else digest


def why_local(table: RecordedTable) -> str | None:
    """Return why a table's kernel cannot be imported from its module, in words; None where it can."""
    if "<locals>" in table.kernel:
        return "its kernel is made only when its library calls a function"
    if table.module == "__main__":
        return "its kernel is in a program's main module, which nothing else imports"
    return None


def kernel_of(module: str, name: str) -> Any:
    """Import the kernel that a module makes of a function, for `aot-tune compile` and `check`.

    A module may make several, with other hints of the decorator. The one that has the function's name is
    taken, else the first.

    Args:
        module: The module of the function.
        name: The function's qualified name.

    Raises:
        UsageError: The module cannot be imported, or has no such kernel.
    """
    names = vars(imported(module))
    kernels = [value for value in names.values() if cutile.is_kernel(value) and _is_of(value, module, name)]
    if not kernels:
        raise UsageError(f"no global of {module} is a ct.kernel of the function {name}")
    named = names.get(name.rpartition(".")[2])
    return next((kernel for kernel in kernels if kernel is named), kernels[0])


def without_hints(module: str, name: str, kernel: None = None) -> Any:
    """Import the kernel that archives call `name`, without its decorator's hints.

    A compiling process calls it: a cubin has the hints of the launch, and no others.

    Raises:
        UsageError: The module cannot be imported, or has no such kernel.
    """
    imported_kernel = kernel_of(module, name.removeprefix(f"{module}."))
    return cutile.with_hints(imported_kernel, dict.fromkeys(cutile.default_hints(imported_kernel)))


def recorded_code(kernel: Any) -> KernelCode:
    """Return the code of a kernel that no declaration names.

    Its own hints do not count: libraries replace them, and cubins are looked up by a launch's hints.
    """
    function = cutile.python_function(kernel)
    module = function.__module__
    return KernelCode(
        name=name_of(module, function.__qualname__),
        module=module,
        finder=f"{__name__}:{without_hints.__name__}",
        kernel=kernel,
        source_hash=lambda: hash_now(kernel) or token_hex(HEX_DIGITS // 2),  # then it counts as changed
    )


def _is_of(kernel: Any, module: str, name: str) -> bool:
    function = cutile.python_function(kernel)
    return (function.__module__, function.__qualname__) == (module, name)
