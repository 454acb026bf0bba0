"""Find and read recorded tables: ``<folder>/<arch>/<module>.<qualified name>.json``. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from aot_tune.errors import AotTuneError, TableError
from aot_tune.replay.document import is_recorded, parse
from aot_tune.replay.table import RecordedTable, file_name
from aot_tune.tables import store
from aot_tune.tables.files import read_bytes
from aot_tune.tables.strict_json import loads


def has_recorded_name(path: Path) -> bool:
    """Return whether a file is named as a recorded table: its name has a dot, a declared kernel's none."""
    return path.suffix == ".json" and "." in path.stem


def is_recorded_file(path: Path) -> bool:
    """Return whether a file is a recorded table by its name or its content."""
    if has_recorded_name(path):
        return True
    try:
        document = loads(read_bytes(path))
    except AotTuneError:
        return False
    return is_recorded(document) and "module" in document  # the form of declared kernels has no module


def listed_recorded(folders: Iterable[Path]) -> list[Path]:
    """Return the files of all recorded tables in folders, sorted within each folder.

    Raises:
        StoreError: A folder cannot be listed.
    """
    return [
        path for folder in dict.fromkeys(folders) for path in store.listed(folder) if has_recorded_name(path)
    ]


def is_shipped(path: Path) -> bool:
    """Return whether a table is one that aot_tune ships for another library, in any of its versions."""
    return path.parent.parent.absolute() == store.libraries_folder().absolute()


def shipped_for(modules: Iterable[str]) -> list[Path]:
    """Return the shipped tables of the libraries that modules belong to.

    Raises:
        StoreError: The folder cannot be listed.
    """
    tops = tuple({f"{module.partition('.')[0]}." for module in modules})
    return [path for path in listed_recorded([store.libraries_folder()]) if path.name.startswith(tops)]


def read_recorded(path: Path) -> RecordedTable:
    """Read and check one recorded table.

    Raises:
        StoreError: The file does not exist, is not a regular file, or cannot be read.
        TableError: The file is not a recorded table; the message starts with the path.
    """
    data = read_bytes(path)
    try:
        return parse(data)
    except TableError as error:
        raise type(error)(f"{path}: {error.problem}", error.path) from None


def right_place_of(path: Path, table: RecordedTable) -> str | None:
    """Return the path where a table belongs, ``sm90/mylib.ops.kernel.json``; None if it is there already."""
    right = f"{table.arch}/{file_name(table.module, table.kernel)}"
    return right if right != f"{path.parent.name}/{path.name}" else None
