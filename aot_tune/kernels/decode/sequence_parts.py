"""Which part of which sequence a block reads: of as many parts of each, or of parts of about one length.

Where sequences of different lengths are cut into equal parts, every block finds its own from all lengths, so
that one launch does it all and a CUDA graph replays it for other lengths. Long sequences get more blocks than
short ones: all end at about the same time, as with the fixed chunks of FlashInfer (Ye et al., 2025), which a
host plans. Knows no kernel.
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


_LONGEST = 1 << 24
"""Lengths from this one on count as equal."""

_OF_A_WARP = 32
"""Sequences of a tile of which each warp has all: it finds their sums without waiting for the others."""

_FEW_TILES = 2
"""Such tiles that a block looks at, where they hold all sequences; of more one tile is for all warps."""


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
        most: A power of two from 32 on.

    Returns:
        The sequence, its head, which part of it, and how many parts it has: 0 for a block that has none.
    """
    seq, before, share, needed = 0, 0, 0, 0
    if most == _OF_A_WARP:
        seq, before, share, needed = _cut(seq_lens, sequences, heads, window, tile_n, splits, 1, _OF_A_WARP)
    elif sequences <= _FEW_TILES * _OF_A_WARP:
        seq, before, share, needed = _cut(
            seq_lens, sequences, heads, window, tile_n, splits, _FEW_TILES, _OF_A_WARP
        )
    else:
        seq, before, share, needed = _cut(seq_lens, sequences, heads, window, tile_n, splits, 1, most)
    head, part, parts = 0, 0, 0
    if ct.bid(0) < needed:
        length = ct.load(seq_lens, (seq,), (1,)).item()
        _, own = span(length, window, tile_n)
        parts = ct.cdiv(ct.maximum(own, 1), share)
        head, part = (ct.bid(0) - before) // parts, (ct.bid(0) - before) % parts
    return seq, head, part, parts


def part_of_block(
    seq_lens: Any, sequences: Any, heads: Any, window: Any, tile_n: Any, splits: Any, most: Any, balanced: Any
) -> Any:
    """What the present block reads, in a kernel: as `of_block`, or one of `splits` parts of every sequence.

    Args:
        seq_lens: As for `of_block`.
        sequences: As for `of_block`.
        heads: As for `of_block`.
        window: As for `span`.
        tile_n: As for `span`.
        splits: As for `of_block`, or the parts of every sequence and head.
        most: As for `of_block`, or for `longest_first`, and 0 for sequences in any order.
        balanced: Whether the parts of all sequences are about as long as each other.

    Returns:
        As `of_block`.
    """
    if balanced:
        seq, head, part, parts = of_block(seq_lens, sequences, heads, window, tile_n, splits, most)
    else:
        part, parts, pair = ct.bid(0) % splits, splits, ct.bid(0) // splits
        seq, head = pair // heads, pair % heads
        if most > 0:  # what begins last should end soon
            seq = longest_first(seq_lens, seq, most)
    return seq, head, part, parts


def tiles_of_part(
    length: Any, window: Any, windowed: Any, tile_n: Any, part: Any, parts: Any, balanced: Any
) -> Any:
    """Which keys and tiles a part of a sequence reads, in a kernel.

    Balanced parts take tiles in turn, which makes them 1 to 2 us faster, and parts that are not balanced
    slower.

    Args:
        length: The sequence's keys.
        window: As for `span`, where it is `windowed`.
        windowed: Whether only the last keys are attended.
        tile_n: As for `span`.
        part: Which.
        parts: Of how many.
        balanced: As for `part_of_block`.

    Returns:
        The first of the sequence's keys that is attended; and the part's first tile, the one before which it
        ends, and the step.
    """
    begin, count = 0, ct.cdiv(length, tile_n)
    if windowed:
        begin, count = span(length, window, tile_n)
    first = begin // tile_n
    if balanced:
        tiles = first + part, first + count, parts
    else:
        tiles = first + part * count // parts, first + (part + 1) * count // parts, 1
    return begin, tiles


def longest_first(seq_lens: Any, place: Any, most: Any) -> Any:
    """The sequence with `place` longer ones; of equal ones the first comes first.

    Args:
        seq_lens: (sequences,), int32.
        place: From 0 to sequences - 1.
        most: A power of two, the number of sequences or more.
    """
    lengths = ct.load(seq_lens, (0,), (most,), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    index = ct.arange(most, dtype=ct.int32)
    # No two are alike, and those that are no sequence's, of length 0 and behind all others, come last.
    rank = ct.minimum(ct.maximum(lengths, 0), _LONGEST) * most - index
    before = ct.where(rank.reshape((most, 1)) > rank.reshape((1, most)), 1, 0)
    return ct.sum(ct.where(ct.sum(before, axis=0) == place, index, 0))


def _cut(
    seq_lens: Any, sequences: Any, heads: Any, window: Any, tile_n: Any, splits: Any, count: Any, size: Any
) -> Any:
    """Which sequence the present block reads, blocks of those before it, the share, and blocks of all.

    Looks at `count` tiles of `size` sequences, which hold all.
    """
    blocks, block = ct.num_blocks(0), ct.bid(0)
    zeros = ct.zeros((size,), ct.int32)
    tiles, all_tiles, longest = (), zeros, zeros
    for i in ct.static_iter(range(count)):
        lengths = ct.load(seq_lens, (i,), (size,), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
        _, own = span(lengths, window, tile_n)
        # One without keys has a part too, which writes its zeros.
        own = ct.where(i * size + ct.arange(size, dtype=ct.int32) < sequences, ct.maximum(own, 1), 0)
        tiles, all_tiles = (*tiles, own), all_tiles + own  # type: ignore[assignment]  # grows while compiling
        longest = ct.maximum(longest, own)
    longest = ct.max(longest)
    share = ct.maximum(ct.cdiv(ct.sum(all_tiles) * heads, blocks), ct.cdiv(longest, splits))
    needed = blocks + 1
    # With two blocks for each sequence and head, the longest is more than two shares as long as there are too
    # many parts, and a step is a quarter of the share at most: so the share stays below the longest.
    while (needed > blocks) & (share <= longest):
        parts = zeros
        for i in ct.static_iter(range(count)):
            parts = parts + ct.cdiv(tiles[i], share)
        needed = ct.sum(parts) * heads
        if needed > blocks:
            share = share + ct.maximum((needed - blocks) * share // (2 * blocks), 1)
    passed, before, upto = zeros, zeros, 0
    for i in ct.static_iter(range(count)):
        each = ct.cdiv(tiles[i], share)
        ends = (upto + ct.cumsum(each)) * heads
        is_passed = (ends <= block) & (each > 0)
        passed, before = passed + ct.where(is_passed, 1, 0), ct.maximum(before, ct.where(is_passed, ends, 0))
        if i + 1 < count:
            upto = upto + ct.sum(each)
    return ct.sum(passed), ct.max(before), share, needed
