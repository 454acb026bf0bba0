"""Describe a launch's arguments as plain values, and make arguments like them in another process.

A tensor is described by its shape, strides, dtype and the offset of its start. Its contents are sent only
where they are whole numbers, which may be indices. Other contents are zeros: where a kernel writes does not
depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aot_tune.errors import NotRecordableError

MOST_CONTENTS = 64 << 20
"""Largest tensor whose contents are sent, bytes. A larger tensor of whole numbers holds quantised weights."""

ALIGNMENT = 512
"""Alignment of torch's allocations, bytes. A tensor's offset from it is kept."""


def described(args: Sequence[Any], contents: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Describe arguments as values that JSON holds.

    Args:
        args: A launch's arguments.
        contents: Receives a copy of each tensor of whole numbers, on the host, by its key.

    Raises:
        NotRecordableError: An argument is not a tensor, number, text or list of these.
    """
    return [_described(arg, contents) for arg in args]


def _described(arg: Any, contents: dict[str, torch.Tensor]) -> dict[str, Any]:
    if isinstance(arg, torch.Tensor):
        return _tensor(arg, contents)
    if isinstance(arg, list | tuple):
        return {"list" if isinstance(arg, list) else "tuple": described(arg, contents)}
    if arg is None or type(arg) in (bool, int, float, str):
        return {"value": arg}
    raise NotRecordableError(
        f"an argument is a {type(arg).__name__}, which cannot be sent to another process"
    )


def _tensor(tensor: torch.Tensor, contents: dict[str, torch.Tensor]) -> dict[str, Any]:
    facts = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "beyond": tensor.data_ptr() % ALIGNMENT,
    }
    key = f"{tensor.data_ptr()} {facts}"
    whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    if whole and key not in contents and tensor.numel() * tensor.element_size() <= MOST_CONTENTS:
        contents[key] = tensor.detach().to("cpu", copy=True)
    return {"tensor": facts, "same": key}


def rebuilt(
    args: Sequence[Mapping[str, Any]], contents: Mapping[str, torch.Tensor], device: torch.device
) -> tuple[Any, ...]:
    """Make arguments like those that were `described`. Arguments that shared a tensor share one again."""
    tensors: dict[str, torch.Tensor] = {}
    return tuple(_rebuilt(arg, contents, device, tensors) for arg in args)


def _rebuilt(
    arg: Mapping[str, Any],
    contents: Mapping[str, torch.Tensor],
    device: torch.device,
    tensors: dict[str, torch.Tensor],
) -> Any:
    if "value" in arg:
        return arg["value"]
    if "tensor" in arg:
        key = arg["same"]
        if key not in tensors:
            tensors[key] = _like(arg["tensor"], contents.get(key), device)
        return tensors[key]
    (kind, parts), *_ = arg.items()
    items = [_rebuilt(part, contents, device, tensors) for part in parts]
    return items if kind == "list" else tuple(items)


def _like(facts: Mapping[str, Any], held: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Make a tensor from its description, with the contents `held`; zeros where None."""
    dtype, shape, strides = getattr(torch, facts["dtype"]), facts["shape"], facts["strides"]
    beyond = facts["beyond"] // dtype.itemsize
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    elements = beyond + (reach if all(shape) else 0)
    # As bytes: not every dtype can be filled with zeros.
    memory = torch.zeros(max(1, elements) * dtype.itemsize, dtype=torch.uint8, device=device).view(dtype)
    tensor = memory.as_strided(shape, strides, beyond)
    if held is not None and held.numel():
        tensor.copy_(held.to(device))
    return tensor
