"""Lock a GPU of this host for one tuner at a time; a refusal names the holder. Touches no GPU.

The lock is a file in a folder that is the same for every user and job of a host: TMPDIR is not, since batch
systems set it for each job. It is the first of `FOLDERS` in which everybody may write. A container has
folders of its own, so that tuners in two containers do not see each other's lock; NVML reports their
processes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from aot_tune.errors import TuneError

FOLDERS = (Path("/run/lock"), Path("/var/lock"), Path("/tmp"), Path("/var/tmp"))
"""Folders for the lock file, the first choice first. Some systems let only root write to the first two."""


class GpuLock:
    """Locks a GPU from construction to `release`. The system frees the lock when this process ends.

    Args:
        gpu: The GPU's UUID, or another text that names it on this host.
        purpose: The purpose of the lock, which the refused tuner's error repeats.

    Raises:
        TuneError: Another process holds the lock, or no lock file can be made.
    """

    def __init__(self, gpu: str, purpose: str) -> None:
        path = _folder() / f"aot-tune-{re.sub(r'[^A-Za-z0-9-]', '_', gpu)}.lock"
        # The holder is noted in a second file: in the lock file a dead holder's line would look like a live
        # one's.
        self._note = path.with_suffix(".holder")
        self._file = -1
        try:
            self._file = _open_lock_file(path)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            raise TuneError(
                f"GPU {gpu} is taken by {self._holder()}; wait for it, or choose another GPU"
            ) from None
        except OSError as error:
            self._close()
            raise TuneError(
                f"{path}: GPU {gpu} cannot be locked ({error.strerror}); remove this file"
            ) from error
        self.set_purpose(purpose)

    def set_purpose(self, purpose: str) -> None:
        """Change the purpose that a refused tuner's error repeats."""
        with suppress(OSError):  # the note only makes a refusal clearer
            self._note.unlink(missing_ok=True)
            self._note.write_text(f"process {os.getpid()}, {purpose}")

    def _holder(self) -> str:
        try:
            return self._note.read_text()[:200] or "another tuner"
        except (OSError, UnicodeDecodeError):
            return "another tuner"

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def release(self) -> None:
        """Release the GPU for others. The file stays: a removed file can be locked by two processes."""
        if self._file >= 0:
            with suppress(OSError):
                self._note.unlink(missing_ok=True)
            self._close()


def _folder() -> Path:
    """Return the first world-writable folder with the sticky bit.

    Raises:
        TuneError: No folder of `FOLDERS` is one.
    """
    shared = stat.S_ISVTX | stat.S_IWOTH
    for folder in FOLDERS:
        with suppress(OSError):
            mode, flags = folder.stat().st_mode, os.statvfs(folder).f_flag
            if stat.S_ISDIR(mode) and mode & shared == shared and not flags & os.ST_RDONLY:
                return folder
    places = ", ".join(map(str, FOLDERS))
    raise TuneError(f"the GPU cannot be locked: make one of {places} writable for all users (mode 1777)")


def _open_lock_file(path: Path) -> int:
    """Open the lock file, which any user may have made, and return its descriptor."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for _ in range(10):
        # Without O_CREAT: in such folders Linux may refuse that for another user's file (protected_regular).
        with suppress(FileNotFoundError):
            file = os.open(path, os.O_RDONLY | flags)
            if not stat.S_ISREG(os.fstat(file).st_mode):
                os.close(file)
                raise OSError(errno.EINVAL, "not a regular file")
            return file
        with suppress(FileExistsError):  # another tuner made it meanwhile
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666)
            os.fchmod(file, 0o666)  # whatever the umask is
            return file
    raise OSError(errno.EAGAIN, "it appears and disappears")
