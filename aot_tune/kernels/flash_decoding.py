"""Tile code of attention_decode: one block's part of a sequence's keys, and the sum over the parts.

Memory-bound: each key and value is read once, for all query heads that share it. Up to `splits` blocks read
one sequence's share of a KV head (flash decoding, Dao et al., 2023), tell each other what they found in
memory of the stream, and each combines slices of the result: so that one launch does it all, which CUDA
graphs replay and a sweep times whole. They wait for each other, as the blocks of row_groups.py do and as
safely.

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

from aot_tune.kernels.decode_workspace import width_of_slice
from aot_tune.kernels.paged_cache import gathered, keys_and_values, page_numbers
from aot_tune.kernels.sequence_parts import of_block, span

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2)

_NOTHING = -1e30
"""The largest score of no keys: a number, so that its difference to itself is 0."""

_NEVER_SO_MANY = 20
"""Elements that a block waits for are fewer than 2 to this power."""

_MINUS_ZERO = -(2**31)
"""The bits of -0.0, as int32."""


def _attend(
    state: Any, q: Any, k: Any, v: Any, scale: Any, at: Any, begin: Any, end: Any, ragged: Any
) -> Any:
    """Add a tile of keys and values, the first at position `at`, to the running softmax (Milakov, 2018)."""
    most, total, acc = state
    scores = ct.mma(k, q, ct.zeros((k.shape[0], q.shape[1]), ct.float32)) * scale
    if ragged:
        position = (at + ct.arange(k.shape[0], dtype=ct.int32)).reshape((k.shape[0], 1))
        attended = (position >= begin) & (position < end)
        scores, v = ct.where(attended, scores, -math.inf), _masked_values(v, attended)
    larger = ct.maximum(most, ct.max(scores, axis=0, keepdims=True))
    weights, shrink = ct.exp2(scores - larger), ct.exp2(most - larger)
    # Summed over its rows once, at the end: a sum across warps at each step would wait for them.
    total = total * shrink + weights
    return larger, total, _weighed(acc * shrink, weights, v)


def _masked_scores(q: Any, k: Any, attended: Any, scale: Any) -> Any:
    scores = ct.mma(k, q, ct.zeros((k.shape[0], q.shape[1]), ct.float32)) * scale
    return ct.where(attended, scores, -math.inf)


def _masked_values(v: Any, attended: Any) -> Any:
    """Zeros where nothing is attended: it may be NaN, which a weight of 0 would not take away."""
    return ct.where(attended, v, ct.zeros(v.shape, v.dtype))


def _weighed(acc: Any, weights: Any, v: Any) -> Any:
    return ct.mma(v.transpose(), weights.astype(v.dtype), acc)


def _write(out: Any, lse: Any, place: Any, group: Any, at: Any, result: Any, log2_total: Any) -> None:
    """Store the `at`-th part of a group's results, and the log-sums with the first."""
    (seq, head), (dims, rows) = place, result.shape
    first, last = head * group, head * group + group
    tile = result.astype(out.dtype).reshape((1, dims, rows))
    ct.store(out.slice(1, first, last), (seq, at, 0), tile, order=(0, 2, 1), allow_tma=False)
    if at == 0:
        ct.store(lse.slice(1, first, last), (seq, 0), log2_total * _LN_2, allow_tma=False)


def _write_slice(
    out: Any, lse: Any, place: Any, group: Any, at: Any, combined: Any, logs: Any, rows: Any
) -> None:
    tile = combined.reshape((combined.shape[1] // rows, rows))
    _write(out, lse, place, group, at, tile, ct.extract(logs, (0, 0), (1, rows)))


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


def _combined(left: Any, row: Any, parts: Any, at: Any, slices: Any, shape: Any) -> Any:
    """The `at`-th slice of the result and of the log-sums of all keys, from what every part left of it.

    What is read is set back to zero: nobody else reads it.

    Args:
        left: (parts, numbers), or more rows.
        row: The tile of rows that the parts left.
        parts: How many they are: fewer than a tile has rows, or None.
        at: Which slice.
        slices: Of a result; the log-sums lie as many behind.
        shape: Rows of a tile, and the numbers of a slice.
    """
    mine, missing = left, 1
    result, logs = ct.zeros((1, shape[1]), ct.float32), ct.zeros((1, shape[1]), ct.float32)
    there = ct.full((shape[0], 1), True, ct.bool_)
    if parts is not None:
        there = ct.arange(shape[0], dtype=ct.int32).reshape((shape[0], 1)) < parts
        mine = left.slice(0, 0, parts)
    while missing > 0:
        # Always 0, which the compiler cannot know: it would move a relaxed load of one place out of the loop
        # (tileiras 13.4), and acquiring ones would wait for each other.
        none = missing >> _NEVER_SO_MANY
        bits = _found(left, (row, at + none), shape)
        log_bits = _found(left, (row, slices + at + none), shape)
        missing = ct.sum(ct.where(there & ((bits == 0) | (log_bits == 0)), 1, 0))
        # Summed at each turn, so that nobody reads once more: tiles that leave a loop lie so among the
        # threads that their sums take four times as long.
        log2_parts, values = ct.bitcast(log_bits, ct.float32), ct.bitcast(bits, ct.float32)
        if parts is not None:
            log2_parts, values = ct.where(there, log2_parts, -math.inf), ct.where(there, values, 0.0)
        most = ct.maximum(ct.max(log2_parts, axis=0, keepdims=True), _NOTHING)
        weights = ct.exp2(log2_parts - most)
        total = ct.sum(weights, axis=0, keepdims=True)
        result = ct.sum(values * weights, axis=0, keepdims=True) / ct.where(total > 0, total, 1.0)
        logs = most + ct.log2(total)
    ct.store(mine, (row, at), ct.zeros(shape, ct.int32), allow_tma=False)
    ct.store(mine, (row, slices + at), ct.zeros(shape, ct.int32), allow_tma=False)
    return result, logs


# The kernel -------------------------------------------------------------------------------------


def _queries(q: Any, place: Any, group: Any, head_dim: Any, rows: Any) -> Any:
    """The queries of a KV head, a column each; zeros in columns that are too many."""
    seq, head = place
    return ct.load(
        q.slice(1, head * group, head * group + group), (seq, 0, 0), (1, head_dim, rows),
        order=(0, 2, 1), padding_mode=ct.PaddingMode.ZERO, allow_tma=False,
    ).reshape((head_dim, rows))  # fmt: skip


def _attend_part(
    q: Any, caches: Any, block_table: Any, place: Any, keys: Any, tiles: Any, scale: Any, sizes: Any
) -> Any:
    """The result of some tiles' keys, and the log2 of the sum of their scores' exponentials."""
    begin, end = keys
    group, rows, head_dim, page_size, tile_n, gather = sizes
    queries = _queries(q, place, group, head_dim, rows)
    most = ct.full((1, rows), _NOTHING, ct.float32)
    total = ct.zeros((tile_n, rows), ct.float32)
    acc = ct.zeros((head_dim, rows), ct.float32)
    state = most, total, acc
    # One loop, also for those tiles that the window or the sequence's end cuts: each further place that loads
    # would take a share of the shared memory in which loads run ahead.
    for tile in range(tiles[0], tiles[1]):
        k, v = keys_and_values(caches, block_table, place, tile, page_size, head_dim, tile_n, gather)
        at = tile * tile_n
        if (at < begin) | (at + tile_n > end):
            state = _attend(state, queries, k, v, scale, at, begin, end, True)
        else:
            state = _attend(state, queries, k, v, scale, at, begin, end, False)
    most, total, acc = state
    sums = ct.sum(total, axis=0, keepdims=True)
    return acc / ct.where(sums > 0, sums, 1.0), most + ct.log2(sums)


def _attend_window(
    q: Any, caches: Any, block_table: Any, place: Any, keys: Any, scale: Any, sizes: Any
) -> Any:
    """As `_attend_part`, of a window of two tiles at most: all is asked for before any is computed with.

    Three tiles hold it, the first of which begins with the window's first page.
    """
    (seq, head), (begin, end) = place, keys
    group, rows, head_dim, page_size, tile_n, _ = sizes
    count, most = tile_n // page_size, block_table.shape[1]
    # A sequence without keys has a page too, and a tile behind the last is the last once more: all masked.
    first = ct.minimum(begin // page_size, most - 1)
    behind = ct.minimum(ct.maximum(ct.cdiv(end, page_size), first + 1), most)
    own, last = block_table.slice(1, first, behind), ct.cdiv(behind - first, count) - 1
    pages = page_numbers(own, seq, 0, count)
    pages_1 = page_numbers(own, seq, ct.minimum(1, last), count)
    pages_2 = page_numbers(own, seq, ct.minimum(2, last), count)
    queries = _queries(q, place, group, head_dim, rows)
    k, v = gathered(caches, pages, head, page_size, head_dim)
    k_1, v_1 = gathered(caches, pages_1, head, page_size, head_dim)
    k_2, v_2 = gathered(caches, pages_2, head, page_size, head_dim)
    at = first * page_size + ct.arange(tile_n, dtype=ct.int32).reshape((tile_n, 1))
    here = (at >= begin) & (at < end)
    here_1 = (at + tile_n >= begin) & (at + tile_n < end)
    here_2 = (at + 2 * tile_n >= begin) & (at + 2 * tile_n < end)
    scores = _masked_scores(queries, k, here, scale)
    scores_1 = _masked_scores(queries, k_1, here_1, scale)
    scores_2 = _masked_scores(queries, k_2, here_2, scale)
    most = ct.max(ct.maximum(ct.maximum(scores, scores_1), scores_2), axis=0, keepdims=True)
    most = ct.maximum(most, _NOTHING)
    weights, weights_1, weights_2 = ct.exp2(scores - most), ct.exp2(scores_1 - most), ct.exp2(scores_2 - most)
    acc = _weighed(ct.zeros((head_dim, rows), ct.float32), weights, _masked_values(v, here))
    acc = _weighed(acc, weights_1, _masked_values(v_1, here_1))
    acc = _weighed(acc, weights_2, _masked_values(v_2, here_2))
    sums = ct.sum(weights + weights_1 + weights_2, axis=0, keepdims=True)
    return acc / ct.where(sums > 0, sums, 1.0), most + ct.log2(sums)


def _block(
    q: Any, caches: Any, block_table: Any, seq_lens: Any, out: Any, lse: Any, scratch: Any, scale: Any,
    window: Any, place: Any, part: Any, parts: Any, splits: Any, sizes: Any, windowed: Any, balanced: Any,
) -> None:  # fmt: skip
    """Attend to the `part`-th of a sequence's `parts`, and combine slices of the result with the others."""
    group, rows, head_dim, _, tile_n, _ = sizes
    end = ct.load(seq_lens, (place[0],), (1,)).item()
    begin, count = 0, ct.cdiv(end, tile_n)
    if windowed:
        begin, count = span(end, window, tile_n)
    first = begin // tile_n
    tiles = first + part * count // parts, first + (part + 1) * count // parts
    result, log2_sum = _attend_part(
        q, caches, block_table, place, (begin, end), tiles, scale * _LOG2_E, sizes
    )
    if parts == 1:
        _write(out, lse, place, group, 0, result, log2_sum)
    else:
        # A part without keys leaves zeros and a log-sum of -inf, as one that holds nothing else.
        numbers, width = head_dim * rows, width_of_slice(splits, rows, head_dim, balanced)
        _leave(scratch, (ct.bid(0), 0), result.reshape((1, numbers)))
        _leave(scratch, (ct.bid(0), 1), ct.broadcast_to(log2_sum, (head_dim, rows)).reshape((1, numbers)))
        shape, slices = (splits, width), numbers // width
        if balanced:
            first = ct.bid(0) - part
            left = scratch.slice(0, first, first + splits)
            for at in range(part, slices, parts):
                combined, logs = _combined(left, 0, parts, at, slices, shape)
                _write_slice(out, lse, place, group, at, combined, logs, rows)
        else:
            for again in ct.static_iter(range(slices // splits)):
                at = again * splits + part
                combined, logs = _combined(scratch, ct.bid(0) // splits, None, at, slices, shape)
                _write_slice(out, lse, place, group, at, combined, logs, rows)


@ct.kernel
def attention_decode_kernel(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, block_table, seq_lens, out, lse, scratch, scale, window,
    group: ct.Constant[int], rows: ct.Constant[int], head_dim: ct.Constant[int], page_size: ct.Constant[int],
    windowed: ct.Constant[bool], at_once: ct.Constant[bool], sequences: ct.Constant[int],
    splits: ct.Constant[int], balanced: ct.Constant[bool],
    tile_n: ct.Constant[int], gather: ct.Constant[bool],
):  # fmt: skip
    """Attend with the `group` queries of one KV head of one sequence to a part of its keys.

    The parts of a pair follow each other: those that wait for each other are started together. Of `balanced`
    ones `sequences` are a tile that holds all.
    """
    sizes = group, rows, head_dim, page_size, tile_n, gather
    caches, kv_heads = (k_cache, v_cache), k_cache.shape[2]
    if balanced:
        seq, head, part, parts = of_block(seq_lens, q.shape[0], kv_heads, window, tile_n, splits, sequences)
        if parts > 0:
            _block(
                q, caches, block_table, seq_lens, out, lse, scratch, scale, window, (seq, head),
                part, parts, splits, sizes, windowed, True,
            )  # fmt: skip
    else:
        part, pair = ct.bid(0) % splits, ct.bid(0) // splits
        place = pair // kv_heads, pair % kv_heads
        if at_once:
            end = ct.load(seq_lens, (place[0],), (1,)).item()
            keys = ct.maximum(end - window, 0), end
            result, log2_sum = _attend_window(q, caches, block_table, place, keys, scale * _LOG2_E, sizes)
            _write(out, lse, place, group, 0, result, log2_sum)
        else:
            _block(
                q, caches, block_table, seq_lens, out, lse, scratch, scale, window, place,
                part, splits, splits, sizes, windowed, False,
            )  # fmt: skip
