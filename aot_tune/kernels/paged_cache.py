"""Tile code that reads a sequence's keys and values from the pages of a cache. Knows no kernel.

Of pages that a sequence does not have the numbers may be anything. One that the cache does not have loads
zeros, and one that is another's is to be masked. Nothing is computed from the numbers of gathered pages: the
warps that load would wait for those that compute, and only begin a tile when the one before it is done.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

_NARROW, _FAR = 64, 8
"""The smaller head_dim, and the latency that loads of it are said to have. Without it tiles of 64 keys are
loaded three ahead, with it six: as much as two blocks a multiprocessor have shared memory for (tileiras 13.4,
sm_90). Those of 128 numbers a key fill it anyway."""


def keys_and_values(
    caches: Any,
    block_table: Any,
    place: Any,
    tile: Any,
    page_size: Any,
    head_dim: Any,
    tile_n: Any,
    gather: Any,
) -> Any:
    """The `tile`-th `tile_n` keys and values of a sequence, each as (tile_n, head_dim).

    Args:
        caches: Of the keys and of the values, each (pages, page_size, kv_heads, head_dim).
        block_table: (sequences, most pages), int32.
        place: The sequence and the KV head.
        tile: Which; one at least of its keys is the sequence's.
        page_size: Keys of a page.
        head_dim: Of the caches.
        tile_n: Keys of a tile: several pages' where they are gathered.
        gather: Whether all pages are loaded at once, as archs from sm90 on can.
    """
    (seq, head), (k_cache, v_cache) = place, caches
    if gather:
        pages = page_numbers(block_table, seq, tile, tile_n // page_size)
        return gathered(caches, pages, head, page_size, head_dim)
    return (
        _joined(k_cache, block_table, seq, tile, head, page_size, head_dim, tile_n),
        _joined(v_cache, block_table, seq, tile, head, page_size, head_dim, tile_n),
    )


def page_numbers(block_table: Any, seq: Any, tile: Any, count: Any) -> Any:
    """The numbers of the `tile`-th `count` pages of a sequence; 0 behind the table's end."""
    shape = (1, count)
    return ct.load(block_table, (seq, tile), shape, padding_mode=ct.PaddingMode.ZERO).reshape((count,))


def gathered(caches: Any, pages: Any, head: Any, page_size: Any, head_dim: Any) -> Any:
    """The keys and the values of one head in some pages, each as (pages * page_size, head_dim)."""
    return (
        _rows(caches[0], pages, head, page_size, head_dim),
        _rows(caches[1], pages, head, page_size, head_dim),
    )


def _rows(cache: Any, pages: Any, head: Any, page_size: Any, head_dim: Any) -> Any:
    where = (pages, ct.Slice(0, page_size), ct.Slice(head, 1), ct.Slice(0, head_dim))
    if head_dim == _NARROW:
        tile = ct.load_advanced_indexing(cache, where, padding_mode=ct.PaddingMode.ZERO, latency=_FAR)
    else:
        tile = ct.load_advanced_indexing(cache, where, padding_mode=ct.PaddingMode.ZERO)
    return tile.reshape((tile.shape[0] * tile.shape[1], head_dim))


def _joined(
    cache: Any, block_table: Any, seq: Any, tile: Any, head: Any, page_size: Any, head_dim: Any, tile_n: Any
) -> Any:
    """The `tile`-th `tile_n` keys or values of a sequence, page by page."""
    if tile_n <= page_size:
        slot, part = tile * tile_n // page_size, tile * tile_n % page_size // tile_n
        return _page(cache, block_table, seq, slot, part, head, (1, tile_n, 1, head_dim))
    count = tile_n // page_size
    slot, shape = tile * count, (1, page_size, 1, head_dim)
    first = _page(cache, block_table, seq, slot, 0, head, shape)
    pair = ct.cat((first, _page(cache, block_table, seq, slot + 1, 0, head, shape)), 0)
    if count == 2:
        return pair
    first = _page(cache, block_table, seq, slot + 2, 0, head, shape)
    return ct.cat((pair, ct.cat((first, _page(cache, block_table, seq, slot + 3, 0, head, shape)), 0)), 0)


def _page(cache: Any, block_table: Any, seq: Any, slot: Any, part: Any, head: Any, shape: Any) -> Any:
    # A joined tile may reach over the pages that its sequence has, and over the table's end.
    slot = ct.minimum(slot, block_table.shape[1] - 1)
    page = ct.load(block_table, (seq, slot), (1, 1)).item()
    page = ct.minimum(ct.maximum(page, 0), cache.shape[0] - 1)
    return ct.load(cache, (page, part, head, 0), shape).reshape((shape[1], shape[3]))
