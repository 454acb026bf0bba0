"""Which part of which sequence a block reads, where sequences of different lengths are cut into equal parts.

Every block finds it out for itself from all lengths, so that one launch does it all and a CUDA graph replays
it for other lengths. Long sequences get more blocks than short ones: all end at about the same time, as with
the fixed chunks of FlashInfer (Ye et al., 2025), which a host plans. Knows no kernel.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct


def span(length: Any, window: Any, tile_n: Any) -> Any:
    """The first of the last `window` keys of a sequence, and how many tiles hold them.

    Args:
        length: The sequence's keys, or a tile of several's.
        window: How many of the last keys are attended.
        tile_n: Keys of a tile.
    """
    begin = ct.maximum(length - window, 0)
    return begin, ct.cdiv(length, tile_n) - begin // tile_n


def of_block(
    seq_lens: Any, sequences: Any, heads: Any, window: Any, tile_n: Any, splits: Any, most: Any
) -> Any:
    """What the present block reads, in a kernel: a part of a sequence's tiles for one of its heads.

    A part is the share of all tiles that a block should have, or less: the smallest share with which there
    are blocks enough. The parts of a sequence and head are as long as each other, and lie in blocks that
    follow each other.

    Args:
        seq_lens: (sequences,), int32: keys of each.
        sequences: How many, up to `most`.
        heads: Of a sequence, each cut alike; the launch has 2 x sequences x heads blocks or more.
        window: As for `span`.
        tile_n: As for `span`.
        splits: The most parts of a sequence and head.
        most: A power of two. Of 32 each warp finds all sums for itself, without waiting for the others.

    Returns:
        The sequence, its head, which part of it, and how many parts it has: 0 for a block that has none.
    """
    blocks, block = ct.num_blocks(0), ct.bid(0)
    lengths = ct.load(seq_lens, (0,), (most,), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    _, tiles = span(lengths, window, tile_n)
    # One without keys has a part too, which writes its zeros.
    tiles = ct.where(ct.arange(most, dtype=ct.int32) < sequences, ct.maximum(tiles, 1), 0)
    longest = ct.max(tiles)
    share = ct.maximum(ct.cdiv(ct.sum(tiles) * heads, blocks), ct.cdiv(longest, splits))
    needed = blocks + 1
    # With two blocks for each sequence and head, the longest is more than two shares as long as there are too
    # many parts, and a step is a quarter of the share at most: so the share stays below the longest.
    while (needed > blocks) & (share <= longest):
        needed = ct.sum(ct.cdiv(tiles, share)) * heads
        if needed > blocks:
            share = share + ct.maximum((needed - blocks) * share // (2 * blocks), 1)
    seq, head, part, parts = 0, 0, 0, 0
    if block < needed:
        each = ct.cdiv(tiles, share)
        upto = ct.cumsum(each) * heads
        passed = (upto <= block) & (each > 0)
        seq, before = ct.sum(ct.where(passed, 1, 0)), ct.max(ct.where(passed, upto, 0))
        length = ct.load(seq_lens, (seq,), (1,)).item()
        _, own = span(length, window, tile_n)
        parts = ct.cdiv(ct.maximum(own, 1), share)
        head, part = (block - before) // parts, (block - before) % parts
    return seq, head, part, parts
