"""Where tables lie, reading one, writing one whole or not at all. Knows no kernel's meaning and no GPU.

The layout: ``<folder>/<arch>/<kernel>.json``. A reader opens without blocking and reads a bounded amount of a
regular file; a writer replaces a file by renaming a complete one over it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from aot_tune.declare.declaration import check_name
from aot_tune.errors import StoreError, TableError
from aot_tune.tables.reader import parse
from aot_tune.tables.strict_json import MOST_BYTES
from aot_tune.tables.table import Table
from aot_tune.values.arch import Arch

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration

FOLDER_NAME = "tuned_configs"
"""The folder of tables in a package, and beside it in a checkout."""

_LEFTOVER_SECONDS = 3600.0
"""A temporary file this old belongs to a writer that was killed: writing takes milliseconds."""


# Where ------------------------------------------------------------------------------


def package_folder(tunable: Declaration) -> Path:
    """The folder of a declaration's tables; it need not exist.

    ``tables=``, where the declaration names a folder; else as `folder_of_package` says of its package.

    Raises:
        StoreError: The package has no folder.
    """
    return tunable.tables if tunable.tables is not None else folder_of_package(tunable.package)


def folder_of_package(package: str) -> Path:
    """The folder of a package's tables, found without importing it; it need not exist.

    1. ``tuned_configs`` in its top-level package
    2. ``tuned_configs`` beside that, where it exists and a ``pyproject.toml`` marks a checkout
    3. as 1: where a first table will be written

    Raises:
        StoreError: The package has no folder.
    """
    top = _folder_of(package.partition(".")[0])
    inside, beside = top / FOLDER_NAME, top.parent / FOLDER_NAME
    if not inside.is_dir() and beside.is_dir() and (top.parent / "pyproject.toml").is_file():
        return beside
    return inside


def _folder_of(package: str) -> Path:
    """The folder of an importable top-level package; of a namespace package, its first."""
    spec = getattr(sys.modules.get(package), "__spec__", None)
    try:
        spec = spec or find_spec(package)
    except (ImportError, ValueError):
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise StoreError(
            f"no package called {package!r} can be found, so its tables have no place; declare "
            "package=__package__ in a module of a package, or tables=Path(...)"
        )
    return Path(places[0])


def table_path(folder: Path, arch: Arch, kernel: str) -> Path:
    """The file of one kernel's table: ``<folder>/sm90/matmul.json``.

    Raises:
        DeclarationError: The kernel's name is no plain file name.
    """
    check_name(kernel)
    return folder / str(arch) / f"{kernel}.json"


def right_place(path: Path, table: Table) -> str | None:
    """Where a table belongs, ``sm100/matmul.json``, when it lies elsewhere; None where it lies right."""
    right = f"{table.arch}/{table.kernel}.json"
    return right if right != f"{path.parent.name}/{path.name}" else None


def listed(folder: Path) -> list[Path]:
    """All ``<folder>/*/*.json``, sorted; none where the folder does not exist. Hidden names are left out.

    Raises:
        StoreError: The folder cannot be listed.
    """
    found: list[Path] = []
    try:
        for arch in _children(folder):
            if arch.is_dir():
                found += [path for path in _children(arch) if path.suffix == ".json"]
    except OSError as error:
        raise StoreError(f"cannot list {folder}: {error.strerror}") from error
    return sorted(found)


def listed_in(arch_folder: Path) -> list[Path]:
    """All ``<arch_folder>/*.json``, sorted, as `listed` tells them of all archs.

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


def read_table(path: Path) -> Table:
    """Read and check one table. Links are followed.

    Raises:
        StoreError: There is no such regular file, or it cannot be read.
        TableError: It is no table; the message starts with the path.
    """
    data = read_bytes(path)
    try:
        return parse(data)
    except TableError as error:
        raise type(error)(f"{path}: {error.problem}", error.path) from None


def read_bytes(path: Path) -> bytes:
    """A regular file's content, at most `MOST_BYTES`; never blocks on a FIFO, a device or a directory.

    Raises:
        StoreError: As for `read_table`.
        TableError: It is too large.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer. Regular files do not care.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        _cannot("read", path, error)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"cannot read {path}: it is {_kind(status.st_mode)}, not a file")
        if status.st_size > MOST_BYTES:
            raise TableError(f"{path}: {status.st_size} bytes; a document has at most {MOST_BYTES}")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(MOST_BYTES + 1)  # one more, so that a file that grows meanwhile is refused too
    except OSError as error:
        _cannot("read", path, error)
    finally:
        os.close(descriptor)


# Writing ------------------------------------------------------------------------------


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file by a complete one or leave it as it was, whenever the process is killed or power fails.

    Makes the folder where it is missing. An existing file keeps its mode, a new one has the process's usual.

    Raises:
        StoreError: It cannot be written, or is a link or no regular file; the old file is as it was.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = _mode_of(path)
        _remove_leftovers(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}.tmp")
        _write_new(temporary, data, mode)
        os.replace(temporary, path)
        temporary = None
        _sync_folder(path.parent)
    except (OSError, ValueError) as error:
        _cannot("write", path, error)
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError, ValueError):
                temporary.unlink()


def check_writable(folder: Path) -> None:
    """Refuse, before any work is done, a folder in which no file could be made. Makes no folder itself.

    Raises:
        StoreError: Neither it nor, where it is missing, the nearest folder above it can be written.
    """
    existing = next((place for place in (folder, *folder.parents) if os.path.lexists(place)), Path("."))
    probe = existing / f".aot_tune.{os.getpid()}-{time.monotonic_ns()}.tmp"
    try:
        # Tried, not asked: access() knows nothing of quotas, network file systems or a full disk.
        _write_new(probe, b"", None)
    except (OSError, ValueError) as error:
        _cannot("write in", folder, error)
    finally:
        with contextlib.suppress(OSError, ValueError):
            probe.unlink()


def check_replaceable(path: Path) -> None:
    """Refuse, before any work is done, a file that `write_atomic` would not replace.

    Raises:
        StoreError: It is a link, no regular file or read-only.
    """
    try:
        _mode_of(path)
    except (OSError, ValueError) as error:
        _cannot("write", path, error)


def _mode_of(path: Path) -> int | None:
    """The mode an existing file has; None where there is none."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(status.st_mode):
        # A rename would replace the link and leave its target old; writing through it would leave the folder.
        raise StoreError(f"cannot write {path}: it is a link to {os.readlink(path)}; remove it or tune there")
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"cannot write {path}: it is {_kind(status.st_mode)}; remove it")
    if not os.access(path, os.W_OK):
        # The rename would succeed; whoever took the right to write away meant the content.
        raise StoreError(f"cannot write {path}: it is read-only; allow writing or choose another folder")
    return stat.S_IMODE(status.st_mode)


def _write_new(path: Path, data: bytes, mode: int | None) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        if mode is not None:
            os.fchmod(descriptor, mode)
        os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable. Some network file systems refuse it; the file is whole without it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_leftovers(path: Path) -> None:
    for name in os.listdir(path.parent):
        if name.startswith(f".{path.name}.") and name.endswith(".tmp"):
            leftover = path.with_name(name)
            with contextlib.suppress(OSError):  # another writer may take it away first
                if time.time() - leftover.lstat().st_mtime > _LEFTOVER_SECONDS:
                    leftover.unlink()


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "no regular file")


def _cannot(verb: str, path: Path, error: Exception) -> NoReturn:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    step = "" if verb == "read" else "; allow it, free space, or choose another folder"
    raise StoreError(f"cannot {verb} {path}: {reason}{step}") from error
