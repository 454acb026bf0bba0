"""Tile code of rope: rotate some heads of one token in registers."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from aot_tune.kernels.rows.rows import load_part, store_part


@ct.kernel
def rope_kernel(  # type: ignore[no-untyped-def]
    q, k, cos, sin,
    interleaved: ct.Constant[bool], half: ct.Constant[int], width: ct.Constant[int],
    tile_heads: ct.Constant[int], inside: ct.Constant[bool],
    tile_kv_heads: ct.Constant[int], kv_inside: ct.Constant[bool],
    together: ct.Constant[bool],
):  # fmt: skip
    """Rotate some heads of one token a block, of queries or of keys, or all heads of both `together`.

    A tile has `width` pairs of a head: the `half` pairs that are rotated, and maybe further ones.
    """
    token, tile, anything = ct.bid(0), ct.bid(1), ct.PaddingMode.UNDETERMINED
    token_cos = load_part(cos, (token, 0), (1, width), half == width, anything).reshape((1, 1, width))
    token_sin = load_part(sin, (token, 0), (1, width), half == width, anything).reshape((1, 1, width))
    angles, q_tiles = (token_cos, token_sin), ct.cdiv(q.shape[1], tile_heads)
    q_shape, k_shape = (tile_heads, half, width, inside), (tile_kv_heads, half, width, kv_inside)
    if together:
        some_q, some_k = _load(q, token, 0, q_shape, interleaved), _load(k, token, 0, k_shape, interleaved)
        _rotate(q, token, 0, some_q, q_shape, angles, interleaved)
        _rotate(k, token, 0, some_k, k_shape, angles, interleaved)
    elif tile < q_tiles:
        some_q = _load(q, token, tile, q_shape, interleaved)
        _rotate(q, token, tile, some_q, q_shape, angles, interleaved)
    else:
        some_k = _load(k, token, tile - q_tiles, k_shape, interleaved)
        _rotate(k, token, tile - q_tiles, some_k, k_shape, angles, interleaved)


def _load(x: Any, token: Any, tile: Any, shape: Any, interleaved: Any) -> Any:
    """Load a tile of heads: as one tile where neighbours are pairs, else as its two halves."""
    heads, half, width, inside = shape
    anything = ct.PaddingMode.UNDETERMINED
    if interleaved:
        pairs = _elements(x, 0, 2 * half, half == width)
        return (load_part(pairs, (token, tile, 0), (1, heads, 2 * width), inside, anything),)
    low, high, at = _halves(x, half, half == width)
    return (
        load_part(low, (token, tile, 0), (1, heads, width), inside, anything),
        load_part(high, (token, tile, at), (1, heads, width), inside, anything),
    )


def _rotate(x: Any, token: Any, tile: Any, loaded: Any, shape: Any, angles: Any, interleaved: Any) -> None:
    heads, half, width, inside = shape
    cos, sin = angles
    if interleaved:
        # Pairs are separated inside the registers of a thread.
        pairs, one = loaded[0].astype(ct.float32).reshape((heads, width, 2)), (heads, width, 1)
        a, b = ct.extract(pairs, (0, 0, 0), one), ct.extract(pairs, (0, 0, 1), one)
        cos, sin = cos.reshape((1, width, 1)), sin.reshape((1, width, 1))
        turned = ct.cat(((a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)), 2)
        rotated = _elements(x, 0, 2 * half, half == width)
        store_part(rotated, (token, tile, 0), turned.reshape((1, heads, 2 * width)), inside)
    else:
        first, second, at = _halves(x, half, half == width)
        low, high = loaded[0].astype(ct.float32), loaded[1].astype(ct.float32)
        store_part(first, (token, tile, 0), (low * cos - high * sin).astype(x.dtype), inside)
        store_part(second, (token, tile, at), (high * cos + low * sin).astype(x.dtype), inside)


def _halves(x: Any, half: Any, whole: Any) -> Any:
    """Return the arrays of the first and the second half of each head, and the tile index of the second."""
    if whole:
        return x, x, 1
    return _elements(x, 0, half, False), _elements(x, half, 2 * half, False), 0


def _elements(x: Any, start: Any, stop: Any, whole: Any) -> Any:
    """Slice the elements of each head, or return `x` where the elements fill a `whole` tile."""
    if whole:
        return x
    return x.slice(2, ct.astype(start, ct.int64), ct.astype(stop, ct.int64))  # narrow-offsets (README)
