"""Tile code of a dense product of two matrices: the order of the tiles, and the sums of a tile over K.

A tile has `tile_m` rows and `tile_n` columns, plus `more` further columns, or further rows if `swapped`: 80
to 192 in all, while a tile of cuTile has a power of two. They cost one more instruction a step, and they fill
the GPU where tiles of a power of two would leave a third of the multiprocessors idle, or of the last rows
empty.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

_NEVER_SO_MANY = 30
"""Binary logarithm of a bound on the tiles along each side of a product."""


def place(tile: Any, height: Any, tile_m: Any, tiles_n: Any, group: Any) -> Any:
    """Return the first row of the `tile`-th tile of a product of `height` rows, and its column index."""
    m, n = order(tile, ct.cdiv(height, tile_m), tiles_n, group)
    return first_row(m, tile_m, height), n


def order(tile: Any, tiles_m: Any, tiles_n: Any, group: Any) -> Any:
    """Return the index down and the index along of the `tile`-th of `tiles_m` x `tiles_n` tiles.

    Tiles are taken down a `group` of rows of tiles before along it, to keep L2 warm (Triton's matrix
    multiplication tutorial).
    """
    first = tile // (group * tiles_n) * group
    rows = min(tiles_m - first, group)
    index = tile % (group * tiles_n)
    return first + index % rows, index // rows


def first_row(m: Any, tile_m: Any, height: Any) -> Any:
    """Return the first row of the `m`-th tile down.

    Rows outside are slow to load: with 43 of 64 outside, a step took 1.4 times as long on an H200. So a last
    tile of fewer rows begins earlier; it shares rows with the tile before, and both store equal results. A
    product of fewer rows than one tile cannot do so and loads rows outside.
    """
    return max(min(m * tile_m, height - tile_m), 0)


def rows_from(a: Any, first: Any, step: Any, tile_m: Any, tile_k: Any) -> Any:
    """Load (tile_m, tile_k) of A, (M, K), from row `first` on: the `step`-th `tile_k` columns."""
    view = a.tiled_view((tile_m, tile_k), padding_mode=ct.PaddingMode.ZERO, traversal_steps=(1, tile_k))
    return view.load((first, step)).astype(operand(a))


def columns(
    b: Any, step: Any, n: Any, tile_k: Any, width: Any, spacing: Any, by_rows: Any, swapped: Any
) -> Any:
    """Load (tile_k, width) of B, from column `n` * `spacing` on; the transpose of it if `swapped`.

    Args:
        b: (K, N), or (N, K) if `by_rows`.
        step: Index of the step along K.
        n: The first column, in units of `spacing`.
        tile_k: Rows of the tile.
        width: Columns of the tile.
        spacing: Columns in a unit of `n`.
        by_rows: Whether `b` is (N, K), as linear layers store a weight.
        swapped: As for `multiply_add`.
    """
    zero = ct.PaddingMode.ZERO
    if by_rows:
        if width == spacing:
            tile = ct.load(b, (n, step), (width, tile_k), padding_mode=zero)
        else:
            view = b.tiled_view((width, tile_k), padding_mode=zero, traversal_steps=(spacing, tile_k))
            tile = view.load((n, step))
        # Converted before it is transposed: a transposed tile would be converted to tf32 in registers.
        tile = tile.astype(operand(b))
        if swapped:
            return tile
        return tile.transpose()
    if width == spacing:
        tile = ct.load(b, (step, n), (tile_k, width), padding_mode=zero)
    else:
        view = b.tiled_view((tile_k, width), padding_mode=zero, traversal_steps=(tile_k, spacing))
        tile = view.load((step, n))
    tile = tile.astype(operand(b))
    if swapped:
        return tile.transpose()
    return tile


def operand(array: Any) -> Any:
    """Return the dtype that the matrix units multiply: tf32 for float32, else the array's own."""
    if array.dtype == ct.float32:
        return ct.tfloat32
    return array.dtype


def multiply_add(x: Any, y: Any, sums: Any, swapped: Any, fast: Any = False) -> Any:
    """Add ``x @ y`` to `sums`; if `swapped`, add its transpose, `sums` and `y` being transposed already.

    The matrix units of sm90 and sm100 take 64 rows or more. With few tokens the weight supplies the 64 rows.

    `fast` is for 8-bit floats only. The fp8 unit of sm90 keeps only 14 bits of its sums. Without `fast` the
    compiler takes the sums out after every 128 columns and adds them in float32 (as CUTLASS does, and
    torch._scaled_mm by default).
    """
    if swapped:
        return ct.mma(y, x.transpose(), sums, use_fast_acc=fast)
    return ct.mma(x, y, sums, use_fast_acc=fast)


def unknown_zeros(shape: Any, index: Any) -> Any:
    """Return float32 zeros that the compiler cannot identify; `index` is any from 0 to 2^30 - 1."""
    return ct.full(shape, index >> _NEVER_SO_MANY, ct.int32).astype(ct.float32)


def one_sum(
    a: Any, b: Any, m: Any, n: Any, tile_m: Any, tile_n: Any, tile_k: Any, by_rows: Any, swapped: Any,
    peeled: Any,
) -> Any:  # fmt: skip
    """Sum a tile without further columns or rows in float32, its first row `m`; transposed if `swapped`.

    A loop that begins with known zeros rarely pipelines: zero-start (README). There are two ways out. If
    `peeled` is 1, the first step is before the loop; its operands then have shared memory of their own,
    and the second step waits for the first. If it is 0, the sums begin with zeros that the compiler does not
    know. That pipelines too where a warpgroup has 64 rows of the tile, and the loop has all of the memory;
    with 128 rows each product is waited for.
    """
    if peeled:
        x = rows_from(a, m, 0, tile_m, tile_k)
        y = columns(b, 0, n, tile_k, tile_n, tile_n, by_rows, swapped)
        sums = multiply_add(x, y, turned(ct.zeros((tile_m, tile_n), ct.float32), swapped), swapped)
    else:
        sums = turned(unknown_zeros((tile_m, tile_n), n), swapped)
    for step in range(peeled, ct.cdiv(a.shape[1], tile_k)):
        x = rows_from(a, m, step, tile_m, tile_k)
        y = columns(b, step, n, tile_k, tile_n, tile_n, by_rows, swapped)
        sums = multiply_add(x, y, sums, swapped)
    return sums


def two_sums(a: Any, b: Any, m: Any, n: Any, tile: Any, by_rows: Any, swapped: Any) -> Any:
    """Sum the `n`-th tile along with first row `m` in float32, and its further columns.

    If `swapped`, the second sums are those of its further rows, and both are transposed.

    Args:
        a: (M, K).
        b: (K, N), or (N, K) if `by_rows`.
        m: The tile's first row.
        n: Its index along the columns.
        tile: tile_m, tile_n, more and tile_k. `more` divides tile_n, unless `swapped`.
        by_rows: As for `columns`.
        swapped: As for `multiply_add`.
    """
    tile_m, tile_n, more, tile_k = tile
    wide = turned(ct.zeros((tile_m, tile_n), ct.float32), swapped)
    narrow = ct.zeros((tile_n if swapped else tile_m, more), ct.float32)
    wide, narrow = _with_step(a, b, m, n, 0, tile, by_rows, swapped, wide, narrow)
    for step in range(1, ct.cdiv(a.shape[1], tile_k)):
        wide, narrow = _with_step(a, b, m, n, step, tile, by_rows, swapped, wide, narrow)
    return wide, narrow


def _with_step(
    a: Any, b: Any, m: Any, n: Any, step: Any, tile: Any, by_rows: Any, swapped: Any, wide: Any, narrow: Any
) -> Any:
    """Add a step along K to both sums of a tile."""
    tile_m, tile_n, more, tile_k = tile
    x = rows_from(a, m, step, tile_m, tile_k)
    if swapped:
        z = rows_from(a, m + tile_m, step, more, tile_k)
        y = columns(b, step, n, tile_k, tile_n, tile_n, by_rows, True)
        return multiply_add(x, y, wide, True), multiply_add(z, y, narrow, True)
    first, further = first_and_more(n, tile_n, more)
    y = columns(b, step, first, tile_k, tile_n, more, by_rows, False)
    z = columns(b, step, further, tile_k, more, more, by_rows, False)
    return multiply_add(x, y, wide, False), multiply_add(x, z, narrow, False)


def first_and_more(n: Any, tile_n: Any, more: Any) -> Any:
    """Return the first columns of both parts of the `n`-th tile along, in units of `more` columns."""
    first = n * ((tile_n + more) // more)
    return first, first + tile_n // more


def turned(tile: Any, swapped: Any) -> Any:
    """Turn a tile of the product into the layout of the sums, or back: transpose it if `swapped`."""
    if swapped:
        return tile.transpose()
    return tile


def store(c: Any, m: Any, n: Any, tile: Any, spacing: Any) -> None:
    """Store a tile whose first row is `m` and whose first column is `n` * `spacing`."""
    c.tiled_view(tile.shape, traversal_steps=(1, spacing)).store((m, n), tile)
