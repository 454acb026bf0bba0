"""Tile code of attention_decode: one block's part of a sequence's keys, and the sum over the parts.

Memory-bound: each key and value is read once, for all query heads that share it. `splits` blocks read one
sequence's share of a KV head (flash decoding, Dao et al., 2023). The last of them to arrive combines what all
left in the workspace, so that one launch does it all: CUDA graphs replay it, and a sweep times the whole.

Nothing releases or acquires: a release would make each step of the loop wait for its loads. So what a block
leaves says of itself that it is there. The workspace is zero between launches, and no number in it is stored
as zero bits; who combines reads until there are none, and sets all back to zero.

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

_TOGETHER = 4
"""Parts that are read at once."""

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


def _write(
    out: Any, lse: Any, seq: Any, head: Any, group: Any, at: Any, result: Any, log2_total: Any
) -> None:
    """Store the `at`-th part of a group's results, and the log-sums with the first."""
    dims, rows = result.shape
    first, last = head * group, head * group + group
    tile = result.astype(out.dtype).reshape((1, dims, rows))
    ct.store(out.slice(1, first, last), (seq, at, 0), tile, order=(0, 2, 1), allow_tma=False)
    if at == 0:
        ct.store(lse.slice(1, first, last), (seq, 0), log2_total * _LN_2, allow_tma=False)


def _leave(scratch: Any, place: Any, tile: Any) -> None:
    """Store float32 so that none of it is zero bits."""
    bits = ct.bitcast(tile, ct.int32)
    bits = ct.where(bits == 0, _MINUS_ZERO, bits)
    order, scope = ct.MemoryOrder.RELAXED, ct.MemoryScope.DEVICE
    ct.store(scratch, (place,), bits, allow_tma=False, memory_order=order, memory_scope=scope)


def _found(scratch: Any, place: Any, size: Any) -> Any:
    """The bits that another block left; zeros where it has not yet."""
    return ct.load(
        scratch, (place,), (size,), check_bounds=False, allow_tma=False,
        memory_order=ct.MemoryOrder.RELAXED, memory_scope=ct.MemoryScope.DEVICE,
    )  # fmt: skip


def _combined(scratch: Any, results: Any, sums: Any, stride: Any, active: Any, piece: Any) -> Any:
    """A piece of the result and of the log-sums of all keys; sets the piece of each part back to zero.

    All have stored, in the order of their programs, before they counted: what is not seen yet is on its way.
    """
    most, total = ct.full((piece,), _NOTHING, ct.float32), ct.zeros((piece,), ct.float32)
    result = ct.zeros((piece,), ct.float32)
    missing = 1
    # Relaxed loads of one place would be moved out of this loop (tileiras 13.4); these stay, since what they
    # read depends on the inner loop's count. Acquiring ones would wait for each other.
    while missing > 0:
        most, total = ct.full((piece,), _NOTHING, ct.float32), ct.zeros((piece,), ct.float32)
        result, unseen = ct.zeros((piece,), ct.float32), ct.zeros((piece,), ct.int32)
        for first in range(0, active, _TOGETHER):
            values, logs, larger = (), (), most
            for each in ct.static_iter(range(_TOGETHER)):
                part, counts = ct.minimum(first + each, active - 1), first + each < active
                bits = _found(scratch, results + part * stride, piece)
                log_bits = _found(scratch, sums + part, piece)
                unseen = unseen + ct.where((bits == 0) | (log_bits == 0), 1, 0)
                # The last stands for those behind it, which count as 0: times a weight of 0, inf would not.
                value = ct.where(counts, ct.bitcast(bits, ct.float32), 0.0)
                log2_part = ct.where(counts, ct.bitcast(log_bits, ct.float32), -math.inf)
                values, logs = (*values, value), (*logs, log2_part)  # type: ignore[assignment]  # grow while compiling
                larger = ct.maximum(larger, log2_part)
            shrink = ct.exp2(most - larger)
            total, result = total * shrink, result * shrink
            for each in ct.static_iter(range(_TOGETHER)):
                weight = ct.exp2(logs[each] - larger)
                total = total + weight
                result = result + values[each] * weight
            most = larger
        missing = ct.sum(unseen)
    for part in range(active):
        ct.store(scratch, (results + part * stride,), ct.zeros((piece,), ct.int32), allow_tma=False)
    return result / ct.where(total > 0, total, 1.0), most + ct.log2(total)


@ct.kernel
def attention_decode_kernel(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, block_table, seq_lens, out, lse, scratch, scale, window,
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
        state = most, total, acc
        # One loop, also for those tiles that the window or the sequence's end cuts: each further place that
        # loads would take a share of the shared memory in which loads run ahead.
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
        if splits == 1:  # noqa: SIM114 - decided while compiling, and the rest is left out
            _write(out, lse, seq, head, group, 0, result, log2_total)
        elif active == 1:
            _write(out, lse, seq, head, group, 0, result, log2_total)
        else:
            pair = seq * kv_heads + head
            piece = min(PIECE, head_dim * rows)
            pieces, dims = head_dim * rows // piece, piece // rows
            mine, parts = pair * splits, ct.num_blocks(0)
            sums = parts * pieces  # log-sums lie behind all results, and the counters behind those
            counter = (sums + parts) * piece + pair
            _leave(scratch, mine + split, result.reshape((head_dim * rows,)))
            _leave(scratch, sums + mine + split, ct.broadcast_to(log2_total, (dims, rows)).reshape((piece,)))
            arrived = ct.atomic_add(
                scratch, counter, 1, memory_order=ct.MemoryOrder.RELAXED, memory_scope=ct.MemoryScope.DEVICE
            )
            if arrived == active - 1:
                for at in range(pieces):
                    combined, logs = _combined(
                        scratch, mine * pieces + at, sums + mine, pieces, active, piece
                    )
                    combined = combined.reshape((dims, rows))
                    logs = ct.extract(logs, (0,), (rows,)).reshape((1, rows))
                    _write(out, lse, seq, head, group, at, combined, logs)
                for part in range(active):
                    ct.store(scratch, (sums + mine + part,), ct.zeros((piece,), ct.int32), allow_tma=False)
                ct.scatter(scratch, counter, 0)
