"""Append-only journal of a sweep. Written records survive a kill, synced records a crash.

An added record is written to the file at once, so that no end of this process loses it. Syncing a line to
disk takes milliseconds, as long as several measurements on a GPU: so `sync` does it for all lines since the
last call.

Each line holds one record: ``crc32 length identity {json}``. The length and the checksum let the reader find
intact records between any damage. The identity is a digest of the conditions of the sweep and of the schema.
It identifies a record's sweep even when the first line, which spells out both, is lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from aot_tune.errors import JournalMismatchError, TuneError
from aot_tune.tables import files

Record = dict[str, Any]

Accepts = Callable[[Record], bool]
"""Returns whether a record of this schema has the content that its reader expects."""

SCHEMA = 3
"""The only version of the records' form that is read and written. The first line names it."""

MOST_RECORD_BYTES = 16_384
"""Most bytes of a record without its checksum and length. The longest part of a record is a failure's
message, which `aot_tune.tuner.sweep.results` cuts. The bound keeps the search for records after damage linear
in the file's size."""

_START = re.compile(rb"([0-9a-f]{8}) ([0-9]{1,5}) ([0-9a-f]{16}) (?=\{)")
_IDENTITY_KEY, _SCHEMA_KEY = "made_with", "schema"


class JournalWriteError(TuneError):
    """The journal cannot be read or written: the disk is full or broken, or the folder cannot be used."""


def _all(record: Record) -> bool:
    return True


class Journal:
    """An open journal, locked by this process; made by `Journal.open`.

    Attributes:
        damage: One line that describes the damage of the file and names the file that holds the damaged
            bytes; None for an intact file.
    """

    def __init__(self, path: Path, lock: FileLock, identity: Mapping[str, str], accepts: Accepts) -> None:
        self._path = path
        self._lock = lock
        self._identity = dict(identity)
        self._digest = _digest(identity)
        self._accepts = accepts
        self._records: list[Record] = []
        self._descriptor: int | None = None
        self._failed: str | None = None
        self._writing = threading.Lock()
        self._size = self._synced = 0
        """Bytes of the file's whole lines, and of its synced lines."""
        self.damage: str | None = None

    @classmethod
    def open(
        cls, path: Path, identity: Mapping[str, str], *, accepts: Accepts = _all, fresh: bool = False
    ) -> Journal:
        """Open a journal to resume it, or start a new journal. Follows a link.

        Args:
            path: The file; a missing folder is created.
            identity: The conditions of its records, name to text: driver, compiler, source, GPU.
            accepts: Checks records; a record that it rejects counts as damage.
            fresh: Whether to set an earlier journal aside as ``<name>.old``, once the lock is held.

        Raises:
            JournalMismatchError: It was made under other conditions or in the form of another release; the
                message names the differences.
            TuneError: Another process has locked it; the message names its pid.
            JournalWriteError: It cannot be read or written.
        """
        path = Path(os.path.realpath(path))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = _locked(path)
        except OSError as error:
            _cannot_open(path, error)
        journal = cls(path, lock, identity, accepts)
        try:
            if fresh and path.exists():
                path.replace(path.with_suffix(".old"))
            journal._start()
        except OSError as error:
            journal.close()
            _cannot_open(path, error)
        except BaseException:
            journal.close()
            raise
        return journal

    @property
    def records(self) -> list[Record]:
        """The records in the file when it was opened, in their order."""
        return list(self._records)

    def append(self, record: Record) -> None:
        """Write one record to disk, where no crash loses it or earlier records.

        Args:
            record: As for `add`.

        Raises:
            ValueError: As `add`.
            JournalWriteError: As `add`.
        """
        before = self._size
        self.add(record)
        self._sync(before)

    def add(self, record: Record) -> None:
        """Write one record to the file, where no end of this process loses it.

        Args:
            record: Plain JSON values that are read back equal. NaN and infinities are refused.

        Raises:
            ValueError: The record would not be read back equal, or is longer than `MOST_RECORD_BYTES`.
            JournalWriteError: It could not be written. The journal accepts no further record, and keeps all
                earlier records.
        """
        if _IDENTITY_KEY in record:
            raise ValueError(
                f"a record may not have the key {_IDENTITY_KEY!r}: the journal's first line has it"
            )
        line = _line(record, self._digest)
        with self._writing:
            try:
                left = memoryview(line)
                while left:
                    left = left[os.write(self._writable(), left) :]
            except OSError as error:
                self._fail(error, self._size)
            self._size += len(line)

    def sync(self) -> None:
        """Sync all added records to disk, where no crash loses them.

        Raises:
            JournalWriteError: As `add`.
        """
        self._sync(None)

    def _sync(self, keep: int | None) -> None:
        """Sync; on failure cut the file to `keep` bytes, or to all whole lines where that is None."""
        with self._writing:
            descriptor, size = self._writable(), self._size
        try:
            os.fsync(descriptor)  # other threads may add meanwhile
        except OSError as error:
            with self._writing:
                self._fail(error, self._size if keep is None else keep)
        with self._writing:
            self._synced = max(self._synced, size)

    def retire(self) -> str | None:
        """Rename the file to ``<name>.done``, so that the next sweep measures anew.

        Returns:
            The reason why it cannot be renamed, and the remedy; None where it was.
        """
        try:
            self._path.replace(self._path.with_suffix(".done"))
        except OSError as error:
            return (
                f"{self._path}: the table is published, but its journal cannot be renamed: {_reason(error)}; "
                "remove it, else the next sweep takes over its measurements"
            )
        return None

    def close(self) -> None:
        """Close and unlock the file. May be called twice."""
        if self._descriptor is not None:
            if self._synced < self._size:
                with contextlib.suppress(OSError):  # lost records are measured again
                    os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
        with contextlib.suppress(OSError):  # the system frees the lock when the process ends
            self._lock.release(force=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        """Read the file, check its identity, set damaged bytes aside, and open it for appending."""
        data = _content(self._path)
        scanned = _scan(data, self._digest, self._accepts)
        _check_identity(self._path, scanned.records, self._identity, self._digest)
        self._records = [record for _, record in scanned.records if _IDENTITY_KEY not in record]
        header = _line({_IDENTITY_KEY: self._identity, _SCHEMA_KEY: SCHEMA}, self._digest)
        clean = header + b"".join(_line(record, self._digest) for record in self._records)
        # An empty file is left by a crash between its creation and its first line: nothing was lost.
        if data and data != clean:
            headers = len(scanned.records) - len(self._records)
            self.damage = self._set_aside(scanned.damaged, headers)
        if data != clean:
            files.write_atomic(self._path, clean)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size = self._synced = len(clean)

    def _set_aside(self, damaged: Sequence[bytes], headers: int) -> str:
        if not damaged:
            fault = "lacked a line end" if headers == 1 else "lacked its first line"
            fault = f"held its first line {headers} times" if headers > 1 else fault
            return f"{self._path}: {fault}; {len(self._records)} records are kept"
        aside = self._path.with_name(self._path.name + ".damaged")
        with aside.open("ab") as file:
            file.write(b"\n".join([*damaged, b""]))
            file.flush()
            os.fsync(file.fileno())
        return (
            f"{self._path}: was damaged in {len(damaged)} places; {sum(map(len, damaged))} bytes are set "
            f"aside in {aside}, {len(self._records)} records are intact and kept"
        )

    def _writable(self) -> int:
        if self._descriptor is None:
            raise JournalWriteError(self._failed or f"{self._path}: the journal is closed")
        return self._descriptor

    def _fail(self, error: OSError, keep: int) -> NoReturn:
        """Cut the file to its safe bytes and refuse records: after a failed fsync its state is unknown."""
        self._failed = self._failed or (
            f"{self._path}: cannot save a measurement: {_reason(error)}; all finished results are kept: "
            "make room and run the same command again"
        )
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # on failure the next opening sets the torn line aside
                os.ftruncate(descriptor, keep)
            with contextlib.suppress(OSError):
                os.fsync(descriptor)
            os.close(descriptor)
        raise JournalWriteError(self._failed) from error


# Reading without opening ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JournalContent:
    """The content of a journal's file."""

    identity: Mapping[str, str]
    """The conditions of its records, name to text; empty where the first line is lost."""

    records: tuple[Record, ...]
    """The intact records of these conditions, in their order."""

    foreign: int
    """Number of records of other conditions."""

    damaged_places: int
    """Number of damaged places between intact records."""

    damaged_bytes: int
    """Number of damaged bytes."""


def read(path: Path, accepts: Accepts = _all) -> JournalContent:
    """Read a journal without a lock, also while a sweep writes it.

    Args:
        path: The file.
        accepts: Checks records; a record that it rejects counts as damage.

    Raises:
        JournalMismatchError: It has the form of another release.
        JournalWriteError: It cannot be read.
    """
    data = _readable(path)
    every = _scan(data, "", _all)
    headers = [(digest, record) for digest, record in every.records if _IDENTITY_KEY in record]
    _check_schema(path, [record for _, record in every.records])
    own = headers[0][0] if headers else next((digest for digest, _ in every.records), "")
    scanned = _scan(data, own, accepts)
    records = [(digest, record) for digest, record in scanned.records if _IDENTITY_KEY not in record]
    return JournalContent(
        identity=dict(headers[0][1][_IDENTITY_KEY]) if headers else {},
        records=tuple(record for digest, record in records if digest == own),
        foreign=sum(digest != own for digest, _ in records),
        damaged_places=len(scanned.damaged),
        damaged_bytes=sum(map(len, scanned.damaged)),
    )


def check_resumable(path: Path, identity: Mapping[str, str]) -> None:
    """Refuse a journal that could not be resumed, before anything is measured. It may be missing.

    Raises:
        JournalMismatchError: As `Journal.open`.
        JournalWriteError: It cannot be read.
    """
    digest = _digest(identity)
    _check_identity(path, _scan(_readable(path), digest, _all).records, identity, digest)


# Bytes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Scanned:
    """The content of a journal's bytes."""

    records: tuple[tuple[str, Record], ...]
    """The intact records in their order, each with the digest of its conditions."""

    damaged: tuple[bytes, ...]
    """The other bytes, in their order. A line end after a record is not damage."""


def _line(record: Record, digest: str) -> bytes:
    text = json.dumps(record, allow_nan=False, separators=(",", ":"))
    if json.loads(text) != record:
        raise ValueError(
            f"a record would be read back from the journal as {text:.200}; use lists and str keys"
        )
    body = f"{digest} {text}".encode()
    if len(body) > MOST_RECORD_BYTES:
        raise ValueError(f"a journal's record has at most {MOST_RECORD_BYTES} bytes: {text:.200}")
    return b"%08x %d %b\n" % (zlib.crc32(body), len(body), body)


def _scan(data: bytes, digest: str, accepts: Accepts) -> _Scanned:
    """Find every intact record between damage. `accepts` checks the records of the conditions `digest`."""
    records: list[tuple[str, Record]] = []
    damaged: list[bytes] = []
    view = memoryview(data)
    done = at = 0
    while start := _START.search(data, at):
        length, end = int(start[2]), start.start(3) + int(start[2])
        whole = length <= MOST_RECORD_BYTES and end <= len(data)
        if not whole or zlib.crc32(view[start.start(3) : end]) != int(start[1], 16):
            at = start.start() + 1
            continue
        identity = start[3].decode()
        record = _parsed(data[start.end() : end])
        if record is not None and _IDENTITY_KEY not in record and identity == digest and not accepts(record):
            record = None
        at = end + 1 if data[end : end + 1] == b"\n" else end
        if record is None:
            continue  # its bytes count as damaged bytes before the next record
        if start.start() > done:
            damaged.append(data[done : start.start()])
        records.append((identity, record))
        done = at
    if done < len(data):
        damaged.append(data[done:])
    return _Scanned(records=tuple(records), damaged=tuple(damaged))


def _parsed(text: bytes) -> Record | None:
    """Parse a record's text; None where it is no record in spite of a correct checksum."""
    try:
        record: Record = json.loads(text, parse_constant=_no_number)
        _line(record, "0" * 16)  # raises for a number too large, or a record too long, to be written again
    except (ValueError, RecursionError):
        return None
    if _IDENTITY_KEY in record:
        identity = record[_IDENTITY_KEY]
        named = isinstance(identity, dict) and all(isinstance(value, str) for value in identity.values())
        if not named or type(record.get(_SCHEMA_KEY)) is not int:
            return None
    return record


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _digest(identity: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps([SCHEMA, sorted(identity.items())]).encode()).hexdigest()[:16]


def _check_identity(
    path: Path, records: Sequence[tuple[str, Record]], identity: Mapping[str, str], digest: str
) -> None:
    foreign = [record for own, record in records if own != digest]
    if not foreign:
        return
    _check_schema(path, foreign)
    spelled = next((record[_IDENTITY_KEY] for record in foreign if _IDENTITY_KEY in record), None)
    if spelled is not None:
        differences = "; ".join(
            f"{name} was {spelled.get(name, 'not set')}, is {identity.get(name, 'not set')}"
            for name in dict.fromkeys((*identity, *spelled))
            if spelled.get(name) != identity.get(name)
        )
    elif len(foreign) < len(records):
        differences = f"{len(foreign)} of its records are of another sweep, whose first line is missing"
    else:
        differences = "its first line, which named the conditions, is damaged"
    raise JournalMismatchError(
        f"{path}: this sweep was begun under other conditions: {differences}; its times cannot be mixed "
        "with new ones: move the file away or start over with --fresh, or restore the conditions to continue"
    )


def _check_schema(path: Path, records: Sequence[Record]) -> None:
    """Refuse the journal of another release, by its first line."""
    schemas = (record[_SCHEMA_KEY] for record in records if _IDENTITY_KEY in record)
    foreign = next((schema for schema in schemas if schema != SCHEMA), None)
    if foreign is not None:
        raise JournalMismatchError(
            f"{path}: this journal was written by another release of aot_tune: its schema is {foreign}, this "
            f"release reads {SCHEMA}; move the file away, or start over with --fresh"
        )


# Files ------------------------------------------------------------------------------------------------------


_ANOTHER_FOLDER = "move it away or name another folder with --journal"
"""The remedy for a journal that cannot be read."""


def _content(path: Path) -> bytes:
    """Read the file's bytes; empty where there is no file."""
    if path.exists() and not path.is_file():
        raise JournalWriteError(f"{path}: is not a plain file; {_ANOTHER_FOLDER}")
    return path.read_bytes() if path.exists() else b""


def _readable(path: Path) -> bytes:
    try:
        return _content(path)
    except OSError as error:
        raise JournalWriteError(
            f"{path}: cannot read the journal: {_reason(error)}; {_ANOTHER_FOLDER}"
        ) from error


def _cannot_open(path: Path, error: OSError) -> NoReturn:
    raise JournalWriteError(
        f"{path}: cannot open the journal: {_reason(error)}; make room or name another folder with --journal"
    ) from error


def _locked(path: Path) -> FileLock:
    """Lock the journal; the lock's file holds the pid of its holder."""
    lock_path = path.with_name(path.name + ".lock")

    def sign(descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)

    lock = FileLock(lock_path, timeout=0, on_acquired=sign, preserve_lock_file=True, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        holder = lock_path.read_text(errors="replace").strip() or "unknown"
        raise TuneError(
            f"{path}: another tuner, pid {holder}, holds this journal; wait for it or stop it, "
            "or tune into another folder"
        ) from None
    return lock


def _reason(error: OSError) -> str:
    """Return the system's reason without the file's name, with which the messages begin."""
    return error.strerror or str(error)
