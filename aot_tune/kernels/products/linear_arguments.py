"""What `linear` takes and refuses, by name. Knows no kernel."""

from __future__ import annotations

import math

import torch

from aot_tune.errors import LaunchError
from aot_tune.kernels import activations
from aot_tune.kernels.host.arguments import check_apart, check_dtype, check_rank, check_shape, indexable
from aot_tune.kernels.rows.rows import as_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> None:
    """Refuse shapes, dtypes and activations by name; `linear` only sees whether all is plainly fine."""
    check_dtype("linear", "x", x, *DTYPES)
    check_rank("linear", "weight", weight, "N K")
    check_dtype("linear", "weight", weight, x.dtype)
    n, k = weight.shape
    if x.dim() == 0 or x.shape[-1] != k:
        raise LaunchError(
            f"linear: x has shape {tuple(x.shape)}; weight of shape {(n, k)} asks for (..., {k})"
        )
    if activation is not None:
        activations.check_activation("linear", activation, *activations.NAMES)
    if bias is not None:
        check_dtype("linear", "bias", bias, x.dtype)
        check_shape("linear", "bias", bias, (n,), f"weight of {n} rows")
    if out is not None:
        check_dtype("linear", "out", out, x.dtype)
        check_shape("linear", "out", out, (*x.shape[:-1], n), "the product")


def counted(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Arguments with strides that a kernel can index with, `x` as rows."""
    rows = as_matrix("x", x)
    if bias is None:
        rows, weight = indexable("linear", x=rows, weight=weight)
    else:
        rows, weight, bias = indexable("linear", x=rows, weight=weight, bias=bias)
    return rows, weight, bias


def written_rows(
    out: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`out` as rows, checked against arguments that are; `rows` are those of `x`."""
    m, n = rows.shape[0], weight.shape[0]
    fine = (
        isinstance(out, torch.Tensor)
        and out.shape == ((m, n) if x.dim() == 2 else (*x.shape[:-1], n))
        and out.dtype == x.dtype
        and out.device == x.device
    )
    if not fine:
        check_linear(x, weight, out=out)
    if not m * n:
        return out
    if bias is None:
        check_apart("linear", "out", out, x=x, weight=weight)
    else:
        check_apart("linear", "out", out, x=x, weight=weight, bias=bias)
    written = out if out.dim() == 2 else as_matrix("out", out)
    if fine and written.stride() == (n, 1) and not written.is_neg():
        return written
    return indexable("linear", x=rows, out=written)[1]


def as_matrix(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A vector is one row."""
    if tensor.dim() == 1:
        return tensor.unsqueeze(0)
    if tensor.shape[-1] == 0:
        return tensor.view(math.prod(tensor.shape[:-1]), 0)
    return as_rows("linear", name, tensor)
