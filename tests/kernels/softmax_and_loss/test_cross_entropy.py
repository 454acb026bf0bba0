"""cross_entropy without a GPU: the declaration, the arithmetic, what it compiles to and what it takes."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.choose.legality import Legality
from aot_tune.errors import LaunchError
from aot_tune.kernels.rows import row_groups
from aot_tune.kernels.rows.rows import threads
from aot_tune.kernels.softmax_and_loss import cross_entropy_space, cross_entropy_tiles
from aot_tune.kernels.softmax_and_loss.cross_entropy import cross_entropy, cross_entropy_tunable
from aot_tune.tables import store
from aot_tune.values.arch import KNOWN_ARCHS, Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import emulator
from tests.support.agree import assert_agrees, expected, poison, problem
from tests.support.compiling import SM90_AND_SLOW_ARCHS, compiled
from tests.support.pairs import pairwise
from tests.support.samples import SM90

CPU = torch.device("cpu")
IGNORED = -100


def config(chunk: int, members: int = 1) -> Config:
    return Config(
        constants={"chunk": chunk, "members": members},
        hints={"num_ctas": 1, "occupancy": 2, "num_worker_warps": 4},
    )


ALONE, SHARED = config(2048), config(128, 8)


def shape(rows: int, vocabulary: int, dtype: str = "bfloat16", *, gradient: bool = True) -> Problem:
    return problem(dtype=dtype, gradient=gradient, rows=rows, vocabulary=vocabulary)


def made(one: Problem, seed: int) -> tuple[Any, ...]:
    """Arguments, whose rows may be shared however narrow they are."""
    logits, target, loss, _, *others = cross_entropy_tunable.make_args(one, CPU, seed)
    return logits, target, loss, zeros(one.size("rows")), *others


def zeros(rows: int) -> torch.Tensor:
    return torch.zeros(row_groups.ints(rows, row_groups.MOST_LANES), dtype=torch.int32)


def run(
    args: tuple[Any, ...],
    chosen: Config,
    monkeypatch: pytest.MonkeyPatch,
    disorder: random.Random | None = None,
) -> int:
    """All blocks of a row, and one of the next, at the same time."""
    members = int(chosen["members"])
    at_once = members + 1 if members > 1 else 1
    return emulator.run(
        cross_entropy_tunable, args, chosen, monkeypatch, sms=members, at_once=at_once,
        disorder=disorder, amended=args[0].shape[0] if members > 1 else 0,
    )  # fmt: skip


@pytest.fixture(params=[True, False], ids=["fused", "rounded"])
def is_fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether products stay exact until something is subtracted, as the compiler has it on all archs."""

    def fused(x: Any, factor: Any, product: Any) -> emulator.Tile:
        exact = x.values.double() * factor.values.double() - product.values.double()
        return emulator.Tile(exact.float())

    if request.param:
        monkeypatch.setattr(cross_entropy_tiles, "_less", fused)
    return bool(request.param)


# The space --------------------------------------------------------------------------------------


def test_the_default_is_a_candidate_at_any_vocabulary() -> None:
    for arch in KNOWN_ARCHS:
        for one in (shape(1, 1), shape(1, 10**6)):
            default = cross_entropy_tunable.default_config(arch, one)
            assert default in cross_entropy_tunable.candidates(arch, one), one


def test_the_sweep_stays_small_and_holds_both_problems_of_most_vocabularies() -> None:
    typical = cross_entropy_tunable.typical_problems
    assert len(typical) <= 120
    for one in typical:
        assert len(cross_entropy_tunable.candidates(SM90, one)) <= 16 + (one["vocabulary"] == 50272), one
    with_gradient, without = (
        {p["vocabulary"] for p in typical if p["gradient"] is asked} for asked in (True, False)
    )
    by_divisor = {30522, 28996, 50280, 32016, 50272, 32064}
    assert with_gradient & without == {32000, 50257, 128256, 151936, 262144} | by_divisor


def test_the_gradient_of_a_wide_row_is_shared_by_at_most_half_a_gpu() -> None:
    for arch in KNOWN_ARCHS:
        most = Device.reference(arch).sm_count // 2
        for cols, shared in ((16383, False), (16384, True), (50257, True), (2**21, False)):
            for dtype in ("bfloat16", "float32"):
                one = shape(1024, cols, dtype)
                default = cross_entropy_tunable.default_config(arch, one)
                members = [int(c["members"]) for c in cross_entropy_tunable.candidates(arch, one)]
                assert (int(default["members"]) > 1) is shared
                assert (max(members) > 1) is shared
                assert 1 in members
                assert max(members) <= most


def test_the_losses_of_few_wide_rows_are_shared() -> None:
    def most(rows: int, cols: int) -> int:
        candidates = cross_entropy_tunable.candidates(SM90, shape(rows, cols, gradient=False))
        return max(int(c["members"]) for c in candidates)

    assert [most(rows, 262144) for rows in (1, 64, 65)] == [32, 32, 1]
    assert most(1, 32000) == 1


def test_the_parts_of_all_members_are_the_row_and_what_is_inside_is_inside_for_all() -> None:
    for cols in (16384, 32000, 50257, 128256, 151936, 201088, 262144):
        for one in (shape(64, cols), shape(64, cols, "float32")):
            shared = [c for c in cross_entropy_tunable.candidates(SM90, one) if int(c["members"]) > 1]
            assert shared, cols
            for chosen in shared:
                step = int(chosen["members"]) * int(chosen["chunk"])
                parts, inside = cross_entropy_space.parts(chosen, cols)
                assert (parts - 1) * step < cols <= parts * step
                assert inside * step <= cols < (inside + 1) * step
                assert cols > step, "each member has a column to begin with"


@pytest.mark.parametrize(("cols", "members"), [(32000, 2), (128256, 5), (151936, 6), (262144, 10)])
def test_a_row_is_shared_by_the_fewest_blocks_whose_registers_hold_it(cols: int, members: int) -> None:
    one = shape(4096, cols)
    at_four = [c for c in cross_entropy_tunable.candidates(SM90, one) if c.hints["occupancy"] == 4]
    assert members in {c["members"] for c in at_four}
    fewer = config_of(members - 1, at_four)
    assert members == 2 or "spill" in str(cross_entropy_tunable.refusal(fewer, SM90, one))


def config_of(members: int, like: Sequence[Config]) -> Config:
    constants = {"chunk": 1024, "members": members}
    return Config(constants=constants, hints=next(c for c in like if c["chunk"] == 1024).hints)


def test_elements_that_are_loaded_one_by_one_take_a_register_each() -> None:
    held = [
        max(
            cross_entropy_space.parts(c, cols)[0] * int(c["chunk"]) // threads(c)
            for c in cross_entropy_tunable.candidates(SM90, shape(4096, cols, dtype))
            if int(c["members"]) > 1 and c.hints["occupancy"] * threads(c) == 512
        )
        for cols, dtype in ((151936, "bfloat16"), (151937, "bfloat16"), (151936, "float32"))
    ]
    assert held == [200, 80, 80]


def test_rows_that_are_too_many_or_not_shared_ask_for_no_slots() -> None:
    assert cross_entropy_space.slots(True, 1000, 16384) >= row_groups.ints(1000, 512)
    assert cross_entropy_space.slots(False, 1, 16384) == cross_entropy_space.slots(False, 64, 16384) > 1
    for gradient, rows, cols in ((False, 65, 16384), (True, 1000, 16383), (True, 2**22, 16384)):
        assert cross_entropy_space.slots(gradient, rows, cols) == 1
    assert cross_entropy_tunable.default_config(SM90, shape(2**22, 16384))["members"] == 1
    # 2^20 rows fit; a few more belong to a bucket whose edge does not.
    for rows in (2**20 + 1, 2**21):
        assert cross_entropy_space.slots(True, rows, 16384) == 1
    assert row_groups.ints(2**20, 512) == cross_entropy_space.slots(True, 2**20, 16384) < 2**30


def test_slots_suffice_for_whatever_may_run() -> None:
    for arch in KNOWN_ARCHS:
        for dtype in ("bfloat16", "float32"):
            for cols in (16384, 20000, 32000, 50257, 65537, 128256, 151936, 262144):
                for rows in (1, 1025, 5000):
                    one, found = shape(rows, cols, dtype), cross_entropy_space.slots(True, rows, cols)
                    for each in cross_entropy_tunable.candidates(arch, one):
                        if (members := int(each["members"])) > 1:
                            assert rows * members * threads(each) <= found, (one, each)
        for rows in (1, 64):
            losses = shape(rows, 262144, gradient=False)
            found = cross_entropy_space.slots(False, rows, 262144)
            shared = [c for c in cross_entropy_tunable.candidates(arch, losses) if int(c["members"]) > 1]
            assert rows * max((int(c["members"]) * threads(c) for c in shared), default=0) <= found <= 1 << 20


def test_a_config_whose_blocks_have_no_slots_is_refused() -> None:
    constants, hints = {"chunk": 2048, "members": 32}, {"num_ctas": 1, "occupancy": 2, "num_worker_warps": 8}
    refused = cross_entropy_tunable.refusal(Config(constants=constants, hints=hints), SM90, shape(9, 262144))
    assert "its slots are for" in str(refused)


@pytest.mark.parametrize(("cols", "chunk", "members"), [(20000, 4096, 6), (20480, 4096, 6), (20480, 4096, 5)])
def test_members_that_begin_behind_the_end_of_a_row_are_refused(cols: int, chunk: int, members: int) -> None:
    hints = {"num_ctas": 1, "occupancy": 4, "num_worker_warps": 4}
    wide = Config(constants={"chunk": chunk, "members": members}, hints=hints)
    refused = cross_entropy_tunable.refusal(wide, SM90, shape(9, cols))
    assert (refused is None) is (members == 5)
    assert members == 5 or "leave nothing to the last" in str(refused)


def test_what_was_tuned_for_one_vocabulary_may_run_for_any_other_whatever_was_met_before() -> None:
    table = Path(__file__).parents[3] / "tuned_configs" / "sm90" / "cross_entropy.json"
    tuned = [c for c in store.read_table(table).portfolio if int(c["members"]) > 1]
    for first in (32000, 262144):
        legality = Legality(cross_entropy_tunable, SM90)
        legality.refusal(tuned[0], shape(4096, first))
        for cols in (50257, 100352, 129280, 163840, 201088, 262208):
            one = shape(4096, cols)
            legal = [c for c in tuned if cross_entropy_tunable.refusal(c, SM90, one) is None]
            assert len(legal) >= 2
            assert [c for c in tuned if legality.refusal(c, one) is None] == legal


def test_a_gpu_that_may_not_hold_a_rows_blocks_is_refused() -> None:
    one, small = shape(3, 128256), Device.reference(SM90).with_sm_count("small", 3)
    chosen = cross_entropy_tunable.default_config(SM90, one)
    assert cross_entropy_tunable.grid_fn(chosen, Device.reference(SM90), one) == (36,)
    with pytest.raises(
        LaunchError, match=r"12 blocks wait for each other, and half of this GPU of 3 .* runs 6 at once"
    ):
        cross_entropy_tunable.grid_fn(chosen, small, one)


# The arithmetic ---------------------------------------------------------------------------------


@pytest.mark.emulated
@pairwise(
    "rows cols",
    {
        "dtype": ("bfloat16", "float16", "float32"),
        "gradient": (True, False),
    },
    [
        ((1, 1), ("bfloat16", True), ("float16", False), ("float32", False)),
        ((3, 5), ("bfloat16", False), ("float16", True), ("float32", True)),
        ((17, 100), ("bfloat16", False), ("float16", True), ("float32", False)),
        ((5, 2048), ("bfloat16", False), ("float16", False), ("float32", True)),
        ((3, 5000), ("bfloat16", False), ("float16", False), ("float32", True)),
        ((2, 9001), ("bfloat16", True), ("float16", True), ("float32", False)),
    ],
)
def test_the_kernel_agrees_with_the_reference(
    rows: int, cols: int, gradient: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(shape(rows, cols, dtype, gradient=gradient), 1)
    args[1][rows // 2] = IGNORED if rows > 1 else 0
    wanted = expected(cross_entropy_tunable, args)
    poison(cross_entropy_tunable, args)
    assert run(args, ALONE, monkeypatch) == rows
    assert_agrees(cross_entropy_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("cols", "width", "members"),
    [
        (4096, 256, 4),  # all parts are full
        (3841, 128, 4),  # one column in a member's last part, none in that of the next one
        (2000, 128, 3),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in [(5000, 128, 8), (3141, 64, 16), (50257, 1024, 32), (5000, 128, 7), (3141, 64, 14)]
        ),
    ],
)
def test_blocks_that_share_rows_agree_with_the_reference(
    cols: int, width: int, members: int, dtype: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(shape(4, cols, dtype), 1)
    args[1][1] = IGNORED
    wanted, logits = expected(cross_entropy_tunable, args), args[0].clone()
    logits[1] = torch.nan  # which an ignored row may well hold
    for _ in range(2):  # on the same slots
        args[0].copy_(logits)
        args[2].fill_(torch.nan)
        assert run(args, config(width, members), monkeypatch) == 4 * members
        assert_agrees(cross_entropy_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("cols", "width", "members"), [(5000, 128, 8), (3141, 64, 14)])
def test_blocks_that_share_rows_agree_on_the_loss_alone(
    cols: int, width: int, members: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(shape(4, cols, dtype, gradient=False), 1)
    args[1][1] = IGNORED
    wanted = expected(cross_entropy_tunable, args)
    for _ in range(2):  # on the same slots
        args[2].fill_(torch.nan)
        assert run(args, config(width, members), monkeypatch) == 4 * members
        assert_agrees(cross_entropy_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_far_below_zero_are_no_less_than_what_nobody_left(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, *_ = args = made(shape(3, 2000, dtype), 5)
    logits -= 500  # e to the power of which is 0
    wanted = expected(cross_entropy_tunable, args)
    run(args, config(128, 7), monkeypatch)
    assert_agrees(cross_entropy_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_target_at_the_border_of_a_part_is_found_by_whoever_holds_it(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = [0, 127, 128, 255, 256, 1023, 1024, 1999]
    args = made(shape(len(columns), 2000, dtype), 4)
    args[1][:] = torch.tensor(columns)
    wanted = expected(cross_entropy_tunable, args)
    run(args, SHARED, monkeypatch)
    assert_agrees(cross_entropy_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("seed", range(8))
def test_what_blocks_tell_each_other_may_be_seen_late_and_in_any_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(shape(5, 3000), seed)
    args[1][2] = IGNORED
    wanted = expected(cross_entropy_tunable, args)
    run(args, config(128, 8 - seed % 2), monkeypatch, random.Random(seed))
    assert_agrees(cross_entropy_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("dtype", "offset"),
    [
        *(("bfloat16", sign * size) for size in (1e3, 3e38) for sign in (1, -1)),
        *(("float16", offset) for offset in (1e3, 6e4, -6e4)),
        *(
            pytest.param(dtype, sign * size, marks=pytest.mark.slow)
            for dtype, size in [*(("bfloat16", each) for each in (1e5, 1e6, 1e7, 1e30)), ("float16", 4e3)]
            for sign in (1, -1)
        ),
        pytest.param("float16", -1e3, marks=pytest.mark.slow),
        *(("float32", offset) for offset in (1e3, -1e3)),
    ],
)
def test_logits_far_from_zero_give_what_they_would_near_it(
    dtype: str, offset: float, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, target, *_ = args = made(shape(8, 2000, dtype), 7)
    logits.copy_(logits + offset)
    logits[1:3, 5] = offset * 0.99
    logits[2, 900:] = -torch.inf  # all of some members
    logits[3:5] = offset  # all equal
    logits[4, ::3] = -offset
    logits[5, 1000:] = 0.0
    logits[6] *= torch.linspace(0.5, 1.0, 2000)
    target[:] = logits.float().argmax(dim=1)
    target[0], target[6] = 17, 1400
    wanted = dict(expected(cross_entropy_tunable, args))
    if not is_fused:  # an exponent of 6000 is off by 2^-12
        wanted["loss"] = replace(wanted["loss"], atol=5e-4)
    run(args, SHARED, monkeypatch)
    assert_agrees(cross_entropy_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, 80.0])
def test_a_part_of_zeros_or_far_below_the_others_is_counted(
    value: float, dtype: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(shape(3, 1000, dtype), 5)
    args[0][0] = value
    args[0][1] = value
    args[0][1, 300:] = value - 200
    args[0][2, 500:900] = -torch.inf
    args[1][1:] = 5
    wanted = expected(cross_entropy_tunable, args)
    run(args, SHARED, monkeypatch)
    assert_agrees(cross_entropy_tunable, args, wanted)


@pytest.mark.parametrize("scale", [None, 1.0, -0.25, 0.0])
def test_the_reference_is_torchs_loss_and_its_gradient(scale: float | None) -> None:
    logits, target, loss, slots, ignored, _ = made(shape(7, 300, "float32"), 2)
    target[::3] = ignored
    wanted = expected(cross_entropy_tunable, (logits, target, loss, slots, ignored, scale))
    leaf = logits.double().requires_grad_()
    right = torch.nn.functional.cross_entropy(leaf, target, ignore_index=ignored, reduction="none")
    torch.testing.assert_close(wanted["loss"].value, right)
    if scale is None:
        assert torch.equal(wanted["logits"].value, logits.double())
    else:
        [slopes] = torch.autograd.grad(right.sum() * scale, leaf)
        torch.testing.assert_close(wanted["logits"].value, slopes)


@pytest.mark.emulated
@pytest.mark.parametrize("chosen", [ALONE, SHARED])
def test_a_target_that_is_no_column_gives_nan_and_no_other_row_changes(
    chosen: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(shape(6, 3000), 3)
    logits, target, loss, slots, *others = args
    target[1], target[2], target[3], target[4] = 3000, -1, 2**32 + 5, -(2**40)
    before = logits.clone()
    run(args, chosen, monkeypatch)
    assert loss.isnan().tolist() == [False, True, True, True, True, False]
    assert logits.isnan().all(dim=1).tolist() == [False, True, True, True, True, False]
    kept = [0, 5]
    wanted = expected(cross_entropy_tunable, (before[kept], target[kept], loss[kept], slots, *others))
    assert_agrees(cross_entropy_tunable, (logits[kept], target[kept], loss[kept], slots, *others), wanted)
    assert not slots.any()


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chosen", [ALONE, SHARED])
def test_a_row_of_infinities_or_nan_comes_out_as_torchs_does(
    chosen: Config, dtype: torch.dtype, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn((6, 3000)).to(dtype)
    logits[0, 1:] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 7], logits[3, 7] = torch.nan, torch.inf
    logits[4] = torch.finfo(dtype).min
    logits[5, 2500] = torch.nan
    target, loss, slots = torch.zeros(6, dtype=torch.int64), torch.empty(6), zeros(6)
    leaf = logits.clone().float().requires_grad_()
    right = torch.nn.functional.cross_entropy(leaf, target, reduction="none")
    [slopes] = torch.autograd.grad(right.sum(), leaf)
    run((logits, target, loss, slots, IGNORED, 1.0), chosen, monkeypatch)
    torch.testing.assert_close(loss, right.detach(), equal_nan=True, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, slopes.to(dtype), equal_nan=True)
    assert not slots.any()


def test_a_wrong_loss_or_gradient_is_told_from_a_rounding() -> None:
    args = cross_entropy_tunable.make_args(shape(4, 32000), CPU, 0)
    logits, target, loss, slots = args[:4]
    slots.zero_()
    wanted = expected(cross_entropy_tunable, args)
    right, slopes = wanted["loss"].value, wanted["logits"].value
    hit = torch.zeros_like(slopes).scatter_(1, target[:, None], 1.0)
    for wrong_loss, wrong_slopes in (
        (right, slopes + hit),  # without the target's one
        (right, slopes.where(hit.bool(), 0)),  # the shares lost
        (right, slopes * 32000 / 32768),  # padding counted
        (right - 0.02, slopes),
    ):
        loss.copy_(wrong_loss)
        logits.copy_(wrong_slopes)
        with pytest.raises(AssertionError, match="are wrong"):
            assert_agrees(cross_entropy_tunable, args, wanted)


def test_arguments_without_storage_pose_the_problem_that_made_them() -> None:
    for one in cross_entropy_tunable.typical_problems[::5]:
        args = cross_entropy_tunable.make_args(one, torch.device("meta"), 0)
        assert cross_entropy_tunable.problem_of(*args) == one


# What it compiles to ----------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("name", SM90_AND_SLOW_ARCHS)
def test_the_default_compiles_and_does_not_spill(name: str) -> None:
    arch = Arch.parse(name)
    for cols, dtype, gradient in (
        (128256, "bfloat16", False),
        (128256, "float32", True),
        (128256, "bfloat16", True),
        (50257, "float16", True),
        (262144, "bfloat16", True),
        (8000, "float32", True),
    ):
        one = shape(4096, cols, dtype, gradient=gradient)
        default = cross_entropy_tunable.default_config(arch, one)
        assert compiled(cross_entropy_tunable, arch, one, default).stack_bytes == 0, one


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "one",
    [
        shape(64, 151936, gradient=False),
        shape(64, 128256),
        shape(64, 151936),
        shape(64, 151936, "float16"),
        shape(64, 262144, "float32"),
    ],
)
def test_what_is_legal_on_sm90_does_not_spill(one: Problem) -> None:
    candidates = cross_entropy_tunable.candidates(SM90, one)
    fewest = [c for c in candidates if 1 < int(c["members"]) <= 8]  # whose threads hold the most
    for chosen in dict.fromkeys((*candidates[1::3], *fewest)):
        assert compiled(cross_entropy_tunable, SM90, one, chosen).stack_bytes == 0, chosen


def test_a_cluster_reads_a_row_only_where_rows_are_few_and_read_once() -> None:
    def most(one: Problem) -> int:
        return max(c.hints["num_ctas"] for c in cross_entropy_tunable.candidates(SM90, one))

    assert most(shape(1, 128256, gradient=False)) == 4
    assert most(shape(1024, 128256, gradient=False)) == 1
    assert most(shape(1, 128256, gradient=True)) == 1


@pytest.mark.process
def test_an_odd_vocabulary_compiles() -> None:
    one = shape(7, 50257, "float16")
    compiled(cross_entropy_tunable, SM90, one, cross_entropy_tunable.default_config(SM90, one))


# The host function ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    module = sys.modules["aot_tune.kernels.softmax_and_loss.cross_entropy"]
    monkeypatch.setattr(
        module, "cross_entropy_tunable", SimpleNamespace(launch=lambda *args: calls.append(args))
    )
    return calls


def half(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16)


def columns(rows: int) -> torch.Tensor:
    return torch.zeros((rows,), dtype=torch.int64)


def test_the_loss_is_a_new_tensor_and_a_scale_asks_for_the_gradient(launched: list[tuple[Any, ...]]) -> None:
    logits, target = half(3, 9), columns(3)
    loss = cross_entropy(logits, target)
    assert (loss.shape, loss.dtype) == ((3,), torch.float32)
    assert cross_entropy(logits, target, ignore_index=0, grad_scale=2) is not loss
    first, second = launched
    assert first[0] is logits
    assert first[2] is loss
    assert first[4:] == (IGNORED, None)
    assert second[4:] == (0, 2.0)
    assert type(second[5]) is float


def test_blocks_meet_in_zeros_that_serve_every_call(launched: list[tuple[Any, ...]]) -> None:
    for rows in (3, 2):
        cross_entropy(half(rows, 16384), columns(rows), grad_scale=1.0)
    slots = launched[0][3]
    assert slots is launched[1][3]
    assert slots.numel() >= row_groups.ints(3, 512)
    assert not slots.any()


def test_rows_of_a_wider_tensor_are_taken_where_they_are(launched: list[tuple[Any, ...]]) -> None:
    cross_entropy(half(3, 16)[:, :9], columns(6)[::2])
    assert launched[0][0].stride() == (16, 1)
    assert launched[0][1].stride() == (2,)


def test_no_rows_are_not_launched(launched: list[tuple[Any, ...]]) -> None:
    assert cross_entropy(half(0, 8), columns(0), grad_scale=1.0).shape == (0,)
    assert launched == []


def test_each_unusable_argument_is_named(launched: list[tuple[Any, ...]]) -> None:
    def refused(says: str, *args: Any, **more: Any) -> None:
        with pytest.raises(LaunchError, match=says):
            cross_entropy(*args, **more)

    refused(r"logits is \(2, 3, 8\); pass a tensor of shape \(rows, vocabulary\)", half(2, 3, 8), columns(2))
    refused("logits is float64; pass bfloat16 or float16 or float32", half(2, 8).double(), columns(2))
    refused(r"logits has shape \(2, 0\); pass one column or more", half(2, 0), columns(2))
    refused("target is int32; pass int64", half(2, 8), columns(2).int())
    refused(r"target has shape \(3,\); logits of 2 rows asks for \(2,\)", half(2, 8), columns(3))
    for scale in (None, 1.0):
        says = r"logits is an expanded view, whose elements share memory; pass logits\.contiguous\(\)"
        refused(says, half(1, 8).expand(2, 8), columns(2), grad_scale=scale)
        refused(says, half(2, 1).expand(2, 8), columns(2), grad_scale=scale)
    refused("target is on meta, not on cpu", half(2, 8), columns(2).to("meta"))
    refused("ignore_index is 2147483648; pass an int", half(2, 8), columns(2), ignore_index=2**31)
    assert launched == []
