"""Let one process at a time search on a GPU: others would disturb its times, or write over its table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from aot_tune.errors import NotRecordableError

PATIENCE_S = 600.0
"""The longest wait for another process's search, seconds; a whole search takes 10 to 40."""


@contextmanager
def turn(folder: Path, gpu: str) -> Iterator[None]:
    """Hold the turn of a GPU. The system gives it back when this process ends.

    Args:
        folder: Where the lock's file lies, the same for all processes of a program.
        gpu: What tells the GPU from others of this host.

    Raises:
        NotRecordableError: Another process kept it for `PATIENCE_S`, or the lock's file cannot be made.
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
