"""Compare an output with its reference, and poison outputs before the launch. Launches nothing.

Before a check the outputs hold a poison that no correct result contains, by the seed NaN bits or a huge
finite number. So a kernel that writes nothing, or only a part, cannot pass with the results of an earlier
launch.
"""

from __future__ import annotations

import torch

from aot_tune.declare.declaration import Close

CHUNK = 1 << 24
"""Elements compared at a time, so that any output takes only a few temporaries of 128 MiB."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POISONS = {1: (0xFF, 0x7F), 2: (-1, 0x7F7F), 4: (-1, 0x7F7F7F7F), 8: (-1, 0x7F7F7F7F7F7F7F7F)}
"""Poisons of even and odd seeds, by the bytes of an element. All bits set are NaN in every float dtype
and -1 in ints; bytes of 0x7F are 3.4e38 in bfloat16 and float32, 1.4e306 in float64, NaN in float16 and fp8,
and 127 in int8."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's memory as integers, so that NaNs of one bit pattern are equal. Keeps all strides."""
    return tensor.view(_BITS[tensor.element_size()])


def words(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's bits in memory order, eight bytes at a time, if possible; else its `bits`.

    A GPU reads eight bytes at a time at its memory's speed, two at a time more slowly. The elements must have
    no gaps, in any order of dimensions.
    """
    whole, size = bits(tensor), tensor.element_size()
    in_memory = whole.permute(sorted(range(whole.dim()), key=whole.stride, reverse=True))
    aligned = not (tensor.numel() * size % 8 or tensor.storage_offset() * size % 8)
    if tensor.dim() and aligned and in_memory.is_contiguous():
        return in_memory.view(-1).view(torch.int64)
    return whole


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits."""
    if one.stride() == other.stride():
        left, right = words(one), words(other)
        if left.dtype == right.dtype:
            return torch.equal(left, right)
    return torch.equal(bits(one), bits(other))


def poison(tensor: torch.Tensor, seed: int) -> None:
    """Overwrite a tensor with values that no correct result contains, by whether the seed is odd."""
    if tensor.dtype == torch.bool:
        tensor.fill_(seed % 2 == 0)
        return
    memory = bits(tensor)
    memory.fill_(_POISONS[memory.element_size()][seed % 2])


def compare(name: str, output: torch.Tensor, expected: Close) -> str | None:
    """Describe the wrong elements of an output; None where all are within tolerance.

    A NaN or infinity in the output is never close to a finite value; an infinity equals the same infinity.
    """
    right = expected.value
    exact = torch.float64 in (right.dtype, output.dtype) or not output.dtype.is_floating_point
    wide = torch.float64 if exact else torch.float32
    wrong = torch.zeros((), dtype=torch.int64, device=output.device)
    for part, right_part in zip(chunks(output), chunks(right), strict=True):
        wrong += _off(part.to(wide), right_part.to(wide), expected).sum()
    count = int(wrong)
    return None if count == 0 else _explained(name, output, expected, count, wide)


def _off(part: torch.Tensor, right: torch.Tensor, expected: Close) -> torch.Tensor:
    allowed = right.abs().mul_(expected.rtol).add_(expected.atol)
    close = (part - right).abs_() <= allowed  # false wherever either is NaN
    # An infinite right value makes `allowed` infinite and would admit anything finite.
    return torch.where(right.isinf(), part != right, ~close)


def chunks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Split a tensor along its first dimension into slices of at most `CHUNK` elements, or of one row."""
    if tensor.dim() == 0:
        return [tensor]
    rows = max(1, CHUNK // max(1, tensor[0].numel() if len(tensor) else 1))
    return list(torch.split(tensor, rows))


def _explained(name: str, output: torch.Tensor, expected: Close, count: int, wide: torch.dtype) -> str:
    """Return a sentence with the count of wrong elements and the first of them."""
    first, offset = "", 0
    for part, right in zip(chunks(output), chunks(expected.value), strict=True):
        off = _off(part.to(wide), right.to(wide), expected)
        if bool(off.any()):
            place = off.nonzero()[0]
            at = tuple(int(i) for i in place)
            got, want = part[at].item(), right[at].item()
            where = (at[0] + offset, *at[1:]) if at else ()
            first = f"{name}{list(where) if where else ''} is {got:.6g} and should be {want:.6g}"
            break
        offset += len(part) if part.dim() else 0
    return (
        f"{name}: {count} of {output.numel()} elements are wrong, first {first} "
        f"(rtol {expected.rtol:g}, atol {expected.atol:g})"
    )
