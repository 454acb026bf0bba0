"""Write an archive of cubins in the format of `aot_tune.cubins.archive`. Uses no kernel and no compiler."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from aot_tune.cubins.archive import HEADER, MAGIC, SCHEMA, WINDOW, CubinKey, Section
from aot_tune.cubins.origin import Origin
from aot_tune.values.arch import Arch


@dataclass(frozen=True, kw_only=True)
class KernelCubins:
    """A kernel's cubins in memory, to be packed."""

    kernel: str
    """Declared name of the kernel, or its module and qualified name where no declaration has it."""

    symbol: str
    """Name of the kernel in every cubin."""

    origin: Origin
    """Sources and compiler of the cubins."""

    cubins: Mapping[CubinKey, bytes]
    """Cubins by hints and signature."""

    @classmethod
    def unpacked(cls, kernel: str, section: Section) -> KernelCubins:
        """Unpack all cubins of a kernel from an archive, to pack them again.

        Raises:
            ArchiveError: A cubin is damaged.
        """
        cubins = {key: cubin for key in section.keys if (cubin := section.cubin(*key)) is not None}
        return cls(kernel=kernel, symbol=section.symbol, origin=section.origin, cubins=cubins)


def pack(arch: Arch, kernels: Sequence[KernelCubins]) -> bytes:
    """Make an archive's bytes, which are equal for equal input in any order."""
    body = _Body()
    sections = {}
    for packed in sorted(kernels, key=lambda packed: packed.kernel):
        sections[packed.kernel] = body.put(orjson.dumps(_section(packed, body)))
    index = orjson.dumps({"arch": str(arch), "kernels": sections})
    return b"".join(
        [HEADER.pack(MAGIC, SCHEMA, len(index), hashlib.sha256(index).digest()), index, *body.parts]
    )


class _Body:
    """Parts after the index. Offsets count from the index's end, because its length depends on them."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._length = 0

    def put(self, data: bytes, dictionary: bytes = b"", *, level: int = 9) -> list[Any]:
        """Add a part and return its place in the form of the index."""
        strategy = zlib.Z_DEFAULT_STRATEGY
        packer = zlib.compressobj(level, zlib.DEFLATED, zlib.MAX_WBITS, 9, strategy, dictionary)
        part = packer.compress(data) + packer.flush()
        place = [self._length, len(part), len(data), hashlib.sha256(data).hexdigest()]
        self.parts.append(part)
        self._length += len(part)
        return place


def _section(packed: KernelCubins, body: _Body) -> dict[str, Any]:
    """Add a kernel's cubins and return its section."""
    # The cubin of middle size resembles most others. The order and this choice depend on the bytes alone.
    distinct = sorted(set(packed.cubins.values()), key=lambda cubin: (len(cubin), cubin))
    distinct[:0] = [distinct.pop(len(distinct) // 2)] if distinct else []
    number = {cubin: place for place, cubin in enumerate(distinct)}
    keys = sorted(packed.cubins)
    hints = sorted({hints for hints, _ in keys})
    return {
        "symbol": packed.symbol,
        "source_hash": packed.origin.source_hash,
        "files": dict(sorted(packed.origin.files.items())),
        "values": dict(sorted(packed.origin.values.items())),
        "complete": packed.origin.complete,
        "cuda_tile": packed.origin.cuda_tile,
        "tileiras": packed.origin.tileiras,
        "hints": [dict(pairs) for pairs in hints],
        "blocks": [
            # Reading any other block reads the first too, and a first launch waits for it: not compressed.
            body.put(cubin, distinct[0][:WINDOW]) if place else body.put(cubin, level=0)
            for place, cubin in enumerate(distinct)
        ],
        "cubins": [[hints.index(key[0]), key[1], number[packed.cubins[key]]] for key in keys],
    }
