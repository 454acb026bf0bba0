"""Read a regular file without blocking; replace a file atomically; lock a folder. Never interprets them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from aot_tune.errors import StoreError, TableError
from aot_tune.tables.strict_json import MOST_BYTES

_LEFTOVER_SECONDS = 3600.0
"""Age, in seconds, from which a temporary file is a killed writer's: writing takes milliseconds."""

_POLL_S = 0.005
"""Seconds between two attempts to take a lock."""


def open_regular(path: Path) -> int:
    """Open a regular file for reading without blocking; the caller closes the descriptor.

    Raises:
        StoreError: The file does not exist, is not a regular file, or cannot be read.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer. Regular files do not care.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        _cannot("read", path, error)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise StoreError(f"cannot read {path}: it is {_kind(mode)}, not a file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_bytes(path: Path) -> bytes:
    """Read a regular file of at most `MOST_BYTES`; never blocks on a FIFO, a device or a directory.

    Raises:
        StoreError: The file does not exist, is not a regular file, or cannot be read.
        TableError: It is too large.
    """
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > MOST_BYTES:
            raise TableError(f"{path}: {size} bytes; a document has at most {MOST_BYTES}")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(MOST_BYTES + 1)  # one more, so that a file that grows meanwhile is refused too
    except OSError as error:
        _cannot("read", path, error)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace a file atomically, even if the process is killed or power fails meanwhile.

    A missing folder is made. An existing file keeps its mode; a new one gets the process's usual mode.

    Args:
        path: The file.
        data: Its new content.
        durable: False for content that can be made again; the file may then be empty after a power failure.

    Raises:
        StoreError: The file cannot be written, or is a link or not a regular file; it is left as it was.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = _mode_of(path)
        _remove_leftovers(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}.tmp")
        _write_new(temporary, data, mode, durable=durable)
        os.replace(temporary, path)
        temporary = None
        if durable:
            _sync_folder(path.parent)
    except (OSError, ValueError) as error:
        _cannot("write", path, error)
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError, ValueError):
                temporary.unlink()


@contextlib.contextmanager
def locked_folder(folder: Path, patience_s: float) -> Iterator[bool]:
    """Lock a folder while files in it are read and replaced; create a missing folder.

    The system frees the lock when its holder ends, for whatever reason. A file system that cannot lock a
    folder (NFS) is used without a lock: two writers then collide only if both replace a file within the same
    milliseconds. No file is made.

    Args:
        folder: The folder.
        patience_s: Longest wait for another process, seconds.

    Yields:
        Whether it is locked; False where another process did not release it in time.

    Raises:
        StoreError: The folder cannot be created or opened.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        _cannot("write in", folder, error)
    try:
        limit = time.monotonic() + patience_s
        while not (is_held := _is_taken(descriptor)) and time.monotonic() <= limit:
            time.sleep(_POLL_S)
        yield is_held
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile holds it too
        os.close(descriptor)


def check_writable(folder: Path) -> None:
    """Refuse a folder in which no file can be made, before any work is done. Makes no folder itself.

    Raises:
        StoreError: The folder, or where it is missing the nearest one above it, cannot be written in.
    """
    existing = next((place for place in (folder, *folder.parents) if os.path.lexists(place)), Path("."))
    import tempfile  # not when serving: it takes milliseconds

    try:
        # Writing is tried because access() knows nothing of quotas, network file systems or a full disk.
        with tempfile.TemporaryFile(dir=existing) as probe:  # without a name, so that a kill leaves nothing
            os.fsync(probe.fileno())
    except (OSError, ValueError) as error:
        _cannot("write in", folder, error)


def check_replaceable(path: Path) -> None:
    """Refuse a file that `write_atomic` would not replace, before any work is done.

    Raises:
        StoreError: The file is a link, not a regular file, or read-only.
    """
    try:
        _mode_of(path)
    except (OSError, ValueError) as error:
        _cannot("write", path, error)


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system cannot lock folders
        pass
    return True


def _mode_of(path: Path) -> int | None:
    """Return the mode of an existing file; None where no file exists."""
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
        # The rename would succeed, but whoever made the file read-only wanted to keep its content.
        raise StoreError(f"cannot write {path}: it is read-only; allow writing or choose another folder")
    return stat.S_IMODE(status.st_mode)


def _write_new(path: Path, data: bytes, mode: int | None, *, durable: bool = True) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        if mode is not None:
            os.fchmod(descriptor, mode)
        if durable:
            os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable. Some network file systems refuse it; the file is complete without it."""
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
            with contextlib.suppress(OSError):  # another writer may remove it first
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
    return kinds.get(stat.S_IFMT(mode), "a special file")


def _cannot(verb: str, path: Path, error: Exception) -> NoReturn:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    step = "" if verb == "read" else "; allow it, free space, or choose another folder"
    raise StoreError(f"cannot {verb} {path}: {reason}{step}") from error
