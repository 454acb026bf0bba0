"""Read single cubins from an arch's archive, and define its format. Imports no kernel and no GPU code.

An archive is ``<folder of tables>/<arch>/cubins.aot``, a build product:

    header        magic, schema, length and SHA-256 of the index, of fixed size: `HEADER`
    index         JSON: the arch, and the place of each kernel's section
    sections      zlib of JSON, one for each kernel: its origin, and the block of each (hints, signature)
    blocks        zlib of one cubin each; a kernel's first cubin is the preset dictionary of its others

A place is an offset, a length and a SHA-256, so that a launch reads only the index, a section and a block.
Cubins of one kernel resemble each other: fifteen of a matmul take 80 KB with the dictionary, 130 KB without.
LZMA over all fifteen takes 28 KB, but has to be unpacked whole in 1.4 ms, where a block takes 0.06 ms. Equal
cubins are stored once, and equal input gives equal bytes. Nothing in a file is imported, evaluated or
unpickled.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from aot_tune.cubins.origin import Origin
from aot_tune.errors import AotTuneError, ArchiveError, StoreError
from aot_tune.tables import strict_json
from aot_tune.tables.files import open_regular
from aot_tune.values.arch import Arch
from aot_tune.values.lazy import lazy

FILE_NAME = "cubins.aot"
"""File name of an archive."""

SCHEMA = 1
"""Version of the format, the only one that this release writes and reads: an archive is built together with
its package."""

HEADER = struct.Struct("<16sII32s")
"""Header: `MAGIC`, `SCHEMA`, the length of the index in bytes and its SHA-256."""
MAGIC = b"aot_tune cubins\n"
"""First bytes of every archive."""
_MOST_INDEX = 1 << 20
"""Most bytes of an index, 1 MiB."""
_MOST_SECTION = strict_json.MOST_BYTES
"""Most bytes of a section."""
_MOST_CUBIN = 1 << 26
"""Most bytes of a cubin, 64 MiB. The largest seen, a matmul that assumes nothing, has 0.7 MiB."""
_MOST_FILE = 1 << 31
"""Most bytes of an archive, 2 GiB."""
WINDOW = 32768
"""Bytes of a dictionary that deflate can refer to (RFC 1951)."""

Hints = tuple[tuple[str, int], ...]
"""Names and values of hints, in canonical order."""
CubinKey = tuple[Hints, str]
"""Key of a cubin in its section: (hints, signature)."""


class Place(NamedTuple):
    """Place of a part of the file, as the index or a section states it."""

    offset: int
    """Bytes from the end of the index to the part."""
    stored: int
    """Bytes of the part in the file."""
    size: int
    """Bytes of the part when unpacked."""
    sha256: str
    """SHA-256 of the unpacked bytes, in hexadecimal digits."""


# Reading ----------------------------------------------------------------------------------------------------


class Archive:
    """An archive on disk. The constructor reads the index; sections and cubins are read on demand.

    The file is opened for each read and not kept open, so that a server may close all its descriptors.
    Everything wrong with the file is an `ArchiveError`; if it is replaced between two reads, a hash differs.

    Args:
        path: The file.

    Raises:
        ArchiveError: The file is not an archive of this schema, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        magic, schema, length, digest = HEADER.unpack(_read(path, 0, HEADER.size))
        if magic != MAGIC:
            raise ArchiveError(f"{path} is not an archive of cubins")
        if schema != SCHEMA:
            raise ArchiveError(f"{path} has schema {schema}, expected {SCHEMA}; build it with this release")
        if length > _MOST_INDEX:
            raise ArchiveError(f"{path}: the index has {length} bytes; at most {_MOST_INDEX} are read")
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
        self._places = {name: _place(stated, path, name) for name, stated in document["kernels"].items()}
        self._sections: dict[str, Section] = {}

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels with cubins in the archive."""
        return tuple(self._places)

    def section(self, kernel: str) -> Section | None:
        """Return a kernel's section, read once; None where the archive has none.

        Raises:
            ArchiveError: The section is damaged.
        """
        if kernel not in self._sections and kernel in self._places:
            data = self.unpacked(self._places[kernel], f"the section of {kernel}", most=_MOST_SECTION)
            self._sections[kernel] = Section(self, kernel, data)
        return self._sections.get(kernel)

    def unpacked(self, place: Place, what: str, *, most: int, dictionary: bytes = b"") -> bytes:
        """Unpack a part and check its hash, in memory that the stated size bounds."""
        data = self.start(place, what, most=most, dictionary=dictionary, length=place.size + 1)
        if hashlib.sha256(data).hexdigest() != place.sha256:
            raise ArchiveError(f"{self.path}: {what} is damaged: its SHA-256 is not the stated one")
        return data

    def start(
        self, place: Place, what: str, *, most: int, length: int = WINDOW, dictionary: bytes = b""
    ) -> bytes:
        """Unpack the first `length` bytes of a part without a check of its hash."""
        if place.size > most or place.stored > most:
            raise ArchiveError(f"{self.path}: {what} has {place.size} bytes; at most {most} are read")
        stored = _read(self.path, self._body + place.offset, place.stored)
        try:
            unpacker = zlib.decompressobj(zdict=dictionary) if dictionary else zlib.decompressobj()
            return unpacker.decompress(stored, length)
        except zlib.error as error:
            raise ArchiveError(f"{self.path}: {what} is damaged: {error}") from None


class Section:
    """A kernel's section of an archive."""

    def __init__(self, archive: Archive, kernel: str, data: bytes) -> None:
        self._archive, self._kernel = archive, kernel
        what = f"the section of {kernel}"
        keys = ("symbol", "source_hash", "files", "values", "complete", "cuda_tile", "tileiras")
        stated = _parsed(data, archive.path, what, (*keys, "hints", "blocks", "cubins"))
        try:
            self.symbol: str = _text(stated["symbol"])
            self.origin = Origin(
                source_hash=_text(stated["source_hash"]),
                files={_text(name): _text(digest) for name, digest in stated["files"].items()},
                values={_text(name): _text(value) for name, value in stated["values"].items()},
                complete=stated["complete"] is True,
                cuda_tile=_text(stated["cuda_tile"]),
                tileiras=_text(stated["tileiras"]),
            )
            hints = [
                tuple((_text(name), _count(value)) for name, value in config.items())
                for config in stated["hints"]
            ]
            self._blocks = [_place(block, archive.path, f"a block of {kernel}") for block in stated["blocks"]]
            self._at = {
                (hints[_count(which)], _text(name)): _count(block) for which, name, block in stated["cubins"]
            }
            if any(block >= len(self._blocks) for block in self._at.values()):
                raise ValueError("a cubin names a block that does not exist")
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ArchiveError(f"{archive.path}: {what} is not as this release writes it: {error}") from None

    @property
    def archive(self) -> Archive:
        """Archive of the section."""
        return self._archive

    @property
    def keys(self) -> tuple[CubinKey, ...]:
        """Keys of the section's cubins."""
        return tuple(self._at)

    def has(self, hints: Hints, signature: str) -> bool:
        """Whether the section has a cubin of these hints and this signature; reads nothing."""
        return (hints, signature) in self._at

    def cubin(self, hints: Hints, signature: str) -> bytes | None:
        """Read the cubin of exactly these hints and this signature, and check its SHA-256; None if absent.

        Raises:
            ArchiveError: The cubin is damaged.
        """
        block = self._at.get((hints, signature))
        if block is None:
            return None
        place, what = self._blocks[block], f"cubin {block} of {self._kernel}"
        dictionary = self._dictionary if block else b""
        return self._archive.unpacked(place, what, most=_MOST_CUBIN, dictionary=dictionary)

    @lazy
    def _dictionary(self) -> bytes:
        return self._archive.start(self._blocks[0], f"cubin 0 of {self._kernel}", most=_MOST_CUBIN)

    def sizes(self) -> tuple[int, int, int]:
        """Return the number of different cubins, their bytes in the file, and their bytes when unpacked."""
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
        raise ArchiveError(f"{path} is cut short: it ends at byte {offset + len(data)}, within a part of it")
    return data


def _parsed(data: bytes, path: Path, what: str, keys: tuple[str, ...]) -> Any:
    try:
        document = strict_json.loads(data)
        strict_json.check_keys(document, "", keys)
    except AotTuneError as error:
        raise ArchiveError(f"{path}: {what} is not as this release writes it: {error}") from None
    return document


def _place(stated: object, path: Path, what: str) -> Place:
    if (
        type(stated) is not list
        or [type(part) for part in stated] != [int, int, int, str]
        or min(stated[:3]) < 0
        or max(stated[:3]) > _MOST_FILE
    ):
        raise ArchiveError(f"{path}: {what}: expected offset, length, size and SHA-256, got {stated!r:.80}")
    return Place(*stated)


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"expected a string, got {value!r:.80}")
    return value


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"expected a count, got {value!r:.80}")
    return value
