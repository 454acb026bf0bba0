"""Tile code: find which part of which sequence a block reads. Imports no kernel.

Either each sequence has the same number of parts, or all parts are about equally long. For equal parts every
block finds its own from the lengths of all sequences, so that one launch does it all and a CUDA graph replays
it for other lengths. Long sequences get more blocks than short ones, so all end at about the same time, as
with the fixed chunks of FlashInfer (Ye et al., 2025), which a host plans.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct


def span(length: Any, window: Any, tile_n: Any) -> Any:
    """Return the first of the last `window` keys of a sequence, and how many tiles hold them.

    Args:
        length: Keys of the sequence, or a tile of the lengths of several.
        window: Number of last keys that are attended.
        tile_n: Keys of a tile.
    """
    begin = ct.maximum(length - window, 0)
    return begin, ct.cdiv(length, tile_n) - begin // tile_n


_LONGEST = 1 << 24
"""Lengths from this one on count as equal when sequences are sorted."""

_OF_A_WARP = 32
"""Sequences of a tile that each warp holds whole: it finds sums over them without waiting for other warps."""

_FEW_TILES = 2
"""Tiles of `_OF_A_WARP` sequences, at most; more sequences are one tile that all warps share."""


def of_block(
    seq_lens: Any, sequences: Any, heads: Any, window: Any, tile_n: Any, splits: Any, most: Any
) -> Any:
    """Find the part that the present block reads, where all parts are about equally long. For kernels.

    A part is a share of all tiles or less; the share is the smallest for which the blocks suffice. The parts
    of one sequence and head are equally long and belong to consecutive blocks.

    Args:
        seq_lens: (sequences,), int32: keys of each sequence.
        sequences: Number of sequences, up to `most`.
        heads: KV heads of a sequence, all cut alike; the launch has at least 2 * sequences * heads blocks.
        window: As for `span`.
        tile_n: As for `span`.
        splits: Parts of a sequence and head, at most.
        most: Size of the tile that holds all sequences, a power of two of 32 or more.

    Returns:
        The sequence, its head, the index of the part, and the number of parts: 0 for a block without a part.
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
    """Find the part that the present block reads: like `of_block`, or one of `splits` parts of each sequence.

    Args:
        seq_lens: As for `of_block`.
        sequences: As for `of_block`.
        heads: As for `of_block`.
        window: As for `span`.
        tile_n: As for `span`.
        splits: As for `of_block`, or the parts of every sequence and head.
        most: As for `of_block` or `longest_first`; 0 for sequences in any order.
        balanced: Whether the parts of all sequences are about equally long.

    Returns:
        As `of_block`.
    """
    if balanced:
        seq, head, part, parts = of_block(seq_lens, sequences, heads, window, tile_n, splits, most)
    else:
        part, parts, pair = ct.bid(0) % splits, splits, ct.bid(0) // splits
        seq, head = pair // heads, pair % heads
        if most > 0:  # the blocks that begin last should be short
            seq = longest_first(seq_lens, seq, most)
    return seq, head, part, parts


def tiles_of_part(
    length: Any, window: Any, windowed: Any, tile_n: Any, part: Any, parts: Any, balanced: Any
) -> Any:
    """Find the keys and tiles that a part of a sequence reads. For kernels.

    Balanced parts take tiles in turn, which makes them 1 to 2 us faster; it makes other parts slower.

    Args:
        length: Keys of the sequence.
        window: As for `span`; used if `windowed`.
        windowed: Whether only the last keys are attended.
        tile_n: As for `span`.
        part: Index of the part.
        parts: Number of parts.
        balanced: As for `part_of_block`.

    Returns:
        The first attended key of the sequence; and the part's first tile, the tile before which it ends, and
        the step from tile to tile.
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
    """Return the `place`-th sequence's index, the longest first; equal lengths keep their order.

    Args:
        seq_lens: (sequences,), int32.
        place: From 0 to sequences - 1.
        most: A power of two that is at least the number of sequences.
    """
    lengths = ct.load(seq_lens, (0,), (most,), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    index = ct.arange(most, dtype=ct.int32)
    # No two ranks are equal. Places beyond the sequences have length 0 and the highest indices: they come
    # last.
    rank = ct.minimum(ct.maximum(lengths, 0), _LONGEST) * most - index
    before = ct.where(rank.reshape((most, 1)) > rank.reshape((1, most)), 1, 0)
    return ct.sum(ct.where(ct.sum(before, axis=0) == place, index, 0))


def _cut(
    seq_lens: Any, sequences: Any, heads: Any, window: Any, tile_n: Any, splits: Any, count: Any, size: Any
) -> Any:
    """Return the present block's sequence, the blocks of those before it, the share, and all blocks.

    Looks at `count` tiles of `size` sequences, which hold all sequences.
    """
    blocks, block = ct.num_blocks(0), ct.bid(0)
    zeros = ct.zeros((size,), ct.int32)
    tiles, all_tiles, longest = (), zeros, zeros
    for i in ct.static_iter(range(count)):
        lengths = ct.load(seq_lens, (i,), (size,), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
        _, own = span(lengths, window, tile_n)
        # A sequence without keys has a part too, which writes its zeros.
        own = ct.where(i * size + ct.arange(size, dtype=ct.int32) < sequences, ct.maximum(own, 1), 0)
        tiles, all_tiles = (*tiles, own), all_tiles + own  # type: ignore[assignment]  # grows while compiling
        longest = ct.maximum(longest, own)
    longest = ct.max(longest)
    share = ct.maximum(ct.cdiv(ct.sum(all_tiles) * heads, blocks), ct.cdiv(longest, splits))
    needed = blocks + 1
    # With two blocks for each sequence and head, the longest sequence has more than two shares while the
    # parts exceed the blocks, and a step is at most a quarter of the share: so the share stays below the
    # longest.
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
