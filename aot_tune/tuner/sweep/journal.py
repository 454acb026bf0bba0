"""A sweep's journal: every record is on disk before it is acknowledged. Does not interpret its records.

Each line holds one record: ``crc32 length identity {json}``. The length and the checksum let the reader find
intact records between any damage. The identity is a digest of the conditions of the sweep. It says which
sweep a record belongs to even when the first line, which spells the conditions out, is lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from aot_tune.errors import JournalMismatchError, TuneError
from aot_tune.tables import files

Record = dict[str, Any]

_START = re.compile(rb"([0-9a-f]{8}) ([0-9]{1,8}) ([0-9a-f]{16}) (?=\{)")
_IDENTITY_KEY = "made_with"


class Journal:
    """An open journal, locked by this process. Make one with `Journal.open`.

    Attributes:
        damage: One line that describes the damage of the file and names the file that holds the damaged
            bytes; None for an intact file.
    """

    def __init__(self, path: Path, lock: FileLock, identity: Mapping[str, str]) -> None:
        self._path = path
        self._lock = lock
        self._digest = _digest(identity)
        self._records: list[Record] = []
        self._descriptor: int | None = None
        self._failed: str | None = None
        self._saved = 0
        self.damage: str | None = None

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, str]) -> Journal:
        """Open a journal to resume it, or start one.

        Args:
            path: The file; a missing folder is made.
            identity: The conditions of its records, name to text: driver, compiler, source, GPU.

        Raises:
            JournalMismatchError: It was made under other conditions; the message names those that differ.
            TuneError: Another process has locked it (the message names its pid), or it cannot be read or
                written.
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = _locked(path)
        except OSError as error:
            raise TuneError(
                f"{path}: cannot open the journal: {_reason(error)}; name another folder with --journal"
            ) from error
        journal = cls(path, lock, identity)
        try:
            journal._start(identity)
        except OSError as error:
            journal.close()
            raise TuneError(
                f"{path}: cannot open the journal: {_reason(error)}; "
                "make room or name another folder with --journal"
            ) from error
        except BaseException:
            journal.close()
            raise
        return journal

    @property
    def records(self) -> list[Record]:
        """The records that the file held when it was opened, in their order."""
        return list(self._records)

    def append(self, record: Record) -> None:
        """Write one record to disk. When this returns, no crash loses it.

        Args:
            record: Plain JSON values that come back equal. NaN and infinities are refused.

        Raises:
            ValueError: The record would not come back equal.
            TuneError: It could not be written. The journal accepts no further record, and keeps all earlier
                ones.
        """
        if _IDENTITY_KEY in record:
            raise ValueError(
                f"a record may not have the key {_IDENTITY_KEY!r}: the journal's first line has it"
            )
        self._write(_line(record, self._digest))

    def close(self) -> None:
        """Close and unlock the file. May be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._lock.release(force=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, identity: Mapping[str, str]) -> None:
        """Read the file, check its identity, set damaged bytes aside, and open it for appending."""
        if self._path.exists() and not self._path.is_file():
            raise TuneError(
                f"{self._path}: is not a plain file; move it away or name another folder with --journal"
            )
        data = self._path.read_bytes() if self._path.exists() else b""
        found = _scan(data)
        _check_identity(self._path, found.records, identity, self._digest)
        self._records = [record for _, record in found.records if _IDENTITY_KEY not in record]
        header = _line({_IDENTITY_KEY: dict(identity)}, self._digest)
        clean = header + b"".join(_line(record, self._digest) for record in self._records)
        # An empty file is left by a crash between its creation and its first line: nothing was lost.
        if data and data != clean:
            self.damage = self._set_aside(found.damaged)
        if data != clean:
            files.write_atomic(self._path, clean)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._saved = len(clean)

    def _set_aside(self, damaged: Sequence[bytes]) -> str:
        if not damaged:
            return f"{self._path}: lacked a line end or its first line; {len(self._records)} records are kept"
        aside = self._path.with_name(self._path.name + ".damaged")
        with aside.open("ab") as file:
            file.write(b"\n".join([*damaged, b""]))
            file.flush()
            os.fsync(file.fileno())
        return (
            f"{self._path}: was damaged in {len(damaged)} places; {sum(map(len, damaged))} bytes are set "
            f"aside in {aside}, {len(self._records)} records are intact and kept"
        )

    def _write(self, line: bytes) -> None:
        if self._descriptor is None:
            raise TuneError(self._failed or f"{self._path}: the journal is closed")
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(self._descriptor, left) :]
            os.fsync(self._descriptor)
        except OSError as error:
            self._failed = (
                f"{self._path}: cannot save a measurement: {_reason(error)}; all finished results are kept: "
                "make room and run the same command again"
            )
            self._stop()
            raise TuneError(self._failed) from error
        self._saved += len(line)

    def _stop(self) -> None:
        """Remove a half-written line and accept no more: after a failed fsync the disk's state is unknown."""
        assert self._descriptor is not None
        with contextlib.suppress(OSError):  # where this fails, the next opening sets the torn line aside
            os.ftruncate(self._descriptor, self._saved)
        os.close(self._descriptor)
        self._descriptor = None


# Bytes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Scanned:
    """The content of a journal's bytes."""

    records: tuple[tuple[str, Record], ...]
    """The intact records in their order, each with the digest of its conditions."""

    damaged: tuple[bytes, ...]
    """The bytes between them, in their order. A line end after a record is not damage."""


def _line(record: Record, digest: str) -> bytes:
    text = json.dumps(record, allow_nan=False, separators=(",", ":"))
    if json.loads(text) != record:
        raise ValueError(f"a record would come back from the journal as {text:.200}; use lists and str keys")
    body = f"{digest} {text}".encode()
    return b"%08x %d %b\n" % (zlib.crc32(body), len(body), body)


def _scan(data: bytes) -> _Scanned:
    """Find every intact record, wherever the damage is."""
    records: list[tuple[str, Record]] = []
    damaged: list[bytes] = []
    done = at = 0
    while start := _START.search(data, at):
        end = start.start(3) + int(start[2])
        body = data[start.start(3) : end]
        if end > len(data) or zlib.crc32(body) != int(start[1], 16):
            at = start.start() + 1
            continue
        if start.start() > done:
            damaged.append(data[done : start.start()])
        records.append((start[3].decode(), json.loads(body[start.end() - start.start(3) :])))
        done = at = end + 1 if data[end : end + 1] == b"\n" else end
    if done < len(data):
        damaged.append(data[done:])
    return _Scanned(records=tuple(records), damaged=tuple(damaged))


def _digest(identity: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(identity.items())).encode()).hexdigest()[:16]


def _check_identity(
    path: Path, records: Sequence[tuple[str, Record]], identity: Mapping[str, str], digest: str
) -> None:
    foreign = [record for theirs, record in records if theirs != digest]
    if not foreign:
        return
    spelled = next((record[_IDENTITY_KEY] for record in foreign if _IDENTITY_KEY in record), None)
    differences = "its first line, which named them, is damaged"
    if spelled is not None:
        differences = "; ".join(
            f"{name} was {spelled.get(name, 'not set')}, is {identity.get(name, 'not set')}"
            for name in dict.fromkeys((*identity, *spelled))
            if spelled.get(name) != identity.get(name)
        )
    raise JournalMismatchError(
        f"{path}: this sweep was begun under other conditions: {differences}; its times cannot be mixed "
        "with new ones: move the file away to start over, or restore the conditions to go on"
    )


# Files ------------------------------------------------------------------------------------------------------


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
    """The system's reason without the file's name, which the messages here begin with."""
    return error.strerror or str(error)
