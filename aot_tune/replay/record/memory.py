"""Save, restore and compare the contents of a launch's tensors, so that a search changes none.

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
"""Largest difference of two configs' outputs, as a fraction of the largest expected value. Configs add in
other orders, and float32 products may run in tf32. Narrower floating-point types have `NARROW`."""

NARROW = 0.13
"""Tolerance of eight-bit and narrower floating-point types: two steps of their three mantissa bits."""

Places = tuple[int, ...]
"""Place of a tensor in a launch's arguments: its position, followed by positions in lists."""


def tensors_of(args: Sequence[Any]) -> dict[Places, torch.Tensor]:
    """Return all tensors with contents among arguments and in lists, by place."""
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
    """Contents of the tensors that a kernel changes, before and after the first config."""

    before: Mapping[Places, torch.Tensor]
    """Contents before the launch."""

    after: Mapping[Places, torch.Tensor]
    """Contents after the launch. Every other config has to compute them too."""

    def restore(self, args: Sequence[Any]) -> None:
        """Copy the contents before the launch back into the changed tensors.

        A tensor whose shape varies with the config is left as `args_fn` made it.
        """
        for place, tensor in tensors_of(args).items():
            held = self.before.get(place)
            if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype:
                tensor.copy_(held)

    def difference(self, args: Sequence[Any], names: Sequence[str]) -> str | None:
        """Return how a config's results differ from the first config's, in words; None where they do not.

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
    """Copy all tensors; to the host where the GPU's memory is too small."""
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
        args: The launch's arguments, after it.
    """
    tensors = tensors_of(args)
    changed = {
        place: held for place, held in before.items() if not _same(held, tensors[place].to(held.device))
    }
    return Memory(before=changed, after={place: _copy(tensors[place]) for place in changed})


def _same(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(bits(tensor), bits(expected)) if tensor.numel() else True


def tolerance(dtype: torch.dtype) -> float:
    """Return the tolerance of a dtype; 0 for whole numbers, which must be equal."""
    return TOLERANCES.get(dtype, NARROW) if dtype.is_floating_point else 0.0


def distance(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference / the largest expected value; infinite where only one side is NaN."""
    if _same(tensor, expected.to(tensor.device)):
        return 0.0
    if not expected.dtype.is_floating_point:
        return float("inf")
    wide = torch.float64 if expected.dtype == torch.float64 else torch.float32
    largest = most = 0.0
    for part, expected_part in zip(chunks(tensor), chunks(expected.to(tensor.device)), strict=True):
        got, want = part.to(wide), expected_part.to(wide)
        finite = want.isfinite()
        if bool((got.isfinite() != finite).any()) or bool((got.isnan() != want.isnan()).any()):
            return float("inf")
        largest = max(largest, float(torch.where(finite, want.abs(), 0.0).max()))
        most = max(most, float(torch.where(finite, (got - want).abs(), 0.0).max()))
    return most / largest if largest else (float("inf") if most else 0.0)
