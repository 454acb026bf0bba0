"""The contents of a launch's tensors: saved, restored and compared, so that a search changes none of them.

A tensor without contents (on the device "meta") is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aot_tune.declare.comparison import bits, chunks

TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 2e-3,
    torch.float16: 5e-3,
    torch.bfloat16: 2e-2,
}
"""How far outputs of two configs may be apart, as a fraction of the largest expected value: they add in
another order, and float32 products may run in tf32. Narrower floating-point types have `NARROW`."""

NARROW = 0.13
"""The tolerance of eight-bit and narrower floating-point types: two steps of their three mantissa bits."""

Places = tuple[int, ...]
"""Where a tensor lies in a launch's arguments: its position, and below it those in lists."""


def tensors_of(args: Sequence[Any]) -> dict[Places, torch.Tensor]:
    """All tensors with contents among arguments, those in lists too, by their place."""
    return dict(_tensors(args, ()))


def _tensors(args: Sequence[Any], above: Places) -> Iterator[tuple[Places, torch.Tensor]]:
    for at, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            if not arg.is_meta:
                yield (*above, at), arg
        elif isinstance(arg, list | tuple):
            yield from _tensors(arg, (*above, at))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The tensors that a kernel changes: what they held before a launch, and what the first config left."""

    before: Mapping[Places, torch.Tensor]
    """Their contents before the launch."""

    after: Mapping[Places, torch.Tensor]
    """Their contents after it: what every other config has to compute too."""

    def restore(self, args: Sequence[Any]) -> None:
        """Give the changed tensors of a launch's arguments what they held before.

        A tensor whose shape varies with the config is left as `args_fn` made it.
        """
        for place, tensor in tensors_of(args).items():
            held = self.before.get(place)
            if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype:
                tensor.copy_(held)

    def difference(self, args: Sequence[Any], names: Sequence[str]) -> str | None:
        """What a config computed otherwise than the first, in words; None where it is the same.

        Args:
            args: The arguments after the launch.
            names: The kernel's parameters.
        """
        tensors = tensors_of(args)
        for place, expected in self.after.items():
            tensor = tensors.get(place)
            if tensor is None or tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                continue
            off = distance(tensor, expected)
            if off > tolerance(expected.dtype):
                return (
                    f"{names[place[0]]} differs from the first config's by {off:.3g} of its largest value; "
                    f"at most {tolerance(expected.dtype):g} is allowed for {expected.dtype}"
                )
        return None


def saved(args: Sequence[Any]) -> dict[Places, torch.Tensor]:
    """Copies of all tensors; on the host where the GPU's memory is too small."""
    return {place: _copy(tensor) for place, tensor in tensors_of(args).items()}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.detach().clone()
    except torch.OutOfMemoryError:
        return tensor.detach().to("cpu", copy=True)


def observed(before: Mapping[Places, torch.Tensor], args: Sequence[Any]) -> Memory:
    """Find which tensors a launch changed.

    Args:
        before: Copies of all tensors from before the launch.
        args: Its arguments, after it.
    """
    tensors = tensors_of(args)
    changed = {
        place: held for place, held in before.items() if not _same(held, tensors[place].to(held.device))
    }
    return Memory(before=changed, after={place: _copy(tensors[place]) for place in changed})


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits(one), bits(other)) if one.numel() else True


def tolerance(dtype: torch.dtype) -> float:
    """The tolerance of a dtype; 0 for whole numbers, which must be equal."""
    return TOLERANCES.get(dtype, NARROW) if dtype.is_floating_point else 0.0


def distance(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a fraction of the largest expected value; infinite where one alone is NaN."""
    if _same(tensor, expected.to(tensor.device)):
        return 0.0
    if not expected.dtype.is_floating_point:
        return float("inf")
    wide = torch.float64 if expected.dtype == torch.float64 else torch.float32
    largest = most = 0.0
    for part, right in zip(chunks(tensor), chunks(expected.to(tensor.device)), strict=True):
        one, other = part.to(wide), right.to(wide)
        if bool((one.isfinite() != other.isfinite()).any()) or bool((one.isnan() != other.isnan()).any()):
            return float("inf")
        finite = other.isfinite()
        largest = max(largest, float(torch.where(finite, other.abs(), 0.0).max()))
        most = max(most, float(torch.where(finite, (one - other).abs(), 0.0).max()))
    return most / largest if largest else (float("inf") if most else 0.0)
