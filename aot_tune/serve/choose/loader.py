"""Read a declaration's tables for this machine's archs. Makes no CUDA context; writes and raises nothing.

A faulty table gives one `TableWarning` and is left out, so that its problems are misses.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path

from aot_tune import environment
from aot_tune.declare.declaration import Declaration
from aot_tune.errors import AotTuneError, TableWarning
from aot_tune.nvidia.nvml import Gpu, known_gpus
from aot_tune.serve.choose.index import Index, Shipped
from aot_tune.tables.fit import mismatch
from aot_tune.tables.store import package_folder, read_table, right_place, table_path
from aot_tune.tables.table import Table
from aot_tune.values.arch import KNOWN_ARCHS, Arch
from aot_tune.values.text import error_in_words


def gpus() -> tuple[Gpu, ...] | None:
    """The GPUs that this process may use, as NVML reports them once; None where it reports nothing."""
    return known_gpus()


def archs_to_load(tunable: Declaration) -> tuple[Arch, ...]:
    """The archs of this machine's GPUs; none where there is no folder of tables or NVML fails."""
    if not any(os.path.isdir(folder) for folder, _ in folders(tunable)):
        return ()
    return tuple(dict.fromkeys(gpu.arch for gpu in gpus() or () if gpu.arch is not None))


def folders(tunable: Declaration) -> list[tuple[Path, bool]]:
    """The folders of tables in reading order; True where the user named one, so that predictions are read."""
    named = [(folder, True) for folder in environment.table_folders()]
    try:
        return [*named, (package_folder(tunable), False)]
    except AotTuneError as error:  # the package is not a folder: it runs from a string or an archive
        _warn(f"{tunable.name}: {error}; its own tables are not read")
        return named


def load(tunable: Declaration, arch: Arch) -> Index:
    """Read the tables of one declaration for one arch."""
    tables = []
    for folder, named in folders(tunable):
        path = table_path(folder, arch, tunable.name)
        if not os.path.lexists(path):
            if named and (mistake := folder_mistake(folder)):
                _warn(mistake)
            continue  # there is no table: the warning of a miss names the command that makes one
        try:
            table = read_table(path)
        except Exception as error:  # whatever a file holds, serving goes on
            _warn(f"{error_in_words(error)}; {tunable.name} is served without it on {arch}: restore {path}")
            continue
        reason = mismatch(tunable, arch, table)
        if reason:
            right = right_place(path, table)
            step = f"move it to {right}, or remove it" if right else "tune it again"
            _warn(f"{path}: {reason}; {tunable.name} is served without it on {arch}: {step}")
            continue
        tables.append(Shipped(table=table if named else _measured_only(path, table), path=path))
    return Index(tunable.axes, tunable.tiles, tables)


def folder_mistake(folder: Path) -> str | None:
    """What is wrong with a folder that AOT_TUNE_TABLES names; None where it may hold tables."""
    if not os.path.isdir(folder):
        return f"{environment.TABLES} names {folder}, which is not a folder; make it or leave it out"
    if folder.name in map(str, KNOWN_ARCHS) and not os.path.isdir(folder / folder.name):
        return f"{environment.TABLES} names {folder}, an arch's folder; name its parent, {folder.parent}"
    return None


def _measured_only(path: Path, table: Table) -> Table:
    measured = tuple(entry for entry in table.entries if entry.evidence == "measured")
    if len(measured) < len(table.entries):
        _warn(
            f"{path}: {len(table.entries) - len(measured)} of its entries are predicted and left out; "
            f"predictions are read only from a folder named in {environment.TABLES}"
        )
    return dataclasses.replace(table, entries=measured)


def _warn(message: str) -> None:
    warnings.warn(message, TableWarning, stacklevel=2)
