"""Memory reads of attention_decode as a declaration of its own, which the bench times too.

Each block finds out which keys and values it reads, and reads them as the kernel does, in the same config.
There are no queries, no scores, no softmax and no parts to combine. It is no bound: the compiler may let
loads run further ahead, or less far, than in the kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cuda.tile as ct

from aot_tune.kernels.decode.attention_decode import attention_decode_tunable
from aot_tune.kernels.decode.paged_cache import (
    TILES_BETWEEN,
    keys_and_values,
    page_numbers,
    pages_of_window,
    tiles_of_window,
)
from aot_tune.kernels.decode.sequence_parts import part_of_block, tiles_of_part


@ct.kernel
def paged_read_kernel(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, block_table, seq_lens, out, lse, scratch, scale, window,
    group: ct.Constant[int], rows: ct.Constant[int], head_dim: ct.Constant[int], page_size: ct.Constant[int],
    windowed: ct.Constant[bool], short: ct.Constant[bool], sequences: ct.Constant[int],
    splits: ct.Constant[int], balanced: ct.Constant[bool],
    tile_n: ct.Constant[int], gather: ct.Constant[bool],
):  # fmt: skip
    """Read what `attention_decode_kernel` reads of the caches; a number of it goes to `lse`."""
    caches, kv_heads = (k_cache, v_cache), k_cache.shape[2]
    seq, head, part, parts = part_of_block(
        seq_lens, q.shape[0], kv_heads, window, tile_n, splits, sequences, balanced
    )
    if short:
        end = ct.load(seq_lens, (seq,), (1,)).item()
        pages = pages_of_window(block_table, (ct.maximum(end - window, 0), end), page_size)
        tiles = tiles_of_window(
            caches, block_table, (seq, head), pages, page_size, head_dim, tile_n // page_size
        )
        # Through the matrix units: else the compiler uses so many registers that half the blocks run at once.
        ones, products = ct.full((head_dim, rows), 1, k_cache.dtype), ct.zeros((tile_n, rows), ct.float32)
        for tile in ct.static_iter(range(TILES_BETWEEN + 1)):
            products = ct.mma(tiles[tile][1], ones, ct.mma(tiles[tile][0], ones, products))
        _keep(lse, seq, head * group, products)
    elif parts > 0:
        end = ct.load(seq_lens, (seq,), (1,)).item()
        _, tiles = tiles_of_part(end, window, windowed, tile_n, part, parts, balanced)
        sums = ct.zeros((tile_n, head_dim), k_cache.dtype)
        following = page_numbers(block_table, seq, tiles[0], page_size, tile_n)
        for tile in range(tiles[0], tiles[1], tiles[2]):
            numbers = following
            following = page_numbers(block_table, seq, tile + tiles[2], page_size, tile_n)
            k, v = keys_and_values(caches, numbers, head, tile, page_size, head_dim, tile_n, gather)
            sums = sums + (k + v)
        _keep(lse, seq, head * group, sums)


def _keep(lse: Any, seq: Any, head: Any, tile: Any) -> None:
    """Store a number of the read values: the compiler drops reads without a use."""
    ct.store(lse, (seq, head), ct.max(tile.astype(ct.float32)).reshape((1, 1)))


paged_read_tunable = replace(
    attention_decode_tunable, name="paged_read", kernel=paged_read_kernel, outputs=(), reset=("lse",)
)
"""Takes what `attention_decode_tunable` takes, in the same configs. A declaration has to write something, so
`lse` is named; it means nothing, and nobody compares it."""
