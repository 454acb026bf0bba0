"""Copy factors of a product whose rows the copy engine (TMA) cannot load. Imports no kernel.

TMA loads rows that start at multiples of 16 bytes. From other rows cuTile loads one element at a time, which
takes several times as long to run and to compile.
"""

from __future__ import annotations

import math

import torch

from aot_tune.kernels.host.arguments import LARGEST_INDEX, PLAIN_TENSORS, address

ROW_BYTES = 16
"""Rows must start at multiples of this many bytes (CUDA C++ Programming Guide, "Tensor Memory Access")."""


def padded(factor: torch.Tensor) -> torch.Tensor:
    """Return the factor or, where TMA cannot load its rows, a copy with each row padded to 16 bytes.

    Args:
        factor: (..., rows, columns), any strides. If the stride along rows is 1, columns are padded instead.

    Returns:
        A tensor of the same shape and values. A copy is row-major where neither of the last strides was 1.
        Tensors that no launch takes, and factors whose copy no kernel could index, are returned unchanged.
    """
    *outer, row, column = factor.stride()
    by_columns = row == 1 and (column != 1 or factor.shape[-1] == 1) and factor.shape[-2] > 1
    across, along = (column, row) if by_columns else (row, column)
    apart = math.gcd(across, *outer) * factor.element_size()
    aligned = along == 1 and (apart | address(factor)) % ROW_BYTES == 0
    if aligned or type(factor) not in PLAIN_TENSORS:
        return factor
    rows = factor.mT if by_columns else factor
    if padded_width(rows) * math.prod(rows.shape[1:-1]) > LARGEST_INDEX:
        return factor
    copy = padded_copy(rows)
    return copy.mT if by_columns else copy


def padded_copy(rows: torch.Tensor) -> torch.Tensor:
    """Copy (..., rows, columns), each row padded to a multiple of 16 bytes."""
    room = torch.empty((*rows.shape[:-1], padded_width(rows)), dtype=rows.dtype, device=rows.device)
    return room[..., : rows.shape[-1]].copy_(rows)


def padded_width(rows: torch.Tensor) -> int:
    """Return columns of (..., rows, columns), in elements, rounded up to a multiple of 16 bytes."""
    step = ROW_BYTES // rows.element_size()
    return -(-rows.shape[-1] // step) * step
