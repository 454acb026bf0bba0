"""Equal parts of sequences of different lengths: every tile is some block's, and no block has much more."""

from __future__ import annotations

import random

import pytest
import torch

from aot_tune.kernels.decode import sequence_parts
from tests.support import emulator

TILE = 64


def parts_of(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch, *,
    heads: int, blocks: int, splits: int, window: int = 2**31 - 1, most: int = 512,
) -> list[tuple[int, int, int, int]]:  # fmt: skip
    """The sequence, head, part and parts of each block."""
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    given = len(lengths), heads, window, TILE, splits, most
    found = emulator.answers(sequence_parts.of_block, (seq_lens, *given), monkeypatch, blocks=blocks)
    return [tuple(map(int, one)) for one in found]  # type: ignore[misc]


def tiles_of(length: int) -> int:
    return max(-(-length // TILE), 1)


@pytest.mark.long
@pytest.mark.parametrize(
    "seed", [seed if seed < 20 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(60)]
)
def test_the_parts_of_every_sequence_and_head_lie_in_blocks_that_follow_each_other(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    heads, splits = chance.choice([1, 2, 3, 8]), chance.choice([2, 4, 8, 64])
    most, least = chance.randrange(1, 9000), chance.choice([0.0, 0.25, 0.9, 1.0])
    lengths = [round(most * chance.uniform(least, 1.0)) for _ in range(chance.randrange(1, 60))]
    for place in range(0, len(lengths), chance.choice([2, 1000])):
        lengths[place] = chance.choice([0, 1, most])
    blocks = 2 * len(lengths) * heads + chance.choice([0, 1, 2, 3, chance.randrange(300)])
    found = parts_of(lengths, monkeypatch, heads=heads, blocks=blocks, splits=splits)
    if len(lengths) <= 32:
        again = parts_of(lengths, monkeypatch, heads=heads, blocks=blocks, splits=splits, most=32)
        assert again == found, "the tile that holds them changes nothing"
    busy = [one for one in found if one[3] > 0]
    assert found[: len(busy)] == busy, "blocks without a part come last"
    expected = []
    for seq, length in enumerate(lengths):
        counts = {one[3] for one in busy if one[0] == seq}
        assert len(counts) == 1, "a sequence is cut alike for all heads"
        count = counts.pop()
        assert count <= min(splits, tiles_of(length))
        expected += [(seq, head, part, count) for head in range(heads) for part in range(count)]
    assert busy == expected


def test_long_sequences_have_more_blocks_than_short_ones_and_all_blocks_about_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = [8192, 2048, 4096, 6000, 3000, 8000, 2500, 5000]
    found = parts_of(lengths, monkeypatch, heads=8, blocks=264, splits=8)
    busy = [one for one in found if one[3] > 0]
    assert len(busy) > 264 * 0.8
    work = [-(-tiles_of(lengths[seq]) // parts) for seq, _, _, parts in busy]
    mean = sum(tiles_of(length) for length in lengths) * 8 / 264
    assert max(work) <= 1.5 * mean
    assert {seq: parts for seq, _, _, parts in busy}[0] >= 3 * {seq: parts for seq, _, _, parts in busy}[1]


@pytest.mark.long
def test_sequences_of_one_length_are_cut_into_as_many_parts_as_there_are_blocks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def counts(lengths: list[int], heads: int, blocks: int, splits: int) -> set[int]:
        found = parts_of(lengths, monkeypatch, heads=heads, blocks=blocks, splits=splits)
        assert all(seq < len(lengths) and head < heads for seq, head, _, parts in found if parts)
        return {one[3] for one in found}

    assert counts([65 * TILE] * 8, 8, 132, 8) == {0, 2}
    assert counts([128 * TILE] * 22, 8, 528, 8) == {3}
    assert counts([32 * TILE] * 20, 2, 80, 8) == {2}
    assert counts([64 * TILE] * 2, 1, 132, 64) == {0, 64}
    assert counts([64 * TILE] * 2, 1, 132, 8) == {0, 8}
    assert counts([TILE] * 9, 2, 36, 8) == {0, 1}


def test_keys_before_the_window_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"heads": 1, "blocks": 100, "splits": 64}
    assert parts_of([6400], monkeypatch, window=640, **given)[0][3] == 10
    assert parts_of([6400 + 1], monkeypatch, window=640, **given)[0][3] == 11
    assert parts_of([6400 + 16], monkeypatch, window=640, **given)[0][3] == 11


@pytest.mark.long
def test_the_most_sequences_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [500 + 7 * i for i in range(512)]
    found = parts_of(lengths, monkeypatch, heads=1, blocks=1056, splits=8)
    assert {one[0] for one in found if one[3]} == set(range(512))


@pytest.mark.parametrize("count", [31, 32, 33, 63, 64, 65])
def test_no_sequence_is_left_out_where_another_tile_begins(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [500 + 7 * (i * 5 % count) for i in range(count)]
    found = parts_of(lengths, monkeypatch, heads=1, blocks=2 * count + 5, splits=8)
    assert [one[0] for one in found if one[3] and one[2] == 0] == list(range(count))


@pytest.mark.parametrize("seed", range(5))
def test_sequences_are_put_in_order_of_length_the_longest_first(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    usual = [0, 1, 64, chance.randrange(9000), chance.randrange(9000)]  # many alike
    lengths = [chance.choice(usual) for _ in range(chance.choice([17, 40, 64]))]
    lengths[:3] = [-5, 2**31 - 1, 2**24]  # beyond what is told apart, where the first comes first
    seq_lens, order = torch.tensor(lengths, dtype=torch.int32), []
    for place in range(len(lengths)):
        given = seq_lens, place, 64
        order += map(int, emulator.answers(sequence_parts.longest_first, given, monkeypatch, blocks=1))
    counted = [min(max(length, 0), 2**24) for length in lengths]
    assert order == sorted(range(len(lengths)), key=lambda seq: (-counted[seq], seq))
