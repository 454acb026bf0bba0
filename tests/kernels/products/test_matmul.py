"""matmul without a GPU: the space and its rules, tiles, arithmetic, what the host function refuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.errors import LaunchError
from aot_tune.kernels import matmul, matmul_tunable
from aot_tune.kernels.products import dense_space, product, split_k
from aot_tune.kernels.products.dense_space import config_of, constants_of, tiles
from aot_tune.kernels.products.product_space import extent
from aot_tune.nvidia import cutile
from aot_tune.nvidia.cubin import machine_code
from aot_tune.nvidia.sass import inner_loop
from aot_tune.values.arch import KNOWN_ARCHS, Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import emulator
from tests.support.agree import assert_agrees, expected, poison, problem
from tests.support.compiling import SM90_AND_SLOW_ARCHS, compiled
from tests.support.pairs import constants, pairwise
from tests.support.samples import SM90
from tests.support.shared_sums import shares_left

CPU = torch.device("cpu")


def shape(m: int, n: int = 6144, k: int = 4096, dtype: str = "bfloat16") -> Problem:
    return problem(dtype=dtype, M=m, N=n, K=k)


def config(
    tile_m: int,
    tile_n: int,
    tile_k: int,
    *,
    more: int = 0,
    swapped: int = 0,
    num_ctas: int = 1,
    occupancy: int = 1,
    warps: int = 4,
    splits: int = 1,
    peeled: int = 1,
    group: int = 8,
) -> Config:
    hints = num_ctas, occupancy, warps
    return config_of(tile_m, tile_n, more, tile_k, swapped, group, *hints, splits, peeled)


def refusal(candidate: Config, arch: str = "sm90", m: int = 4096) -> str:
    return matmul_tunable.refusal(candidate, Arch.parse(arch), shape(m)) or ""


# The space --------------------------------------------------------------------------------------


def test_the_space_of_sm90_is_a_sweep_of_minutes() -> None:
    for m, most in ((1, 30), (64, 30), (256, 40), (1024, 40), (4096, 30)):
        assert 10 <= len(matmul_tunable.candidates(SM90, shape(m))) <= most, m


@pytest.mark.parametrize("arch", [a for a in KNOWN_ARCHS if a >= Arch(10, 0)], ids=str)
def test_from_sm100_on_clusters_and_every_tile_size_are_searched(arch: Arch) -> None:
    for size in (256, 16384):
        candidates = matmul_tunable.candidates(arch, shape(size))
        assert {c.hints["num_ctas"] for c in candidates} >= {1, 2}
        for name in ("tile_m", "tile_n", "tile_k"):
            assert len({c[name] for c in candidates}) >= 2, name


def test_before_sm90_no_config_asks_for_a_cluster() -> None:
    for arch in [a for a in KNOWN_ARCHS if a < Arch(9, 0)]:
        assert {c.hints["num_ctas"] for c in matmul_tunable.space(arch, shape(4096))} == {1}


def test_what_does_not_fit_is_refused_with_its_reason() -> None:
    assert "registers" in refusal(config(128, 256, 64))
    assert refusal(config(128, 256, 64, num_ctas=2)) == ""
    assert refusal(config(128, 256, 64, warps=8)) == ""
    assert "registers" in refusal(config(128, 128, 64, more=64))
    assert refusal(config(128, 128, 64, more=64, warps=8)) == ""
    assert "clusters" in refusal(config(128, 128, 32, num_ctas=2), "sm80")
    assert "shared memory" in refusal(config(128, 128, 128), "sm120")
    assert "shared memory" in refusal(config(128, 128, 128, occupancy=2))
    assert "tensor memory" in refusal(config(256, 256, 64, occupancy=2), "sm100")
    assert refusal(config(256, 256, 64), "sm100") == ""


def test_what_is_a_waste_on_a_bucket_is_refused_with_its_reason() -> None:
    assert "half empty" in refusal(config(128, 128, 64), m=32)
    assert refusal(config(128, 128, 64), m=33) == ""
    assert "more than four times" in refusal(config(16, 64, 128), m=65)
    assert refusal(config(16, 64, 128), m=64) == ""


def test_further_columns_divide_those_beside_them() -> None:
    assert "more is 48; with swapped 0 it must divide tile_n, 128" in refusal(config(64, 128, 64, more=48))
    assert refusal(config(64, 128, 64, more=32)) == ""


def test_further_rows_divide_those_above_and_are_for_batches_in_between() -> None:
    taller = config(128, 128, 64, more=32, swapped=1, warps=8)
    assert refusal(taller, m=129) == refusal(taller, m=2048) == ""
    for m in (128, 2049):
        assert "tiles of 128 and 32 rows are for 129 to 2048 rows" in refusal(taller, m=m)
    wrong = config(64, 128, 64, more=48, swapped=1, warps=8)
    assert "with swapped 1 it must divide tile_m, 64" in refusal(wrong, m=300)
    assert "registers" in refusal(config(128, 128, 64, more=64, swapped=1), m=300)
    found = matmul_tunable.candidates(SM90, shape(885))
    heights = {c["tile_m"] + c["more"] for c in found if c["swapped"] and c["more"]}
    assert heights == {80, 96, 144, 160, 192}


def test_only_a_tile_of_one_width_and_one_block_begins_with_its_loop() -> None:
    assert refusal(config(128, 256, 32, warps=8, peeled=0)) == ""
    assert "needs peeled to be 1" in refusal(config(128, 128, 64, more=64, warps=8, peeled=0))
    for wrong in (-1, 2):
        assert f"peeled is {wrong}; it must be 1" in refusal(config(128, 128, 64, peeled=wrong))


def test_a_group_of_rows_is_searched_where_it_is_another_order_of_the_tiles() -> None:
    wide = config(128, 256, 32, warps=8, peeled=0, group=16)
    assert refusal(wide, m=1025) == ""
    assert "group 16 orders the tiles of up to 1024 rows as group 8 does" in refusal(wide, m=1024)
    tall = config(512, 256, 64, num_ctas=8, group=4)
    assert refusal(tall, "sm100", m=2049) == ""
    assert "group 4 orders" in refusal(tall, "sm100", m=2048)
    for wrong in (0, -8):
        assert f"group is {wrong}; it must be the number of rows" in refusal(
            config(128, 128, 64, group=wrong)
        )
    for arch in KNOWN_ARCHS:
        assert len({c["group"] for c in matmul_tunable.candidates(arch, shape(16384))}) > 1, arch
        assert {c["group"] for c in matmul_tunable.candidates(arch, shape(1024))} == {8}, arch


def test_blocks_share_the_sums_of_few_rows_and_a_long_k() -> None:
    def said(candidate: Config, m: int, n: int, k: int) -> str:
        return matmul_tunable.refusal(candidate, SM90, shape(m, n, k)) or ""

    shared = config(128, 128, 64, warps=8, splits=3)
    assert said(shared, 256, 5120, 25600) == ""
    assert "5120 over 3 splits" in said(shared, 256, 5120, 5120)
    assert "512 rows and a K" in said(shared, 512, 5120, 25600)
    assert "half empty" in said(shared, 64, 5120, 25600)
    assert "448 tiles are enough" in said(shared, 256, 28672, 25600)
    assert "are not shared" in said(config(128, 128, 64, more=32, warps=8, splits=3), 256, 5120, 25600)
    assert "over 16; (2, 3, 4) share" in said(config(16, 64, 128, swapped=1, splits=16), 16, 5120, 65536)
    assert "of up to 128 columns" in said(config(64, 256, 64, splits=2), 64, 5120, 25600)
    assert "of 1024 numbers or" in said(config(16, 32, 128, splits=2), 16, 5120, 25600)
    assert "are not shared" in said(config(128, 256, 64, num_ctas=2, splits=2), 256, 5120, 25600)
    for arch in KNOWN_ARCHS:
        found = matmul_tunable.candidates(arch, shape(1, 4096, 14336))
        few = Device.reference(arch).sm_count < 48  # 64 tiles keep them busy
        assert any(c["splits"] == 3 for c in found) != few, arch
    for name in ("sm90", "sm100"):
        found = matmul_tunable.candidates(Arch.parse(name), shape(256, 5120, 25600))
        assert any(c["splits"] == 3 and c["tile_m"] == 128 for c in found), name


def test_blocks_share_the_last_wave_of_batches_in_between() -> None:
    def said(candidate: Config, m: int, n: int = 5120, k: int = 4096) -> str:
        return matmul_tunable.refusal(candidate, SM90, shape(m, n, k)) or ""

    shared = config(128, 256, 32, warps=8, splits=4, peeled=0)
    assert said(shared, 129) == said(shared, 2048) == ""
    for m in (128, 2049):
        assert "the last wave is shared for 129 to 2048 rows and a K of 2048 or more" in said(shared, m)
    assert "and a K of 1024" in said(shared, 300, k=1024)
    assert "over 9; up to 8 share" in said(config(128, 256, 32, warps=8, splits=9, peeled=0), 300)
    assert "of up to 256 rows and columns" in said(config(64, 512, 32, warps=8, splits=4, peeled=0), 300)
    assert "are not shared" in said(config(128, 256, 32, num_ctas=2, warps=8, splits=4, peeled=0), 300)
    found = matmul_tunable.candidates(SM90, shape(885))
    assert {c["splits"] for c in found if not c["peeled"]} == {1, 4, 8}


def test_what_blocks_leave_fits_and_each_slice_has_more_elements_than_a_block_has_threads() -> None:
    for one in matmul_tunable.typical_problems:
        scratch = matmul_tunable.make_args(one, torch.device("meta"), 0)[3]
        for arch in KNOWN_ARCHS:
            for candidate in matmul_tunable.candidates(arch, one):
                tile_m, tile_n, *_, splits, slices = constants_of(candidate)
                if splits > 1:
                    parts = tiles(candidate, matmul_tunable.bucket_of(one).size("M"), one.size("N"))
                    if not candidate["peeled"]:  # no more than blocks that multiply
                        parts = min(parts, matmul_tunable.grid_fn(candidate, Device.reference(arch), one)[0])
                    assert parts * tile_m * tile_n <= scratch.numel()
                    assert tile_m * tile_n // slices >= 32 * candidate.hints["num_worker_warps"] * 4


def test_a_config_without_hints_is_judged_as_one_block_on_one_multiprocessor() -> None:
    bare = Config(
        constants={
            "tile_m": 64,
            "tile_n": 64,
            "more": 0,
            "tile_k": 64,
            "swapped": 0,
            "group": 8,
            "peeled": 1,
            "splits": 1,
        }
    )
    assert matmul_tunable.refusal(bare, SM90, shape(64)) is None
    assert matmul_tunable.grid_fn(bare, Device.reference(SM90), shape(8192)) == (132,)


def test_the_declared_shapes_are_twenty_weights_three_of_them_in_float16_too() -> None:
    weights = {(p["dtype"], p["N"], p["K"]) for p in matmul_tunable.typical_problems}
    assert len({w for w in weights if w[0] == "bfloat16"}) == 20
    assert len({w for w in weights if w[0] == "float16"}) == 3
    assert {p["M"] for p in matmul_tunable.typical_problems} == {2**i for i in range(15)}


# Tiles and grid ---------------------------------------------------------------------------------


def test_tiles_count_partly_filled_ones() -> None:
    assert matmul_tunable.tiles is not None
    assert matmul_tunable.tiles(config(128, 64, 64), shape(129, 65)) == 2 * 2
    assert matmul_tunable.tiles(config(128, 64, 64), shape(128, 64)) == 1
    assert matmul_tunable.tiles(config(128, 128, 64, more=32), shape(256, 161)) == 2 * 2


def test_the_grid_is_what_the_gpu_holds_at_once_and_no_more_than_the_tiles() -> None:
    device = Device.reference(SM90)
    grid = matmul_tunable.grid_fn
    assert grid(config(128, 128, 64), device, shape(4096)) == (132,)
    assert grid(config(128, 128, 64, occupancy=2), device, shape(4096)) == (264,)
    assert grid(config(128, 256, 64, num_ctas=2), device, shape(4096)) == (66,)
    assert grid(config(128, 128, 64), device, shape(1)) == (48,)
    # 96 tiles of 3 parts, and 8 slices of each tile.
    assert grid(config(128, 128, 64, warps=8, splits=3), device, shape(256)) == (96 * 3 + 96 * 8,)
    assert grid(config(16, 64, 128, swapped=1, splits=2), device, shape(16)) == (96 * 2 + 96,)
    # 7 x 24 tiles fill 132 blocks once and leave 36, of which 3 blocks share each; 132 blocks add up.
    assert grid(config(128, 256, 32, warps=8, splits=4, peeled=0), device, shape(885)) == (132, 2)
    assert grid(config(128, 256, 32, warps=8, splits=4, peeled=0), device, shape(129, 256)) == (8, 2)


def test_the_work_of_all_tiles_is_the_work_of_the_product() -> None:
    assert matmul_tunable.work is not None
    assert matmul_tunable.tiles is not None
    one, candidate = shape(4096, 6144, 4096), config(128, 256, 64, num_ctas=2)
    work, tiles = matmul_tunable.work(candidate, one), matmul_tunable.tiles(candidate, one)
    assert tiles * work.steps * work.flops == 2 * 4096 * 6144 * 4096
    assert tiles * work.store_bytes == 4096 * 6144 * 2
    assert work.load_bytes == (128 + 256) * 64 * 2
    wider = matmul_tunable.work(config(128, 128, 64, more=64, warps=8), one)
    assert (wider.flops, wider.store_bytes) == (2 * 128 * 192 * 64, 128 * 192 * 2)
    assert wider.load_bytes == (128 + 192) * 64 * 2
    split = config(128, 128, 64, warps=8, splits=2)
    assert matmul_tunable.tiles(split, shape(256)) * matmul_tunable.work(split, shape(256)).steps == 96 * 64


# The kernel -------------------------------------------------------------------------------------


FORMS = ["", "swapped=1", "more=32", "more=8", "more=8 swapped=1", "peeled=0", "peeled=0 swapped=1"]
"""The ways to compute a tile."""


@pytest.mark.emulated
@pairwise(
    "m n k",
    {
        "dtype": ("bfloat16", "float16"),
        "form": FORMS,
    },
    [
        (
            (1, 1, 1),
            ("bfloat16", "swapped=1"),
            ("bfloat16", "more=32"),
            ("float16", "more=8"),
            ("float16", "peeled=0 swapped=1"),
        ),
        ((64, 96, 64), ("bfloat16", "peeled=0 swapped=1"), ("float16", "more=32"), ("float16", "more=8")),
        ((65, 97, 65), ("bfloat16", "more=8"), ("float16", "more=32"), ("float16", "peeled=0 swapped=1")),
        (
            (5, 200, 31),
            ("bfloat16", "more=32"),
            ("bfloat16", "more=8 swapped=1"),
            ("float16", "peeled=0 swapped=1"),
        ),
        (
            (300, 40, 100),
            ("bfloat16", "more=32"),
            ("bfloat16", "more=8 swapped=1"),
            ("float16", ""),
            ("float16", "peeled=0 swapped=1"),
        ),
        ((257, 257, 33), ("bfloat16", "more=32"), ("bfloat16", "peeled=0"), ("float16", "more=8 swapped=1")),
    ],
)
def test_the_kernel_agrees_with_the_reference(
    m: int, n: int, k: int, dtype: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = matmul_tunable.make_args(shape(m, n, k, dtype), CPU, 1)
    poison(matmul_tunable, args)
    wanted = expected(matmul_tunable, args)
    chosen = config(16, 32, 32, **constants(form))
    twice = emulator.of_two_tiles(m, extent(chosen)[0], n)
    emulator.run(matmul_tunable, args, chosen, monkeypatch, twice=twice)
    assert_agrees(matmul_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize(("form", "across"), [("", 6), ("swapped=1", 6), ("more=8", 4), ("peeled=0", 6)])
def test_every_tile_is_computed_once_on_any_number_of_multiprocessors(
    form: str, across: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sms in (1, 7, 200):
        m, n = 16 * 11 + 3, 16 * 5 + 1
        args = matmul_tunable.make_args(shape(m, n, 16), CPU, 0)
        wanted = expected(matmul_tunable, args)
        chosen, twice = config(16, 16, 16, **constants(form)), emulator.of_two_tiles(m, 16, n)
        blocks = emulator.run(matmul_tunable, args, chosen, monkeypatch, sms=sms, twice=twice)
        assert blocks == min(sms, 12 * across)
        assert_agrees(matmul_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("group", [1, 3, 16])
def test_every_tile_is_computed_once_however_many_rows_are_taken_together(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n = 16 * 19 + 3, 16 * 5 + 1
    args = matmul_tunable.make_args(shape(m, n, 16), CPU, 0)
    wanted = expected(matmul_tunable, args)
    chosen, twice = config(16, 16, 16, group=group), emulator.of_two_tiles(m, 16, n)
    assert emulator.run(matmul_tunable, args, chosen, monkeypatch, sms=7, twice=twice) == 7
    assert_agrees(matmul_tunable, args, wanted)


def test_tiles_go_down_a_group_of_rows_before_they_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "ct", SimpleNamespace(cdiv=lambda x, y: -(-x // y)))
    places = [product.place(tile, 5 * 16, 16, 2, 3) for tile in range(10)]
    first = [(0, 0), (16, 0), (32, 0), (0, 1), (16, 1), (32, 1)]
    assert places == [*first, (48, 0), (64, 0), (48, 1), (64, 1)]


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("m", "n", "tile"),
    [
        (70, 150, {"tile_m": 64, "tile_n": 64}),  # two slices
        (130, 100, {"tile_m": 128, "tile_n": 64}),  # four
        (16, 300, {"tile_m": 16, "tile_n": 256, "swapped": 1}),
    ],
)
@pytest.mark.parametrize("splits", [2, 3, 4])
def test_parts_of_a_sum_are_added_up_by_whoever_comes_later(
    m: int, n: int, tile: dict[str, int], splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = matmul_tunable.make_args(shape(m, n, 8192 + 40), CPU, 1)
    args[0][0] = 0.0  # sums of 0 and -0 must be seen too
    args[0][1] = -0.0
    wanted = expected(matmul_tunable, args)
    for at_once in (1, 5):  # on the same scratch
        poison(matmul_tunable, args)
        emulator.run(
            matmul_tunable,
            args,
            config(tile_k=512, splits=splits, **tile),
            monkeypatch,
            at_once=at_once,
            twice=emulator.of_two_tiles(m, tile["tile_m"], n),
        )
        assert_agrees(matmul_tunable, args, wanted)
        assert not bool(args[3].any()), "what parts left is not zero again"


@pytest.mark.emulated
@pairwise(
    "sms k parts whole",
    {
        "slices": (1, 4),
        "swapped": (0, 1),
    },
    [
        ((7, 320, 6, 3), (1, 0), (4, 1)),  # 24 tiles: 3 are left, of which 2 blocks share each
        ((20, 320, 16, 3), (1, 0), (4, 1)),  # 4 are left for 5 blocks each, 4 at most
        ((23, 325, 4, 3), (1, 1), (4, 0)),  # 1 for 4
        ((24, 320, 0, 4), (1, 1), (4, 0)),  # none
        ((100, 320, 96, 0), (1, 0), (4, 1)),  # all tiles are the last wave, for 4 each
        ((16, 320, 16, 2), (1, 0), (4, 1)),  # 8 are left, for 2 each
        ((13, 320, 0, 2), (1, 1), (4, 0)),  # 11 are left for one each
        ((23, 112, 0, 3), (1, 1), (4, 0)),  # too few steps to share
    ],
)
def test_what_the_last_wave_leaves_is_shared(
    sms: int,
    k: int,
    parts: int,
    whole: int,
    slices: int,
    swapped: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`whole` of the 4 tiles of the last row are; what is left but not shared stores rows twice as well."""
    m, n = 32 * 5 + 3, 64 * 4
    one = shape(m, n, k)
    monkeypatch.setattr(split_k, "left", lambda rows, k, columns: 1 << 20)
    monkeypatch.setattr(dense_space, "_LEAST_SLICE", 32 * 64 // slices)
    earlier = 24 if slices == 4 and not swapped else 0  # of 29 rows, by slices of 8; whole tiles if swapped
    twice = emulator.of_two_tiles(m, 32, 64 * whole)
    if not parts:
        twice += earlier * 64 * (4 - whole)
    left = shares_left(monkeypatch)
    args = matmul_tunable.make_args(one, CPU, 1)
    args[0][0] = 0.0
    wanted = expected(matmul_tunable, args)
    for at_once in (1, 5):  # on the same scratch
        poison(matmul_tunable, args)
        left.clear()
        blocks = emulator.run(
            matmul_tunable,
            args,
            config(32, 64, 16, splits=4, peeled=0, swapped=swapped),
            monkeypatch,
            sms=sms,
            at_once=at_once,
            twice=twice,
        )
        assert blocks == 2 * min(sms, 24 * 4)
        assert sorted(left) == list(range(parts))
        assert_agrees(matmul_tunable, args, wanted)
        assert not bool(args[3].any()), "what parts left is not zero again"


@pytest.mark.emulated
@pytest.mark.parametrize("tile", [{"tile_m": 64, "tile_n": 64}, {"tile_m": 128, "tile_n": 64}], ids=str)
def test_several_blocks_add_up_a_tile_of_the_last_wave(
    tile: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slices of a tile, or four. Of the last row of tiles the first is whole."""
    m, n = 64 * 4 + 9, 64 * 2
    monkeypatch.setattr(split_k, "left", lambda rows, k, columns: 1 << 20)
    args = matmul_tunable.make_args(shape(m, n, 16 * 20), CPU, 1)
    wanted = expected(matmul_tunable, args)
    poison(matmul_tunable, args)
    emulator.run(
        matmul_tunable,
        args,
        config(tile_k=16, splits=4, peeled=0, **tile),
        monkeypatch,
        sms=4,
        twice=emulator.of_two_tiles(m, tile["tile_m"], n // 2),
    )
    assert_agrees(matmul_tunable, args, wanted)
    assert not bool(args[3].any())


@pytest.mark.emulated
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_sums_that_are_not_finite_are_seen_and_taken_away_again(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = matmul_tunable.make_args(shape(20, 64, 8192), CPU, 1)
    args[0][3, 5] = value
    emulator.run(matmul_tunable, args, config(16, 64, 1024, splits=2), monkeypatch, twice=12 * 64)
    wanted = args[0].double() @ args[1].double()
    torch.testing.assert_close(args[2].double(), wanted, rtol=1e-2, atol=1e-2, equal_nan=True)
    assert not bool(args[3].any())


def test_the_tolerance_tells_a_missing_step_from_a_rounding() -> None:
    args = matmul_tunable.make_args(shape(64, 64, 28672), CPU, 0)
    wanted = expected(matmul_tunable, args)
    a, b, out, _ = args
    out.copy_(a.float() @ b.float())
    assert_agrees(matmul_tunable, args, wanted)
    out.copy_(a[:, 64:].float() @ b[64:].float())
    with pytest.raises(AssertionError, match="are wrong"):
        assert_agrees(matmul_tunable, args, wanted)


def test_arguments_without_storage_pose_the_problem_that_made_them() -> None:
    for one in matmul_tunable.typical_problems[:: len(matmul_tunable.typical_problems) // 20]:
        assert matmul_tunable.problem_of(*matmul_tunable.make_args(one, torch.device("meta"), 0)) == one


@pytest.mark.process
@pytest.mark.parametrize(("m", "splits"), [(4096, {1}), pytest.param(885, {1, 4, 8}, marks=pytest.mark.slow)])
def test_what_is_not_peeled_pipelines(m: int, splits: set[int]) -> None:
    """Also where blocks share the last wave: flattened-store."""
    one = shape(m)
    unpeeled = [c for c in matmul_tunable.candidates(SM90, one) if not c["peeled"] and c["tile_k"] == 32]
    assert {c["splits"] for c in unpeeled} == splits
    for candidate in unpeeled:
        args = matmul_tunable.args_fn(candidate, *matmul_tunable.make_args(one, torch.device("meta"), 0))
        signature = cutile.signature_of(matmul_tunable.kernel, args)
        data = cutile.compile_cubin(matmul_tunable.kernel, candidate.hints, signature, SM90)
        loop = inner_loop(machine_code(data))
        assert loop is not None
        assert loop.pipelined, candidate
        assert (loop.waits, loop.selects, loop.local_accesses) == (0, 0, 0), candidate


# The host function ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    module = sys.modules["aot_tune.kernels.products.matmul"]
    monkeypatch.setattr(module, "matmul_tunable", SimpleNamespace(launch=lambda *args: calls.append(args)))
    return calls


def half(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16)


def test_the_host_function_allocates_the_product_and_launches_once(launched: list[tuple[Any, ...]]) -> None:
    a, b = half(3, 8), half(5, 8).t()
    out = matmul(a, b)
    assert (tuple(out.shape), out.dtype) == ((3, 5), torch.bfloat16)
    [(passed_a, passed_b, passed_out, _)] = launched
    assert passed_a is a
    assert passed_b is b
    assert passed_out is out


def test_the_host_function_writes_where_it_is_told(launched: list[tuple[Any, ...]]) -> None:
    out = half(3, 5)
    assert matmul(half(3, 4), half(4, 5), out=out) is out
    assert launched[0][2] is out


@pytest.mark.parametrize(("m", "n"), [(0, 5), (3, 0)])
def test_an_empty_product_is_not_launched(m: int, n: int, launched: list[tuple[Any, ...]]) -> None:
    assert matmul(half(m, 4), half(4, n)).shape == (m, n)
    assert launched == []


def test_a_sum_of_nothing_is_zero_without_a_launch(launched: list[tuple[Any, ...]]) -> None:
    out = torch.ones((3, 5), dtype=torch.bfloat16)
    assert bool((matmul(half(3, 0), half(0, 5), out=out) == 0).all())
    assert launched == []


def test_each_unusable_argument_is_named(launched: list[tuple[Any, ...]]) -> None:
    def refused(says: str, *args: torch.Tensor, **more: torch.Tensor) -> None:
        with pytest.raises(LaunchError, match=says):
            matmul(*args, **more)

    refused(r"b has shape \(5, 6\); a of 4 columns asks for \(4, 6\)", half(3, 4), half(5, 6))
    refused(r"a is \(2, 3, 4\); pass a tensor of shape \(M, K\)", half(2, 3, 4), half(4, 5))
    refused("b is a list", half(3, 4), [1.0])  # type: ignore[arg-type]
    refused("a is float32; pass bfloat16 or float16", half(3, 4).float(), half(4, 5))
    refused("b is float16; pass bfloat16", half(3, 4), half(4, 5).half())
    refused(r"out has shape \(5, 3\)", half(3, 4), half(4, 5), out=half(5, 3))
    refused("out is float32; pass bfloat16", half(3, 4), half(4, 5), out=half(3, 5).float())
    square = half(4, 4)
    refused("out and a share memory", square, half(4, 4), out=square)
    refused("b is on meta, not on cpu", half(3, 4), half(4, 5).to("meta"))
    refused("at most 2147483647", half(1, 1).expand(2**31, 1).to("meta"), half(1, 1).to("meta"))
    assert launched == []


# Through the real compiler ----------------------------------------------------------------------


SAMPLED = 5
"""Configs of the space that are compiled beside the defaults; each takes about half a second."""


def matmul_configs(arch: Arch) -> Iterator[tuple[Problem, Config]]:
    for m in (1, 4096):
        one = problem(dtype="bfloat16", M=m, N=6144, K=4096)
        yield one, matmul_tunable.default_config(arch, one)
        candidates = matmul_tunable.candidates(arch, one)
        yield from ((one, config) for config in candidates[:: -(-len(candidates) // SAMPLED)])


@pytest.mark.process
@pytest.mark.parametrize("name", SM90_AND_SLOW_ARCHS)
def test_matmul_compiles_in_its_defaults_and_across_its_space(name: str) -> None:
    arch = Arch.parse(name)
    for one, config in dict.fromkeys(matmul_configs(arch)):
        found = compiled(matmul_tunable, arch, one, config)
        is_default = config == matmul_tunable.default_config(arch, one)
        # sm80 spills before the loop in much of its space, which the sweep prunes; sm90 and sm100 nowhere.
        if is_default or name in ("sm90", "sm100"):
            assert found.stack_bytes == 0, (one, config)


@pytest.mark.process
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (200, 100, 72), (33, 97, 65)])
def test_matmul_compiles_for_sizes_that_are_not_aligned(m: int, n: int, k: int) -> None:
    arch, one = Arch.parse("sm90"), problem(dtype="float16", M=m, N=n, K=k)
    compiled(matmul_tunable, arch, one, matmul_tunable.default_config(arch, one))
