"""Tile code of layer_norm: hold rows in registers, compute mean and variance, write the norm."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from aot_tune.kernels.rows.rows import load_part, load_parts, store_part


@ct.kernel
def layer_norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, out, eps,
    height: ct.Constant[int], width: ct.Constant[int], parts: ct.Constant[int], inside: ct.Constant[int],
    has_bias: ct.Constant[bool], persistent: ct.Constant[bool], ahead: ct.Constant[int],
):  # fmt: skip
    """Normalise `height` rows at a time, each in `parts` of `width`; without a bias, `bias` is any number.

    A persistent block takes rows until none is left and holds weight and bias in registers. Other blocks load
    them `ahead` parts before the part that they write: the compiler moves no load before a store, which
    might write to the same place.
    """
    shape = height, width, parts, inside
    read = weight, bias, has_bias
    if persistent:
        held = _weight_and_bias(read, ((), ()), parts, shape)
        for block in range(ct.bid(0), ct.cdiv(x.shape[0], height), ct.num_blocks(0)):
            _write(out, block, _moments(x, block, eps, shape), read, held, shape, parts)
    else:
        moments = _moments(x, ct.bid(0), eps, shape)
        _write(out, ct.bid(0), moments, read, ((), ()), shape, ahead)


def _moments(x: Any, block: Any, eps: Any, shape: Any) -> Any:
    """Return the rows of a block, their means and the inverses of their standard deviations."""
    height, width, parts, inside = shape
    rows = load_parts(_rows(x, block, height), (0,), (height, width), parts, inside, ct.PaddingMode.ZERO)
    total, squares = ct.zeros((height, width), ct.float32), ct.zeros((height, width), ct.float32)
    for part in ct.static_iter(range(parts)):
        total = total + rows[part].astype(ct.float32)
    mean = ct.sum(total, axis=1, keepdims=True) / x.shape[1]
    # The variance is taken about the mean: the mean of the squares minus the square of the mean would lose
    # all digits where the mean is large.
    for part in ct.static_iter(range(parts)):
        centred = rows[part].astype(ct.float32) - mean
        if part >= inside:
            here = part * width + ct.arange(width, dtype=ct.int32) < x.shape[1]
            centred = ct.where(here, centred, 0.0)
        squares = squares + centred * centred
    variance = ct.sum(squares, axis=1, keepdims=True) / x.shape[1]
    return rows, mean, ct.rsqrt(variance + eps)


def _rows(array: Any, block: Any, height: Any) -> Any:
    """Slice a block's rows. A last block of fewer rows begins earlier; rows of two blocks get equal results.

    So no block has to check the bounds of its loads: checked-load-branch (README).
    """
    first = block * height
    if height > 1:
        first = ct.maximum(ct.minimum(first, array.shape[0] - height), 0)
    end = ct.minimum(first + height, array.shape[0])
    # narrow-offsets (README): the start is multiplied with the stride in the width given here, 64 bits.
    return array.slice(0, ct.astype(first, ct.int64), ct.astype(end, ct.int64))


def _weight_and_bias(read: Any, held: Any, count: Any, shape: Any) -> Any:
    """Load the first `count` parts of weight and bias; parts that are `held` are not read again."""
    _, width, parts, inside = shape
    (weight, bias, has_bias), (scales, shifts) = read, held
    for part in ct.static_iter(range(len(scales), min(count, parts))):
        scales = (*scales, load_part(weight, (part,), (width,), part < inside, ct.PaddingMode.ZERO))
        if has_bias:
            shifts = (*shifts, load_part(bias, (part,), (width,), part < inside, ct.PaddingMode.ZERO))
    return scales, shifts


def _write(out: Any, block: Any, moments: Any, read: Any, held: Any, shape: Any, ahead: Any) -> None:
    rows, mean, norm = moments
    height, _, parts, inside = shape
    written = _rows(out, block, height)
    for part in ct.static_iter(range(parts)):
        held = _weight_and_bias(read, held, part + ahead, shape)
        scales, shifts = held
        normed = (rows[part].astype(ct.float32) - mean) * norm * scales[part].astype(ct.float32)
        if len(shifts) > 0:
            normed = normed + shifts[part].astype(ct.float32)
        store_part(written, (0, part), normed.astype(out.dtype), part < inside)
