"""Tile code: the maximum of a row and its sum of exponentials, chunk by chunk, for rows beyond registers.

One pass keeps a running maximum and rescales the running sum when the maximum grows (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018). Imports no kernel.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from aot_tune.kernels.rows.rows import load_part

LOG2_E = 1.4426950408889634

LOWEST = -3.4028234663852886e38
"""Lowest float32 number. With a running maximum of -inf, a chunk that is all -inf would give NaN."""


def exponential(x: Any) -> Any:
    """Compute e^x on the special function unit: relative error 1e-6 from -10 to 0; below 1.2e-38 it is 0."""
    return ct.exp2(x * LOG2_E, flush_to_zero=True)


def maximum_and_sum(array: Any, row: Any, chunk: Any, ragged: Any, lanes: Any, vector: Any) -> Any:
    """Return the maximum m of a row and the sum of e^(x - m), float32 tiles of shape (1, 1).

    Reads from the row's end to its start, so that a second pass from the start finds some of it in L2.

    Args:
        array: (rows, cols).
        row: Index of the row.
        chunk: Columns read at a time, a multiple of lanes x vector.
        ragged: Whether the last chunk is partly empty.
        lanes: Number of running maxima, one for each thread of the block: so no thread waits in the loop.
        vector: Neighbouring columns that one thread loads together.
    """
    largest = ct.full((1, lanes, 1), LOWEST, ct.float32)
    total = ct.zeros((1, lanes, 1), ct.float32)
    # The compiler gives each thread `vector` neighbours of every lanes x vector columns, so the running
    # maximum and sum of a lane stay in one thread.
    shape = chunk // lanes // vector, lanes, vector
    chunks = array.shape[1] // chunk
    if ragged:
        part = load_part(array, (row, chunks), (1, chunk), False, ct.PaddingMode.NEG_INF)
        largest, total = _joined(largest, total, part.reshape(shape))
    for step in range(chunks):
        part = load_part(array, (row, chunks - 1 - step), (1, chunk), True, ct.PaddingMode.NEG_INF)
        largest, total = _joined(largest, total, part.reshape(shape))
    top = ct.max(largest, axis=1, keepdims=True)
    total = ct.sum(total * exponential(largest - top), axis=1, keepdims=True)
    return top.reshape((1, 1)), total.reshape((1, 1))


def _joined(largest: Any, total: Any, part: Any) -> Any:
    part = part.astype(ct.float32)
    higher = ct.maximum(largest, ct.max(part, axis=(0, 2), keepdims=True))
    exponentials = ct.sum(exponential(part - higher), axis=(0, 2), keepdims=True)
    return higher, total * exponential(largest - higher) + exponentials
