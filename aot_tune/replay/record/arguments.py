"""A launch's arguments as plain values, and arguments like them, made in another process.

Of a tensor go its shape, strides, dtype and the place of its start; its contents only where they are whole
numbers, which may be indices. Other contents are zeros: where a kernel writes does not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aot_tune.errors import NotRecordableError

MOST_CONTENTS = 64 << 20
"""The largest tensor whose contents are handed on, bytes. A larger one of whole numbers is no index, but
quantised weights."""

ALIGNMENT = 512
"""The alignment of torch's allocations, bytes: how far a tensor starts beyond it is kept."""


def described(args: Sequence[Any], contents: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Arguments as values that JSON holds.

    Args:
        args: A launch's arguments.
        contents: Takes a copy of each tensor of whole numbers, on the host, by its key.

    Raises:
        NotRecordableError: An argument is no tensor, number, text or list of these.
    """
    return [_described(arg, contents) for arg in args]


def _described(arg: Any, contents: dict[str, torch.Tensor]) -> dict[str, Any]:
    if isinstance(arg, torch.Tensor):
        return _tensor(arg, contents)
    if isinstance(arg, list | tuple):
        return {"list" if isinstance(arg, list) else "tuple": described(arg, contents)}
    if arg is None or type(arg) in (bool, int, float, str):
        return {"value": arg}
    raise NotRecordableError(f"an argument is a {type(arg).__name__}, which no other process can be given")


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
    """Arguments like those that were `described`. What was one tensor is one tensor again."""
    made: dict[str, torch.Tensor] = {}
    return tuple(_rebuilt(arg, contents, device, made) for arg in args)


def _rebuilt(
    arg: Mapping[str, Any],
    contents: Mapping[str, torch.Tensor],
    device: torch.device,
    made: dict[str, torch.Tensor],
) -> Any:
    if "value" in arg:
        return arg["value"]
    if "tensor" in arg:
        key = arg["same"]
        if key not in made:
            made[key] = _like(arg["tensor"], contents.get(key), device)
        return made[key]
    (kind, parts), *_ = arg.items()
    built = [_rebuilt(part, contents, device, made) for part in parts]
    return built if kind == "list" else tuple(built)


def _like(facts: Mapping[str, Any], held: torch.Tensor | None, device: torch.device) -> torch.Tensor:
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
