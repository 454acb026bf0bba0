"""attention_decode without a GPU: space, splits, arithmetic, what the host function takes and refuses."""

from __future__ import annotations

import itertools
import random
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.choose.legality import Legality
from aot_tune.choose.resolve import resolve
from aot_tune.declare.argument_mistakes import argument_mistakes
from aot_tune.errors import LaunchError
from aot_tune.kernels.decode import attention_decode_space, decode_workspace, flash_decoding
from aot_tune.kernels.decode.attention_decode import attention_decode, attention_decode_tunable
from aot_tune.kernels.softmax_and_loss.cross_entropy import cross_entropy_tunable
from aot_tune.kernels.softmax_and_loss.softmax import softmax_tunable
from aot_tune.serve.launch.checks import unfit
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.tunable import Tunable
from aot_tune.values.arch import KNOWN_ARCHS, Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import emulator
from tests.support.agree import assert_agrees, expected, poison, problem
from tests.support.compiling import SM90_AND_SLOW_ARCHS, compiled
from tests.support.pairs import constants, pairwise
from tests.support.samples import SM90

CPU = torch.device("cpu")


def shape(
    batch: int, context: int, heads: int = 4, kv_heads: int = 2, *,
    head_dim: int = 64, page_size: int = 16, windowed: bool = False, dtype: str = "bfloat16",
) -> Problem:  # fmt: skip
    return problem(
        dtype=dtype, windowed=windowed, batch=batch, context=context, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, page_size=page_size,
    )  # fmt: skip


def config(
    splits: int, tile_n: int = 64, *, balanced: bool = False, gather: bool = False, occupancy: int = 2
) -> Config:
    return Config(
        constants={"splits": splits, "balanced": balanced, "tile_n": tile_n, "gather": gather},
        hints={"num_ctas": 1, "occupancy": occupancy},
    )


# The space --------------------------------------------------------------------------------------


def test_the_sweep_is_one_of_minutes() -> None:
    for arch in KNOWN_ARCHS:
        for one in attention_decode_tunable.typical_problems:
            assert len(attention_decode_tunable.candidates(arch, one)) <= 26, (arch, one)


def test_few_sequences_are_split_more_than_many() -> None:
    def splits(batch: int, context: int = 8192) -> list[int]:
        found = attention_decode_tunable.candidates(SM90, shape(batch, context, 32, 8))
        return sorted({int(c["splits"]) for c in found})

    assert splits(1) == [1, 8, 16, 32, 64]  # 1 because it serves every batch, 8 for the smallest GPUs
    assert splits(8) == [1, 2, 4, 8, 16]  # 16 in equal parts only
    assert splits(256) == [1, 2]
    assert splits(1, 128) == [1, 2]
    assert splits(2048) == [1]


def test_what_does_not_fit_is_refused_with_its_reason() -> None:
    def refusal(candidate: Config, arch: str = "sm90", page_size: int = 16, context: int = 8192) -> str:
        one = shape(64, context, 32, 8, page_size=page_size)
        return attention_decode_tunable.refusal(candidate, Arch.parse(arch), one) or ""

    assert (
        refusal(config(1), page_size=64)
        == refusal(config(1, gather=True))
        == refusal(config(4), "sm80")
        == ""
    )
    assert refusal(config(4, gather=True)) == ""
    crashing = config(4, 128, gather=True, occupancy=1)
    assert refusal(crashing) == refusal(crashing, "sm100") == ""  # of a head_dim of 64
    wide = shape(64, 8192, 32, 8, head_dim=128)
    for spilling in (crashing, config(1, 128, gather=True, occupancy=1)):
        assert "spill registers" in str(attention_decode_tunable.refusal(spilling, SM90, wide))
    spilling = config(8, 128, balanced=True, gather=True)
    assert "spill registers" in str(
        attention_decode_tunable.refusal(spilling, SM90, shape(8, 8192, 32, 8, head_dim=128))
    )
    assert attention_decode_tunable.refusal(spilling, SM90, shape(8, 8192, 64, 8, head_dim=64)) is None
    for arch in ("sm100", "sm103", "sm110"):
        assert "crashes" in str(attention_decode_tunable.refusal(crashing, Arch.parse(arch), wide))
    pair = Config(constants=config(1, 128, gather=True).constants, hints={"num_ctas": 2, "occupancy": 1})
    assert refusal(pair, "sm100") == refusal(pair, "sm100", page_size=32) == ""
    assert "compile for minutes" in refusal(pair, "sm100", page_size=64)
    assert refusal(config(1, gather=True, occupancy=3)) == ""
    assert "no more at once than two" in refusal(config(4, gather=True, occupancy=3))
    third = attention_decode_tunable.refusal(config(1, gather=True, occupancy=3), SM90, wide)
    assert "no more at once than two" in str(third)
    assert "are for short windows" in refusal(config(1, gather=True, occupancy=4))
    assert "that one block asks for at once" in refusal(config(2, gather=True, occupancy=4))
    assert "that one block asks for at once" in refusal(config(1, occupancy=4))
    many = shape(64, 128, 32, 1, windowed=True)
    assert "for so many queries" in str(
        attention_decode_tunable.refusal(config(1, gather=True, occupancy=3), SM90, many)
    )
    assert attention_decode_tunable.refusal(config(1, gather=True), SM90, many) is None
    for shared in (config(2, gather=True), config(1, 128, gather=True), config(1)):
        of_one = attention_decode_tunable.refusal(shared, SM90, shape(64, 100, 32, 8, windowed=True))
        assert "a window of 100 keys is one block's, in gathered tiles of 64" in str(of_one)
    pair = Config(constants=config(1, gather=True).constants, hints={"num_ctas": 2, "occupancy": 1})
    paired = attention_decode_tunable.refusal(pair, Arch.parse("sm100"), shape(64, 100, 32, 8, windowed=True))
    assert "load a window at once spill" in str(paired)
    assert "gathered where an arch can" in refusal(config(1))
    assert refusal(config(1, occupancy=1), "sm80") == ""
    eight = Config(constants=config(4).constants, hints={"num_worker_warps": 8})
    assert "waited for by the four warps" in refusal(eight)
    assert "no loads that gather" in refusal(config(1, gather=True), "sm80")
    assert "lies in a page" in refusal(config(1, gather=True), page_size=64)
    assert "more than 4 pages" in refusal(config(1, 128), "sm80")
    assert refusal(config(1, 128), "sm80", page_size=32) == ""
    assert "spill" in refusal(config(1, 128, occupancy=3), page_size=128)
    assert "half empty" in refusal(config(1, 128), page_size=128, context=64)
    assert "32 splits; from 1 to 8" in refusal(config(32, gather=True))
    pair = Config(constants=config(1).constants, hints={"num_ctas": 2, "occupancy": 1})
    assert "from sm100 on" in refusal(pair, page_size=64)
    assert refusal(pair, "sm100", page_size=64) == ""
    splitting = Config(constants=config(4).constants, hints=pair.hints)
    assert "waited for by the four warps of one block" in refusal(splitting, "sm100", page_size=64)


def test_more_blocks_hide_what_a_window_waits_for() -> None:
    def occupancies(*, windowed: bool, head_dim: int = 64, context: int = 128) -> set[int]:
        one = shape(256, context, 64, 8, windowed=windowed, head_dim=head_dim)
        return {c.hints["occupancy"] for c in attention_decode_tunable.candidates(SM90, one)}

    assert occupancies(windowed=True) == {1, 2, 3, 4}
    assert occupancies(windowed=True, context=129) == {1, 2, 3}
    assert occupancies(windowed=False) == {1, 2, 3}
    assert occupancies(windowed=True, head_dim=128) == {1, 2}


def test_short_windows_are_loaded_at_once_and_few_sequences_looked_at_together() -> None:
    gathered = config(1, gather=True)
    assert attention_decode_space.loads_at_once(gathered, 32, 128, True)
    for page_size, context, windowed in ((64, 128, True), (32, 129, True), (32, 128, False)):
        assert not attention_decode_space.loads_at_once(gathered, page_size, context, windowed)
    for other in (config(1), config(2, gather=True), config(1, 128, gather=True)):
        assert not attention_decode_space.loads_at_once(other, 32, 128, True)
    equal = config(8, balanced=True)
    tiles = [attention_decode_space.tile_of_sequences(equal, batch, 8, False) for batch in (2, 16, 17, 512)]
    assert tiles == [32, 32, 512, 512]


def test_more_blocks_than_run_at_once_begin_with_the_longest_sequences() -> None:
    def tile(batch: int, kv_heads: int, splits: int = 1, *, windowed: bool = False) -> int:
        return attention_decode_space.tile_of_sequences(config(splits), batch, kv_heads, windowed)

    assert [tile(batch, 8) for batch in (1, 16, 17, 33, 64, 65, 256)] == [0, 0, 64, 64, 64, 0, 0]
    assert [tile(64, *each) for each in ((4, 1), (4, 2), (1, 4), (1, 8))] == [0, 64, 0, 64]
    assert tile(64, 8, windowed=True) == 0


def test_equal_parts_are_for_a_few_sequences_of_lengths_that_differ() -> None:
    def refusal(candidate: Config, one: Problem) -> str:
        return attention_decode_tunable.refusal(candidate, SM90, one) or ""

    equal = config(8, balanced=True, gather=True)
    assert refusal(equal, shape(8, 8192, 32, 8)) == ""
    assert refusal(config(16, 128, balanced=True, gather=True), shape(64, 8192, 8, 1)) == ""
    for one in (
        shape(1, 8192, 64, 64), shape(64, 8192, 32, 8), shape(600, 8192, 8, 1),
        shape(8, 8192, 32, 8, windowed=True),
    ):  # fmt: skip
        assert "lengths that differ" in refusal(equal, one)
    assert "from 8 to 16 suit sequences in equal parts" in refusal(
        config(32, balanced=True, gather=True), shape(8, 8192, 32, 8)
    )
    for crashing in (config(8, balanced=True, gather=True, occupancy=1), config(1, balanced=True)):
        assert "crashes" in refusal(crashing, shape(8, 8192, 32, 8))
    third, wide = config(64, balanced=True, occupancy=3), shape(2, 65536, 64, 1, head_dim=128, page_size=64)
    large = attention_decode_tunable.refusal(third, Arch.parse("sm120"), wide)
    assert "more than the workspace holds" in str(large)


def test_equal_parts_run_only_where_each_sequence_and_head_may_have_two_blocks() -> None:
    """With fewer, sequences of nearly one length would be cut into more parts than there are blocks."""
    equal, device = config(8, balanced=True, gather=True), Device.reference(SM90)
    for batch, fits in ((16, True), (17, False), (22, False), (23, True), (33, True)):
        one = shape(batch, 8192, 64, 8)
        assert (unfit(attention_decode_tunable, equal, device, one) is None) == fits, batch
    with pytest.raises(LaunchError, match="176 sequences and heads take 352 blocks, and 264 are launched"):
        attention_decode_tunable.grid(equal, device, shape(22, 8192, 64, 8))
    index, legality = (
        dispatcher_of(attention_decode_tunable).load(SM90),
        Legality(attention_decode_tunable, SM90),
    )
    for name, sms in (("H200", 132), ("H100 PCIe", 114), ("H20", 78), ("a slice", 26)):
        gpu = device.with_sm_count(name, sms)
        for one in (shape(b, 8192, h, kv, head_dim=d) for b in range(2, 40) for h, kv, d in HEADS):
            fits_there = partial(unfit, attention_decode_tunable, device=gpu, problem=one)
            chosen = resolve(one, index, legality.fitting(fits_there)).config
            blocks = attention_decode_tunable.grid(chosen, gpu, one)[0]
            assert not chosen["balanced"] or blocks >= 2 * one.size("batch") * one.size("kv_heads")


HEADS = ((64, 8, 64), (32, 8, 128), (8, 1, 128), (32, 4, 128))


def test_equal_parts_have_as_many_blocks_as_run_at_once() -> None:
    equal, device = config(8, balanced=True, gather=True), Device.reference(SM90)
    assert attention_decode_tunable.grid_fn(equal, device, shape(5, 8192, 32, 8)) == (264,)
    assert attention_decode_tunable.grid_fn(equal, device, shape(64, 8192, 32, 4)) == (528,)
    small = device.with_sm_count("a slice", 16)
    assert attention_decode_tunable.grid_fn(equal, small, shape(5, 8192, 32, 8)) == (64,)
    with pytest.raises(LaunchError, match=r"up to 512 sequences.* here are 513 and .*balanced=False"):
        attention_decode_tunable.grid_fn(equal, device, shape(513, 8192, 8, 1))
    large = device.with_sm_count("a large one", 400)
    with pytest.raises(LaunchError, match=r"512 blocks that leave parts; here are 2 and 800"):
        attention_decode_tunable.grid_fn(equal, large, shape(2, 8192, 64, 1, head_dim=128))


def test_pages_smaller_than_a_tile_are_gathered_by_default_where_an_arch_can() -> None:
    def gathers(arch: str, page_size: int) -> bool:
        one = shape(8, 8192, 32, 8, page_size=page_size)
        return bool(attention_decode_tunable.default_config(Arch.parse(arch), one)["gather"])

    assert gathers("sm90", 16)
    assert gathers("sm100", 32)
    assert not gathers("sm90", 64)
    assert not gathers("sm80", 16)
    assert not gathers("sm120", 16)


def test_the_declared_problems_are_a_sweep_of_minutes() -> None:
    problems = attention_decode_tunable.typical_problems
    assert len(problems) <= 130
    assert sum(len(attention_decode_tunable.candidates(SM90, one)) for one in problems) <= 1260


def test_the_blocks_of_a_launch_are_those_of_all_sequences_heads_and_splits() -> None:
    assert attention_decode_tunable.tiles is not None
    assert attention_decode_tunable.tiles(config(4), shape(3, 8192, 32, 8)) == 3 * 8 * 4


def test_arguments_without_storage_pose_the_problem_that_made_them() -> None:
    for one in attention_decode_tunable.typical_problems:
        assert not list(argument_mistakes(attention_decode_tunable, SM90, one))


# The kernel -------------------------------------------------------------------------------------


def made(one: Problem, lengths: list[int] | None = None, window: int | None = None) -> tuple[Any, ...]:
    """Arguments of a problem, with NaN in all that no sequence may look at."""
    args = list(attention_decode_tunable.make_args(one, CPU, 1))
    _, k_cache, v_cache, table, seq_lens = args[:5]
    if lengths is not None:
        seq_lens.copy_(torch.tensor(lengths))
    if window is not None:
        args[-1] = window
    page_size, used = k_cache.shape[1], torch.zeros(k_cache.shape[:2], dtype=torch.bool)
    for row, length in zip(table, seq_lens.tolist(), strict=True):
        for position in range(max(length - args[-1], 0), length):
            used[row[position // page_size], position % page_size] = True
        row[-(-length // page_size) :] = -7
    for cache in (k_cache, v_cache):
        cache[~used] = torch.nan
    poison(attention_decode_tunable, args)
    return tuple(args)


def run(
    args: tuple[Any, ...], candidate: Config, monkeypatch: pytest.MonkeyPatch, *,
    at_once: int | None = None, disorder: random.Random | None = None,
) -> None:  # fmt: skip
    """Run the kernel with as few blocks at a time as may be, or with more."""
    splits = int(candidate["splits"])
    emulator.run(
        attention_decode_tunable, args, candidate, monkeypatch,
        sms=2 * splits, at_once=at_once or splits, disorder=disorder,
    )  # fmt: skip
    assert not bool(args[7].any()), "what the splits left is not zero again"


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("one", "candidate"),
    [
        (shape(1, 1), config(1)),
        (shape(3, 300), config(1)),
        (shape(3, 300), config(1, gather=True)),
        (shape(3, 300), config(4)),
        (shape(2, 300, 3, 3), config(2)),
        (shape(2, 300, 10, 2, page_size=32), config(2, 128)),
        (shape(2, 300, 9, 1, page_size=64), config(8)),
        (shape(2, 500, head_dim=128, page_size=128), config(2, 128)),
        (shape(2, 500, head_dim=128, page_size=128), config(4)),
        (shape(2, 100, windowed=True), config(2)),
        (shape(2, 257, windowed=True), config(1, 128, gather=True)),
        (shape(3, 100, 10, 2, windowed=True), config(1, gather=True)),
        (shape(3, 128, 8, 1, head_dim=128, page_size=32, windowed=True), config(1, gather=True)),
        (shape(3, 600), config(8, balanced=True)),
        (shape(3, 600), config(8, balanced=True, gather=True)),
        (shape(5, 900, 10, 2, head_dim=128, page_size=32), config(4, 128, balanced=True, gather=True)),
        (shape(2, 700, 24, 1, head_dim=128), config(16, balanced=True)),
    ],
)
def test_the_kernel_agrees_with_the_reference(
    one: Problem, candidate: Config, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(one.replaced(dtype=dtype))
    wanted = expected(attention_decode_tunable, args)
    run(args, candidate, monkeypatch)
    assert_agrees(attention_decode_tunable, args, wanted)


@pytest.mark.emulated
@pairwise(
    "window",
    {
        "form": [
            "splits=1",
            "splits=2",
            "splits=8",
            "splits=1 gather=True",
            "splits=8 gather=True",
            "splits=4 balanced=True gather=True",
            "splits=8 balanced=True",
        ],
    },
    [
        (None, "splits=1", "splits=2", "splits=8 gather=True", "splits=4 balanced=True gather=True"),
        (1, "splits=1", "splits=2", "splits=8 gather=True", "splits=4 balanced=True gather=True"),
        (
            63,
            "splits=2",
            "splits=1 gather=True",
            "splits=4 balanced=True gather=True",
            "splits=8 balanced=True",
        ),
        (64, "splits=1", "splits=2", "splits=8", "splits=4 balanced=True gather=True"),
        (65, "splits=1", "splits=2", "splits=4 balanced=True gather=True", "splits=8 balanced=True"),
        (127, "splits=1", "splits=2", "splits=8 gather=True", "splits=4 balanced=True gather=True"),
        (
            128,
            "splits=2",
            "splits=1 gather=True",
            "splits=4 balanced=True gather=True",
            "splits=8 balanced=True",
        ),
        (
            130,
            "splits=2",
            "splits=1 gather=True",
            "splits=4 balanced=True gather=True",
            "splits=8 balanced=True",
        ),
    ],
)
def test_every_key_counts_once_at_any_length_window_and_number_of_splits(
    window: int | None, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [1, 16, 63, 64, 65, 128, 129, 200]
    args = made(shape(len(lengths), 200, 2, 1), lengths, window)
    wanted = expected(attention_decode_tunable, args)
    run(args, config(**constants(form)), monkeypatch)
    lse = wanted["lse"]
    torch.testing.assert_close(args[6].double(), lse.value, rtol=lse.rtol, atol=lse.atol)
    torch.testing.assert_close(args[5].double(), wanted["out"].value, rtol=2e-2, atol=2e-2)


@pytest.mark.emulated
@pairwise(
    "number",
    {
        "window": (None, 40),
        "form": [
            "splits=1 gather=True",
            "splits=4 gather=True",
            "splits=4 balanced=True gather=True",
            "splits=2 tile_n=128 gather=True",
            "splits=2",
        ],
    },
    [
        (
            -1,
            (None, "splits=4 balanced=True gather=True"),
            (None, "splits=2 tile_n=128 gather=True"),
            (40, "splits=1 gather=True"),
            (40, "splits=2"),
        ),
        (
            -2147483648,
            (None, "splits=1 gather=True"),
            (None, "splits=2"),
            (40, "splits=4 balanced=True gather=True"),
            (40, "splits=2 tile_n=128 gather=True"),
        ),
        (
            2147483647,
            (None, "splits=1 gather=True"),
            (None, "splits=2"),
            (40, "splits=4 balanced=True gather=True"),
            (40, "splits=2 tile_n=128 gather=True"),
        ),
        (
            1000000,
            (None, "splits=4 gather=True"),
            (None, "splits=2"),
            (40, "splits=1 gather=True"),
            (40, "splits=4 balanced=True gather=True"),
            (40, "splits=2 tile_n=128 gather=True"),
        ),
        (
            None,
            (None, "splits=1 gather=True"),
            (None, "splits=2 tile_n=128 gather=True"),
            (40, "splits=4 balanced=True gather=True"),
            (40, "splits=2"),
        ),
    ],
)
def test_numbers_beside_the_pages_of_a_sequence_may_be_anything_also_those_of_another_s_pages(
    number: int | None, window: int | None, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(shape(4, 200, 2, 1), [0, 1, 70, 130], window)
    table = args[3]
    own, other = table.clone(), [int(table[3, 0]), int(table[1, 0])]
    for row, length in zip(table, args[4].tolist(), strict=True):
        row[-(-length // 16) :] = other[0] if number is None else number
        if window is not None:
            row[: max(length - window, 0) // 16] = other[1] if number is None else number
    wanted = expected(attention_decode_tunable, (*args[:3], own.clamp(min=0), *args[4:]))
    run(args, config(**constants(form)), monkeypatch)
    torch.testing.assert_close(args[5].double(), wanted["out"].value, rtol=2e-2, atol=2e-2)


@pytest.mark.emulated
@pytest.mark.parametrize("number", [-1, 2**31 - 1, None], ids=str)
@pytest.mark.parametrize("width", [5, 6, 7])
def test_short_windows_of_large_pages_read_their_own_pages_and_never_beyond_the_table(
    width: int, number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [0, 1, 33, 32 * width, 32 * width - 31]
    args = made(shape(5, 32 * width, 2, 1, page_size=32), lengths, 100)
    table = args[3]
    assert table.shape[1] == width
    own, other = table.clone(), int(table[3, 0])
    for row, length in zip(table, lengths, strict=True):
        row[-(-length // 32) :] = other if number is None else number
        row[: max(length - 100, 0) // 32] = other if number is None else number
    wanted = expected(attention_decode_tunable, (*args[:3], own.clamp(min=0), *args[4:]))
    run(args, config(1, gather=True), monkeypatch)
    torch.testing.assert_close(args[5].double(), wanted["out"].value, rtol=2e-2, atol=2e-2)
    # Against the contract: what it gives is anything, what it reads is the table's.
    args[4][2] = 32 * width + 1000
    run(args, config(1, gather=True), monkeypatch)


@pytest.mark.emulated
@pytest.mark.parametrize(("splits", "balanced"), [(1, False), (4, False), (4, True)])
def test_an_empty_sequence_gives_zeros_and_a_log_sum_of_minus_infinity(
    splits: int, balanced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(shape(2, 200), [0, 150])
    run(args, config(splits, balanced=balanced), monkeypatch)
    out, lse = args[5], args[6]
    assert bool((out[0] == 0).all())
    assert bool((lse[0] == -torch.inf).all())
    assert bool(out[1].isfinite().all())
    assert bool(lse[1].isfinite().all())


@pytest.mark.emulated
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("length", [-1, -64, -200, -(2**30), 200 + 16])
def test_a_length_that_no_sequence_has_reads_nothing_beside_the_table_and_changes_no_other_sequence(
    length: int, gather: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(shape(3, 200), [200, 100, 100])
    wanted = expected(attention_decode_tunable, args)["out"]
    for windowed in (False, True):
        args[4][1] = length
        poison(attention_decode_tunable, args)
        run((*args[:-1], 300 if windowed else args[-1]), config(4, gather=gather), monkeypatch)
        for seq in (0, 2):
            torch.testing.assert_close(args[5][seq].double(), wanted.value[seq], rtol=2e-2, atol=2e-2)


@pytest.mark.emulated
@pytest.mark.parametrize(("heads", "splits"), [(8, 1), (1, 8), (4, 2)])
@pytest.mark.parametrize("batch", [17, 40, 64])
def test_sequences_in_any_order_of_length_are_each_attended_once(
    batch: int, heads: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(batch)
    lengths = [rng.choice((0, 1, 64, 65, 150, rng.randint(1, 200))) for _ in range(batch)]  # many alike
    args = made(shape(batch, 200, heads, heads), lengths)
    assert attention_decode_space.tile_of_sequences(config(splits), batch, heads, windowed=False) == 64
    wanted = expected(attention_decode_tunable, args)
    run(args, config(splits), monkeypatch)
    lse = wanted["lse"]
    torch.testing.assert_close(args[6].double(), lse.value, rtol=lse.rtol, atol=lse.atol)
    kept = torch.tensor(lengths) > 0
    torch.testing.assert_close(args[5].double()[kept], wanted["out"].value[kept], rtol=2e-2, atol=2e-2)
    assert bool((args[5][~kept] == 0).all())


@pytest.mark.emulated
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize(
    ("one", "candidate"),
    [
        (shape(2, 1000, 4, 2), config(8)),  # two slices for eight splits
        (shape(2, 1000, 4, 2, head_dim=128), config(4)),
        (shape(1, 700, 10, 1, head_dim=128), config(16)),  # a slice for each; of 16 splits 11 have keys
        (shape(1, 300, 64, 1, head_dim=128), config(2)),  # four for each
        (shape(1, 200, 40, 1), config(64)),  # a slice for each split
        (shape(3, 1000, 4, 2), config(8, balanced=True)),
        (shape(4, 900, 10, 2, head_dim=128), config(16, balanced=True)),
    ],
    ids=str,
)
def test_parts_are_combined_in_whatever_order_they_arrive(
    one: Problem, candidate: Config, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(one)
    wanted = expected(attention_decode_tunable, args)
    for again in range(2):  # on the same scratch
        run(args, candidate, monkeypatch, disorder=random.Random(2 * seed + again))
        assert_agrees(attention_decode_tunable, args, wanted)
        args[5].fill_(torch.nan)


@pytest.mark.emulated
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("splits", [2, 8, 16, 32, 64])
def test_parts_of_one_tile_many_and_none_are_combined(
    splits: int, balanced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(shape(3, 3000, 4, 2), [0, 3000, 1])
    wanted = expected(attention_decode_tunable, args)
    run(args, config(splits, balanced=balanced), monkeypatch, disorder=random.Random(splits))
    assert_agrees(attention_decode_tunable, args, wanted)
    assert bool((args[5][0] == 0).all())
    assert bool((args[6][0] == -torch.inf).all())


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("splits", "parts"), [(32, (8, 9)), (32, (16, 17)), (64, (16, 17)), (64, (32, 33)), (64, (64, 1))]
)
def test_no_part_is_left_out_where_more_are_combined_in_another_way(
    splits: int, parts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(shape(2, 64 * max(parts), 4, 1), [64 * count for count in parts])
    wanted = expected(attention_decode_tunable, args)
    run(args, config(splits, balanced=True), monkeypatch, at_once=splits + 1)
    assert_agrees(attention_decode_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("splits", [8, 32])
def test_what_is_nan_in_one_sequence_is_so_in_no_other(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args = made(shape(3, 900, 4, 1), [700, 900, 500])
    _, _, v_cache, table, *_ = args
    v_cache[table[1, 3]] = torch.nan
    run(args, config(splits, balanced=True), monkeypatch, at_once=2 * splits)
    assert [bool(out.isfinite().all()) for out in args[5]] == [True, False, True]
    assert bool(args[5][1].isnan().all())


def test_slices_are_a_result_and_each_thread_that_waits_has_words_of_its_own() -> None:
    for splits, queries, head_dim in itertools.product((2, 4, 8, 16, 32, 64), (8, 16, 32, 64), (64, 128)):
        width = decode_workspace.width_of_slice(splits, queries, head_dim)
        assert head_dim * queries % width == width % queries == 0, (splits, queries, head_dim)
        loaded_together = width if splits <= decode_workspace.MOST_APART else splits * width
        assert loaded_together >= 32 * decode_workspace.MOST_WARPS, (splits, queries, head_dim)


@pytest.mark.emulated
def test_more_blocks_than_a_sequence_has_may_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    args = made(shape(2, 500, 4, 2))
    wanted = expected(attention_decode_tunable, args)
    run(args, config(8), monkeypatch, at_once=20)
    assert_agrees(attention_decode_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("value", [0.0, -0.0, torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("length", [1, 100, 300])
def test_parts_that_are_zero_or_not_finite_are_waited_for_and_combined(
    value: float, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(shape(2, 300, 4, 2), [length, 300])
    q, _, v_cache, table = args[:4]
    last = length - 1
    if value == 0.0:
        v_cache[table[0, : last // 16 + 1].long(), :, 0] = value
    else:
        v_cache[table[0, last // 16], last % 16, 0] = value
    wanted = expected(attention_decode_tunable, args)["out"].value
    run(args, config(4), monkeypatch, disorder=random.Random(1))
    torch.testing.assert_close(args[5].double(), wanted, rtol=2e-2, atol=2e-2, equal_nan=True)
    assert bool((args[5][0, :2].double() == value).all()) or value != value
    assert bool(args[5][1].isfinite().all())
    q[0].fill_(torch.nan)
    run(args, config(4), monkeypatch, disorder=random.Random(2))
    assert bool(args[5][0].isnan().all())
    assert bool(args[6][0].isnan().all())


@pytest.mark.emulated
def test_a_block_asks_for_its_row_of_the_scratch_before_it_asks_for_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[int, list[str]] = {}  # by block

    def noted(name: str) -> None:
        function = getattr(flash_decoding, name)

        def instead(*args: Any) -> Any:
            asked.setdefault(int(flash_decoding.ct.bid(0)), []).append(name)
            return function(*args)

        monkeypatch.setattr(flash_decoding, name, instead)

    for name in ("asked_for", "page_numbers", "leave"):
        noted(name)
    run(made(shape(2, 400)), config(4), monkeypatch)
    assert sorted(asked) == list(range(16))
    for order in asked.values():
        assert order[:2] == ["asked_for", "page_numbers"]
        assert order[-1] == "leave"


@pytest.mark.emulated
@pytest.mark.parametrize(("heads", "words"), [(16, 2048), (32, 0)])
def test_a_row_is_asked_for_whole_or_where_it_is_long_not_at_all(
    heads: int, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, function = [], flash_decoding.asked_for

    def asked_for(*args: Any) -> Any:
        zeros = function(*args)
        found.append(0 if isinstance(zeros, int) else zeros.shape[1])
        return zeros

    monkeypatch.setattr(flash_decoding, "asked_for", asked_for)
    run(made(shape(1, 200, heads, 1, head_dim=128)), config(2), monkeypatch)
    assert found == [words] * 2


def test_the_scratch_holds_what_the_blocks_of_any_candidate_leave() -> None:
    for one in (*attention_decode_tunable.typical_problems, shape(1, 65536, 64, 1, head_dim=128)):
        args = attention_decode_tunable.make_args(one, torch.device("meta"), 0)
        for arch in KNOWN_ARCHS:
            for candidate in attention_decode_tunable.candidates(arch, one):
                if int(candidate["splits"]) > 1:
                    edge, device = attention_decode_tunable.bucket_of(one), Device.reference(arch)
                    blocks = attention_decode_space.blocks_on(candidate, device, edge)
                    # The last of equal parts are read with rows behind them, up to as many as there may be.
                    behind = int(candidate["splits"]) if candidate["balanced"] else 0
                    assert blocks + behind <= args[7].shape[0]


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90", "sm120"])
@pytest.mark.parametrize(
    "tunable", [attention_decode_tunable, cross_entropy_tunable, softmax_tunable], ids=str
)
def test_a_gpu_smaller_than_its_archs_reference_runs_every_declared_problem(
    tunable: Tunable, arch: str
) -> None:
    here = Arch.parse(arch)
    index, legality = dispatcher_of(tunable).load(here), Legality(tunable, here)
    problems = tunable.typical_problems[:: 1 if tunable is attention_decode_tunable else 5]
    for sms, one in itertools.product((8, 20, 58, 78, 114, 132), problems):
        device = Device.reference(here).with_sm_count("a smaller one", sms)
        fits = partial(unfit, tunable, device=device, problem=one)
        chosen = resolve(one, index, legality.fitting(fits)).config
        assert fits(chosen) is None, one
        assert tunable.refusal(chosen, here, one) is None, one


def test_in_place_of_a_default_that_does_not_fit_runs_what_is_most_like_it() -> None:
    here = Arch.parse("sm89")
    l4, one = Device.reference(here).with_sm_count("NVIDIA L4", 58), shape(1, 8192, 8, 1, head_dim=128)
    default = attention_decode_tunable.default_config(here, one)
    assert "64 blocks wait for each other" in str(unfit(attention_decode_tunable, default, l4, one))
    index, legality = (
        dispatcher_of(attention_decode_tunable).load(here),
        Legality(attention_decode_tunable, here),
    )
    fits = partial(unfit, attention_decode_tunable, device=l4, problem=one)
    choice = resolve(one, index, legality.fitting(fits))
    # A third block a multiprocessor is nearer than half the splits.
    assert choice.config == Config(constants=default.constants, hints={**default.hints, "occupancy": 3})
    assert choice.source == "default"
    assert "in place of the default" in choice.reason


def test_blocks_that_would_wait_for_ever_on_a_small_gpu_are_refused() -> None:
    one = shape(1, 8192)
    small = Device.reference(SM90).with_sm_count("a slice", 14)
    assert attention_decode_tunable.grid_fn(config(8, gather=True), small, one) == (16,)
    with pytest.raises(LaunchError, match=r"16 blocks wait .* runs 14 at once; tune attention_decode on it"):
        attention_decode_tunable.grid_fn(config(16, gather=True), small, one)


@pytest.mark.parametrize("window", [None, 37])
def test_the_reference_is_the_attention_that_torch_computes(window: int | None) -> None:
    args = attention_decode_tunable.make_args(shape(2, 100, 4, 2), CPU, 3)
    args = args if window is None else (*args[:-1], window)
    q, k_cache, v_cache, table, seq_lens = args[:5]
    wanted = expected(attention_decode_tunable, args)
    for i, length in enumerate(seq_lens.tolist()):
        first = 0 if window is None else max(length - window, 0)
        k, v = (c[table[i].long()].flatten(0, 1)[first:length].transpose(0, 1) for c in (k_cache, v_cache))
        plain = torch.nn.functional.scaled_dot_product_attention(
            q[i, :, None].double(), k.double(), v.double(), enable_gqa=True
        )
        torch.testing.assert_close(wanted["out"].value[i], plain[:, 0])
        scores = (q[i].double().reshape(2, 2, -1) @ k.double().transpose(1, 2)).reshape(4, -1) * args[-2]
        torch.testing.assert_close(wanted["lse"].value[i], scores.logsumexp(1))


def test_the_tolerances_tell_a_missing_or_mistaken_tile_from_a_rounding() -> None:
    args = attention_decode_tunable.make_args(shape(1, 32768, 2, 1), CPU, 0)
    poison(attention_decode_tunable, args)
    q, k_cache, v_cache, table, _, out, lse = args[:7]
    wanted = expected(attention_decode_tunable, args)
    k, v = (cache[table[0].long()].flatten(0, 2).float() for cache in (k_cache, v_cache))
    scores = q[0].float() @ k.t() * args[-2]

    def attend(s: torch.Tensor, values: torch.Tensor) -> None:
        weights = (s - s.amax(1, keepdim=True)).exp()
        out[0] = (weights.to(out.dtype).float() @ values) / weights.sum(1, keepdim=True)
        lse[0] = s.logsumexp(1)

    attend(scores, v)
    assert_agrees(attention_decode_tunable, args, wanted)
    mistaken = v.clone()
    mistaken[640:704] = v[:64]
    attend(scores, mistaken)
    with pytest.raises(AssertionError, match="of out are wrong"):
        assert_agrees(attention_decode_tunable, args, wanted)
    attend(scores[:, 64:], v[64:])
    with pytest.raises(AssertionError, match="are wrong"):
        assert_agrees(attention_decode_tunable, args, wanted)


# The compiler -----------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("name", SM90_AND_SLOW_ARCHS)
@pytest.mark.parametrize("page_size", [16, 64])
def test_it_compiles_without_spilling(name: str, page_size: int) -> None:
    arch, one = Arch.parse(name), shape(8, 8192, 32, 8, head_dim=128, page_size=page_size)
    default = attention_decode_tunable.default_config(arch, one)
    assert int(default["splits"]) > 1
    assert compiled(attention_decode_tunable, arch, one, default).stack_bytes == 0


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "heads", "head_dim"), [("sm90", 64, 64), pytest.param("sm120", 32, 128, marks=pytest.mark.slow)]
)
def test_many_queries_of_a_key_compile_without_spilling(name: str, heads: int, head_dim: int) -> None:
    arch, one = Arch.parse(name), shape(8, 8192, heads, 1, head_dim=head_dim)
    default = attention_decode_tunable.default_config(arch, one)
    assert int(default["splits"]) > 1
    assert compiled(attention_decode_tunable, arch, one, default).stack_bytes == 0


@pytest.mark.process
def test_splits_take_nothing_from_the_loads_ahead_of_a_block_that_is_alone() -> None:
    one = shape(8, 8192, 64, 8, head_dim=64)
    split, whole = (
        compiled(attention_decode_tunable, SM90, one, config(n, gather=True, occupancy=1)) for n in (16, 1)
    )
    assert split.stack_bytes == whole.stack_bytes == 0
    stage = 2 * 64 * 64 * 2  # keys and values, bfloat16
    assert split.shared_bytes // stage == whole.shared_bytes // stage >= 3


@pytest.mark.process
def test_narrow_keys_are_loaded_as_far_ahead_as_shared_memory_lets_two_blocks() -> None:
    found = compiled(
        attention_decode_tunable, SM90, shape(64, 2048, 64, 8, head_dim=64), config(1, gather=True)
    )
    assert found.shared_bytes // (2 * 64 * 64 * 2) == 6  # keys and values, bfloat16


@pytest.mark.process
@pytest.mark.parametrize(
    ("one", "candidate"),
    [
        (shape(64, 2048, 64, 8, head_dim=128, page_size=64), config(4)),
        (shape(256, 128, 64, 8, head_dim=64, windowed=True), config(1, gather=True, occupancy=4)),
        (shape(8, 8192, 64, 8, head_dim=128, page_size=32), config(8, 128, gather=True)),
        (shape(8, 8192, 32, 8, head_dim=128), config(8, balanced=True, gather=True)),
        (shape(3, 700, 5, 1, dtype="float16", page_size=128), config(1, 128)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (shape(256, 2048, 64, 8, head_dim=64), config(1, gather=True)),
                (shape(8, 8192, 64, 8, head_dim=64), config(16, 128, gather=True, occupancy=1)),
                (shape(8, 8192, 32, 8, head_dim=128), config(8)),
                (shape(8, 8192, 64, 8, head_dim=64), config(8, 128, balanced=True, gather=True)),
                (shape(8, 8192, 64, 8, head_dim=64), config(16, balanced=True, gather=True)),
            )
        ),
    ],
)
def test_it_compiles_across_its_space_to_loads_ahead_of_their_use(one: Problem, candidate: Config) -> None:
    found = compiled(attention_decode_tunable, SM90, one, candidate)
    assert found.stack_bytes == 0
    # What is loaded ahead waits in shared memory: 1.3 us of an H200's 4.8 TB/s over its 132 multiprocessors
    # is 47 KB. Loads that are waited for at once take none.
    assert found.shared_bytes * candidate.hints["occupancy"] > 60_000


# The host function ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    module = sys.modules["aot_tune.kernels.decode.attention_decode"]
    fake = SimpleNamespace(launch=lambda *args: calls.append(args))
    monkeypatch.setattr(module, "attention_decode_tunable", fake)
    return calls


def tensors(
    batch: int = 2, heads: int = 4, kv_heads: int = 2, pages: int = 6, page_size: int = 16, width: int = 3
) -> dict[str, Any]:
    cache = (pages, page_size, kv_heads, 64)
    return {
        "q": torch.zeros((batch, heads, 64), dtype=torch.bfloat16),
        "k_cache": torch.zeros(cache, dtype=torch.bfloat16),
        "v_cache": torch.zeros(cache, dtype=torch.bfloat16),
        "block_table": torch.zeros((batch, width), dtype=torch.int32),
        "seq_lens": torch.zeros((batch,), dtype=torch.int32),
    }


def test_the_host_function_allocates_its_outputs_and_launches_once(launched: list[tuple[Any, ...]]) -> None:
    given = tensors()
    out, lse = attention_decode(**given, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 4, 64), torch.bfloat16, (2, 4), torch.float32)
    [args] = launched
    assert all(passed is tensor for passed, tensor in zip(args[:5], given.values(), strict=True))
    assert args[5] is out
    assert args[6] is lse
    assert args[8:] == (64**-0.5, 2**31 - 1)


def test_scale_window_and_out_are_passed_on(launched: list[tuple[Any, ...]]) -> None:
    out = torch.zeros((2, 4, 64), dtype=torch.bfloat16)
    assert attention_decode(**tensors(), scale=0.5, window=128, out=out) is out
    assert launched[0][5] is out
    assert launched[0][8:] == (0.5, 128)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"pages": 0}, {"width": 0}, {"heads": 0}])
def test_without_queries_or_keys_nothing_is_launched(
    sizes: dict[str, int], launched: list[tuple[Any, ...]]
) -> None:
    out, lse = attention_decode(**tensors(**sizes), return_lse=True)
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())
    assert launched == []


def test_each_unusable_argument_is_named(launched: list[tuple[Any, ...]]) -> None:
    def refused(says: str, sizes: dict[str, int] | None = None, **more: Any) -> None:
        with pytest.raises(LaunchError, match=says):
            attention_decode(**{**tensors(**sizes or {}), **more})

    half = torch.zeros((2, 4, 64), dtype=torch.bfloat16)
    refused(r"q is \(4, 64\); pass a tensor of shape \(batch, heads, head_dim\)", q=half[0])
    refused("q is float32; pass bfloat16 or float16", q=half.float())
    refused("head_dim of 32; pass 64 or 128", q=half[:, :, :32])
    refused("k_cache is float16; pass bfloat16", k_cache=tensors()["k_cache"].half())
    refused("v_cache is float16; pass bfloat16", v_cache=tensors()["v_cache"].half())
    refused("pages of 8 keys; pass a power of two of 16 or more", {"page_size": 8})
    refused("pages of 48 keys; pass a power of two", {"page_size": 48})
    refused("q has 4 heads and k_cache 3", {"kv_heads": 3})
    refused("q has 65 heads and k_cache 1; .* 1 to 64 times as many", {"heads": 65, "kv_heads": 1})
    refused(r"v_cache has shape \(6, 16, 2, 64\); k_cache asks for", k_cache=tensors(pages=5)["k_cache"])
    refused("block_table is int64; pass int32", block_table=torch.zeros((2, 3), dtype=torch.int64))
    refused(r"block_table has shape \(1, 3\)", block_table=torch.zeros((1, 3), dtype=torch.int32))
    refused("seq_lens is int64; pass int32", seq_lens=torch.zeros((2,), dtype=torch.int64))
    refused(r"seq_lens has shape \(3,\); q asks for \(2,\)", seq_lens=torch.zeros((3,), dtype=torch.int32))
    refused("window is 0; pass an int of 1 or more", window=0)
    refused(r"out has shape \(2, 64, 4\)", out=half.reshape(2, 64, 4))
    refused("out is float16", out=half.half())
    refused("out and q share memory", q=half, out=half)
    inside = half.view(torch.int32).flatten()
    refused("out and block_table share memory", out=half, block_table=inside[:6].view(2, 3))
    refused("out and seq_lens share memory", out=half, seq_lens=inside[:2])
    refused("seq_lens is on meta, not on cpu", seq_lens=torch.zeros((2,), dtype=torch.int32, device="meta"))
    assert launched == []
