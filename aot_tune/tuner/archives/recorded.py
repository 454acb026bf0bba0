"""The kernel of a recorded table and the compilations that replaying the table asks for. Compiles nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aot_tune.errors import TableError, UsageError
from aot_tune.recorded.files import read_recorded, right_place_of
from aot_tune.recorded.fit import hash_now, is_local, kernel_of, misfit
from aot_tune.recorded.table import RecordedTable, name_of
from aot_tune.tuner.archives.signatures import Compilation


@dataclass(frozen=True, kw_only=True)
class RecordedKernel:
    """A recorded table and its kernel, whose code and library are those that were recorded."""

    path: Path
    """The table's file."""

    table: RecordedTable
    """The table."""

    kernel: Any
    """The ``@ct.kernel``; None where importing its module does not give it (`why_local`)."""

    @property
    def name(self) -> str:
        """The kernel's name in archives."""
        return name_of(self.table.module, self.table.kernel)

    @property
    def folder(self) -> Path:
        """The folder of tables that it lies in, ``tuned_configs``."""
        return self.path.parent.parent

    @property
    def compilations(self) -> tuple[Compilation, ...]:
        """Every (hints, signature) that replaying launches, sorted, each once."""
        return tuple(Compilation(one.hints, one.signature) for one in self.table.compilations)


def recorded_kernel(path: Path) -> RecordedKernel:
    """Read a recorded table and import its kernel.

    Raises:
        TableError: The table cannot be read, lies elsewhere, or does not fit the kernel and library here, so
            that replaying would not use it.
        StoreError: The file cannot be read.
    """
    table = read_recorded(path)
    if (right := right_place_of(path, table)) is not None:
        raise TableError(f"{path}: it belongs in {right}: move it there")
    if is_local(table):
        return RecordedKernel(path=path, table=table, kernel=None)
    try:
        kernel = kernel_of(table.module, table.kernel)
    except UsageError as error:
        raise TableError(f"{path}: {error}") from error
    reason = misfit(table, kernel, table.arch, hash_now(kernel))
    if reason is not None:
        raise TableError(f"{path}: {reason}; record again (aot-tune record), or remove the table")
    return RecordedKernel(path=path, table=table, kernel=kernel)
