"""Tile code: read the keys and values of a sequence from the pages of a cache. Imports no kernel.

Page numbers beyond the end of a sequence may be anything. A page that is not in the cache loads zeros, and a
page of another sequence must be masked by the caller. Page numbers are loaded one by one, as scalars, and not
through TMA: so the loading warps read them themselves, a tile ahead, without a wait. If a tile of numbers
were loaded, these warps would wait for it at each tile (with TMA), or for the computing warps (without).
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

_NARROW = 64
"""Smaller of the two head_dims. Keys of 128 numbers fill the shared memory without a latency hint."""

_SHORT, _OF_SHORT, _OF_LONG = 64, 8, 3
"""Keys of the shorter tile, and latency hints for loads of narrow keys in tiles of that length and in
longer ones: latency-sets-depth (README). With 8, shared memory would hold a single longer tile of keys."""

TILES_BETWEEN = 2
"""Tiles that hold the pages between the first and the last of a window of two tiles."""

_OF_A_PAGE = 6
"""Latency hint for loads of a page or a part of a page: latency-sets-depth (README)."""


def keys_and_values(
    caches: Any,
    numbers: Any,
    head: Any,
    tile: Any,
    page_size: Any,
    head_dim: Any,
    tile_n: Any,
    gather: Any,
) -> Any:
    """Load the `tile`-th `tile_n` keys and values of a sequence, each as (tile_n, head_dim).

    Args:
        caches: The caches of keys and of values, each (pages, page_size, kv_heads, head_dim).
        numbers: The numbers of the tile's pages, from `page_numbers`.
        head: Index of the KV head.
        tile: Index of the tile; at least one of its keys belongs to the sequence.
        page_size: Keys of a page.
        head_dim: Numbers of a key.
        tile_n: Keys of a tile: those of several pages where pages are gathered.
        gather: Whether one load gathers all pages of a tile, which sm90, sm100 and sm110 can.
    """
    k_cache, v_cache = caches
    if gather:
        count = tile_n // page_size
        pages, place = ct.zeros((count,), ct.int32), ct.arange(count, dtype=ct.int32)
        for i in ct.static_iter(range(count)):
            pages = ct.where(place == i, numbers[i], pages)
        return _gathered(caches, pages, head, page_size, head_dim)
    return (
        _joined(k_cache, numbers, tile, head, page_size, head_dim, tile_n),
        _joined(v_cache, numbers, tile, head, page_size, head_dim, tile_n),
    )


def page_numbers(block_table: Any, seq: Any, tile: Any, page_size: Any, tile_n: Any) -> Any:
    """Return the page numbers of the `tile`-th `tile_n` keys of a sequence, as scalars.

    Pages outside of the table get its first or last number: so any tile may be asked for, even one beyond the
    end of a sequence or of the table.
    """
    numbers, first = (), tile * tile_n // page_size
    for i in ct.static_iter(range(max(tile_n // page_size, 1))):
        where = seq, ct.minimum(ct.maximum(first + i, 0), block_table.shape[1] - 1)
        page = ct.load(block_table, where, (1, 1), check_bounds=False, allow_tma=False).item()
        numbers = (*numbers, page)  # type: ignore[assignment]  # grows while compiling
    return numbers


def pages_of_window(block_table: Any, keys: Any, page_size: Any) -> Any:
    """Return the positions in a table row of the first and the last page of `keys`, (begin, end).

    A sequence without keys gets a page too, all of whose keys must be masked.
    """
    (begin, end), slots = keys, block_table.shape[1]
    first = ct.minimum(begin // page_size, slots - 1)
    return first, ct.maximum(ct.minimum(ct.cdiv(end, page_size), slots) - 1, first)


def ends_of_window(first: Any, last: Any, count: Any) -> Any:
    """Return the positions of a window's first and last page, in a tile of `count`; -1 is no page."""
    place = ct.arange(count, dtype=ct.int32)
    return ct.where(place == 0, first, ct.where((place == 1) & (first < last), last, -1))


def between_ends(first: Any, tile: Any, count: Any) -> Any:
    """Return the positions of the `tile`-th `count` pages between a window's ends, also beyond the last."""
    return first + 1 + tile * count + ct.arange(count, dtype=ct.int32)


def tiles_of_window(
    caches: Any, block_table: Any, place: Any, pages: Any, page_size: Any, head_dim: Any, count: Any
) -> Any:
    """Load the keys and values of a window's `pages` in `TILES_BETWEEN` + 1 tiles, all in flight at once.

    The last tile holds the window's first and last page. A tile for which no page is left loads the first
    page, since the result of a gather wholly outside of the cache is undefined.

    Args:
        caches: As for `keys_and_values`.
        block_table: (sequences, most pages), int32.
        place: Indices of the sequence and the KV head.
        pages: Positions of the first and last page, from `pages_of_window`.
        page_size: Keys of a page.
        head_dim: Numbers of a key.
        count: Pages of a tile.
    """
    (seq, head), (first, last), numbers, tiles = place, pages, (), ()
    place_of_page = ct.arange(count, dtype=ct.int32)
    for tile in ct.static_iter(range(TILES_BETWEEN)):
        slot = between_ends(first, tile, count)
        slot = ct.where(slot < last, slot, ct.where(place_of_page == 0, first, -1))
        numbers = (*numbers, ct.gather(block_table, (seq, slot), padding_value=-1))  # type: ignore[assignment]  # grows while compiling
    slot = ends_of_window(first, last, count)
    numbers = (*numbers, ct.gather(block_table, (seq, slot), padding_value=-1))  # type: ignore[assignment]
    for tile in ct.static_iter(range(TILES_BETWEEN + 1)):
        tiles = (*tiles, _gathered(caches, numbers[tile], head, page_size, head_dim))  # type: ignore[assignment]
    return tiles


def _gathered(caches: Any, pages: Any, head: Any, page_size: Any, head_dim: Any) -> Any:
    """Gather the keys and values of one head from some pages, each as (pages * page_size, head_dim)."""
    return (
        _rows(caches[0], pages, head, page_size, head_dim),
        _rows(caches[1], pages, head, page_size, head_dim),
    )


def _rows(cache: Any, pages: Any, head: Any, page_size: Any, head_dim: Any) -> Any:
    where = (pages, ct.Slice(0, page_size), ct.Slice(head, 1), ct.Slice(0, head_dim))
    if head_dim == _NARROW:
        latency = _OF_SHORT if pages.shape[0] * page_size == _SHORT else _OF_LONG
        tile = ct.load_advanced_indexing(cache, where, padding_mode=ct.PaddingMode.ZERO, latency=latency)
    else:
        tile = ct.load_advanced_indexing(cache, where, padding_mode=ct.PaddingMode.ZERO)
    return tile.reshape((tile.shape[0] * tile.shape[1], head_dim))


def _joined(
    cache: Any, numbers: Any, tile: Any, head: Any, page_size: Any, head_dim: Any, tile_n: Any
) -> Any:
    """Load the `tile`-th `tile_n` keys or values of a sequence page by page."""
    if tile_n <= page_size:
        part = tile * tile_n % page_size // tile_n
        return _page(cache, numbers[0], part, head, (1, tile_n, 1, head_dim))
    shape = (1, page_size, 1, head_dim)
    first = _page(cache, numbers[0], 0, head, shape)
    pair = ct.cat((first, _page(cache, numbers[1], 0, head, shape)), 0)
    if tile_n // page_size == 2:
        return pair
    first = _page(cache, numbers[2], 0, head, shape)
    return ct.cat((pair, ct.cat((first, _page(cache, numbers[3], 0, head, shape)), 0)), 0)


def _page(cache: Any, page: Any, part: Any, head: Any, shape: Any) -> Any:
    # A tile joined from several pages may reach beyond the last page of its sequence.
    page = ct.minimum(ct.maximum(page, 0), cache.shape[0] - 1)
    return ct.load(cache, (page, part, head, 0), shape, latency=_OF_A_PAGE).reshape((shape[1], shape[3]))
