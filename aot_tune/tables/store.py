"""Find and read tables at ``<folder>/<arch>/<kernel>.json``. Uses no GPU."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

from aot_tune.declare.declaration import Declaration, check_name
from aot_tune.errors import StoreError, TableError
from aot_tune.tables.files import read_bytes
from aot_tune.tables.reader import parse, parse_as_asked
from aot_tune.tables.table import Table
from aot_tune.values.arch import Arch

FOLDER_NAME = "tuned_configs"
"""Name of the folder of tables, in a package or next to it in a checkout."""

LIBRARIES = "libraries"
"""Folder of the recorded tables of other libraries that aot_tune ships, within its own folder of tables."""


# Where ------------------------------------------------------------------------------


def package_folder(tunable: Declaration) -> Path:
    """Return the folder of a declaration's tables; it need not exist.

    It is ``tables=`` where the declaration names a folder, else that of `folder_of_package`.

    Raises:
        StoreError: The package has no folder.
    """
    return tunable.tables if tunable.tables is not None else folder_of_package(tunable.package)


def folder_of_package(package: str) -> Path:
    """Return the folder of a package's tables, without running any of its code; it need not exist.

    The tables belong to the topmost package on the dotted path that has an ``__init__``: the top-level
    package, or below a namespace package, which several distributions may share, one distribution's own
    package. Where none has an ``__init__``, they belong to the deepest.

    1. ``tuned_configs`` in that package, where it exists
    2. ``tuned_configs`` next to that package, where it exists and a ``pyproject.toml`` marks a checkout
    3. as 1, where a first table will be written

    Raises:
        StoreError: The package has no folder, or several.
    """
    return tables_at(_home(package))


@cache
def libraries_folder() -> Path:
    """Return the folder of the recorded tables of other libraries that aot_tune ships; it need not exist."""
    return folder_of_package(__name__.partition(".")[0]) / LIBRARIES


def former_folders(package: str) -> list[Path]:
    """Return where the tables of a package below a namespace package once were: in or next to the namespace.

    Raises:
        StoreError: The package has no folder, or several.
    """
    top = _spec(package.partition(".")[0])
    if top is None or top.origin is not None:
        return []
    home = _home(package)
    return [tables_at(place) for place in _places(top) if place != home]


def tables_at(home: Path) -> Path:
    """Return the folder of the tables of the package in a folder (steps of `folder_of_package`)."""
    inside, adjacent = home / FOLDER_NAME, home.parent / FOLDER_NAME
    if not inside.is_dir() and adjacent.is_dir() and (home.parent / "pyproject.toml").is_file():
        return adjacent
    return inside


def _home(package: str) -> Path:
    """Return the folder of the package that tables belong to (see `folder_of_package`)."""
    places: list[Path] = []
    for name in accumulate(package.split("."), "{}.{}".format):
        spec = _spec(name)
        if spec is None or spec.submodule_search_locations is None:  # a module, or nothing
            break
        places = _places(spec)
        if spec.origin is not None:
            break
    if not places:
        raise StoreError(
            f"the package {package!r} cannot be found, so there is no folder for its tables; declare "
            "package=__package__ in a module of a package, or tables=Path(...)"
        )
    if len(places) > 1:
        raise StoreError(
            f"the package {package!r} has no __init__.py and lies in {' and '.join(map(str, places))}, so "
            "its tables have no folder of their own; put its modules into a package with an __init__.py, or "
            "declare tables=Path(...)"
        )
    return places[0]


def _spec(package: str) -> ModuleSpec | None:
    try:
        return getattr(sys.modules.get(package), "__spec__", None) or find_spec(package)
    except (ImportError, ValueError):
        return None


def _places(spec: ModuleSpec) -> list[Path]:
    """Return the folders of a package: the first of a regular one, all of a namespace package."""
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if spec.origin is not None:
        return places[:1]
    # A folder is listed again where the path leads to it twice.
    distinct = {os.path.realpath(place): place for place in reversed(places) if place.is_dir()}
    return list(reversed(distinct.values()))


def table_path(folder: Path, arch: Arch, kernel: str) -> Path:
    """Return the file of a kernel's table: ``<folder>/sm90/matmul.json``.

    Raises:
        DeclarationError: The kernel's name is not a plain file name.
    """
    check_name(kernel)
    return folder / str(arch) / f"{kernel}.json"


def same_folder(one: Path, other: Path) -> bool:
    """Whether two paths lead to one folder. Never raises: `Path.resolve` does, as for a link to itself."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return one == other


def right_place(path: Path, table: Table) -> str | None:
    """Return the path where a misplaced table belongs, such as ``sm100/matmul.json``; None if it is right."""
    right = f"{table.arch}/{table.kernel}.json"
    return right if right != f"{path.parent.name}/{path.name}" else None


def listed(folder: Path) -> list[Path]:
    """List all ``<folder>/*/*.json``, sorted, without hidden names; none where the folder does not exist.

    Raises:
        StoreError: The folder cannot be listed.
    """
    paths: list[Path] = []
    try:
        for arch in _children(folder):
            if arch.is_dir():
                paths += [path for path in _children(arch) if path.suffix == ".json"]
    except OSError as error:
        raise StoreError(f"cannot list {folder}: {error.strerror}") from error
    return sorted(paths)


def listed_in(arch_folder: Path) -> list[Path]:
    """List all ``<arch_folder>/*.json``, sorted, without hidden names; none where the folder does not exist.

    Raises:
        StoreError: The folder cannot be listed.
    """
    try:
        return sorted(path for path in _children(arch_folder) if path.suffix == ".json")
    except OSError as error:
        raise StoreError(f"cannot list {arch_folder}: {error.strerror}") from error


def _children(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder) if not name.startswith(".")]
    except FileNotFoundError:
        return []


# Reading ------------------------------------------------------------------------------


def read_table(path: Path, *, as_asked: bool = False) -> Table:
    """Read and check a table. Links are followed.

    Args:
        path: The file.
        as_asked: Whether each entry's figures are parsed, and checked, when they are first read.

    Raises:
        StoreError: The file does not exist, is not a regular file, or cannot be read.
        TableError: The file is not a table; the message starts with the path.
    """
    data = read_bytes(path)
    try:
        return parse_as_asked(data, str(path)) if as_asked else parse(data)
    except TableError as error:
        raise type(error)(f"{path}: {error.problem}", error.path) from None
