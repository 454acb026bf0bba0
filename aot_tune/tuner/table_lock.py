"""One writer at a time in a folder of tables: a lock on the folder itself, so that no file is left there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import lock_descriptor

from aot_tune.errors import TuneError

PATIENCE_S = 60.0
"""How long to wait for another writer. Reading and replacing a table takes milliseconds, at worst seconds."""

_POLL_S = 0.05


@contextmanager
def locked(path: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold a table's folder while what is there is read and replaced; make the folder where it is missing.

    The system frees the lock when its holder ends, however that ends. A file system that cannot lock a folder
    (NFS) is used without: two writers then meet only within those milliseconds.

    Args:
        path: The table.
        patience_s: Seconds to wait for another writer.

    Raises:
        TuneError: Another process does not let go of it; or the folder can not be made or opened.
    """
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise TuneError(
            f"{folder}: cannot be opened to write {path.name} ({error.strerror}); free the path, or name "
            "another folder with --out; what was measured is kept"
        ) from error
    try:
        _wait(descriptor, folder, patience_s)
        yield
    finally:
        os.close(descriptor)  # and with it the lock goes


def _wait(descriptor: int, folder: Path, patience_s: float) -> None:
    limit = time.monotonic() + patience_s
    while not _taken(descriptor):
        if time.monotonic() > limit:
            raise TuneError(
                f"{folder}: another process has held these tables for {patience_s:g} s; wait for it or stop "
                "it, and run the same command again: what was measured is kept"
            )
        time.sleep(_POLL_S)


def _taken(descriptor: int) -> bool:
    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError:  # no locks of folders here
        return True
