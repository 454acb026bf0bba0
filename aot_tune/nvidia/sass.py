"""Find the inner loop of a kernel's machine code and count its instructions and waits. Pure.

Instructions are counted in the machine code itself, because the vendor's disassembler refuses some sm_90
cubins. Since Volta an instruction has 16 bytes, and its lowest nine bits are the operation. The codes of the
operations and of a branch's offset were read off the disassembly of accepted cubins. Code of another form
gives no `Loop`, and the model works without it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

_Word = tuple[int, int]
"""An instruction: its lower and upper 64 bits."""

_BYTES = 16
"""Bytes of an instruction."""
_OPERATION = 0x1FF
"""Bits of an instruction that are its operation."""
_BRANCH = 0x147  # BRA
_SELECT = frozenset({0x007, 0x008})  # SEL, FSEL
_LOCAL = frozenset({0x183, 0x187})  # LDL, STL
_WARPGROUP = 0x1C5  # WARPGROUP.ARRIVE, WARPGROUP.DEPBAR
_TENSOR = frozenset({0x1F0, 0x1F3, 0x1EA, 0x03C, 0x07A})
"""Matrix operations seen so far: HGMMA and, for 8-bit floats, QGMMA of sm_90; UTCHMMA and UTCQMMA of
sm_100 to sm_110; HMMA and QMMA of all other archs."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One iteration of the smallest loop that contains matrix operations, as one warp executes it."""

    instructions: int
    """Number of all instructions."""

    tensor_ops: int
    """Number of matrix operations."""

    selects: int
    """Number of selects; where it is large, the loop selects every accumulator again at each step."""

    local_accesses: int
    """Number of loads and stores of spilled registers."""

    waits: int
    """Number of times that the warp waits for all its matrix operations to end."""

    pipelined: bool
    """Whether matrix operations of one iteration may still run in the next."""


def inner_loop(code: bytes) -> Loop | None:
    """Find the inner loop with matrix operations; None where there is none, or the code has an unknown form.

    Args:
        code: The kernel's instructions, from `aot_tune.nvidia.cubin.machine_code`.
    """
    words = [struct.unpack_from("<QQ", code, at) for at in range(0, len(code) - _BYTES + 1, _BYTES)]
    operations = [low & _OPERATION for low, _ in words]
    tensor_at = [place for place, operation in enumerate(operations) if operation in _TENSOR]
    spans = [
        (first, last)
        for first, last in _backward_branches(words, operations)
        if any(first <= place <= last for place in tensor_at)
    ]
    if not spans:
        return None
    first, last = min(spans, key=lambda span: span[1] - span[0])
    body, inside = words[first : last + 1], operations[first : last + 1]
    left_running = [
        _allowed_to_run(word) for word, operation in zip(body, inside, strict=True) if operation == _WARPGROUP
    ]
    waits = [left for left in left_running if left is not None]
    return Loop(
        instructions=len(body),
        tensor_ops=sum(operation in _TENSOR for operation in inside),
        selects=sum(operation in _SELECT for operation in inside),
        local_accesses=sum(operation in _LOCAL for operation in inside),
        waits=sum(left == 0 for left in waits),
        pipelined=bool(waits) and min(waits) > 0,
    )


def _backward_branches(words: Sequence[_Word], operations: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (first, last) instruction of each loop, by the encoding with valid branch targets only."""
    places = [place for place, operation in enumerate(operations) if operation == _BRANCH]
    for offset_of in (_offset_since_hopper, _offset_before_hopper):
        targets = {place: (place + 1) * _BYTES + offset_of(words[place]) for place in places}
        if all(target % _BYTES == 0 and 0 <= target <= len(words) * _BYTES for target in targets.values()):
            return [
                (target // _BYTES, place) for place, target in targets.items() if target <= place * _BYTES
            ]
    return []


def _offset_since_hopper(word: _Word) -> int:
    low, high = word
    upper = _signed((high << 64 | low) >> 34, 48)
    return 4 * (upper << 8 | low >> 16 & 0xFF)


def _offset_before_hopper(word: _Word) -> int:
    low, high = word
    return _signed((high << 64 | low) >> 32, 50)


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _allowed_to_run(word: _Word) -> int | None:
    """Return how many groups of matrix operations may run on after a WARPGROUP.DEPBAR; None for an ARRIVE."""
    low, high = word
    return high >> 8 & 0x7 if low >> 47 & 1 else None
