"""Make random tensors for ``make_args``: equal seeds give equal values, device "meta" gives shapes alone."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import torch

_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "fp32": "float32",
    "f32": "float32",
    "tf32": "float32",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}
"""torch's dtype names by the short names that other libraries use."""


def has_odd_sizes(seed: int) -> bool:
    """Whether ``make_args`` should put sizes that no axis names into their other class modulo 16.

    The pages of a cache are such a size. It is true for seeds from 4 on. A sweep uses smaller seeds, so that
    a cubin compiled for one seed fits all.
    """
    return seed >= 4


def _generator(device: torch.device, seed: int) -> torch.Generator | None:
    return None if device.type == "meta" else torch.Generator(device).manual_seed(seed)


def randn(
    shape: Sequence[int],
    dtype: str | torch.dtype,
    device: str | torch.device,
    seed: int,
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return normally distributed values, drawn in float32 where torch cannot draw in `dtype`.

    Args:
        shape: The tensor's sizes.
        dtype: A torch dtype or its name, ``bfloat16``.
        device: A torch device; ``meta`` gives a tensor without storage.
        seed: Seed of the generator: equal seeds give equal values on one device. Give each argument its own.
        scale: Standard deviation.
    """
    device, dtype = torch.device(device), named_dtype(dtype)
    if device.type == "meta":  # torch.randn would draw nothing and import torch._dynamo for it: 1.2 s
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    direct = dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    values = torch.randn(
        tuple(shape),
        dtype=dtype if direct else torch.float32,
        device=device,
        generator=_generator(device, seed),
    )
    if scale != 1.0:
        values.mul_(scale)
    return values if direct else values.to(dtype)


def randint(
    shape: Sequence[int], low: int, high: int, dtype: str | torch.dtype, device: str | torch.device, seed: int
) -> torch.Tensor:
    """Return evenly distributed integers from `low` up to but not `high`; other arguments as in `randn`."""
    device = torch.device(device)
    return torch.randint(
        low, high, tuple(shape), dtype=named_dtype(dtype), device=device, generator=_generator(device, seed)
    )


def uniform(
    shape: Sequence[int],
    low: float,
    high: float,
    dtype: str | torch.dtype,
    device: str | torch.device,
    seed: int,
) -> torch.Tensor:
    """Return values evenly distributed between `low` and `high`; other arguments as in `randn`."""
    device, dtype = torch.device(device), named_dtype(dtype)
    values = torch.empty(tuple(shape), dtype=dtype, device=device)
    return values if device.type == "meta" else values.uniform_(low, high, generator=_generator(device, seed))


def empty(shape: Sequence[int], dtype: str | torch.dtype, device: str | torch.device) -> torch.Tensor:
    """Return a tensor of arbitrary content, for an output."""
    return torch.empty(tuple(shape), dtype=named_dtype(dtype), device=device)


def zeros(shape: Sequence[int], dtype: str | torch.dtype, device: str | torch.device) -> torch.Tensor:
    """Return a tensor of zeros, for locks, counters and sums."""
    return full(shape, 0, dtype, device)


def full(
    shape: Sequence[int], value: float, dtype: str | torch.dtype, device: str | torch.device
) -> torch.Tensor:
    """Return a tensor that holds `value` everywhere, in any dtype that torch can convert to."""
    device, dtype = torch.device(device), named_dtype(dtype)
    filled = torch.empty(tuple(shape), dtype=dtype, device=device)
    return filled if device.type == "meta" else filled.fill_(value)


def named_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype called `dtype`, such as ``bfloat16``."""
    if isinstance(dtype, torch.dtype):
        return dtype
    resolved = getattr(torch, dtype, None)
    if not isinstance(resolved, torch.dtype):
        near = " or ".join(map(repr, _near(dtype)))
        raise ValueError(f"torch has no dtype called {dtype!r}; write {near}")
    if _WITHOUT_ARITHMETIC.fullmatch(dtype):
        raise ValueError(
            f"torch cannot compute in {dtype!r}; pack such values into 'uint8', and unpack them in the kernel"
        )
    return resolved


_WITHOUT_ARITHMETIC = re.compile(r"u?int[1-7]|bit|bits\w+|q\w+")
"""Names of torch's dtypes that hold bits alone."""


def _near(dtype: str) -> list[str]:
    """Return the names that may be meant: in lower case, of a short name, all that begin so, the nearest."""
    wanted = dtype.lower()
    names = sorted({str(value)[6:] for value in vars(torch).values() if isinstance(value, torch.dtype)})
    names = [name for name in names if not _WITHOUT_ARITHMETIC.fullmatch(name)]
    if wanted in (*names, *_SHORT):
        return [_SHORT.get(wanted, wanted)]
    beginning = [name for name in names if wanted and name.startswith(wanted)]
    return beginning or difflib.get_close_matches(wanted, names, n=1) or ["bfloat16"]
