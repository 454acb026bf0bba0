"""Factors of a product whose rows the copy engine cannot load, copied to where it can. Knows no kernel.

It loads rows that start at multiples of 16 bytes. Of any others cuTile loads an element at a time, which
takes several times as long, and so does compiling it.
"""

from __future__ import annotations

import math

import torch

from aot_tune.kernels.host.arguments import LARGEST_INDEX, PLAIN_TENSORS, address

ROW_BYTES = 16
"""What rows start at a multiple of (CUDA C++ Programming Guide, "Tensor Memory Access")."""


def padded(factor: torch.Tensor) -> torch.Tensor:
    """The factor, or where its rows are not loaded well a copy of it, each row padded to 16 bytes.

    Args:
        factor: (..., rows, columns), any strides. Where they are 1 along rows, columns are what is padded.

    Returns:
        A tensor of the same shape and values. A copy lies by rows where neither of the last strides was 1.
        What no launch takes is returned as it is, and so is a factor whose copy no kernel could index.
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
    """A copy of (..., rows, columns), each row padded to 16 bytes."""
    room = torch.empty((*rows.shape[:-1], padded_width(rows)), dtype=rows.dtype, device=rows.device)
    return room[..., : rows.shape[-1]].copy_(rows)


def padded_width(rows: torch.Tensor) -> int:
    """Columns of (..., rows, columns), rounded up to 16 bytes."""
    step = ROW_BYTES // rows.element_size()
    return -(-rows.shape[-1] // step) * step
