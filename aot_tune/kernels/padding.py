"""Factors of a product whose rows the copy engine cannot load, copied to where it can. Knows no kernel.

It loads rows that start at multiples of 16 bytes. Of any others cuTile loads an element at a time, which
takes several times as long, and so does compiling it.
"""

from __future__ import annotations

import math

import torch

from aot_tune.kernels.arguments import PLAIN_TENSORS, address

_ROW_BYTES = 16
"""What rows start at a multiple of (CUDA C++ Programming Guide, "Tensor Memory Access")."""


def padded(factor: torch.Tensor) -> torch.Tensor:
    """The factor, or where its rows are not loaded well a copy of it, each row padded to 16 bytes.

    Args:
        factor: (..., rows, columns), any strides. Where they are 1 along rows, columns are what is padded.

    Returns:
        A tensor of the same shape and values. A copy lies by rows where neither of the last strides was 1.
        What no launch takes is returned as it is.
    """
    *outer, row, column = factor.stride()
    by_columns = row == 1 != column and factor.shape[-2] > 1
    across, along = (column, row) if by_columns else (row, column)
    apart = math.gcd(across, *outer) * factor.element_size()
    aligned = along == 1 and (apart | address(factor)) % _ROW_BYTES == 0
    if aligned or type(factor) not in PLAIN_TENSORS:
        return factor
    return _copied(factor.mT).mT if by_columns else _copied(factor)


def _copied(rows: torch.Tensor) -> torch.Tensor:
    *outer, width = rows.shape
    step = _ROW_BYTES // rows.element_size()
    room = torch.empty((*outer, -(-width // step) * step), dtype=rows.dtype, device=rows.device)
    return room[..., :width].copy_(rows)
