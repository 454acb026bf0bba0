"""Check the arguments of host functions; errors name the argument and what to pass. Imports no kernel."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from aot_tune.errors import LaunchError
from aot_tune.kernels.host.overlap import share

LARGEST_INDEX = 2**31 - 1
"""Largest size or stride that a kernel takes: narrow-sizes (README).

Addresses are computed in 64 bits, so a tensor may have more elements than this.
"""

_ALIGNED = 16
"""Divisor of the strides made here, elements: of any dtype they fill a multiple of 16 bytes, which
cuTile compiles apart from other strides."""


def check_rank(kernel: str, name: str, tensor: torch.Tensor, shape: str) -> None:
    """Refuse anything but a tensor of as many dimensions as `shape` names, ``"tokens heads head_dim"``.

    Raises:
        LaunchError: It names the argument and the shape to pass; so do the other checks here.
    """
    rank = len(shape.split())
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != rank:
        found = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        raise LaunchError(f"{kernel}: {name} is {found}; pass a tensor of shape ({', '.join(shape.split())})")


def check_shape(kernel: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], reason: str) -> None:
    """Refuse a tensor of another shape than `shape`; `reason` names the argument that asks for it."""
    if getattr(tensor, "shape", None) != shape:
        if not isinstance(tensor, torch.Tensor):
            raise LaunchError(f"{kernel}: {name} is {named(tensor)}; pass a tensor of shape {shape}")
        raise LaunchError(f"{kernel}: {name} has shape {tuple(tensor.shape)}; {reason} asks for {shape}")


def check_dtype(kernel: str, name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Refuse anything but a tensor of a dtype among `allowed`."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in allowed:
        found = _plain(tensor.dtype) if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        raise LaunchError(
            f"{kernel}: {name} is {found}; pass {' or '.join(map(_plain, allowed))} ({name}.to(...) converts)"
        )


def number(kernel: str, name: str, value: float) -> float:
    """Return a number as a Python float, since a kernel takes none of NumPy's; refuse anything else."""
    if type(value) is float:
        return value
    if not isinstance(value, Real):
        raise LaunchError(f"{kernel}: {name} is {named(value)}; pass a number")
    try:
        return float(value)
    except OverflowError:
        raise LaunchError(f"{kernel}: {name} is {named(value)}; pass a number that a float holds") from None


def check_flag(kernel: str, name: str, value: bool) -> None:
    """Refuse anything but True and False: a kernel is compiled for each of them."""
    if value is not True and value is not False:
        raise LaunchError(f"{kernel}: {name} is {named(value)}; pass True or False")


def check_window(kernel: str, window: int | None) -> None:
    """Refuse a sliding window that is neither a number of keys nor None."""
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise LaunchError(
            f"{kernel}: window is {named(window)}; pass an int of 1 or more, the number of keys that a query "
            "sees, its own included, or None for all keys"
        )


def indexable(kernel: str, **tensors: torch.Tensor) -> list[torch.Tensor]:
    """Refuse tensors on different devices, and sizes and strides that a kernel cannot index with.

    Also refuses a view whose memory holds the numbers with the opposite sign, as ``x.conj().imag`` does. A
    stride along a dimension of size 1 may have any size, since nothing is indexed with it.

    Returns:
        The tensors in order: each itself or, where such a stride is too large, a view with a smaller one. The
        original stride would be cut to 32 bits like any other and might become negative, but kernels are
        compiled for strides that are not.
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
            f"most {LARGEST_INDEX}, if need be by several calls: the kernel holds them in 32 bits"
        )
    return counted


def _without_unused_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with a smaller stride where one is too large along a dimension of size 1.

    The compiler may assume of the smaller stride what it may of the original one, that it is aligned and that
    no elements overlap: it leads past all elements or, where that is too far, equals the largest stride of
    the other dimensions.
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
    """Return the address of a tensor's first element; 0 on "meta" and for subclasses of Tensor."""
    return tensor.data_ptr() if type(tensor) in PLAIN_TENSORS else 0


PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Types that a launch takes; the memory of other subclasses is not known."""


def check_apart(kernel: str, name: str, written: torch.Tensor, **others: torch.Tensor) -> None:
    """Refuse a written argument that shares memory with another: kernels are compiled for arrays apart.

    A tensor without a known address passes here; the launch refuses it.
    """
    start = address(written)
    if not start:
        return
    most = written.untyped_storage().nbytes()
    for other, tensor in others.items():
        distance = (tensor.data_ptr() if type(tensor) in PLAIN_TENSORS else 0) - start
        if (
            distance < most
            and -distance < tensor.untyped_storage().nbytes()  # usually false, and the costly test is spared
            and share(distance, *_layout(written), *_layout(tensor))
        ):
            raise LaunchError(f"{kernel}: {name} and {other} share memory; pass another tensor as {name}")


def check_reach(kernel: str, dim: int, remedy: str, **tensors: torch.Tensor) -> None:
    """Refuse tensors whose size times stride at `dim` exceeds 32 bits: narrow-offsets (README).

    Kernels that slice an array at any place along `dim` need it.

    Args:
        kernel: The name of the host function, for the error.
        dim: The dimension that is sliced.
        remedy: The end of the error: what to pass instead.
        tensors: The tensors by the names of their arguments.
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
    """Name a value in an error: a number or string as it prints, anything else by its type.

    Printing a tensor would wait for the GPU.
    """
    return repr(value)[:80] if isinstance(value, str | int | float) else f"a {type(value).__name__}"


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
