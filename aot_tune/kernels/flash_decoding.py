"""Tile code of attention_decode: one block's part of a sequence's keys, and the sum over the parts.

Memory-bound: each key and value is read once, for all query heads that share it. `splits` blocks read one
sequence's share of a KV head (flash decoding, Dao et al., 2023), tell each other what they found in memory of
the stream, and each combines a slice of the result: so that one launch does it all, which CUDA graphs replay
and a sweep times whole. They wait for each other, as the blocks of row_groups.py do and as safely.

Nothing releases or acquires: a release would make each step of the loop wait for its loads. So what a block
leaves says of itself that it is there. The workspace is zero between launches, and no number in it is stored
as zero bits; who combines reads until there are none, and sets back to zero what nobody else reads.

The keys, not the queries, are the rows of the matrix products: a group of 4 to 8 queries would leave most of
a tile of 64 rows empty. So the tiles of queries, scores and sums stand upright, a column a query.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct

from aot_tune.kernels.attention_decode_space import PIECE

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2)

_NOTHING = -1e30
"""The largest score of no keys: a number, so that its difference to itself is 0."""

_NEVER_SO_MANY = 20
"""Elements that a block waits for are fewer than 2 to this power."""

_MINUS_ZERO = -(2**31)
"""The bits of -0.0, as int32."""


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


def _write(out: Any, lse: Any, place: Any, group: Any, at: Any, result: Any, log2_total: Any) -> None:
    """Store the `at`-th part of a group's results, and the log-sums with the first."""
    (seq, head), (dims, rows) = place, result.shape
    first, last = head * group, head * group + group
    tile = result.astype(out.dtype).reshape((1, dims, rows))
    ct.store(out.slice(1, first, last), (seq, at, 0), tile, order=(0, 2, 1), allow_tma=False)
    if at == 0:
        ct.store(lse.slice(1, first, last), (seq, 0), log2_total * _LN_2, allow_tma=False)


# What the blocks of a sequence tell each other --------------------------------------------------


def _leave(scratch: Any, index: Any, tile: Any) -> None:
    """Store float32 so that none of it is zero bits."""
    bits = ct.bitcast(tile, ct.int32)
    bits = ct.where(bits == 0, _MINUS_ZERO, bits)
    order, scope = ct.MemoryOrder.RELAXED, ct.MemoryScope.DEVICE
    ct.store(scratch, index, bits, allow_tma=False, memory_order=order, memory_scope=scope)


def _found(scratch: Any, index: Any, shape: Any) -> Any:
    """The bits that other blocks left; zeros where they have not yet."""
    return ct.load(
        scratch, index, shape, check_bounds=False, allow_tma=False,
        memory_order=ct.MemoryOrder.RELAXED, memory_scope=ct.MemoryScope.DEVICE,
    )  # fmt: skip


def _combined(scratch: Any, pair: Any, values: Any, logs: Any, shape: Any) -> Any:
    """A slice of the result and of the log-sums of all keys: what every part left of it, set back to zero.

    `values` and `logs` are the columns, in tiles of `shape`, that nobody else reads.
    """
    missing = 1
    while missing > 0:
        # Always 0, which the compiler cannot know: it would move a relaxed load of one place out of the loop
        # (tileiras 13.4), and acquiring ones would wait for each other.
        none = missing >> _NEVER_SO_MANY
        bits = _found(scratch, (pair, values + none), shape)
        log_bits = _found(scratch, (pair, logs + none), shape)
        missing = ct.sum(ct.where((bits == 0) | (log_bits == 0), 1, 0))
    # Read once more: what leaves a loop lies so among the threads that its sums take four times as long.
    none = missing >> _NEVER_SO_MANY
    bits = _found(scratch, (pair, values + none), shape)
    log_bits = _found(scratch, (pair, logs + none), shape)
    ct.store(scratch, (pair, values), ct.zeros(shape, ct.int32), allow_tma=False)
    ct.store(scratch, (pair, logs), ct.zeros(shape, ct.int32), allow_tma=False)
    log2_parts = ct.bitcast(log_bits, ct.float32)
    most = ct.maximum(ct.max(log2_parts, axis=0, keepdims=True), _NOTHING)
    weights = ct.exp2(log2_parts - most)
    total = ct.sum(weights, axis=0, keepdims=True)
    result = ct.sum(ct.bitcast(bits, ct.float32) * weights, axis=0, keepdims=True)
    return result / ct.where(total > 0, total, 1.0), most + ct.log2(total)


@ct.kernel
def attention_decode_kernel(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, block_table, seq_lens, out, lse, scratch, scale, window,
    group: ct.Constant[int], rows: ct.Constant[int], head_dim: ct.Constant[int], page_size: ct.Constant[int],
    splits: ct.Constant[int], tile_n: ct.Constant[int], gather: ct.Constant[bool],
):  # fmt: skip
    """Attend with the `group` queries of one KV head of one sequence to one of `splits` parts of its keys."""
    # The splits of a pair follow each other: those that wait for each other are started together.
    split, pair, kv_heads = ct.bid(0) % splits, ct.bid(0) // splits, k_cache.shape[2]
    head, seq = pair % kv_heads, pair // kv_heads
    length = ct.load(seq_lens, (seq,), (1,)).item()
    begin = ct.maximum(length - window, 0)
    first_tile = begin // tile_n
    tiles = ct.cdiv(length, tile_n) - first_tile
    share = ct.cdiv(tiles, splits)
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
    state = most, total, acc
    # One loop, also for those tiles that the window or the sequence's end cuts: each further place that loads
    # would take a share of the shared memory in which loads run ahead.
    for tile in range(first, last):
        k = _pages(k_cache, block_table, seq, tile, head, page_size, head_dim, tile_n, gather)
        v = _pages(v_cache, block_table, seq, tile, head, page_size, head_dim, tile_n, gather)
        at = tile * tile_n
        if (at < begin) | (at + tile_n > length):
            state = _attend(state, queries, k, v, log2_scale, at, begin, length, True)
        else:
            state = _attend(state, queries, k, v, log2_scale, at, begin, length, False)
    most, total, acc = state
    sums = ct.sum(total, axis=0, keepdims=True)
    result = acc / ct.where(sums > 0, sums, 1.0)
    log2_total = most + ct.log2(sums)
    if splits == 1:
        _write(out, lse, (seq, head), group, 0, result, log2_total)
    else:
        # A part without keys leaves zeros and a log-sum of -inf, as one that holds nothing else.
        size = head_dim * rows
        _leave(scratch, (ct.bid(0), 0), result.reshape((1, size)))
        _leave(scratch, (ct.bid(0), 1), ct.broadcast_to(log2_total, (head_dim, rows)).reshape((1, size)))
        # Each of them combines its slice of every piece of the result.
        piece = max(min(PIECE // rows, head_dim), splits)
        dims, pieces = piece // splits, head_dim // piece
        for at in range(pieces):
            mine = at * splits + split
            shape = splits, dims * rows
            combined, logs = _combined(scratch, pair, mine, pieces * splits + mine, shape)
            logs = ct.extract(logs, (0, 0), (1, rows))
            _write(out, lse, (seq, head), group, mine, combined.reshape((dims, rows)), logs)
