"""What `linear` takes and refuses, by name. Knows no kernel."""

from __future__ import annotations

import torch

from aot_tune.errors import LaunchError
from aot_tune.kernels import activations
from aot_tune.kernels.arguments import check_apart, check_dtype, check_rank, check_shape, check_sizes
from aot_tune.kernels.rows import as_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> None:
    """Refuse what cannot be launched, by name; `linear` itself only sees whether all is plainly fine."""
    check_dtype("linear", "x", x, *DTYPES)
    check_rank("linear", "weight", weight, "N K")
    check_dtype("linear", "weight", weight, x.dtype)
    n, k = weight.shape
    if x.dim() == 0 or x.shape[-1] != k:
        raise LaunchError(
            f"linear: x has shape {tuple(x.shape)}; weight of shape {(n, k)} asks for (..., {k})"
        )
    if k == 0:
        raise LaunchError("linear: x has no columns; there is nothing to sum")
    if activation is not None:
        activations.check_activation("linear", activation, *activations.NAMES)
    if bias is not None:
        check_dtype("linear", "bias", bias, x.dtype)
        check_shape("linear", "bias", bias, (n,), f"weight of {n} rows")
    check_sizes("linear", x=as_matrix("x", x), weight=weight, **({} if bias is None else {"bias": bias}))


def written_rows(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`out` as rows, checked against arguments that are."""
    shape, others = (*x.shape[:-1], weight.shape[0]), (x, weight) if bias is None else (x, weight, bias)
    fine = (
        isinstance(out, torch.Tensor)
        and out.shape == shape
        and out.dtype == x.dtype
        and out.device == x.device
        and out.is_contiguous()
        and (out.data_ptr() not in [other.data_ptr() for other in others] or not out.numel())
    )
    if not fine:
        check_dtype("linear", "out", out, x.dtype)
        check_shape("linear", "out", out, shape, "the product")
        if out.numel():
            check_sizes("linear", x=as_matrix("x", x), out=as_matrix("out", out))
            check_apart("linear", "out", out, **dict(zip(("x", "weight", "bias"), others, strict=False)))
    return out if out.dim() == 2 or not out.numel() else as_matrix("out", out)


def as_matrix(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A vector is one row."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else as_rows("linear", name, tensor)
