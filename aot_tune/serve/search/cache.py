"""The user's cache: the winners of live searches, one file each. A look-up writes nothing, makes no folder.

A winner's file is ``<folder>/v1/<arch>/<kernel>/<digest>.json``. The schema is in the path, so that each
release finds only files of its own; a file of a later release that lies there all the same is left as it is.
A file is data: no name, import or pickle in it is ever followed. Each folder of its path is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aot_tune import environment
from aot_tune.errors import AotTuneError, CacheWarning, NewerSchemaError, TableError
from aot_tune.tables import strict_json
from aot_tune.tables.files import read_bytes, write_atomic
from aot_tune.tables.reader import CONFIG
from aot_tune.tables.shape import ANY, Shape, number, record
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.text import error_in_words, shortened
from aot_tune.warn import warn

if TYPE_CHECKING:
    from filelock import BaseFileLock

    from aot_tune.declare.declaration import Declaration

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
        tunable: The declaration whose winners are read; with it, a config of other constants is left out.
    """

    def __init__(self, folder: Path | None, tunable: Declaration | None = None) -> None:
        self.folder = folder
        self._tunable = tunable
        self._unlocked: Exception | None = None
        self._listed: dict[str, tuple[float, frozenset[str]]] = {}

    def read(self, key: Key) -> Config | None:
        """The remembered winner; None where there is none or where it cannot be trusted or read."""
        if self.folder is None:
            return None
        path = self.folder / key.place
        # Most shapes have no file, and `lexists` handles that by an exception, which takes longer.
        if not os.access(path, os.F_OK) or not self._trusted(key):
            return None
        try:
            config = _parse(read_bytes(path), key)
            self._check(config, key)
        except NewerSchemaError as error:
            _warn_once(
                (self.folder, "newer"),
                f"{path}: {error}; such winners are left out, and left as they are",
            )
            return None
        except Exception as error:  # whatever a file holds, serving goes on
            reason = shortened(error_in_words(error), 400)
            message = f"{path}: {reason}; this remembered winner is left out: remove the file"
            _warn_once(message, message)
            return None
        return config

    def _check(self, config: Config, key: Key) -> None:
        """Refuse a config of other constants: the declaration's functions may not be asked about it."""
        if self._tunable is None:
            return
        if missing := self._tunable.kernel_missing(config):
            raise TableError(shortened(missing), "config.kernel")
        wanted = self._tunable.config_constants(Arch.parse(key.arch), config.kernel)
        if config.constants.keys() != set(wanted):
            names = shortened(" ".join(config.constants)) or "none"
            raise TableError(f"expected {' '.join(wanted) or 'none'}, got {names}", "config.constants")

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
            _warn_once(
                "no folder",
                "there is no folder for the cache; what a live search finds is kept for this process only: "
                f"name a folder in {environment.CACHE_DIR}, as an absolute path",
            )
            return
        entry = {
            "schema": SCHEMA,
            "key": key.document,
            "config": config.document,
            "mean_us": round(mean_us, 3),
        }
        path = self.folder / key.place
        try:
            self._make(key)
            if not self._trusted(key) or _is_newer(path):
                return
            write_atomic(path, json.dumps(entry).encode() + b"\n")
        except (AotTuneError, OSError, ValueError) as error:
            _warn_once(
                (self.folder, "written"),
                f"the cache folder {self.folder} cannot be written ({error}); what a live search finds is "
                f"kept for this process only: name a folder you can write in {environment.CACHE_DIR}",
            )
            return
        if self._unlocked is not None:
            _warn_once(
                (self.folder, "locked"),
                f"there are no locks in the cache folder {self.folder} ({self._unlocked}); what a live "
                "search finds is written there, but several processes may search for the same: name a folder "
                f"of a local disk in {environment.CACHE_DIR}",
            )

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
                self._make(key)
                if self._trusted(key):
                    lock, state = _acquired((self.folder / key.place).with_suffix(".lock"), timeout_s)
        except (OSError, ValueError, NotImplementedError) as error:
            self._unlocked = error  # said by `write`, which knows whether the winner is written all the same
        try:
            yield state
        finally:
            if lock is not None:
                lock.release()

    def _make(self, key: Key) -> None:
        """Make the folders of a key's file, and those above the cache, for this user alone."""
        assert self.folder is not None
        folder = (self.folder / key.place).parent
        for place in reversed([one for one in (folder, *folder.parents) if not os.path.lexists(one)]):
            with contextlib.suppress(FileExistsError):  # another process made it first
                os.mkdir(place, 0o700)
                os.chmod(place, 0o700)  # mkdir leaves out what the process's umask forbids

    def refusal(self, key: Key | None = None) -> str | None:
        """Why the folder is left out; None where only this user may write to it, or where it does not exist.

        A file that others put there would decide which config runs.

        Args:
            key: The key whose file is wanted: the folders down to it and the file are looked at too.
        """
        if self.folder is None:
            return None
        places = [self.folder]
        if key is not None:
            file = self.folder / key.place
            inside = file.relative_to(self.folder).parents
            places += [*(self.folder / one for one in reversed(inside[:-1])), file]
        alone = False
        for place in places:
            try:
                status = os.lstat(place)
            except OSError:
                return None  # there is nothing that could be read
            reason = _refusal(status, is_file=key is not None and place == places[-1], alone=alone)
            if reason:
                return reason if place == self.folder else f"{place.relative_to(self.folder)} in it: {reason}"
            # What lies in a folder that nobody else may enter can be changed by nobody else.
            alone = alone or not status.st_mode & (stat.S_IXGRP | stat.S_IXOTH)
        return None

    def _trusted(self, key: Key) -> bool:
        if self.folder is None or not os.path.lexists(self.folder):
            return False
        reason = self.refusal(key)
        if reason:
            _warn_once(
                (self.folder, "trusted"),
                f"the cache folder {self.folder} is left out: {reason}; name another in "
                f"{environment.CACHE_DIR}, or make it a folder of your own with mode 700",
            )
        return reason is None


def _refusal(status: os.stat_result, *, is_file: bool, alone: bool) -> str | None:
    """Why a folder of the cache, or the file in it, is not this user's alone."""
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not (stat.S_ISREG if is_file else stat.S_ISDIR)(status.st_mode):
        return "it is not a file" if is_file else "it is not a folder"
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & stat.S_IWOTH and not alone:
        return "anybody may write to it"
    return "its group may write to it" if status.st_mode & stat.S_IWGRP and not alone else None


def _acquired(path: Path, timeout_s: float) -> tuple[BaseFileLock | None, LockState]:
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=timeout_s, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None, "busy"
    return lock, "held"


_WINNER: Shape[dict[str, Any]] = record(
    dict, {"schema": ANY, "key": ANY, "config": CONFIG, "mean_us": number(zero=False)}
)


def _parse(data: bytes, key: Key) -> Config:
    document = strict_json.loads(data)
    _check_schema(document)
    values = _WINNER.read(document)
    if values["key"] != json.loads(json.dumps(key.document)):
        raise TableError("it was written for another problem or another build", "key")
    config: Config = values["config"]
    return config


def _check_schema(document: strict_json.Json) -> None:
    schema = document.get("schema") if type(document) is dict else None
    if type(schema) is not int or schema < SCHEMA:
        raise TableError(f"its schema is {schema!r:.40}, this release reads {SCHEMA}", "schema")
    if schema > SCHEMA:
        raise NewerSchemaError(f"a later release of aot_tune wrote it: schema {schema}", "schema")


def _is_newer(path: Path) -> bool:
    """Whether a later release wrote the file that is there: it may not be replaced."""
    try:
        _check_schema(strict_json.loads(read_bytes(path)))
    except NewerSchemaError:
        return True
    except Exception:  # there is none, or it is none that any release could read
        return False
    return False


_said: set[object] = set()


def _warn_once(about: object, message: str) -> None:
    """Warn once of a file, or of a folder, whatever happens in it and to whichever kernel."""
    if about not in _said:
        _said.add(about)
        warn(message, CacheWarning)
