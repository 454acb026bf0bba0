"""Let one process at a time search on a GPU, and one at a time search a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from aot_tune.errors import NotRecordableError

PATIENCE_S = 600.0
"""Longest wait for another process's search, seconds. A whole search takes 10 to 40."""


@contextmanager
def turn(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock of a GPU or a kernel. The system releases it when this process ends.

    Args:
        folder: The folder of the lock's file, the same for all processes of a program.
        name: The GPU's name, unique on this host, or the kernel's.

    Raises:
        NotRecordableError: Another process held the lock for `PATIENCE_S`, or its file cannot be made.
    """
    path = folder / f"{name}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, timeout=PATIENCE_S, fallback_to_soft=False)
        lock.acquire()
    except Timeout:
        raise NotRecordableError(f"another process has held {path} for {PATIENCE_S:g} s") from None
    except OSError as error:
        raise NotRecordableError(
            f"{path}: {error.strerror}; name another folder: aot-tune record --journal DIR"
        ) from None
    try:
        yield
    finally:
        lock.release()
