"""The user's cache: the winners of live searches, one file each. A look-up writes nothing, makes no folder.

A winner's file is ``<folder>/v1/<arch>/<kernel>/<digest>.json``. The schema is in the path, so that each
release finds only files of its own. A file is data: no name, import or pickle in it is ever followed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from aot_tune import environment
from aot_tune.errors import AotTuneError, CacheWarning, TableError
from aot_tune.tables import strict_json
from aot_tune.tables.files import read_bytes, write_atomic
from aot_tune.tables.reader import Configs
from aot_tune.values.config import Config

if TYPE_CHECKING:
    from filelock import BaseFileLock

SCHEMA = 1
"""The version of the file format that this release reads and writes."""

LockState = Literal["held", "busy", "none"]
"""This process holds the lock; another held it for longer than the wait; there is no lock to be had."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """Everything that a remembered winner depends on."""

    kernel: str
    """The declaration's name."""

    arch: str
    """The GPU's architecture."""

    device_name: str
    """The GPU's product name: an H100 and an H200 are both sm90."""

    distribution: str
    """The name and version of the distribution that ships the kernel."""

    source_hash: str
    """The hash of the kernel's source."""

    cuda_tile: str
    """The version of cuda-tile."""

    bucket: tuple[tuple[str, int | str | bool], ...]
    """The problem's bucket."""

    @property
    def document(self) -> dict[str, object]:
        """The key as the file holds it."""
        # `asdict` copies deeply, which would take half of the time of a look-up.
        return {field.name: getattr(self, field.name) for field in _FIELDS} | {"bucket": dict(self.bucket)}

    @property
    def place(self) -> str:
        """The file's path inside the cache's folder."""
        text = _sorted_text(self.document)
        return f"v{SCHEMA}/{self.arch}/{self.kernel}/{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


_FIELDS = fields(Key)
_sorted_text = json.JSONEncoder(sort_keys=True).encode  # `json.dumps` makes an encoder each time


class Places:
    """`Key.place` for keys that differ only in their buckets, in a third of the time: each new shape asks.

    Args:
        common: Any one of these keys.
    """

    def __init__(self, common: Key) -> None:
        before, after = _sorted_text({**common.document, "bucket": {}}).split('"bucket": {}')
        self._begun = hashlib.sha256((before + '"bucket": {').encode())
        self._after = "}" + after
        self.folder = common.place.rpartition("/")[0]

    def of(self, bucket: Mapping[str, int | str | bool]) -> str:
        """The place of a bucket's file."""
        digest = self._begun.copy()
        values = (
            f"{_sorted_text(name)}: {value if type(value) is int else _sorted_text(value)}"
            for name, value in sorted(bucket.items())
        )
        digest.update((", ".join(values) + self._after).encode())
        return f"{self.folder}/{digest.hexdigest()[:32]}.json"


def folder_here() -> Path | None:
    """AOT_TUNE_CACHE_DIR, else the user's cache folder; None where there is neither (no HOME, no user)."""
    named = environment.cache_folder()
    if named is None:
        import platformdirs

        try:
            named = Path(platformdirs.user_cache_dir("aot_tune", appauthor=False))
        except (RuntimeError, OSError, KeyError):  # there is no HOME, and the uid has no user
            return None
    return named if named.is_absolute() else None


_SEEN_AFTER_S = 1.0
"""Seconds for which a folder's listing is kept; winners of other processes are seen after that."""


class UserCache:
    """One folder of remembered winners.

    Args:
        folder: The folder; it need not exist. None for a process that has none.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._listed: dict[str, tuple[float, frozenset[str]]] = {}

    def read(self, key: Key) -> Config | None:
        """The remembered winner; None where there is none or where it cannot be trusted or read."""
        if self.folder is None:
            return None
        path = self.folder / key.place
        # Most shapes have no file, and `lexists` handles that by an exception, which takes longer.
        if not os.access(path, os.F_OK) or not self._trusted():
            return None
        try:
            return _parse(read_bytes(path), key)
        except (AotTuneError, OSError, ValueError) as error:
            _warn(f"{path}: {error}; this remembered winner is left out: remove the file")
            return None

    def places(self, folder: str) -> frozenset[str]:
        """The places of the files in one of the cache's folders, as listed about a second ago at most.

        Asking the file system for each new shape takes 10 times as long as asking this listing. Most folders
        do not exist, and then the answer is immediate.
        """
        now, known = time.monotonic(), self._listed.get(folder)
        if known is None or now > known[0]:
            names: list[str] = []
            if self.folder is not None:
                with contextlib.suppress(OSError):  # most often the folder does not exist
                    names = os.listdir(os.path.join(self.folder, folder))
            # A folder that takes long to list is listed more seldom.
            until = now + max(_SEEN_AFTER_S, 100 * (time.monotonic() - now))
            known = self._listed[folder] = until, frozenset(f"{folder}/{name}" for name in names)
        return known[1]

    def write(self, key: Key, config: Config, mean_us: float) -> None:
        """Remember a winner for later processes; warn where that cannot be done."""
        if self.folder is None:
            _warn(
                f"there is no folder for the cache; the winner of {key.kernel} is kept for this process "
                f"only: name a folder in {environment.CACHE_DIR}"
            )
            return
        entry = {
            "schema": SCHEMA,
            "key": key.document,
            "config": config.document,
            "mean_us": round(mean_us, 3),
        }
        try:
            self._make()
            if self._trusted():
                write_atomic(self.folder / key.place, json.dumps(entry).encode() + b"\n")
        except (AotTuneError, OSError) as error:
            self._cannot(error)

    @contextlib.contextmanager
    def locked(self, key: Key, timeout_s: float) -> Iterator[LockState]:
        """Hold a key's lock, so that only one process of a host searches for its winner.

        The lock is the operating system's: it ends with its holder and is never stolen. The wait is bounded.
        Where locks do not hold (NFS), two processes may search; the later file replaces the earlier whole.
        """
        state: LockState = "none"
        lock: BaseFileLock | None = None
        try:
            if self.folder is not None:
                self._make()
                if self._trusted():
                    lock, state = _acquired((self.folder / key.place).with_suffix(".lock"), timeout_s)
        except (OSError, NotImplementedError) as error:
            self._cannot(error)
        try:
            yield state
        finally:
            if lock is not None:
                lock.release()

    def _make(self) -> None:
        assert self.folder is not None
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def refusal(self) -> str | None:
        """Why the folder is left out; None where only this user may write to it, or where it does not exist.

        A file that others put there would decide which config runs.
        """
        try:
            status = os.lstat(self.folder) if self.folder is not None else None
        except OSError:
            status = None
        if status is None:
            return None
        if stat.S_ISLNK(status.st_mode):
            return "it is a symbolic link"
        if not stat.S_ISDIR(status.st_mode):
            return "it is not a folder"
        if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            return f"it belongs to user {status.st_uid}, not to {os.geteuid()}"
        return "anybody may write to it" if status.st_mode & stat.S_IWOTH else None

    def _trusted(self) -> bool:
        if self.folder is None or not os.path.lexists(self.folder):
            return False
        reason = self.refusal()
        if reason:
            _warn_once(
                f"the cache folder {self.folder} is left out: {reason}; name another in "
                f"{environment.CACHE_DIR}, or make it a folder of your own with mode 700"
            )
        return reason is None

    def _cannot(self, error: Exception) -> None:
        _warn_once(
            f"the cache folder {self.folder} cannot be written ({error}); what a live search finds is kept "
            f"for this process only: name a folder you can write in {environment.CACHE_DIR}"
        )


def _acquired(path: Path, timeout_s: float) -> tuple[BaseFileLock | None, LockState]:
    from filelock import FileLock, Timeout

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(path, timeout=timeout_s, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None, "busy"
    return lock, "held"


def _parse(data: bytes, key: Key) -> Config:
    document = strict_json.loads(data)
    strict_json.check_keys(document, "", ("schema", "key", "config", "mean_us"))
    if type(document["schema"]) is not int or document["schema"] != SCHEMA:
        raise TableError(f"schema {document['schema']!r:.40}; expected {SCHEMA}", "schema")
    if document["key"] != json.loads(json.dumps(key.document)):
        raise TableError("it was written for another problem or another build", "key")
    strict_json.as_number(document["mean_us"], "mean_us", zero=False)
    return Configs().read(document["config"], "config")


@cache
def _warn_once(message: str) -> None:
    _warn(message)


def _warn(message: str) -> None:
    warnings.warn(message, CacheWarning, stacklevel=3)
