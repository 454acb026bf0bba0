"""softmax without a GPU: the declaration, the arithmetic, what it compiles to and what it takes."""

from __future__ import annotations

import itertools
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.errors import LaunchError
from aot_tune.kernels.rows import row_groups
from aot_tune.kernels.rows.rows import threads
from aot_tune.kernels.softmax_and_loss import softmax_space
from aot_tune.kernels.softmax_and_loss.cross_entropy import _slots as cross_entropy_slots
from aot_tune.kernels.softmax_and_loss.softmax import _slots as softmax_slots
from aot_tune.kernels.softmax_and_loss.softmax import softmax, softmax_tunable
from aot_tune.values.arch import KNOWN_ARCHS, Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import emulator
from tests.support.agree import assert_agrees, expected, poison, problem
from tests.support.compiling import ARCHS, SM90_AND_SLOW_ARCHS, compiled
from tests.support.samples import SM90

CPU = torch.device("cpu")


def config(width: int, members: int = 1, *, chunked: bool = False) -> Config:
    return Config(
        constants={"height": 1, "width": width, "members": members, "chunked": chunked},
        hints={"occupancy": 4, "num_worker_warps": 4},
    )


CHUNKS = config(2048, chunked=True)


def shape(rows: int, cols: int, dtype: str = "bfloat16") -> Problem:
    return problem(dtype=dtype, rows=rows, cols=cols)


def test_the_default_is_a_candidate_at_any_width() -> None:
    for arch in KNOWN_ARCHS:
        widths = (shape(1, cols) for cols in (1, 2, 100, 1000, 4097, 9000, 16385, 32768, 32769, 10**6))
        for one in widths:
            assert softmax_tunable.default_config(arch, one) in softmax_tunable.candidates(arch, one), one


def test_the_sweep_stays_small() -> None:
    assert len(softmax_tunable.typical_problems) <= 153
    for one in softmax_tunable.typical_problems:
        assert len(softmax_tunable.candidates(SM90, one)) <= 24


def test_blocks_share_rows_that_are_long_enough_and_hold_all_of_them() -> None:
    for arch in KNOWN_ARCHS:
        assert not any(int(c["members"]) > 1 for c in softmax_tunable.candidates(arch, shape(8, 8192)))
        for cols in (9000, 32000, 128256, 262144):
            sharing = [c for c in softmax_tunable.candidates(arch, shape(8, cols)) if int(c["members"]) > 1]
            assert sharing
            for one in sharing:
                count, _ = row_groups.parts(int(one["width"]), int(one["members"]), cols)
                span = count * int(one["width"])
                assert (int(one["members"]) - 1) * span < cols <= int(one["members"]) * span


def test_rows_too_many_for_a_workspace_are_not_shared() -> None:
    for arch in KNOWN_ARCHS:
        for cols, most in ((9000, 2**19), (20000, 2**18), (128256, 2**17)):
            for rows in (most, most + 1, 2 * most, 3 * 10**6):
                one = problem(dtype="bfloat16", rows=rows, cols=cols)
                assert softmax_tunable.default_config(arch, one) in softmax_tunable.candidates(arch, one)
                shared = any(int(c["members"]) > 1 for c in softmax_tunable.candidates(arch, one))
                assert shared is (rows == most)
                assert (softmax_space.slots(rows, cols) > 1) is shared
                assert softmax_space.slots(rows, cols) < 2**30


def test_blocks_that_cannot_wait_for_each_other_are_refused() -> None:
    def refusal(members: int, height: int = 1, cols: int = 128256, **hints: int) -> str:
        constants = {"height": height, "width": 1024, "members": members, "chunked": False}
        asked = Config(constants=constants, hints={"occupancy": 1, "num_worker_warps": 4, **hints})
        return softmax_tunable.refusal(asked, SM90, shape(64, cols)) or ""

    assert refusal(16) == ""
    assert refusal(12) == ""
    assert "each must be a single block" in refusal(16, num_ctas=2)
    assert "too few to store numbers for 32 members" in refusal(32, num_worker_warps=2)
    assert "its slots are for" in refusal(64)
    assert "its slots are for" in refusal(32, num_worker_warps=8)
    assert "2 rows of 128256 columns are not shared" in refusal(16, height=2)
    assert "1 rows of 8192 columns are not shared" in refusal(2, cols=8192)


def test_more_blocks_than_half_a_small_gpu_do_not_share_a_row() -> None:
    arch = next(arch for arch in KNOWN_ARCHS if Device.reference(arch).sm_count < 64)
    constants = {"height": 1, "width": 1024, "members": 32, "chunked": False}
    asked = Config(constants=constants, hints={"occupancy": 1, "num_worker_warps": 4})
    refused = softmax_tunable.refusal(asked, arch, shape(64, 128256))
    assert "more than half a GPU" in str(refused)


def test_slots_suffice_for_whatever_may_run() -> None:
    for arch in KNOWN_ARCHS:
        for cols in (8193, 9000, 16384, 16385, 32000, 65537, 128256, 262144, 600000):
            for rows in (1, 1025, 5000):
                one = problem(dtype="float32", rows=rows, cols=cols)
                for each in softmax_tunable.candidates(arch, one):
                    if (members := int(each["members"])) > 1:
                        assert rows * members * threads(each) <= softmax_space.slots(rows, cols), (one, each)


def test_what_grown_slots_leave_behind_is_less_than_they_are() -> None:
    *small, largest = sorted({softmax_space.slots(rows, 128256) for rows in range(1, 16385, 7)})
    assert len(small) > 2
    assert sum(small) < largest == 16384 * row_groups.MOST_LANES


def test_a_grid_has_as_many_blocks_for_a_row_as_share_it() -> None:
    device = Device.reference(SM90)
    for one, blocks in ((shape(1000, 128256), 8000), (shape(100, 2048), 100), (shape(100, 128), 13)):
        default = softmax_tunable.default_config(SM90, one)
        assert softmax_tunable.grid_fn(default, device, one) == (blocks,)
        assert softmax_tunable.tiles is not None
        assert softmax_tunable.tiles(default, one) == blocks


def test_a_launch_of_few_rows_leaves_memory_for_a_graph_of_more() -> None:
    def slots(rows: int) -> torch.Tensor:
        *_, found = softmax_tunable.make_args(shape(rows, 128256), torch.device("meta"), 0)
        assert isinstance(found, torch.Tensor)
        return found

    assert slots(1).shape == slots(1000).shape
    assert slots(5000).shape[0] >= 4 * slots(1).shape[0]


def test_rows_that_no_blocks_share_ask_for_no_memory_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a second stream that is captured there would be none."""
    x = torch.empty(64, 1024)
    first = softmax_slots(x)
    module = sys.modules["aot_tune.kernels.softmax_and_loss.softmax"]
    monkeypatch.setattr(module, "workspace", lambda *asked: pytest.fail(f"asked for {asked}"))
    assert softmax_slots(x) is first
    assert cross_entropy_slots(torch.empty(4096, 1024), False) is first
    with pytest.raises(pytest.fail.Exception):
        softmax_slots(torch.empty(64, 128256))


def test_blocks_that_would_wait_for_ones_that_cannot_run_are_refused() -> None:
    few = Device.reference(SM90).with_sm_count("a slice", 7)
    assert softmax_tunable.grid_fn(config(1024, 8), few, shape(3, 32000)) == (24,)
    with pytest.raises(LaunchError, match=r"16 blocks wait for each other, and half .* of 7 .* runs 14 at"):
        softmax_tunable.grid_fn(config(1024, 16), few, shape(3, 32000))


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 1), (3, 5), (17, 100), (384, 8), (9, 128), (3, 1500), (2, 4096), (13, 9000)]
)
def test_the_kernel_agrees_with_the_reference_in_every_form(
    rows: int, cols: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = shape(rows, cols, dtype)
    args = softmax_tunable.make_args(one, CPU, 1)
    wanted = expected(softmax_tunable, args)
    for config in (softmax_tunable.default_config(SM90, one), CHUNKS):
        poison(softmax_tunable, args)
        emulator.run(softmax_tunable, args, config, monkeypatch, at_once=int(config["members"]))
        assert_agrees(softmax_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "cols", "width", "members"),
    [
        (3, 9000, 1024, 2),
        (2, 5000, 256, 4),
        (5, 1024, 64, 8),
        (1, 4097, 64, 32),
        (3, 8255, 256, 16),
        (3, 5000, 256, 7),
    ],
)
def test_rows_that_blocks_share_agree_with_the_reference(
    rows: int, cols: int, width: int, members: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, out, _ = softmax_tunable.make_args(shape(rows, cols, dtype), CPU, 1)
    args = x, out, torch.zeros(row_groups.ints(rows, row_groups.MOST_LANES), dtype=torch.int32)
    wanted = expected(softmax_tunable, args)
    for at_once in (members, 2 * members + 1):
        poison(softmax_tunable, args)
        emulator.run(softmax_tunable, args, config(width, members), monkeypatch, sms=16, at_once=at_once)
        assert_agrees(softmax_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("seed", range(8))
def test_what_blocks_tell_each_other_may_be_seen_late_and_in_any_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, out, _ = softmax_tunable.make_args(shape(3, 3000), CPU, seed)
    args = x, out, torch.zeros(row_groups.ints(3, row_groups.MOST_LANES), dtype=torch.int32)
    wanted = expected(softmax_tunable, args)
    late = random.Random(seed)
    emulator.run(softmax_tunable, args, config(128, 8), monkeypatch, sms=8, at_once=9, disorder=late)
    assert_agrees(softmax_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("cols", [7, 5000])
def test_infinities_nan_and_the_lowest_numbers_come_out_as_torchs_do(
    cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn((6, cols))
    x[0, 1:] = -torch.inf
    x[1] = -torch.inf
    x[2, 3], x[3, 3] = torch.nan, torch.inf
    x[4] = torch.finfo(torch.float32).min
    x[5, :5] = 3e38
    for one in (softmax_tunable.default_config(SM90, shape(6, cols)), CHUNKS, config(128, 4)):
        args = (
            x,
            torch.empty_like(x),
            torch.zeros(row_groups.ints(6, row_groups.MOST_LANES), dtype=torch.int32),
        )
        emulator.run(softmax_tunable, args, one, monkeypatch, at_once=int(one["members"]))
        torch.testing.assert_close(args[1], torch.softmax(x, dim=1), equal_nan=True)
        assert not bool(args[2].any()), "the next launch would take them for its own"


def test_the_reference_is_torchs_softmax() -> None:
    args = softmax_tunable.make_args(shape(7, 300), CPU, 2)
    value = expected(softmax_tunable, args)["out"].value
    assert value.dtype == torch.float64
    exponentials = args[0].double().exp()
    torch.testing.assert_close(value, exponentials / exponentials.sum(1, keepdim=True))


def test_a_sum_that_lacks_a_chunk_or_counts_padding_is_told_from_a_rounding() -> None:
    x, out, _ = args = softmax_tunable.make_args(shape(4, 32000, "float32"), CPU, 0)
    wanted = expected(softmax_tunable, args)
    exponentials = x.double().exp()
    total = exponentials.sum(1, keepdim=True)
    for wrong in (total - exponentials[:, -2048:].sum(1, keepdim=True), total + 768):
        out.copy_(exponentials / wrong)
        with pytest.raises(AssertionError, match="are wrong"):
            assert_agrees(softmax_tunable, args, wanted)


def test_arguments_without_storage_pose_the_problem_that_made_them() -> None:
    for one in softmax_tunable.typical_problems[::9]:
        assert softmax_tunable.problem_of(*softmax_tunable.make_args(one, torch.device("meta"), 0)) == one


# What it compiles to ----------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("name", ARCHS)
def test_the_default_compiles_and_does_not_spill(name: str) -> None:
    arch = Arch.parse(name)
    for cols in (128, 128256):
        one = shape(1024, cols, "float32")
        default = softmax_tunable.default_config(arch, one)
        assert compiled(softmax_tunable, arch, one, default).stack_bytes == 0, one


UNEVEN = (65537, 100352, 151936, 200064, 524288)
"""Columns that no power of two of members shares in so few parts as the defaults of other rows hold."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_default_shares_every_row_that_is_too_wide_for_a_block(dtype: str) -> None:
    """Read in chunks it would be read twice."""
    archs = [arch for arch in KNOWN_ARCHS if Device.reference(arch).sm_count >= 64]
    wide = (*UNEVEN, 50257, 100277, 129280, 151643, 202048, 248320, 256000, 262144)
    for arch, cols, rows in itertools.product(archs, wide, (1, 85, 5000)):
        one = problem(dtype=dtype, rows=rows, cols=cols)
        default = softmax_tunable.default_config(arch, one)
        assert (int(default["members"]) > 1, default["chunked"]) == (True, False), (arch, one)
        assert softmax_tunable.refusal(default, arch, one) is None


@pytest.mark.emulated
@pytest.mark.parametrize("cols", [100352, 151936])
def test_the_default_of_such_columns_agrees_with_the_reference(
    cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = shape(2, cols, "float32")
    default = softmax_tunable.default_config(SM90, one)
    args = softmax_tunable.make_args(one, CPU, 1)
    wanted = expected(softmax_tunable, args)
    poison(softmax_tunable, args)
    emulator.run(softmax_tunable, args, default, monkeypatch, sms=16, at_once=int(default["members"]))
    assert_agrees(softmax_tunable, args, wanted)


@pytest.mark.process
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SM90_AND_SLOW_ARCHS)
def test_the_default_of_such_columns_does_not_spill(name: str, dtype: str) -> None:
    arch = Arch.parse(name)
    for cols in (100352, 151936, 200064):
        one = problem(dtype=dtype, rows=85, cols=cols)
        default = softmax_tunable.default_config(arch, one)
        assert compiled(softmax_tunable, arch, one, default).stack_bytes == 0, one


@pytest.mark.process
@pytest.mark.parametrize("one", [shape(1024, 128256, "float32"), shape(1000, 32000)], ids=str)
def test_what_is_legal_on_sm90_does_not_spill(one: Problem) -> None:
    candidates = softmax_tunable.candidates(SM90, one)
    for config in candidates[:: -(-len(candidates) // 6)]:
        assert compiled(softmax_tunable, SM90, one, config).stack_bytes == 0, config


# The host function ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    module = sys.modules["aot_tune.kernels.softmax_and_loss.softmax"]
    monkeypatch.setattr(module, "softmax_tunable", SimpleNamespace(launch=lambda *args: calls.append(args)))
    return calls


def half(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16)


@pytest.mark.parametrize("sizes", [(8,), (5, 8), (2, 3, 8)])
def test_leading_dimensions_are_flattened_into_rows(
    sizes: tuple[int, ...], launched: list[tuple[Any, ...]]
) -> None:
    x = half(*sizes)
    out = softmax(x)
    assert out.shape == x.shape
    [(rows, out_rows, _)] = launched
    assert rows.shape == out_rows.shape == (x.numel() // 8, 8)
    assert (rows.data_ptr(), out_rows.data_ptr()) == (x.data_ptr(), out.data_ptr())


def test_rows_of_a_wider_tensor_are_taken_where_they_are(launched: list[tuple[Any, ...]]) -> None:
    softmax(half(2, 3, 16)[:, :, :8])
    assert launched[0][0].stride() == (16, 1)


@pytest.mark.parametrize("sizes", [(0, 8), (2, 0, 8), (2, 0)])
def test_nothing_is_not_launched(sizes: tuple[int, ...], launched: list[tuple[Any, ...]]) -> None:
    assert softmax(half(*sizes)).shape == sizes
    assert launched == []


def test_each_unusable_argument_is_named(launched: list[tuple[Any, ...]]) -> None:
    def refused(says: str, *args: Any, **more: Any) -> None:
        with pytest.raises(LaunchError, match=says):
            softmax(*args, **more)

    refused("x is float64; pass bfloat16 or float16 or float32", half(2, 8).double())
    refused(r"x has shape \(\); pass one dimension or more", half())
    refused(r"out has shape \(8, 2\)", half(2, 8), out=half(8, 2))
    refused("out is float16", half(2, 8), out=half(2, 8).half())
    refused(r"x of shape \(3, 2, 8\).*call x\.contiguous\(\)", half(2, 3, 8).transpose(0, 1))
    refused("out is on meta, not on cpu", half(2, 8), out=half(2, 8).to("meta"))
    x = half(2, 8)
    refused("out and x share memory", x, out=x)
    assert launched == []
