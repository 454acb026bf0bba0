"""Tile code of attention_decode: the kernel, in which a block attends to a part of a sequence's keys.

The kernel is memory-bound: each key and value is read once, for all query heads that share it. Up to `splits`
blocks read the keys of one sequence and KV head (flash decoding, Dao et al., 2023), exchange their results in
memory of the stream (`decode_exchange`), and each combines slices of the result. So one launch does it all,
which CUDA graphs replay and a sweep times whole. The blocks wait for each other as those of `row_groups` do,
and as safely.

The keys, not the queries, are the rows of the matrix products: a group of 4 to 8 queries would leave most of
a tile of 64 rows empty. So each query is a column of the tiles of queries, scores and sums.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct

from aot_tune.kernels.decode.decode_exchange import NOTHING, asked_for, combined, leave
from aot_tune.kernels.decode.decode_workspace import MOST_APART, width_of_slice
from aot_tune.kernels.decode.paged_cache import (
    TILES_BETWEEN,
    between_ends,
    ends_of_window,
    keys_and_values,
    page_numbers,
    pages_of_window,
    tiles_of_window,
)
from aot_tune.kernels.decode.sequence_parts import part_of_block, tiles_of_part

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2)


def _attend(state: Any, scores: Any, v: Any) -> Any:
    """Add the scores and values of a tile of keys to the running softmax (Milakov and Gimelshein, 2018)."""
    most, total, acc = state
    larger = ct.maximum(most, ct.max(scores, axis=0, keepdims=True))
    weights, shrink = ct.exp2(scores - larger), ct.exp2(most - larger)
    # The rows of `total` are summed once, at the end: a sum across warps at each step would wait for them.
    total = total * shrink + weights
    return larger, total, _weighed(acc * shrink, weights, v)


def _scores(q: Any, k: Any, scale: Any) -> Any:
    return ct.mma(k, q, ct.zeros((k.shape[0], q.shape[1]), ct.float32)) * scale


def _attended(at: Any, count: Any, begin: Any, end: Any) -> Any:
    """Return which of `count` keys, the first at `at`, are from `begin` to before `end`: (count, 1)."""
    return _from_to((at + ct.arange(count, dtype=ct.int32)).reshape((count, 1)), begin, end)


def _from_to(position: Any, begin: Any, end: Any) -> Any:
    return (position >= begin) & (position < end)


def _masked_scores(scores: Any, attended: Any) -> Any:
    return ct.where(attended, scores, -math.inf)


def _masked_values(v: Any, attended: Any) -> Any:
    """Replace values that are not attended by zeros: they may be NaN, which a weight of 0 does not remove."""
    return ct.where(attended, v, ct.zeros(v.shape, v.dtype))


def _weighed(acc: Any, weights: Any, v: Any) -> Any:
    return ct.mma(v.transpose(), weights.astype(v.dtype), acc)


def _write(out: Any, lse: Any, place: Any, group: Any, at: Any, result: Any, log2_total: Any) -> None:
    """Store the `at`-th part of a group's results; the first part also stores the log-sums."""
    (seq, head), (dims, rows) = place, result.shape
    first, last = head * group, head * group + group
    tile = result.astype(out.dtype).reshape((1, dims, rows))
    ct.store(out.slice(1, first, last), (seq, at, 0), tile, order=(0, 2, 1), allow_tma=False)
    if at == 0:
        ct.store(lse.slice(1, first, last), (seq, 0), log2_total * _LN_2, allow_tma=False)


# The kernel -------------------------------------------------------------------------------------


def _queries(q: Any, place: Any, group: Any, head_dim: Any, rows: Any) -> Any:
    """Load the queries of a KV head, a column each; surplus columns are zeros."""
    seq, head = place
    return ct.load(
        q.slice(1, head * group, head * group + group), (seq, 0, 0), (1, head_dim, rows),
        order=(0, 2, 1), padding_mode=ct.PaddingMode.ZERO, allow_tma=False,
    ).reshape((head_dim, rows))  # fmt: skip


def _attend_part(
    q: Any, caches: Any, block_table: Any, place: Any, keys: Any, tiles: Any, scale: Any, sizes: Any
) -> Any:
    """Return the result for the keys of some tiles, and the log2 of the sum of their scores' exponentials."""
    begin, end = keys
    group, rows, head_dim, page_size, tile_n, gather = sizes
    queries = _queries(q, place, group, head_dim, rows)
    most = ct.full((1, rows), NOTHING, ct.float32)
    total = ct.zeros((tile_n, rows), ct.float32)
    acc = ct.zeros((head_dim, rows), ct.float32)
    state = most, total, acc
    # One loop serves all tiles, also those that the window or the sequence's end cuts: each further place
    # that loads would take a share of the shared memory in which loads run ahead. The branch in it stays:
    # half-tile-keys (README). The scores are computed before the branch: inside, the queries would be copied
    # to shared memory again for each tile.
    following = page_numbers(block_table, place[0], tiles[0], page_size, tile_n)
    for tile in range(tiles[0], tiles[1], tiles[2]):
        numbers = following
        following = page_numbers(block_table, place[0], tile + tiles[2], page_size, tile_n)
        k, v = keys_and_values(caches, numbers, place[1], tile, page_size, head_dim, tile_n, gather)
        at, scores = tile * tile_n, _scores(queries, k, scale)
        if (at < begin) | (at + tile_n > end):
            attended = _attended(at, tile_n, begin, end)
            state = _attend(state, _masked_scores(scores, attended), _masked_values(v, attended))
        else:
            state = _attend(state, scores, v)
    most, total, acc = state
    sums = ct.sum(total, axis=0, keepdims=True)
    return acc * (1.0 / ct.where(sums > 0, sums, 1.0)), most + ct.log2(sums)


def _attend_window(
    q: Any, caches: Any, block_table: Any, place: Any, keys: Any, scale: Any, sizes: Any
) -> Any:
    """Like `_attend_part`, for a window of two tiles at most: all loads are in flight before any is used.

    All keys of the pages between the first and the last are attended; values are masked only in those two.
    """
    (begin, end), (group, rows, head_dim, page_size, tile_n, _) = keys, sizes
    count, (first, last) = tile_n // page_size, pages_of_window(block_table, keys, page_size)
    attended, found = (), ()
    for tile in ct.static_iter(range(TILES_BETWEEN)):
        is_between = (between_ends(first, tile, count) < last).reshape((count, 1))
        between = ct.broadcast_to(is_between, (count, page_size))
        attended = (*attended, between.reshape((tile_n, 1)))  # type: ignore[assignment]  # grows while compiling
    position = ends_of_window(first, last, count).reshape((count, 1)) * page_size
    position = position + ct.arange(page_size, dtype=ct.int32).reshape((1, page_size))
    attended = (*attended, _from_to(position.reshape((tile_n, 1)), begin, end))  # type: ignore[assignment]
    queries = _queries(q, place, group, head_dim, rows)
    tiles = tiles_of_window(caches, block_table, place, (first, last), page_size, head_dim, count)
    largest = ct.full((tile_n, rows), NOTHING, ct.float32)
    for tile in ct.static_iter(range(TILES_BETWEEN + 1)):
        scores = _masked_scores(_scores(queries, tiles[tile][0], scale), attended[tile])
        largest, found = ct.maximum(largest, scores), (*found, scores)  # type: ignore[assignment]
    most = ct.max(largest, axis=0, keepdims=True)
    total, acc = ct.zeros((tile_n, rows), ct.float32), ct.zeros((head_dim, rows), ct.float32)
    for tile in ct.static_iter(range(TILES_BETWEEN + 1)):
        weights = ct.exp2(found[tile] - most)
        # Pages that a tile between lacks are zeros; a tile that lacks all holds the first page, to be masked.
        is_attended = first + 1 + tile * count < last if tile < TILES_BETWEEN else attended[tile]
        acc = _weighed(acc, weights, _masked_values(tiles[tile][1], is_attended))
        total = total + weights
    sums = ct.sum(total, axis=0, keepdims=True)
    return acc * (1.0 / ct.where(sums > 0, sums, 1.0)), most + ct.log2(sums)


def _block(
    q: Any, caches: Any, block_table: Any, seq_lens: Any, out: Any, lse: Any, scratch: Any, scale: Any,
    window: Any, place: Any, part: Any, parts: Any, splits: Any, sizes: Any, windowed: Any, balanced: Any,
) -> None:  # fmt: skip
    """Attend to the `part`-th of a sequence's `parts`, and combine slices of the results of all parts."""
    group, rows, head_dim, _, tile_n, _ = sizes
    zeros = asked_for(scratch, head_dim * rows) if splits > 1 else 0
    end = ct.load(seq_lens, (place[0],), (1,)).item()
    begin, tiles = tiles_of_part(end, window, windowed, tile_n, part, parts, balanced)
    result, log2_sum = _attend_part(
        q, caches, block_table, place, (begin, end), tiles, scale * _LOG2_E, sizes
    )
    if parts == 1:
        _write(out, lse, place, group, 0, result, log2_sum)
    else:
        # A part without keys stores zeros and a log-sum of -inf, like any part that attends to nothing.
        leave(scratch, result, log2_sum, zeros)
        if splits <= MOST_APART or not balanced:
            _combine(out, lse, scratch, place, group, part, parts, splits, rows, head_dim)
        elif parts <= splits // 4:
            _combine(out, lse, scratch, place, group, part, parts, splits // 4, rows, head_dim)
        elif parts <= splits // 2:
            _combine(out, lse, scratch, place, group, part, parts, splits // 2, rows, head_dim)
        else:
            _combine(out, lse, scratch, place, group, part, parts, splits, rows, head_dim)


def _combine(
    out: Any, lse: Any, scratch: Any, place: Any, group: Any, part: Any, parts: Any, most: Any, rows: Any,
    head_dim: Any,
) -> None:  # fmt: skip
    """Write slices of the result of `parts`, of which there are up to `most`: many parts, narrow slices."""
    width = width_of_slice(most, rows, head_dim)
    for at in range(part, head_dim * rows // width, parts):
        slice_of_result, logs = combined(scratch, ct.bid(0) - part, parts, at, most, width)
        tile = slice_of_result.reshape((width // rows, rows))
        _write(out, lse, place, group, at, tile, ct.extract(logs, (0, 0), (1, rows)))


@ct.kernel
def attention_decode_kernel(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, block_table, seq_lens, out, lse, scratch, scale, window,
    group: ct.Constant[int], rows: ct.Constant[int], head_dim: ct.Constant[int], page_size: ct.Constant[int],
    windowed: ct.Constant[bool], short: ct.Constant[bool], sequences: ct.Constant[int],
    splits: ct.Constant[int], balanced: ct.Constant[bool],
    tile_n: ct.Constant[int], gather: ct.Constant[bool],
):  # fmt: skip
    """Attend with the `group` queries of one KV head of one sequence to a part of its keys.

    The parts of a sequence and head are consecutive blocks, so blocks that wait for each other start
    together. `sequences` is the size of a tile that holds all sequences, where parts are `balanced` or the
    longest sequences are read first, and 0 elsewhere. One block reads a `short` window, with all loads in
    flight.
    """
    sizes = group, rows, head_dim, page_size, tile_n, gather
    caches, kv_heads = (k_cache, v_cache), k_cache.shape[2]
    seq, head, part, parts = part_of_block(
        seq_lens, q.shape[0], kv_heads, window, tile_n, splits, sequences, balanced
    )
    if short:
        end = ct.load(seq_lens, (seq,), (1,)).item()
        keys = ct.maximum(end - window, 0), end
        result, log2_sum = _attend_window(q, caches, block_table, (seq, head), keys, scale * _LOG2_E, sizes)
        _write(out, lse, (seq, head), group, 0, result, log2_sum)
    elif parts > 0:
        _block(
            q, caches, block_table, seq_lens, out, lse, scratch, scale, window, (seq, head),
            part, parts, splits, sizes, windowed, balanced,
        )  # fmt: skip
