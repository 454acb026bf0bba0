"""What the shipped host functions refuse, each with one error that names the argument. Knows no kernel."""

from __future__ import annotations

from typing import Any

import torch

from aot_tune.errors import LaunchError

LARGEST_INDEX = 2**31 - 1
"""Sizes and strides are 32-bit numbers to a cuTile kernel; larger ones are cut silently (cuda-tile 1.7).

Addresses are computed in 64 bits, so that a tensor may well have more elements than this.
"""

_ALIGNED = 16
"""Elements: cuTile tells strides of a multiple of 16 bytes from others."""


def check_rank(kernel: str, name: str, tensor: torch.Tensor, shape: str) -> None:
    """Refuse what is no tensor with as many dimensions as `shape` names, ``"tokens heads head_dim"``."""
    rank = len(shape.split())
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != rank:
        found = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        raise LaunchError(f"{kernel}: {name} is {found}; pass a tensor of shape ({', '.join(shape.split())})")


def check_shape(kernel: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], reason: str) -> None:
    """Refuse a tensor of another shape than `shape`; `reason` says where that comes from."""
    if tensor.shape != shape:
        raise LaunchError(f"{kernel}: {name} has shape {tuple(tensor.shape)}; {reason} asks for {shape}")


def check_dtype(kernel: str, name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Refuse a tensor of a dtype that is not among `allowed`."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in allowed:
        found = _plain(tensor.dtype) if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        raise LaunchError(
            f"{kernel}: {name} is {found}; pass {' or '.join(map(_plain, allowed))} ({name}.to(...) converts)"
        )


def check_sizes(kernel: str, **tensors: torch.Tensor) -> None:
    """Refuse tensors on different devices, and sizes and strides that a kernel cannot index with."""
    for (name, tensor), counted in zip(tensors.items(), indexable(kernel, **tensors), strict=True):
        if counted is not tensor:
            raise _too_large(kernel, name, tensor)


def indexable(kernel: str, **tensors: torch.Tensor) -> list[torch.Tensor]:
    """Refuse what `check_sizes` does, but for strides of dimensions of size 1, which nothing is indexed with.

    Returns:
        The tensors in order: themselves, or where such a stride is too large, views that have a small one. As
        it is it would be cut like any other, to what may be negative, and the compiler is told that none is.
    """
    device, counted = None, []
    for name, tensor in tensors.items():
        if device is not None and tensor.device != device:
            raise LaunchError(f"{kernel}: {name} is on {tensor.device}, not on {device}; move it there")
        device = tensor.device
        if max(tensor.stride(), default=0) > LARGEST_INDEX:
            tensor = _without_unused_strides(tensor)
        if max(tensor.shape, default=0) > LARGEST_INDEX or max(tensor.stride(), default=0) > LARGEST_INDEX:
            raise _too_large(kernel, name, tensors[name])
        counted.append(tensor)
    return counted


def _without_unused_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with a smaller stride where one is too large along a dimension of size 1.

    Like the one it replaces, the smaller one may be told to be aligned and to overlap nothing: it leads past
    all elements, or where that is too far, is the largest of the other dimensions' strides.
    """
    used = [(stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    past = max((stride * size for stride, size in used), default=1)
    past = -(-past // _ALIGNED) * _ALIGNED
    small = past if past <= LARGEST_INDEX else max(used)[0]
    strides = [
        small if size == 1 and stride > LARGEST_INDEX else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return tensor.as_strided(tensor.shape, strides)


def _too_large(kernel: str, name: str, tensor: torch.Tensor) -> LaunchError:
    return LaunchError(
        f"{kernel}: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; keep each "
        f"at most {LARGEST_INDEX}, in several calls if need be: the kernel counts in 32 bits"
    )


def check_apart(kernel: str, name: str, written: torch.Tensor, **others: torch.Tensor) -> None:
    """Refuse a written argument that starts where another does: the compiler is told that none overlap."""
    for other, tensor in others.items():
        if written.data_ptr() == tensor.data_ptr():
            raise LaunchError(f"{kernel}: {name} and {other} share memory; pass another tensor as {name}")


def check_reach(kernel: str, dim: int, remedy: str, **tensors: torch.Tensor) -> None:
    """Refuse tensors that reach too far along a dimension for a kernel that begins anywhere in it.

    cuTile multiplies where a slice starts with the stride in 32 bits (cuda-tile 1.7).
    """
    for name, tensor in tensors.items():
        if tensor.shape[dim] * tensor.stride(dim) > LARGEST_INDEX:
            raise LaunchError(
                f"{kernel}: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; keep the "
                f"product of both at dimension {dim} at most {LARGEST_INDEX}: {remedy}"
            )


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
