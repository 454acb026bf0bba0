"""Read a cubin: its resources with the vendor's tool, its machine code from the ELF. Runs no kernel."""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aot_tune.errors import StoreError, TuneError


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources that a kernel occupies while it runs."""

    registers: int
    """32-bit registers of each thread."""

    stack_bytes: int
    """Stack of each thread, bytes; registers that do not fit are spilled to it."""

    shared_bytes: int
    """Static shared memory of each block, bytes."""

    threads: int
    """Threads of each block."""


@dataclass(frozen=True, kw_only=True)
class _Section:
    name: str
    offset: int
    size: int
    has_bytes: bool


def resources(cubin: bytes) -> Resources:
    """Read a cubin's resources: with ``cuobjdump -res-usage``, the threads of a block from the ELF.

    Raises:
        TuneError: cuobjdump cannot read the file, or it does not contain exactly one kernel.
        StoreError: cuobjdump is not installed.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        answer = subprocess.run(
            [find_tool(), "-res-usage", file.name], capture_output=True, text=True, timeout=60, check=False
        )
    usages = _USAGE.findall(answer.stdout)
    if answer.returncode or len(usages) != 1:
        output = (answer.stderr or answer.stdout).strip()[-300:] or "it printed nothing"
        raise TuneError(f"cuobjdump found {len(usages)} kernels in a cubin, expected one: {output}")
    registers, stack, shared = map(int, usages[0])
    return Resources(registers=registers, stack_bytes=stack, shared_bytes=shared, threads=_threads(cubin))


_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@cache
def find_tool() -> str:
    """Return the path of cuobjdump: in the pip package's folder, which is not on PATH, or else on PATH.

    Raises:
        StoreError: cuobjdump is in neither place.
    """
    try:
        import nvidia

        folders = [str(folder) for root in nvidia.__path__ for folder in Path(root).glob("*/bin")]
    except ImportError:
        folders = []
    for folder in (*folders, None):
        path = shutil.which("cuobjdump", path=folder)
        if path:
            return path
    raise StoreError(
        "cuobjdump, which reads a cubin's registers, is not installed; pip install nvidia-cuda-cuobjdump"
    )


def code_digest(cubin: bytes) -> str:
    """Return a digest of 16 hex digits that is equal for cubins with equal code.

    It covers the instructions, constants, shared memory, and the shapes of block and cluster. Symbol names
    and the compiler's notes are left out, because they differ between hints that give equal code.
    """
    digest = hashlib.sha256()
    for section in sorted(_sections(cubin), key=lambda section: (_kind(section.name), section.size)):
        kind = _kind(section.name)
        if kind in _CODE_KINDS:
            content = cubin[section.offset : section.offset + section.size] if section.has_bytes else b""
            digest.update(f"{kind} {section.size}\n".encode() + content)
    for attribute, value in sorted(_attributes(cubin)):
        if attribute in (_BLOCK_SHAPE, _CLUSTER_SHAPE):
            digest.update(bytes([attribute]) + value)
    return digest.hexdigest()[:16]


def machine_code(cubin: bytes) -> bytes:
    """Return the instructions of the cubin's kernel, in bytes."""
    return b"".join(
        cubin[section.offset : section.offset + section.size]
        for section in _sections(cubin)
        if _kind(section.name) == ".text"
    )


def has_symbol(cubin: bytes, symbol: str) -> bool:
    """Whether a cubin holds a kernel of exactly this name.

    A name in an ELF file ends in a NUL byte, so that a longer name with the same beginning is not found.
    """
    return symbol.encode() + b"\0" in cubin


# The ELF. cuobjdump prints the names and values of its attributes; their numbers were found by matching the
# values to the bytes.

_CODE_KINDS = frozenset({".text", ".nv.shared", ".nv.global", *(f".nv.constant{bank}" for bank in range(5))})
_BLOCK_SHAPE = 0x10
"""EIATTR_REQNTID: the threads of a block in each of three dimensions."""
_CLUSTER_SHAPE = 0x3D
"""EIATTR_CTA_PER_CLUSTER: the blocks of a cluster in each of three dimensions."""
_NO_BYTES = 8
"""SHT_NOBITS: the type of a section that takes memory but no bytes of the file."""


def _kind(name: str) -> str:
    """Return a section's name without the kernel's name: ``.text`` for ``.text.matmul``."""
    for kind in (".nv.shared.reserved", ".nv.info", ".nv.shared", ".text"):
        if name.startswith(kind):
            return kind
    return ".".join(name.split(".")[:3])


def _sections(cubin: bytes) -> tuple[_Section, ...]:
    if cubin[:5] != b"\x7fELF\x02":
        raise TuneError("a cubin is not a 64-bit ELF file; delete it to compile it again")
    try:
        table, size, count, names_at = struct.unpack_from("<40xQ10xHHH", cubin)
        headers = [struct.unpack_from("<IIQQQQ", cubin, table + place * size) for place in range(count)]
        names = headers[names_at][4]
        return tuple(
            _Section(
                name=cubin[names + name : cubin.index(b"\0", names + name)].decode(),
                offset=offset,
                size=length,
                has_bytes=kind != _NO_BYTES,
            )
            for name, kind, _, _, offset, length in headers
        )
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise TuneError(f"a cubin is cut short ({error}); delete it to compile it again") from error


def _attributes(cubin: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the (attribute, value) pairs of the kernel's ``.nv.info`` with values of their own bytes."""
    for section in _sections(cubin):
        if not section.name.startswith(".nv.info."):
            continue
        at, end = section.offset, section.offset + section.size
        while at + 4 <= end:
            layout, attribute, length = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if layout == 4:  # the only layout whose third field is a length, and not the value
                yield attribute, cubin[at : at + length]
                at += length


def _threads(cubin: bytes) -> int:
    shapes = [
        struct.unpack("<III", value) for attribute, value in _attributes(cubin) if attribute == _BLOCK_SHAPE
    ]
    if len(shapes) != 1:
        raise TuneError(f"a cubin states its threads {len(shapes)} times, expected once; delete it")
    x, y, z = shapes[0]
    return int(x * y * z)
