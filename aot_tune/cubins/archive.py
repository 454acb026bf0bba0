"""The archive of one arch's cubins: its format, and reading one cubin of it alone. Knows no kernel, no GPU.

``<folder of tables>/<arch>/cubins.aot``, a build product:

    magic, schema, length and SHA-256 of the index     fixed, `HEADER`
    index         JSON: the arch; of each kernel where its section lies
    sections      zlib of JSON, one a kernel: what it was compiled from, and (hints, signature) -> block
    blocks        zlib of one cubin each; all but a kernel's first with that first one as preset dictionary

Each part is found by offset and length and has its SHA-256 beside them, so that a launch reads the index, one
section and one block. Cubins of one kernel resemble each other: with the dictionary fifteen of a matmul take
80 KB, alone 130. LZMA over all of them takes 28, but has to be unpacked whole (1.4 ms, where a block takes
0.06). Equal cubins are stored once. Equal input gives equal bytes. Nothing in a file is imported, evaluated
or unpickled.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from aot_tune.cubins.origin import Origin
from aot_tune.errors import AotTuneError, ArchiveError, StoreError
from aot_tune.tables import strict_json
from aot_tune.tables.files import open_regular
from aot_tune.values.arch import Arch

FILE_NAME = "cubins.aot"

SCHEMA = 1
"""The version of the format this release writes, and the only one it reads: an archive is built with its
package."""

HEADER = struct.Struct("<16sII32s")
MAGIC = b"aot_tune cubins\n"
_MOST_INDEX = 1 << 20
_MOST_SECTION = strict_json.MOST_BYTES
_MOST_CUBIN = 1 << 26
"""Bytes of one cubin, 64 MiB: the largest seen, a matmul that assumes nothing of its arrays, has 0.7."""
_MOST_FILE = 1 << 31
WINDOW = 32768
"""Bytes of a dictionary that deflate can refer to (RFC 1951)."""

Hints = tuple[tuple[str, int], ...]
CubinKey = tuple[Hints, str]
"""(hints in their canonical order, signature)."""


class Place(NamedTuple):
    """A part of the file."""

    offset: int
    stored: int
    """Bytes in the file."""
    size: int
    """Bytes unpacked."""
    sha256: str
    """Of the unpacked bytes, in hexadecimal digits."""


# Reading ----------------------------------------------------------------------------------------------------


class Archive:
    """An archive on disk. Opening it reads the index; sections and cubins are read when asked for.

    The file is opened for each read and not kept open, so that a server may close all its descriptors.
    Whatever is wrong with the file is an `ArchiveError`; where it is replaced meanwhile, a hash differs.

    Args:
        path: The file.

    Raises:
        ArchiveError: It is no archive of this schema, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        magic, schema, length, digest = HEADER.unpack(_read(path, 0, HEADER.size))
        if magic != MAGIC:
            raise ArchiveError(f"{path} is no archive of cubins")
        if schema != SCHEMA:
            raise ArchiveError(f"{path} has schema {schema}, and not {SCHEMA}; build it with this release")
        if length > _MOST_INDEX:
            raise ArchiveError(f"{path}: an index of {length} bytes; one has at most {_MOST_INDEX}")
        index = _read(path, HEADER.size, length)
        if hashlib.sha256(index).digest() != digest:
            raise ArchiveError(f"{path}: the index is damaged")
        document = _parsed(index, path, "the index", ("arch", "kernels"))
        try:
            self.arch = Arch.parse(document["arch"])
        except AotTuneError as error:
            raise ArchiveError(f"{path}: the index: {error}") from None
        if type(document["kernels"]) is not dict:
            raise ArchiveError(f"{path}: the index: expected an object of kernels")
        self._body = HEADER.size + length
        self._places = {name: _place(told, path, name) for name, told in document["kernels"].items()}
        self._sections: dict[str, Section] = {}

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels it has cubins of."""
        return tuple(self._places)

    def section(self, kernel: str) -> Section | None:
        """What there is of a kernel, read once.

        Raises:
            ArchiveError: Its section is damaged.
        """
        if kernel not in self._sections and kernel in self._places:
            data = self.unpacked(self._places[kernel], f"the section of {kernel}", most=_MOST_SECTION)
            self._sections[kernel] = Section(self, kernel, data)
        return self._sections.get(kernel)

    def unpacked(self, place: Place, what: str, *, most: int, dictionary: bytes = b"") -> bytes:
        """A part's bytes, checked, in memory bounded by what the index says of its size."""
        data = self.start(place, what, most=most, dictionary=dictionary, length=place.size + 1)
        if hashlib.sha256(data).hexdigest() != place.sha256:
            raise ArchiveError(f"{self.path}: {what} is damaged: another SHA-256 than the index says")
        return data

    def start(
        self, place: Place, what: str, *, most: int, length: int = WINDOW, dictionary: bytes = b""
    ) -> bytes:
        """The first `length` bytes of a part, unchecked: as a dictionary, what it unpacks is checked."""
        if place.size > most or place.stored > most:
            raise ArchiveError(f"{self.path}: {what} has {place.size} bytes; at most {most} are read")
        stored = _read(self.path, self._body + place.offset, place.stored)
        try:
            unpacker = zlib.decompressobj(zdict=dictionary) if dictionary else zlib.decompressobj()
            return unpacker.decompress(stored, length)
        except zlib.error as error:
            raise ArchiveError(f"{self.path}: {what} is damaged: {error}") from None


class Section:
    """One kernel in an archive."""

    def __init__(self, archive: Archive, kernel: str, data: bytes) -> None:
        self._archive, self._kernel = archive, kernel
        what = f"the section of {kernel}"
        keys = ("symbol", "source_hash", "files", "values", "complete", "cuda_tile", "tileiras")
        told = _parsed(data, archive.path, what, (*keys, "hints", "blocks", "cubins"))
        try:
            self.symbol: str = _text(told["symbol"])
            self.origin = Origin(
                source_hash=_text(told["source_hash"]),
                files={_text(name): _text(digest) for name, digest in told["files"].items()},
                values={_text(name): _text(value) for name, value in told["values"].items()},
                complete=told["complete"] is True,
                cuda_tile=_text(told["cuda_tile"]),
                tileiras=_text(told["tileiras"]),
            )
            hints = [
                tuple((_text(name), _count(value)) for name, value in each.items()) for each in told["hints"]
            ]
            self._blocks = [_place(block, archive.path, f"a block of {kernel}") for block in told["blocks"]]
            self._at = {
                (hints[_count(which)], _text(name)): _count(block) for which, name, block in told["cubins"]
            }
            if any(block >= len(self._blocks) for block in self._at.values()):
                raise ValueError("a cubin in a block that is not there")
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ArchiveError(f"{archive.path}: {what} is not as this release writes it: {error}") from None

    @property
    def keys(self) -> tuple[CubinKey, ...]:
        """What it has a cubin for."""
        return tuple(self._at)

    def has(self, hints: Hints, signature: str) -> bool:
        """Whether there is a cubin for this; reads nothing."""
        return (hints, signature) in self._at

    def cubin(self, hints: Hints, signature: str) -> bytes | None:
        """The cubin for exactly this, checked by its SHA-256; None where there is none.

        Raises:
            ArchiveError: It is damaged.
        """
        block = self._at.get((hints, signature))
        if block is None:
            return None
        place, what = self._blocks[block], f"cubin {block} of {self._kernel}"
        dictionary = self._dictionary if block else b""
        return self._archive.unpacked(place, what, most=_MOST_CUBIN, dictionary=dictionary)

    @cached_property
    def _dictionary(self) -> bytes:
        return self._archive.start(self._blocks[0], f"cubin 0 of {self._kernel}", most=_MOST_CUBIN)

    def sizes(self) -> tuple[int, int, int]:
        """Different cubins, their bytes in the file and unpacked."""
        stored = sum(block.stored for block in self._blocks)
        return len(self._blocks), stored, sum(block.size for block in self._blocks)


def _read(path: Path, offset: int, length: int) -> bytes:
    try:
        descriptor = open_regular(path)
    except StoreError as error:
        raise ArchiveError(str(error)) from error
    try:
        data = os.pread(descriptor, length, offset)
    except OSError as error:
        raise ArchiveError(f"cannot read {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if len(data) != length:
        raise ArchiveError(f"{path} ends at byte {offset + len(data)}, within a part of it: it is cut short")
    return data


def _parsed(data: bytes, path: Path, what: str, keys: tuple[str, ...]) -> Any:
    try:
        document = strict_json.loads(data)
        strict_json.check_keys(document, "", keys)
    except AotTuneError as error:
        raise ArchiveError(f"{path}: {what} is not as this release writes it: {error}") from None
    return document


def _place(told: object, path: Path, what: str) -> Place:
    if (
        type(told) is not list
        or [type(part) for part in told] != [int, int, int, str]
        or min(told[:3]) < 0
        or max(told[:3]) > _MOST_FILE
    ):
        raise ArchiveError(f"{path}: {what}: expected offset, length, size and SHA-256, got {told!r:.80}")
    return Place(*told)


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"expected a string, got {value!r:.80}")
    return value


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"expected a count, got {value!r:.80}")
    return value
