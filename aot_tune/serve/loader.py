"""Read a declaration's tables for this machine's archs. Makes no CUDA context; writes and raises nothing.

A faulty table gives one `TableWarning` and is left out, so that its problems are misses. A config outside all
search spaces is left out of its table with a warning: the declaration's functions are never called with a
config that only a file names.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from aot_tune import environment
from aot_tune.choose.index import Index
from aot_tune.declare.declaration import Declaration
from aot_tune.errors import AotTuneError, TableWarning
from aot_tune.nvidia.nvml import Gpu, known_gpus
from aot_tune.tables.fit import mismatch, undeclared, without
from aot_tune.tables.store import package_folder, read_table, right_place, same_folder, table_path
from aot_tune.tables.table import Table
from aot_tune.values.arch import KNOWN_ARCHS, Arch
from aot_tune.values.text import counted, error_in_words, shortened
from aot_tune.warn import warn, warn_once


def gpus() -> tuple[Gpu, ...] | None:
    """Return the GPUs that this process may use, as NVML reports them once; None where it reports none."""
    return known_gpus()


def archs_to_load(tunable: Declaration) -> tuple[Arch, ...]:
    """Return the archs of this machine's GPUs; none without a folder of tables or where NVML fails."""
    if not any(os.path.isdir(folder) for folder, _ in folders(tunable)):
        return ()
    return tuple(dict.fromkeys(gpu.arch for gpu in gpus() or () if gpu.arch is not None))


def has_table(tunable: Declaration) -> bool:
    """Whether a file is where a table for a GPU of this machine belongs."""
    return any(
        os.path.lexists(table_path(folder, arch, tunable.name))
        for arch in archs_to_load(tunable)
        for folder, _ in folders(tunable)
    )


def folders(tunable: Declaration) -> list[tuple[Path, bool]]:
    """List the folders of tables in reading order; True where the user named it: predictions are read."""
    named = [(folder, True) for folder in environment.table_folders()]
    try:
        own = package_folder(tunable)
        own_is_named = any(same_folder(folder, own) for folder, _ in named)
        return named if own_is_named else [*named, (own, False)]
    except AotTuneError as error:  # the package is not a folder: it runs from a string or an archive
        _warn_once(f"{tunable.name}: {error}; its own tables are not read")
        return named


def load(tunable: Declaration, arch: Arch) -> Index:
    """Read the tables of a declaration for an arch."""
    tables: dict[Path, Table] = {}
    mistakes = []
    for folder, named in folders(tunable):
        path = table_path(folder, arch, tunable.name)
        if named and (mistake := folder_mistake(folder)):
            mistakes.append(mistake)
            continue
        if not _is_there(path, folder):
            continue  # no table: the warning of a miss names the command that makes one
        try:
            table = read_table(path, as_asked=True)
        except Exception as error:  # whatever a file holds, serving goes on
            _warn(f"{error_in_words(error)}; {tunable.name} is served without it on {arch}: restore {path}")
            continue
        reason = mismatch(tunable, arch, table)
        if reason:
            right = right_place(path, table)
            step = f"move it to {right}, or remove it" if right else "tune it again"
            _warn(f"{path}: {reason}; {tunable.name} is served without it on {arch}: {step}")
            continue
        table = _declared_only(path, table if named else _measured_only(path, table), tunable)
        tables[path] = table
    if mistakes:
        more = f" (and {counted(len(mistakes) - 1, 'folder')} more)" if len(mistakes) > 1 else ""
        _warn_once(shortened(mistakes[0], _LONGEST) + more)
    return Index(tunable.axes, tunable.tiles, tables)


def _is_there(path: Path, folder: Path) -> bool:
    """Whether a file exists; where this cannot be determined, warn once for its folder with the reason."""
    try:
        os.lstat(path)
        return True
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        parents = (path.parent, *path.parent.parents)
        place = next((parent for parent in parents if os.path.lexists(parent)), folder)
        _warn_once(
            f"tables are looked for in {path.parent}, but {place} is not a folder: install the package "
            f"unpacked, or name a folder of tables in {environment.TABLES}"
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        _warn_once(f"no table in {path.parent} is read: {reason}; allow reading the folder, or remove it")
    return False


def folder_mistake(folder: Path) -> str | None:
    """Return the mistake of a folder that AOT_TUNE_TABLES names; None where it may hold tables."""
    if not os.path.isdir(folder):
        return f"{environment.TABLES} names {folder}, which is not a folder; make it or leave it out"
    if folder.name in map(str, KNOWN_ARCHS) and not os.path.isdir(folder / folder.name):
        return f"{environment.TABLES} names {folder}, an arch's folder; name its parent, {folder.parent}"
    return None


def _measured_only(path: Path, table: Table) -> Table:
    measured = tuple(entry for entry in table.entries if entry.evidence == "measured")
    if len(measured) == len(table.entries):
        return table
    _warn(
        f"{path}: {len(table.entries) - len(measured)} of its entries are predicted and left out; "
        f"predictions are read only from a folder named in {environment.TABLES}"
    )
    return dataclasses.replace(table, entries=measured)


def _declared_only(path: Path, table: Table, tunable: Declaration) -> Table:
    left = undeclared(tunable, table)
    if not left:
        return table
    _warn(
        f"{path}: {counted(len(left), 'config')} in no search space of {tunable.name}, left out, such as "
        f"{shortened(str(left[0]))}: tune it again"
    )
    return without(table, left)


_LONGEST = 2000
"""Most characters of a warning: a path may have 4096, and messages quote files."""


def _warn(message: str) -> None:
    warn(shortened(message, _LONGEST), TableWarning)


def _warn_once(message: str) -> None:
    """Warn once of a fault that all kernels meet."""
    warn_once(shortened(message, _LONGEST), TableWarning)
