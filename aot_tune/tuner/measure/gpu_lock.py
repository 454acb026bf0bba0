"""Lock a GPU of this host for one tuner at a time; a refusal names the holder. Touches no GPU."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from aot_tune.errors import TuneError


class GpuLock:
    """Locks a GPU from construction to `release`. The system frees the lock when this process ends.

    Args:
        gpu: The GPU's UUID, or another text that names it on this host.
        purpose: The purpose of the lock, which the refused tuner's error repeats.
        folder: The folder of lock files, the same for all users of a host.

    Raises:
        TuneError: Another process holds the lock, or no lock file can be made.
    """

    def __init__(self, gpu: str, purpose: str, folder: Path | None = None) -> None:
        place = folder or Path(tempfile.gettempdir())
        path = place / f"aot-tune-{re.sub(r'[^A-Za-z0-9-]', '_', gpu)}.lock"
        # The holder is noted in a second file: in the lock file a dead holder's line would look like a live
        # one's.
        self._note = path.with_suffix(".holder")
        # Readable and writable by all: the next tuner may be another user's.
        self._lock = FileLock(path, mode=0o666, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise TuneError(
                f"GPU {gpu} is taken by {self._holder()}; wait for it, or choose another GPU"
            ) from None
        except OSError as error:
            raise TuneError(
                f"{path}: GPU {gpu} cannot be locked ({error.strerror}); remove the file, "
                "or set TMPDIR to a folder that all tuners on this host can write"
            ) from error
        with suppress(OSError):  # the note only makes a refusal clearer
            self._note.unlink(missing_ok=True)
            self._note.write_text(f"process {os.getpid()}, {purpose}")

    def _holder(self) -> str:
        try:
            return self._note.read_text()[:200] or "another tuner"
        except (OSError, UnicodeDecodeError):
            return "another tuner"

    def release(self) -> None:
        """Release the GPU for others."""
        if self._lock.is_locked:
            with suppress(OSError):
                self._note.unlink(missing_ok=True)
            self._lock.release()
