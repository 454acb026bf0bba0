"""Append each problem that missed to the file that AOT_TUNE_RECORD names. Off by default; never blocks.

A line is a JSON object: ``{"kernel": "matmul", "arch": "sm90", "problem": {"M": 300, ...}}`` for a declared
kernel, which `aot-tune tune --problems FILE` reads, and ``{"search": "lib.ops.kernel", ...}`` for a search
that was not recorded. Each process appends to a file of its own, whole lines, each problem once. Where an
earlier process had its number, as in a container, it goes on with that file. Nothing is written while a graph
is captured.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from aot_tune import environment
from aot_tune.errors import MissWarning
from aot_tune.serve.runtime import runtime
from aot_tune.warn import warn

MOST_LINES = 4096
"""Most problems in a file."""

MOST_BYTES = 4 * 1024 * 1024
"""Most bytes of a file."""

_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class _File:
    """Lines of this process's file."""

    def __init__(self, named: Path) -> None:
        text = _text_of(named)
        self.lines = {*text.decode(errors="replace").splitlines()}
        self.bytes = len(text)
        self.ends = b"\n" if text[-1:] not in (b"", b"\n") else b""
        """What ends a line that an earlier process began."""
        self.failed = False


_files: dict[tuple[Path, int], _File] = {}
"""Files by path and process: a forked child begins without lines."""


def note(missed: Mapping[str, object]) -> None:
    """Append a problem that missed, where AOT_TUNE_RECORD asks for it.

    Args:
        missed: The line, as plain JSON values.
    """
    named = environment.missed_file()
    if named is None or runtime().capturing():
        return
    key = named, os.getpid()
    file = _files.get(key) or _files.setdefault(key, _File(named))
    line = json.dumps(missed, separators=(",", ":"))
    data = file.ends + line.encode() + b"\n"
    full = len(file.lines) >= MOST_LINES or file.bytes + len(data) > MOST_BYTES
    if file.failed or full or line in file.lines:
        return
    file.lines.add(line)
    file.bytes += len(data)
    try:
        if named.is_dir():  # also a path without a name, such as "." or "/"
            raise OSError(None, "it is a folder; name a file in it")
        _append(_path_of(named), data)
        file.ends = b""
    except OSError as error:
        file.failed = True
        with suppress(Exception):  # a warning that is an error, or cannot be written, stops no launch
            warn(
                f"{environment.RECORD}={named}: problems that missed are not written: {error.strerror}",
                MissWarning,
            )


def _path_of(named: Path) -> Path:
    return named.with_name(f"{named.name}.{os.getpid()}")


def _text_of(named: Path) -> bytes:
    """Return what an earlier process with this one's number wrote; nothing where that cannot be read."""
    with suppress(OSError, ValueError):  # also a path without a name
        descriptor = os.open(_path_of(named), os.O_RDONLY | _SAFELY)
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return os.read(descriptor, MOST_BYTES)
        finally:
            os.close(descriptor)
    return b""


def _append(path: Path, data: bytes) -> None:
    """Append a line by one system call, so that no partial line remains in the file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _SAFELY, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if os.write(descriptor, data) != len(data):
            os.ftruncate(descriptor, size)
            raise OSError(None, "the disk is full")
    finally:
        os.close(descriptor)
