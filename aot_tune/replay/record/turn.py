"""Let one process at a time search on a GPU, or write into a folder of tables."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from aot_tune.errors import NotRecordableError, StoreError

PATIENCE_S = 600.0
"""Longest wait for another process's search, seconds. A whole search takes 10 to 40."""


@contextmanager
def turn(folder: Path, gpu: str) -> Iterator[None]:
    """Hold the lock of a GPU. The system releases it when this process ends.

    Args:
        folder: The folder of the lock's file, the same for all processes of a program.
        gpu: The GPU's name, unique on this host.

    Raises:
        NotRecordableError: Another process held the lock for `PATIENCE_S`, or its file cannot be made.
    """
    path = folder / f"{gpu}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, timeout=PATIENCE_S, fallback_to_soft=False)
        lock.acquire()
    except Timeout:
        raise NotRecordableError(f"another process has searched on this GPU for {PATIENCE_S:g} s") from None
    except OSError as error:
        raise NotRecordableError(
            f"{path}: {error.strerror}; name another folder: aot-tune record --journal DIR"
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Hold a folder of tables while one is read and replaced, which takes milliseconds.

    No file is made in the library's package. Where a file system has no such locks, nothing is held.

    Raises:
        StoreError: The folder cannot be made or opened.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"cannot write in {folder}: {error.strerror}") from error
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile holds it too
        os.close(descriptor)
