"""User's cache: the winners of live searches, one file each. A look-up writes nothing and makes no folder.

A winner's file is ``<folder>/v1/<arch>/<kernel>/<digest>.json``. The schema is in the path, so that each
release finds only files of its own; a misplaced file of a later release is not changed. A file is data: no
name, import or pickle in it is ever followed. Each folder of its path is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import platformdirs

from aot_tune import environment
from aot_tune.errors import AotTuneError, CacheWarning, NewerSchemaError, TableError
from aot_tune.nvidia import cutile
from aot_tune.tables import strict_json
from aot_tune.tables.files import read_bytes, write_atomic
from aot_tune.tables.reader import CONFIG
from aot_tune.tables.shape import ANY, Shape, number, record
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.lazy import lazy
from aot_tune.values.problem import Problem
from aot_tune.values.text import error_in_words, shortened
from aot_tune.warn import warn

if TYPE_CHECKING:
    from filelock import BaseFileLock

    from aot_tune.declare.declaration import Declaration
    from aot_tune.serve.kernels import HintedKernels

SCHEMA = 1
"""Version of the file format that this release reads and writes."""

MOST_REMEMBERED = 4096
"""Most winners and unusable files that are kept in memory."""

LockState = Literal["held", "busy", "none"]
"""State of a lock: this process holds it; another held it longer than the wait; it cannot be acquired."""


class Key(NamedTuple):
    """Everything that a cached winner depends on."""

    kernel: str
    """Name of the declaration."""

    arch: str
    """Architecture of the GPU."""

    device_name: str
    """Product name of the GPU: an H100 and an H200 are both sm90."""

    distribution: str
    """Name and version of the distribution that ships the kernel."""

    source_hash: str
    """Hash of the kernel's source."""

    cuda_tile: str
    """Version of cuda-tile."""

    bucket: tuple[tuple[str, int | str | bool], ...]
    """Bucket of the problem."""

    @property
    def document(self) -> dict[str, object]:
        """Key as the file holds it."""
        return self._asdict() | {"bucket": dict(self.bucket)}

    @property
    def place(self) -> str:
        """Path of the file inside the cache's folder."""
        text = _sorted_text(self.document)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return f"{kernel_folder(self.arch, self.kernel)}/{digest}.json"


_sorted_text = json.JSONEncoder(sort_keys=True).encode  # `json.dumps` makes an encoder each time


def kernel_folder(arch: str, kernel: str) -> str:
    """Return the folder of a kernel's winners inside the cache's folder."""
    return f"v{SCHEMA}/{arch}/{kernel}"


def folder_here() -> Path | None:
    """Return AOT_TUNE_CACHE_DIR, else the user's cache folder; None without either (no HOME, no user)."""
    named = environment.cache_folder()
    if named is None:
        try:
            named = Path(platformdirs.user_cache_dir("aot_tune", appauthor=False))
        except (RuntimeError, OSError, KeyError):  # no HOME, and the uid has no user
            return None
    return named if named.is_absolute() else None


_SEEN_AFTER_S = 1.0
"""Seconds for which a folder's listing is kept; winners of other processes are seen after that."""


class UserCache:
    """Folder of cached winners.

    Args:
        folder: The folder; it need not exist. None for a process without a cache folder.
        tunable: The declaration whose winners are read; with it, a config of other constants is left out.
    """

    def __init__(self, folder: Path | None, tunable: Declaration | None = None) -> None:
        self.folder = folder
        self._tunable = tunable
        self._unlocked: Exception | None = None
        self._listed: dict[str, tuple[float, frozenset[str]]] = {}

    def read(self, key: Key) -> Config | None:
        """Return the cached winner; None where it is missing, not trusted or not readable."""
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
                f"{path}: {error}; such winners are left out, and their files are not changed",
            )
            return None
        except Exception as error:  # whatever a file holds, serving goes on
            reason = shortened(error_in_words(error), 400)
            message = f"{path}: {reason}; this cached winner is left out: remove the file"
            _warn_once(message, message)
            return None
        return config

    def _check(self, config: Config, key: Key) -> None:
        """Refuse a config of other constants: the declaration's functions may not be called with it."""
        if self._tunable is None:
            return
        if missing := self._tunable.kernel_missing(config):
            raise TableError(shortened(missing), "config.kernel")
        wanted = self._tunable.config_constants(Arch.parse(key.arch), config.kernel)
        if config.constants.keys() != set(wanted):
            names = shortened(" ".join(config.constants)) or "none"
            raise TableError(f"expected {' '.join(wanted) or 'none'}, got {names}", "config.constants")

    def places(self, folder: str) -> frozenset[str]:
        """Return the places of the files in a folder of the cache, listed about a second ago at most.

        A query of the file system for each new shape takes 10 times as long as a look-up in this listing.
        Most folders do not exist; then the listing is immediate.
        """
        now, known = time.monotonic(), self._listed.get(folder)
        if known is None or now > known[0]:
            names: list[str] = []
            if self.folder is not None:
                with contextlib.suppress(OSError):  # most often the folder does not exist
                    names = os.listdir(os.path.join(self.folder, folder))
            # A folder that takes long to list is listed less often.
            until = now + max(_SEEN_AFTER_S, 100 * (time.monotonic() - now))
            known = self._listed[folder] = until, frozenset(f"{folder}/{name}" for name in names)
        return known[1]

    def write(self, key: Key, config: Config, mean_us: float) -> None:
        """Cache a winner for later processes; warn where this is not possible."""
        if self.folder is None:
            _warn_once(
                "no folder",
                "there is no folder for the cache; winners of live searches are kept for this process only: "
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
                f"the cache folder {self.folder} cannot be written ({error}); winners of live searches are "
                f"kept for this process only: name a folder you can write in {environment.CACHE_DIR}",
            )
            return
        if self._unlocked is not None:
            _warn_once(
                (self.folder, "locked"),
                f"the cache folder {self.folder} supports no locks ({self._unlocked}); winners of live "
                "searches are written, but several processes may search for the same problem: name a folder "
                f"on a local disk in {environment.CACHE_DIR}",
            )

    @contextlib.contextmanager
    def locked(self, key: Key, timeout_s: float, *, of_children: bool = False) -> Iterator[LockState]:
        """Hold a key's lock, so that only one process of a host searches for its winner.

        With `of_children`, hold the lock of all searches in child processes, so that one at a time is made.

        The lock is the operating system's: it ends with its holder and is never stolen. The wait is bounded.
        Where locks do not hold (NFS), two processes may search; the later file replaces the earlier whole.
        """
        state: LockState = "none"
        lock: BaseFileLock | None = None
        try:
            if self.folder is not None:
                self._make(key)
                if self._trusted(key):
                    place = f"v{SCHEMA}/children" if of_children else key.place
                    lock, state = _acquired((self.folder / place).with_suffix(".lock"), timeout_s)
        except (OSError, ValueError, NotImplementedError) as error:
            self._unlocked = error  # `write` reports it, if the winner can be written
        try:
            yield state
        finally:
            if lock is not None:
                lock.release()

    def _make(self, key: Key) -> None:
        """Make the folders of a key's file and above the cache, for this user alone."""
        assert self.folder is not None
        folder = (self.folder / key.place).parent
        for place in reversed([path for path in (folder, *folder.parents) if not os.path.lexists(path)]):
            with contextlib.suppress(FileExistsError):  # another process made it first
                os.mkdir(place, 0o700)
                os.chmod(place, 0o700)  # mkdir removes the bits of the process's umask

    def refusal(self, key: Key | None = None) -> str | None:
        """Return why the folder is left out; None where only this user may write to it, or it does not exist.

        A file of another user would decide which config runs.

        Args:
            key: The key of the wanted file: the file and the folders down to it are checked too.
        """
        if self.folder is None:
            return None
        places = [self.folder]
        if key is not None:
            file = self.folder / key.place
            inside = file.relative_to(self.folder).parents
            places += [*(self.folder / parent for parent in reversed(inside[:-1])), file]
        alone = False
        for place in places:
            try:
                status = os.lstat(place)
            except OSError:
                return None  # nothing can be read
            reason = _refusal(status, is_file=key is not None and place == places[-1], alone=alone)
            if reason:
                return reason if place == self.folder else f"{place.relative_to(self.folder)} in it: {reason}"
            # Nobody else can change the content of a folder that nobody else may enter.
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
    """Return why a folder of the cache, or the file in it, does not belong to this user alone."""
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
    """Whether a later release wrote the existing file, which may then not be replaced."""
    try:
        _check_schema(strict_json.loads(read_bytes(path)))
    except NewerSchemaError:
        return True
    except Exception:  # it does not exist, or no release can read it
        return False
    return False


_warned: set[object] = set()


def _warn_once(about: object, message: str) -> None:
    """Warn once of a file or a folder, whatever the fault and the kernel."""
    if about not in _warned:
        _warned.add(about)
        warn(message, CacheWarning)


class Winners:
    """Winners of a declaration's live searches: of this process and in the user's cache.

    Apart from the search, which few processes need: each shape without a bucket of its own asks for them.

    Args:
        tunable: The declaration.
        kernels: Its kernels with hints, whose archive may know the hash of its source.
    """

    def __init__(self, tunable: Declaration, kernels: HintedKernels) -> None:
        self._tunable = tunable
        self._kernels = kernels
        self.known: dict[tuple[Arch, str, Problem], Config | None] = {}

    def of(self, arch: Arch, device_name: str, bucket: Problem) -> Config | None:
        """Return the winner that an earlier search found, of this process or in the user's cache."""
        place = (arch, device_name, bucket)
        if place in (known := self.known):  # another thread may replace the dict but never empties it
            return known[place]
        places = self.cache.places(kernel_folder(str(arch), self._tunable.name))
        key = self.key(arch, device_name, bucket) if places else None
        if key is None or key.place not in places:
            # Not remembered: for millions of shapes the garbage collector would take longer than a look-up.
            return None
        if len(self.known) >= MOST_REMEMBERED:
            self._forget()
        winner = self.known[place] = self.cache.read(key)
        return winner

    def _forget(self) -> None:
        """Make room. Unusable files are dropped first, since a winner may be in no file."""
        known = self.known.copy()
        winners = {place: known[place] for place in known if known[place] is not None}
        self.known = winners if len(winners) <= MOST_REMEMBERED // 2 else {}

    def key(self, arch: Arch, device_name: str, bucket: Problem) -> Key:
        """Return the key under which the cache keeps a bucket's winner."""
        return Key(
            kernel=self._tunable.name,
            arch=str(arch),
            device_name=device_name,
            distribution=self._distribution,
            cuda_tile=cutile.version(),
            bucket=tuple(sorted(bucket.items())),
            source_hash=self._kernels.cubins.source_hash(arch) or self._hashed,
        )

    @lazy
    def cache(self) -> UserCache:
        """The user's cache. Found once: it takes as long as the rest of a look-up."""
        return UserCache(folder_here(), self._tunable)

    @lazy
    def _distribution(self) -> str:
        name = self._tunable.distribution or self._tunable.package.partition(".")[0]
        try:
            return f"{name} {metadata.version(name)}"
        except (metadata.PackageNotFoundError, ValueError):
            # A checkout, or a declaration outside any package.
            return f"{name} (not installed)"

    @lazy
    def _hashed(self) -> str:
        from aot_tune.declare.fingerprint.hashing import source_hash

        return source_hash(self._tunable)
