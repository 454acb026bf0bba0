"""What the shipped host functions refuse, each with one error that names the argument. Knows no kernel."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from aot_tune.errors import LaunchError
from aot_tune.kernels.host.overlap import share

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
    if getattr(tensor, "shape", None) != shape:
        if not isinstance(tensor, torch.Tensor):
            raise LaunchError(f"{kernel}: {name} is {named(tensor)}; pass a tensor of shape {shape}")
        raise LaunchError(f"{kernel}: {name} has shape {tuple(tensor.shape)}; {reason} asks for {shape}")


def check_dtype(kernel: str, name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Refuse a tensor of a dtype that is not among `allowed`."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in allowed:
        found = _plain(tensor.dtype) if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        raise LaunchError(
            f"{kernel}: {name} is {found}; pass {' or '.join(map(_plain, allowed))} ({name}.to(...) converts)"
        )


def number(kernel: str, name: str, value: float) -> float:
    """The number as a float, NumPy's too, which kernels do not take; refuse what is none."""
    if type(value) is float:
        return value
    if not isinstance(value, Real):
        raise LaunchError(f"{kernel}: {name} is {named(value)}; pass a number")
    try:
        return float(value)
    except OverflowError:
        raise LaunchError(f"{kernel}: {name} is {named(value)}; pass a number that a float holds") from None


def check_flag(kernel: str, name: str, value: bool) -> None:
    """Refuse what is neither True nor False: a kernel is compiled for one of them."""
    if value is not True and value is not False:
        raise LaunchError(f"{kernel}: {name} is {named(value)}; pass True or False")


def check_window(kernel: str, window: int | None) -> None:
    """Refuse a sliding window that is no number of keys, or None."""
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise LaunchError(
            f"{kernel}: window is {named(window)}; pass 1 or more, an int that counts the own key, or None "
            "for all keys"
        )


def indexable(kernel: str, **tensors: torch.Tensor) -> list[torch.Tensor]:
    """Refuse tensors on different devices, and sizes and strides that a kernel cannot index with.

    Refuses as well a view whose memory holds the numbers with the other sign, as ``x.conj().imag`` does.
    Strides of dimensions of size 1 may be as large as they like: nothing is indexed with them.

    Returns:
        The tensors in order: themselves, or where such a stride is too large, views that have a small one. As
        it is it would be cut like any other, to what may be negative, and the compiler is told that none is.
    """
    device, counted = None, []
    for name, tensor in tensors.items():
        if device is not None and tensor.device != device:
            raise LaunchError(f"{kernel}: {name} is on {tensor.device}, not on {device}; move it there")
        device = tensor.device
        if tensor.is_neg():
            raise LaunchError(
                f"{kernel}: {name} is a view that negates what its memory holds; pass {name}.resolve_neg()"
            )
        # No size is larger than the number of elements.
        if not 0 < tensor.numel() <= LARGEST_INDEX or max((0, *tensor.stride())) > LARGEST_INDEX:
            tensor = _made_indexable(kernel, name, tensor)
        counted.append(tensor)
    return counted


def _made_indexable(kernel: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    counted = tensor
    if max(tensor.stride(), default=0) > LARGEST_INDEX:
        counted = _without_unused_strides(tensor)
    if max((*counted.shape, *counted.stride()), default=0) > LARGEST_INDEX:
        raise LaunchError(
            f"{kernel}: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; keep each at "
            f"most {LARGEST_INDEX}, in several calls if need be: the kernel counts in 32 bits"
        )
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


def address(tensor: torch.Tensor) -> int:
    """Where a tensor starts; 0 where none is known: on "meta", and of subclasses, which no launch takes."""
    return tensor.data_ptr() if type(tensor) in PLAIN_TENSORS else 0


PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Types that a launch takes; of subclasses it is not known what lies in their memory."""


def check_apart(kernel: str, name: str, written: torch.Tensor, **others: torch.Tensor) -> None:
    """Refuse a written argument that shares memory with another: the compiler is told that none overlap.

    Tensors whose memory is not known are left to the launch, which says so.
    """
    start = address(written)
    if not start:
        return
    most = written.untyped_storage().nbytes()
    for other, tensor in others.items():
        distance = (tensor.data_ptr() if type(tensor) in PLAIN_TENSORS else 0) - start
        if (
            distance < most
            and -distance < tensor.untyped_storage().nbytes()  # mostly one lies farther away
            and share(distance, *_layout(written), *_layout(tensor))
        ):
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


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), tensor.element_size()


def named(value: object) -> str:
    """Numbers and words; of anything else its type: to print a tensor waits for the GPU."""
    return repr(value)[:80] if isinstance(value, str | int | float) else f"a {type(value).__name__}"


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
