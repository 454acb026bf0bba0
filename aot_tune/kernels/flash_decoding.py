"""Tile code of attention_decode: one block's part of a sequence's keys, and the sum over the parts.

Memory-bound: each key and value is read once, for all query heads that share it. `splits` blocks read one
sequence's share of a KV head (flash decoding, Dao et al., 2023). The last of them to arrive combines what all
left in the workspace, so that one launch does it all: CUDA graphs replay it, and a sweep times the whole.

The keys, not the queries, are the rows of the matrix products: a group of 4 to 8 queries would leave most of
a tile of 64 rows empty. So the tiles of queries, scores and sums stand upright, a column a query.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2)

_NOTHING = -1e30
"""The largest score of no keys: a number, so that its difference to itself is 0."""


def _page(cache: Any, block_table: Any, seq: Any, slot: Any, part: Any, head: Any, shape: Any) -> Any:
    page = ct.load(block_table, (seq, slot), (1, 1), padding_mode=ct.PaddingMode.ZERO).item()
    return ct.load(cache, (_inside(cache, page), part, head, 0), shape).reshape((shape[1], shape[3]))


def _inside(cache: Any, page: Any) -> Any:
    # A tile may reach over pages that its sequence does not have, whose numbers in the table may be anything.
    return ct.minimum(ct.maximum(page, 0), cache.shape[0] - 1)


def _pages(
    cache: Any, block_table: Any, seq: Any, tile: Any, head: Any,
    page_size: Any, head_dim: Any, tile_n: Any, gather: Any,
) -> Any:  # fmt: skip
    """The `tile`-th `tile_n` keys or values of a sequence, as (tile_n, head_dim)."""
    if tile_n <= page_size:
        slot, part = tile * tile_n // page_size, tile * tile_n % page_size // tile_n
        return _page(cache, block_table, seq, slot, part, head, (1, tile_n, 1, head_dim))
    count = tile_n // page_size
    if gather:
        zero = ct.PaddingMode.ZERO
        pages = ct.load(block_table, (seq, tile), (1, count), padding_mode=zero).reshape((count,))
        where = (_inside(cache, pages), ct.Slice(0, page_size), ct.Slice(head, 1), ct.Slice(0, head_dim))
        return ct.load_advanced_indexing(cache, where, padding_mode=zero).reshape((tile_n, head_dim))
    slot, shape = tile * count, (1, page_size, 1, head_dim)
    first = _page(cache, block_table, seq, slot, 0, head, shape)
    pair = ct.cat((first, _page(cache, block_table, seq, slot + 1, 0, head, shape)), 0)
    if count == 2:
        return pair
    first = _page(cache, block_table, seq, slot + 2, 0, head, shape)
    return ct.cat((pair, ct.cat((first, _page(cache, block_table, seq, slot + 3, 0, head, shape)), 0)), 0)


def _attend(
    state: Any, q: Any, k: Any, v: Any, scale: Any, at: Any, begin: Any, end: Any, ragged: Any
) -> Any:
    """Add a tile of keys and values, the first at position `at`, to the running softmax (Milakov, 2018)."""
    most, total, acc = state
    scores = ct.mma(k, q, ct.zeros((k.shape[0], q.shape[1]), ct.float32)) * scale
    if ragged:  # what lies outside of `begin` to `end` may be NaN, which a weight of 0 would not take away
        position = (at + ct.arange(k.shape[0], dtype=ct.int32)).reshape((k.shape[0], 1))
        attended = (position >= begin) & (position < end)
        scores = ct.where(attended, scores, -math.inf)
        v = ct.where(attended, v, ct.zeros(v.shape, v.dtype))
    larger = ct.maximum(most, ct.max(scores, axis=0, keepdims=True))
    weights, shrink = ct.exp2(scores - larger), ct.exp2(most - larger)
    # Summed over its rows once, at the end: a sum across warps at each step would wait for them.
    total = total * shrink + weights
    acc = ct.mma(v.transpose(), weights.astype(v.dtype), acc * shrink)
    return larger, total, acc


def _write(out: Any, lse: Any, seq: Any, head: Any, group: Any, result: Any, log2_total: Any) -> None:
    head_dim, rows = result.shape
    first, last = head * group, head * group + group
    tile = result.astype(out.dtype).reshape((1, head_dim, rows))
    ct.store(out.slice(1, first, last), (seq, 0, 0), tile, order=(0, 2, 1), allow_tma=False)
    ct.store(lse.slice(1, first, last), (seq, 0), log2_total * _LN_2, allow_tma=False)


@ct.kernel
def attention_decode_kernel(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, block_table, seq_lens, out, lse, partials, counters, scale, window,
    group: ct.Constant[int], rows: ct.Constant[int], head_dim: ct.Constant[int], page_size: ct.Constant[int],
    splits: ct.Constant[int], tile_n: ct.Constant[int], gather: ct.Constant[bool],
):  # fmt: skip
    """Attend with the `group` queries of one KV head of one sequence to one of `splits` parts of its keys."""
    block, kv_heads = ct.bid(0), k_cache.shape[2]
    # Heads go fastest: what they read lies side by side.
    head, split, seq = block % kv_heads, block // kv_heads % splits, block // (kv_heads * splits)
    length = ct.load(seq_lens, (seq,), (1,)).item()
    begin = ct.maximum(length - window, 0)
    first_tile = begin // tile_n
    tiles = ct.cdiv(length, tile_n) - first_tile
    share = ct.maximum(ct.cdiv(tiles, splits), 1)
    active = ct.maximum(ct.cdiv(tiles, share), 1)  # with no keys at all one block writes the zeros
    if split < active:
        zero = ct.PaddingMode.ZERO
        queries = ct.load(
            q.slice(1, head * group, head * group + group), (seq, 0, 0), (1, head_dim, rows),
            order=(0, 2, 1), padding_mode=zero, allow_tma=False,
        ).reshape((head_dim, rows))  # fmt: skip
        log2_scale = scale * _LOG2_E
        most = ct.full((1, rows), _NOTHING, ct.float32)
        total = ct.zeros((tile_n, rows), ct.float32)
        acc = ct.zeros((head_dim, rows), ct.float32)
        first = first_tile + split * share
        last = ct.minimum(first + share, first_tile + tiles)
        # Whole tiles in the loop; those that the window or the sequence's end cuts before and behind it.
        whole_first = ct.maximum(first, ct.cdiv(begin, tile_n))
        whole_last = ct.minimum(last, length // tile_n)
        behind = ct.maximum(whole_first, whole_last)
        state = most, total, acc
        if first < whole_first:
            k = _pages(k_cache, block_table, seq, first, head, page_size, head_dim, tile_n, gather)
            v = _pages(v_cache, block_table, seq, first, head, page_size, head_dim, tile_n, gather)
            state = _attend(state, queries, k, v, log2_scale, first * tile_n, begin, length, True)
        for tile in range(whole_first, whole_last):
            k = _pages(k_cache, block_table, seq, tile, head, page_size, head_dim, tile_n, gather)
            v = _pages(v_cache, block_table, seq, tile, head, page_size, head_dim, tile_n, gather)
            state = _attend(state, queries, k, v, log2_scale, tile * tile_n, begin, length, False)
        if behind < last:
            k = _pages(k_cache, block_table, seq, behind, head, page_size, head_dim, tile_n, gather)
            v = _pages(v_cache, block_table, seq, behind, head, page_size, head_dim, tile_n, gather)
            state = _attend(state, queries, k, v, log2_scale, behind * tile_n, begin, length, True)
        most, total, acc = state
        sums = ct.sum(total, axis=0, keepdims=True)
        result = acc / ct.where(sums > 0, sums, 1.0)
        log2_total = most + ct.log2(sums)
        if splits == 1:  # noqa: SIM114 - decided while compiling, and the rest is left out
            _write(out, lse, seq, head, group, result, log2_total)
        elif active == 1:
            _write(out, lse, seq, head, group, result, log2_total)
        else:
            pair = seq * kv_heads + head
            mine, sums_at = pair * splits, ct.num_blocks(0) * head_dim  # the sums lie behind all results
            ct.store(partials, (mine + split,), result.reshape((head_dim * rows,)), allow_tma=False)
            ct.store(partials, (sums_at + mine + split,), log2_total.reshape((rows,)), allow_tma=False)
            # Releases what was stored, acquires what the others stored; the order is atomic_add's own.
            if ct.atomic_add(counters, pair, 1) == active - 1:
                ct.scatter(counters, pair, 0)
                most = ct.full((1, rows), _NOTHING, ct.float32)
                sums = ct.zeros((1, rows), ct.float32)
                result = ct.zeros((head_dim, rows), ct.float32)
                for part in range(mine, mine + active):
                    found = ct.load(partials, (part,), (head_dim * rows,), allow_tma=False)
                    found_sum = ct.load(partials, (sums_at + part,), (rows,), allow_tma=False)
                    log2_part = found_sum.reshape((1, rows))
                    larger = ct.maximum(most, log2_part)
                    weight, shrink = ct.exp2(log2_part - larger), ct.exp2(most - larger)
                    sums = sums * shrink + weight
                    result = result * shrink + found.reshape((head_dim, rows)) * weight
                    most = larger
                _write(out, lse, seq, head, group, result / sums, most + ct.log2(sums))
