"""Kernels that the analysis of kernels was written with: one of each kind, small."""

from __future__ import annotations

import operator

import cuda.tile as ct

ConstInt = ct.Constant[int]
PAD = ct.PaddingMode.ZERO


@ct.kernel
def scale_rows_kernel(x, out, factor, TILE: ConstInt):
    at = (ct.bid(0), ct.bid(1))
    ct.store(out, at, (ct.load(x, at, (1, TILE)) * factor).astype(out.dtype))


@ct.kernel
def gather_kernel(x, out, N: ConstInt, TILE: ConstInt):
    places = ct.full((TILE,), ct.bid(0) * TILE, dtype=ct.int32) + ct.arange(TILE, dtype=ct.int32)
    ct.scatter(out, places, ct.gather(x, places, mask=places < N))


def _add_to(array, at, tile):
    ct.store(array, at, ct.load(array, at, tile.shape) + tile)


@ct.kernel
def add_in_helper_kernel(x, y, TILE: ConstInt):
    at = (ct.bid(0),)
    _add_to(x, at, ct.load(y, at, (TILE,)))


@ct.kernel
def add_rows_kernel(x, y, TILE: ConstInt):
    at = (ct.bid(0), ct.bid(1))
    _add_to(x, at, ct.load(y, at, (1, TILE)))


@ct.kernel
def row_mean_kernel(x, out, eps, COLS: ConstInt, ROWS: ConstInt):
    rows = ct.load(x, index=(ct.bid(0), 0), shape=(ROWS, COLS), padding_mode=PAD)
    mean = ct.sum(ct.astype(rows, ct.float32), axis=1) / x.shape[1]
    ct.store(out, index=(ct.bid(0),), tile=mean + eps)


@ct.kernel
def norm_in_parts_kernel(x, weight, out, N: ConstInt, TILE: ConstInt):
    row, total = ct.bid(0), ct.zeros((TILE,), dtype=ct.float32)
    for part in range(ct.cdiv(N, TILE)):
        tile = ct.load(x, (row, part), (1, TILE), padding_mode=PAD).reshape((TILE,)).astype(ct.float32)
        total = total + tile * tile
    norm = ct.rsqrt(ct.sum(total) / N)
    for part in range(ct.cdiv(N, TILE)):
        scaled = ct.load(x, (row, part), (1, TILE)) * norm * ct.load(weight, (part,), (TILE,))
        ct.store(out, (row, part), scaled.astype(out.dtype))


@ct.kernel
def column_sum_kernel(x, out, TM: ConstInt, TN: ConstInt):
    column, total = ct.bid(0), ct.zeros((TN,), dtype=ct.float32)
    for row in range(ct.cdiv(x.shape[0], TM)):
        total = total + ct.sum(
            ct.load(x, (row, column), (TM, TN), padding_mode=PAD).astype(ct.float32), axis=0
        )
    ct.store(out, (column,), total)


@ct.kernel
def count_kernel(x, counts, TILE: ConstInt):
    tile = ct.gather(x, ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32))
    ct.atomic_add(counts, (0,), ct.sum(tile))


@ct.kernel
def largest_kernel(x, counts, ROWS: ConstInt, COLS: ConstInt):
    tile = ct.load(x, (ct.bid(0), 0), (ROWS, COLS), padding_mode=ct.PaddingMode.NEG_INF)
    ct.atomic_add(counts, ct.argmax(tile, axis=1), 1)


@ct.kernel
def product_kernel(a, b, c, TM: ConstInt, TN: ConstInt, TK: ConstInt, TURNED: ct.Constant[bool]):
    m, n, sums = ct.bid(0), ct.bid(1), ct.full((TM, TN), 0.0, dtype=ct.float32)
    for k in range(ct.num_tiles(a, axis=1, shape=(TM, TK))):
        x = ct.load(a, (m, k), (TM, TK), padding_mode=PAD)
        if TURNED:
            y = ct.transpose(ct.load(b, (n, k), (TN, TK), padding_mode=PAD))
        else:
            y = ct.load(b, (k, n), (TK, TN), padding_mode=PAD)
        sums = ct.mma(x, y, sums)
    ct.store(c, (m, n), sums.astype(c.dtype))


def _place(tile, M, N, TM, TN, GROUP):
    tiles_m, tiles_n = ct.cdiv(M, TM), (N + TN - 1) // TN
    first = tile // (GROUP * tiles_n) * GROUP
    rows = min(tiles_m - first, GROUP)
    return first + tile % (GROUP * tiles_n) % rows, tile % (GROUP * tiles_n) // rows


@ct.kernel
def persistent_kernel(
    a, b, c, M: int, N: int, K: int, TM: ConstInt, TN: ConstInt, TK: ConstInt, GROUP: ConstInt
):
    for tile in range(ct.bid(0), ct.cdiv(M, TM) * ct.cdiv(N, TN), ct.num_blocks(0)):
        m, n = _place(tile, M, N, TM, TN, GROUP)
        sums = ct.zeros((TM, TN), dtype=ct.float32)
        for k in range(ct.cdiv(K, TK)):
            sums = ct.mma(ct.load(a, (m, k), (TM, TK)), ct.load(b, (k, n), (TK, TN)), sums)
        ct.store(c, (m, n), sums.astype(c.dtype))


@ct.kernel
def stepping_kernel(x, out, TILE: ConstInt, NUM_SMS: ConstInt):
    for tile in range(ct.bid(0), ct.cdiv(x.shape[0], TILE), NUM_SMS):
        ct.store(out, (tile,), ct.load(x, (tile,), (TILE,)) * 2)


@ct.kernel
def dual_kernel(x, gate, up, out, TM: ConstInt, TN: ConstInt, TK: ConstInt):
    m, n = ct.bid(0), ct.bid(1)
    one, other = ct.zeros((TM, TN), dtype=ct.float32), ct.zeros((TM, TN), dtype=ct.float32)
    for k in range(ct.cdiv(x.shape[1], TK)):
        rows = ct.load(x, (m, k), (TM, TK))
        one = ct.mma(rows, ct.load(gate, (k, n), (TK, TN)), one)
        other = ct.mma(rows, ct.load(up, (k, n), (TK, TN)), other)
    ct.store(out, (m, n), (one / (1 + ct.exp(-one)) * other).astype(out.dtype))


@ct.kernel
def attention_kernel(
    q, k, v, out, lse, scale, D: ConstInt, H: ConstInt, TM: ConstInt, TN: ConstInt, RATIO: ConstInt
):
    m, batch, head = ct.bid(0), ct.bid(1) // H, ct.bid(1) % H
    queries = ct.load(q, (batch, head, m, 0), (1, 1, TM, D)).reshape((TM, D))
    best, total = ct.full((TM, 1), -1e30, dtype=ct.float32), ct.zeros((TM, 1), dtype=ct.float32)
    sums = ct.zeros((TM, D), dtype=ct.float32)
    for n in range(ct.cdiv(k.shape[2], TN)):
        keys = ct.load(k, (batch, head // RATIO, 0, n), (1, 1, D, TN), order=(0, 1, 3, 2)).reshape((D, TN))
        scores = ct.mma(queries, keys, ct.zeros((TM, TN), dtype=ct.float32)) * scale
        largest = ct.maximum(best, ct.max(scores, axis=1, keepdims=True))
        weights = ct.exp(scores - largest)
        total = total * ct.exp(best - largest) + ct.sum(weights, axis=1, keepdims=True)
        values = ct.load(v, (batch, head // RATIO, n, 0), (1, 1, TN, D)).reshape((TN, D))
        sums = ct.mma(weights.astype(v.dtype), values, sums * ct.exp(best - largest))
        best = largest
    ct.store(out, (batch, head, m, 0), (sums / total).reshape((1, 1, TM, D)).astype(out.dtype))
    ct.store(lse, (batch, head, m), (best + ct.log(total)).reshape((1, 1, TM)))


@ct.kernel
def segments_kernel(x, starts, out, TILE: ConstInt):
    segment = ct.bid(0)
    start, stop = ct.load(starts, (segment,), (1,)).item(), ct.load(starts, (segment + 1,), (1,)).item()
    total = ct.zeros((TILE,), dtype=ct.float32)
    for part in range(ct.cdiv(stop - start, TILE)):
        total = total + ct.gather(x, start + part * TILE + ct.arange(TILE, dtype=ct.int32))
    ct.store(out, (segment,), ct.sum(total, keepdims=True))


@ct.kernel
def lists_kernel(xs, ws, outs, TM: ConstInt, TN: ConstInt, TK: ConstInt):
    for group in range(len(xs)):
        x, w, out = xs[group], ws[group], outs[group]
        sums = ct.zeros((TM, TN), dtype=ct.float32)
        for k in range(ct.num_tiles(x, 1, (TM, TK))):
            sums = ct.mma(ct.load(x, (ct.bid(0), k), (TM, TK)), ct.load(w, (k, ct.bid(1)), (TK, TN)), sums)
        ct.store(out, (ct.bid(0), ct.bid(1)), sums.astype(out.dtype))


@ct.kernel
def fp8_kernel(a, b, scale_a, c, TM: ConstInt, TN: ConstInt, TK: ConstInt):
    m, n, sums = ct.bid(0), ct.bid(1), ct.zeros((TM, TN), dtype=ct.float32)
    for k in range(ct.cdiv(a.shape[1], TK)):
        sums = ct.mma(ct.load(a, (m, k), (TM, TK)), ct.load(b, (k, n), (TK, TN)), sums)
    ct.store(c, (m, n), (sums * ct.load(scale_a, (0,), (1,))).astype(c.dtype))


@ct.kernel
def guarded_kernel(x, out, TILE: ConstInt, CHECK_BOUNDS: ct.Constant[bool], TURNED: ct.Constant[bool]):
    places = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    tile = ct.gather(x, places, check_bounds=CHECK_BOUNDS)
    ct.scatter(out, places, -tile if TURNED else tile, check_bounds=CHECK_BOUNDS)


@ct.kernel
def strided_kernel(x, out, stride_x, STEP: ConstInt, GROUP_SIZE: ConstInt, TILE: ConstInt):
    places = ct.bid(0) // GROUP_SIZE * stride_x + STEP * ct.arange(TILE, dtype=ct.int32)
    ct.scatter(out, places, ct.gather(x, places))


@ct.kernel
def handed_away_kernel(x, out, TILE: ConstInt):
    ct.store(out, (ct.bid(0),), ct.load(operator.itemgetter(0)((x, out)), (ct.bid(0),), (TILE,)))


@ct.kernel
def views_kernel(x, out, TILE: ConstInt):
    rows, written = x.tiled_view((1, TILE)), out.tiled_view((1, TILE))
    for part in range(rows.num_tiles(1)):
        written.store((ct.bid(0), part), rows.load((ct.bid(0), part)))


@ct.kernel
def varlen_kernel(q, k, v, starts, out, longest, scale, D: ConstInt, TM: ConstInt, TN: ConstInt):
    m, head, sequence = ct.bid(0), ct.bid(1), ct.bid(2)
    start, stop = ct.load(starts, (sequence,), (1,)).item(), ct.load(starts, (sequence + 1,), (1,)).item()
    length = stop - start
    rows, keys, values = q.slice(0, start, stop), k.slice(0, start, stop), v.slice(0, start, stop)
    queries = ct.load(rows, (m, head, 0), (TM, 1, D), padding_mode=ct.PaddingMode.ZERO).reshape((TM, D))
    best, total = ct.full((TM, 1), -1e30, dtype=ct.float32), ct.zeros((TM, 1), dtype=ct.float32)
    sums = ct.zeros((TM, D), dtype=ct.float32)
    for n in range(ct.cdiv(length, TN)):
        tile = ct.load(keys, (n, head, 0), (TN, 1, D), padding_mode=ct.PaddingMode.ZERO).reshape((TN, D))
        scores = ct.mma(queries, ct.transpose(tile), ct.zeros((TM, TN), dtype=ct.float32)) * scale
        inside = n * TN + ct.arange(TN, dtype=ct.int32) < length
        scores = ct.where(inside[None, :], scores, -1e30)
        largest = ct.maximum(best, ct.max(scores, axis=1, keepdims=True))
        weights = ct.exp(scores - largest)
        total = total * ct.exp(best - largest) + ct.sum(weights, axis=1, keepdims=True)
        tile = ct.load(values, (n, head, 0), (TN, 1, D), padding_mode=ct.PaddingMode.ZERO).reshape((TN, D))
        sums = ct.mma(weights.astype(v.dtype), tile, sums * ct.exp(best - largest))
        best = largest
    written = out.slice(0, start, stop)
    ct.store(written, (m, head, 0), (sums / total).reshape((TM, 1, D)).astype(out.dtype))


@ct.kernel
def quantise_kernel(x, out, scales, ROWS: ConstInt, COLS: ConstInt):
    at = (ct.bid(0), ct.bid(1))
    tile = ct.load(x, at, (ROWS, COLS)).astype(ct.float32).reshape((ROWS, COLS // 32, 32))
    largest = ct.max(ct.abs(tile), axis=2, keepdims=True)
    ct.store(out, at, (tile / largest).reshape((ROWS, COLS)).astype(ct.float8_e4m3fn))
    ct.store(scales, at, largest.reshape((ROWS, COLS // 32)).astype(ct.float8_e8m0fnu))


@ct.kernel
def grouped_kernel(x, w, starts, out, TM: ConstInt, TN: ConstInt, TK: ConstInt):
    m, n, group = ct.bid(0), ct.bid(1), ct.bid(2)
    start, stop = ct.load(starts, (group,), (1,)).item(), ct.load(starts, (group + 1,), (1,)).item()
    rows, sums = x.slice(0, start, stop), ct.zeros((TM, TN), dtype=ct.float32)
    for k in range(ct.cdiv(x.shape[1], TK)):
        tile = ct.load(rows, (m, k), (TM, TK), padding_mode=ct.PaddingMode.ZERO)
        weights = ct.load(w, (group, k, n), (1, TK, TN), padding_mode=ct.PaddingMode.ZERO)
        sums = ct.mma(tile, weights.reshape((TK, TN)), sums)
    ct.store(out.slice(0, start, stop), (m, n), sums.astype(out.dtype))
