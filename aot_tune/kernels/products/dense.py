"""Tile code of the dense products, matmul and linear: what a block computes, and how a tile ends.

A config computes its tiles in one of three ways. Each block computes whole tiles, one after another; or
blocks share the sums of every tile (`splits` above 1, `peeled` 1); or they share those of the last wave alone
(`splits` above 1, `peeled` 0; as in Osama et al., "Stream-K", 2023). In both of the latter the shares are
added up in the order of K, by blocks that start after all that multiply (`split_k`).

Where the last wave is shared and the last row of tiles begins earlier (`product.first_row`), the sums of a
row that a whole tile and a shared one both hold differ in their rounding, and nothing orders their stores. So
a shared tile begins earlier by whole slices alone, and those before its own rows are not stored.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from aot_tune.kernels import activations
from aot_tune.kernels.products import product, split_k

_LEAST_STEPS = 4
"""Steps of a share of a tile in the last wave, at least."""


def compute(
    a: Any, b: Any, out: Any, scratch: Any, ending: Any, linear: Any, tile: Any, order: Any, shared: Any
) -> None:
    """Compute this block's tiles of a product, accumulating in float32.

    Args:
        a: (M, K).
        b: (K, N), or (N, K) if `linear`.
        out: (M, N), the result.
        scratch: Where blocks leave shares of sums; zeros.
        ending: The bias, (N,), whether to add it, and the number of the activation; read if `linear`.
        linear: Whether the product is that of a linear layer, with a bias and an activation.
        tile: tile_m, tile_n, more and tile_k, constants; see `product`.
        order: swapped, group and peeled, constants; see `product`.
        shared: splits and slices, constants; see `split_k`.
    """
    splits, _ = shared
    if splits > 1:
        if order[2]:
            _share_every_tile(a, b, out, scratch, ending, linear, tile, order, shared)
        else:
            _share_the_last_wave(a, b, out, scratch, ending, linear, tile, order, shared)
    else:
        _take_whole_tiles(a, b, out, ending, linear, tile, order)


def _take_whole_tiles(a: Any, b: Any, out: Any, ending: Any, linear: Any, tile: Any, order: Any) -> None:
    (tile_m, tile_n, more, tile_k), (swapped, group, peeled) = tile, order
    high, wide = _extent(tile, swapped)
    tiles_m, tiles_n = ct.cdiv(a.shape[0], high), ct.cdiv(out.shape[1], wide)
    for index in range(ct.bid(0), tiles_m * tiles_n, ct.num_blocks(0)):
        m, n = product.place(index, a.shape[0], high, tiles_n, group)
        if more:
            sums, further = product.two_sums(a, b, m, n, tile, linear, swapped)
            if swapped:
                _finish(out, ending, linear, m, n, sums, tile_n, True)
                _finish(out, ending, linear, m + tile_m, n, further, tile_n, True)
            else:
                first, second = product.first_and_more(n, tile_n, more)
                _finish(out, ending, linear, m, first, sums, more, False)
                _finish(out, ending, linear, m, second, further, more, False)
        else:
            sums = product.one_sum(a, b, m, n, tile_m, tile_n, tile_k, linear, swapped, peeled)
            _finish(out, ending, linear, m, n, sums, tile_n, swapped)


def _share_every_tile(
    a: Any, b: Any, out: Any, scratch: Any, ending: Any, linear: Any, tile: Any, order: Any, shared: Any
) -> None:
    """Sum a tile over a share of K or, in the blocks after those, add up a slice of a tile."""
    (tile_m, tile_n, _, tile_k), (swapped, group, _), (splits, slices) = tile, order, shared
    tiles_m, tiles_n = ct.cdiv(a.shape[0], tile_m), ct.cdiv(out.shape[1], tile_n)
    parts, shape = tiles_m * tiles_n * splits, (tile_m, tile_n, tile_k)
    if ct.bid(0) < parts:
        m, n = product.place(ct.bid(0) // splits, a.shape[0], tile_m, tiles_n, group)
        sums = split_k.part_of_sum(a, b, m, n, ct.bid(0) % splits, splits, shape, linear, swapped)
        split_k.leave(scratch, ct.bid(0), sums)
    else:
        index, at = (ct.bid(0) - parts) // slices, (ct.bid(0) - parts) % slices
        m, n = product.place(index, a.shape[0], tile_m, tiles_n, group)
        sums = split_k.slice_of_sum(scratch, index, at, splits, splits, slices, shape, swapped)
        m, n, spacing = split_k.index_of_slice(m, n, at, slices, (tile_m, tile_n), swapped)
        _finish(out, ending, linear, m, n, sums, spacing, swapped)


def _share_the_last_wave(
    a: Any, b: Any, out: Any, scratch: Any, ending: Any, linear: Any, tile: Any, order: Any, shared: Any
) -> None:
    """Compute whole tiles and then a share of a remaining tile, or add up slices of the remaining tiles.

    The grid is (blocks, 2). Blocks of index 0 multiply, those of index 1, which begin later, add up. Tiles
    that fill the blocks are whole; the others are shared by as many blocks as there are for each, up to
    `splits`. One loop multiplies both: a second one would have registers of its own.
    """
    (tile_m, tile_n, _, tile_k), (swapped, group, _), (splits, slices) = tile, order, shared
    tiles_m, tiles_n = ct.cdiv(a.shape[0], tile_m), ct.cdiv(out.shape[1], tile_n)
    steps, blocks, shape = ct.cdiv(a.shape[1], tile_k), ct.num_blocks(0), (tile_m, tile_n, tile_k)
    left = tiles_m * tiles_n % blocks
    whole = tiles_m * tiles_n - left
    room = min(blocks, scratch.shape[0] * scratch.shape[1] // (tile_m * tile_n))
    shares = max(min(min(splits, room // max(left, 1)), steps // _LEAST_STEPS), 1)
    slice_m = tile_m if swapped else tile_m // slices
    for item in range(ct.bid(0), (whole + left * shares) * (1 - ct.bid(1)), blocks):
        part, among, unit = max(item - whole, 0), 1, 1
        if item >= whole:
            among, unit = shares, slice_m
        m, n = product.order(min(item, whole) + part // shares, tiles_m, tiles_n, group)
        m = _first_row(m, tile_m, a.shape[0], unit)
        share = part % shares
        sums = product.turned(product.unknown_zeros((tile_m, tile_n), n), swapped)
        for step in range(share * steps // among, (share + 1) * steps // among):
            x = product.rows_from(a, m, step, tile_m, tile_k)
            y = product.columns(b, step, n, tile_k, tile_n, tile_n, linear, swapped)
            sums = product.multiply_add(x, y, sums, swapped)
        if among > 1:
            split_k.leave(scratch, part, sums)
        else:
            _finish(out, ending, linear, m, n, sums, tile_n, swapped)
    for index in range(ct.bid(0), left * slices * ct.bid(1) * min(shares - 1, 1), blocks):
        m, n = product.order(whole + index // slices, tiles_m, tiles_n, group)
        at, own = index % slices, m * tile_m
        m = _first_row(m, tile_m, a.shape[0], slice_m)
        sums = split_k.slice_of_sum(scratch, index // slices, at, shares, splits, slices, shape, swapped)
        m, n, spacing = split_k.index_of_slice(m, n, at, slices, (tile_m, tile_n), swapped)
        if m >= own:
            _finish(out, ending, linear, m, n, sums, spacing, swapped)


def _first_row(m: Any, tile_m: Any, height: Any, unit: Any) -> Any:
    """Return `product.first_row` of a tile that begins a multiple of `unit` rows earlier, maybe outside."""
    own = m * tile_m
    return own - (own - product.first_row(m, tile_m, height)) // unit * unit


def _extent(tile: Any, swapped: Any) -> Any:
    """Return rows and columns of a whole tile."""
    tile_m, tile_n, more, _ = tile
    if swapped:
        return tile_m + more, tile_n
    return tile_m, tile_n + more


def _finish(
    out: Any, ending: Any, linear: Any, m: Any, n: Any, sums: Any, spacing: Any, swapped: Any
) -> None:
    """Store sums whose first column is `n` * `spacing`; if `linear`, after adding the bias and activating."""
    if linear:
        bias, biased, activation = ending
        width = sums.shape[0] if swapped else sums.shape[1]
        row = ct.zeros((width,), ct.float32)
        if biased:  # the branch is around the row alone: around the sums it would double their registers
            row = bias.tiled_view((width,), traversal_steps=(spacing,)).load((n,)).astype(ct.float32)
        sums = activations.apply(sums + product.turned(row.reshape((1, width)), swapped), activation)
    product.store(out, m, n, product.turned(sums.astype(out.dtype), swapped), spacing)
