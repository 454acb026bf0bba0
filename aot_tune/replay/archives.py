"""List the cubins of recorded tables for `aot-tune compile` and `check`. Compiles nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aot_tune import environment
from aot_tune.errors import TableError, UsageError
from aot_tune.nvidia import cutile
from aot_tune.replay.files import has_recorded_name, is_shipped, read_recorded, right_place_of, shipped_for
from aot_tune.replay.fit import hash_now, kernel_of, misfit, recorded_code, why_local
from aot_tune.tables import store
from aot_tune.tuner.archives.signatures import Compilation
from aot_tune.tuner.archives.tabled import TabledKernel
from aot_tune.values.arch import Arch


class RecordedTables:
    """Recorded tables in an arch's folder, for `tuner.archives.check`."""

    def names(self, folder: Path) -> list[str]:
        """Return the kernels with a recorded table in an arch's folder, by file name."""
        return [path.stem for path in sorted(folder.glob("*.json")) if has_recorded_name(path)]

    def may_have(self, name: str) -> bool:
        """Return whether a name has a dot. Only names of recorded kernels have one."""
        return "." in name

    def read(self, folder: Path, name: str) -> TabledKernel | str:
        """Return the kernel of a table in an arch's folder, else of its shipped table, or why none is served.

        Raises:
            TableError: As of `tabled_kernel`.
            StoreError: The file cannot be read.
        """
        file = f"{name}.json"
        for path in (folder / file, store.libraries_folder() / folder.name / file):
            if os.path.lexists(path):
                return tabled_kernel(path)
        return "no such kernel is recorded"


def shipped_beside(own: Sequence[Path], modules: Sequence[str], kernels: Sequence[str]) -> list[Path]:
    """Return the shipped tables to compile beside the user's own.

    They are those of the kernels that have no own table, or without `kernels` those of the modules' libraries
    that have none.

    Args:
        own: Files of the user's recorded tables.
        modules: The named modules.
        kernels: The named recorded kernels.
    """

    def covered(path: Path) -> tuple[str, str]:
        return path.parent.name, path.stem if kernels else path.stem.partition(".")[0]

    known = set(map(covered, own))
    return [path for path in shipped_for([*modules, *kernels]) if covered(path) not in known]


def tabled_kernels(
    paths: Sequence[Path], archs: Sequence[Arch], say: Callable[[str], None]
) -> Iterator[TabledKernel]:
    """Read the recorded tables of some archs, and import their kernels.

    Args:
        paths: Files of recorded tables. Files in other archs' folders are left out.
        archs: The archs.
        say: Receives a line for each table whose kernel cannot be imported.

    Raises:
        TableError: As of `tabled_kernel`.
        StoreError: A file cannot be read.
    """
    for path in paths:
        if path.parent.name in map(str, archs):
            kernel = tabled_kernel(path)
            if isinstance(kernel, str):
                say(f"{path}: {kernel}; nothing is compiled")
            else:
                yield kernel


def tabled_kernel(path: Path) -> TabledKernel | str:
    """Read a recorded table and import its kernel, or return why it cannot be imported.

    A shipped table of another version of its library may be of other code too. Its cubins belong in the first
    folder of AOT_TUNE_TABLES, which a read-only installation needs; without one beside the table.

    Raises:
        TableError: The table cannot be read, is in the wrong place, or does not fit the kernel or the
            installed library. Replaying would not use it.
        StoreError: The file cannot be read.
    """
    table = read_recorded(path)
    if (right := right_place_of(path, table)) is not None:
        raise TableError(f"{path}: it belongs in {right}: move it there")
    if (local := why_local(table)) is not None:
        return local
    try:
        kernel = kernel_of(table.module, table.kernel)
    except UsageError as error:
        if is_shipped(path):
            return str(error)
        raise TableError(f"{path}: {error}") from error
    reason = misfit(table, kernel, table.arch, hash_now(kernel), any_version=is_shipped(path))
    if reason is not None and is_shipped(path):
        return reason
    if reason is not None:
        raise TableError(f"{path}: {reason}; record again (aot-tune record), or remove the table")
    return TabledKernel(
        code=recorded_code(kernel),
        arch=table.arch,
        folder=next(iter(environment.table_folders() if is_shipped(path) else ()), path.parent.parent),
        compilations=tuple(
            Compilation(hints, signature)
            for hints, signature in sorted(
                {
                    (launch.hints, signature)
                    for launch in table.compilations
                    for signature in _signatures(kernel, launch.signature)
                }
            )
        ),
    )


def _signatures(kernel: Any, signature: str) -> Iterator[str]:
    """Yield a launch's signature, and its weakest, which serves other sizes where no compiler is."""
    yield signature
    with suppress(ValueError):  # no signature of the kernel: compiling it reports that
        yield cutile.weakest_signature(kernel, signature)
