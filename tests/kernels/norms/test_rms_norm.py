"""rms_norm without a GPU: the declaration, the arithmetic, what the host function takes and refuses."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.errors import LaunchError
from aot_tune.kernels import rms_norm, rms_norm_tunable
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import emulator
from tests.support.agree import assert_agrees, expected, poison, problem
from tests.support.compiling import SM90_AND_SLOW_ARCHS, compiled
from tests.support.pairs import pairwise
from tests.support.samples import SM90

CPU = torch.device("cpu")


def config(warps: int = 4, occupancy: int = 2, each: int = 8) -> Config:
    hints = {"occupancy": occupancy, "num_worker_warps": warps}
    return Config(constants={"width": 32 * warps * each}, hints=hints)


def shape(rows: int, cols: int, dtype: str = "bfloat16") -> Problem:
    return problem(dtype=dtype, rows=rows, cols=cols)


def test_rows_that_no_config_holds_are_an_error_that_says_so() -> None:
    with pytest.raises(LaunchError, match="no config holds rows of 100000 columns; pass rows of at most"):
        rms_norm_tunable.default_config(SM90, problem(dtype="bfloat16", rows=7, cols=100000))


def test_candidates_are_what_a_block_s_registers_hold() -> None:
    def candidates(cols: int, warps: int, each: int) -> list[int]:
        found = rms_norm_tunable.candidates(SM90, shape(1, cols))
        size = (warps, 32 * warps * each)
        return [c.hints["occupancy"] for c in found if (c.hints["num_worker_warps"], c["width"]) == size]

    assert (candidates(4096, 4, 8), candidates(4096, 8, 8)) == ([2, 4, 6, 8], [1, 2, 3, 4])
    assert (candidates(4096, 4, 16), candidates(4096, 8, 16)) == ([2, 4], [1, 2])
    assert (candidates(8192, 4, 8), candidates(8192, 8, 8)) == ([2, 4], [1, 2, 3, 4])
    assert (candidates(32768, 4, 8), candidates(32768, 8, 8)) == ([], [1])
    refusal = rms_norm_tunable.refusal(config(4, 8), SM90, shape(1, 5120))
    assert refusal == "5120 elements over 128 threads spill at an occupancy of 8"
    # 12 parts spilled 200 bytes, 6 of the same registers nothing.
    many = rms_norm_tunable.refusal(config(4, 4), SM90, shape(4096, 12288))
    assert many is not None
    assert "spill at an occupancy of 4" in many
    assert rms_norm_tunable.refusal(config(4, 4, 16), SM90, shape(4096, 12288)) is None


def test_the_declared_problems_are_a_sweep_of_minutes() -> None:
    assert len(rms_norm_tunable.typical_problems) <= 120
    assert {p["rows"] for p in rms_norm_tunable.typical_problems} == {4**i for i in range(11)}


@pytest.mark.parametrize(
    ("rows", "cols", "warps", "each", "wanted"),
    [(1, 4096, 4, 8, (1, 1024, 4, 4)), (1, 4096, 8, 8, (1, 2048, 2, 2)), (7, 5120, 4, 8, (1, 1024, 5, 5)),
     (7, 5120, 8, 8, (1, 2048, 3, 2)), (7, 2880, 4, 8, (1, 1024, 3, 2)), (7, 1000, 4, 8, (1, 1024, 1, 0)),
     (16, 128, 4, 8, (8, 128, 1, 1)), (15, 128, 4, 8, (8, 128, 1, 0)), (3, 1, 4, 8, (16, 1, 1, 0)),
     (1, 32768, 8, 8, (1, 2048, 16, 16)), (1, 4096, 8, 16, (1, 4096, 1, 1)),
     (7, 2880, 4, 16, (1, 2048, 2, 1)), (16, 128, 4, 16, (16, 128, 1, 1)), (16, 512, 8, 16, (8, 512, 1, 1))],
)  # fmt: skip
def test_rows_are_cut_into_parts_of_which_the_whole_ones_are_not_checked(
    rows: int, cols: int, warps: int, each: int, wanted: tuple[int, ...]
) -> None:
    args = rms_norm_tunable.make_args(shape(rows, cols), CPU, 0)
    assert rms_norm_tunable.args_fn(config(warps, each=each), *args)[4:] == wanted


def test_long_rows_have_a_block_each_and_short_ones_share() -> None:
    device = Device.reference(SM90)
    assert rms_norm_tunable.grid_fn(config(), device, shape(100, 4096)) == (100,)
    assert rms_norm_tunable.grid_fn(config(), device, shape(100, 1000)) == (100,)
    assert rms_norm_tunable.grid_fn(config(), device, shape(100, 128)) == (13,)
    assert rms_norm_tunable.tiles is not None
    assert rms_norm_tunable.tiles(config(), shape(100, 128)) == 13


@pytest.mark.emulated
@pairwise(
    "rows cols",
    {
        "dtype": ("bfloat16", "float16", "float32"),
        "warps each": [(4, 8), (8, 8), (8, 16)],
    },
    [
        ((1, 1), ("bfloat16", (8, 8)), ("float16", (4, 8)), ("float32", (8, 16))),
        ((3, 5), ("bfloat16", (4, 8)), ("float16", (8, 16)), ("float32", (8, 8))),
        ((17, 100), ("bfloat16", (8, 8)), ("float16", (8, 16)), ("float32", (4, 8))),
        ((9, 128), ("bfloat16", (8, 16)), ("float16", (4, 8)), ("float32", (8, 8))),
        ((32, 128), ("bfloat16", (8, 8)), ("float16", (4, 8)), ("float32", (8, 16))),
        ((4, 1024), ("bfloat16", (8, 16)), ("float16", (4, 8)), ("float32", (8, 8))),
        ((2, 2880), ("bfloat16", (8, 8)), ("float16", (8, 16)), ("float32", (4, 8))),
        ((3, 1500), ("bfloat16", (8, 16)), ("float16", (4, 8)), ("float32", (8, 8))),
        ((1, 5120), ("bfloat16", (8, 16)), ("float16", (8, 8)), ("float32", (4, 8))),
    ],
)
def test_the_kernel_agrees_with_the_reference(
    rows: int, cols: int, dtype: str, warps: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = rms_norm_tunable.make_args(shape(rows, cols, dtype), CPU, 1)
    poison(rms_norm_tunable, args)
    wanted = expected(rms_norm_tunable, args)
    emulator.run(rms_norm_tunable, args, config(warps, each=each), monkeypatch)
    assert_agrees(rms_norm_tunable, args, wanted)


def test_the_reference_is_the_norm_that_torch_computes() -> None:
    x, weight, out, eps = rms_norm_tunable.make_args(shape(7, 300), CPU, 2)
    wanted = expected(rms_norm_tunable, (x, weight, out, eps))["out"].value
    assert wanted.dtype == torch.float64
    torch.testing.assert_close(wanted, torch.nn.functional.rms_norm(x.double(), (300,), weight.double(), eps))


def test_a_norm_without_its_weight_or_with_the_wrong_mean_is_told_from_a_rounding() -> None:
    x, weight, out, eps = args = rms_norm_tunable.make_args(shape(4, 2880), CPU, 0)
    wanted = expected(rms_norm_tunable, args)
    for wrong in (
        torch.nn.functional.rms_norm(x.double(), (2880,), None, eps),
        torch.nn.functional.rms_norm(x.double(), (2880,), weight.double(), eps) * (4096 / 2880) ** 0.5,
    ):
        out.copy_(wrong)
        with pytest.raises(AssertionError, match="are wrong"):
            assert_agrees(rms_norm_tunable, args, wanted)


def test_arguments_without_storage_pose_the_problem_that_made_them() -> None:
    for one in rms_norm_tunable.typical_problems[::15]:
        assert rms_norm_tunable.problem_of(*rms_norm_tunable.make_args(one, torch.device("meta"), 0)) == one


# The host function ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    module = sys.modules["aot_tune.kernels.norms.rms_norm"]
    monkeypatch.setattr(module, "rms_norm_tunable", SimpleNamespace(launch=lambda *args: calls.append(args)))
    return calls


def half(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16)


@pytest.mark.parametrize("sizes", [(8,), (5, 8), (2, 3, 8), (2, 1, 3, 8)])
def test_leading_dimensions_are_flattened_into_rows(
    sizes: tuple[int, ...], launched: list[tuple[Any, ...]]
) -> None:
    x = half(*sizes)
    out = rms_norm(x, half(8), 1e-5)
    assert out.shape == x.shape
    [(rows, _, out_rows, eps)] = launched
    assert rows.shape == out_rows.shape == (x.numel() // 8, 8)
    assert (rows.data_ptr(), out_rows.data_ptr(), eps) == (x.data_ptr(), out.data_ptr(), 1e-5)


def test_rows_of_a_wider_tensor_are_taken_where_they_are(launched: list[tuple[Any, ...]]) -> None:
    wide = half(2, 3, 16)
    rms_norm(wide[:, :, :8], half(8))
    assert launched[0][0].stride() == (16, 1)


def test_what_cannot_be_viewed_as_rows_is_refused_with_the_way_out(launched: list[tuple[Any, ...]]) -> None:
    with pytest.raises(LaunchError, match=r"x of shape \(3, 2, 8\).*call x\.contiguous\(\) first"):
        rms_norm(half(2, 3, 8).transpose(0, 1), half(8))
    assert launched == []


@pytest.mark.parametrize("sizes", [(0, 8), (2, 0, 8), (4, 0), (0, 0), (2, 3, 0)])
def test_nothing_is_not_launched(sizes: tuple[int, ...], launched: list[tuple[Any, ...]]) -> None:
    assert rms_norm(half(*sizes), half(sizes[-1])).shape == sizes
    assert launched == []


def test_each_unusable_argument_is_named(launched: list[tuple[Any, ...]]) -> None:
    def refused(says: str, *args: Any, **more: Any) -> None:
        with pytest.raises(LaunchError, match=says):
            rms_norm(*args, **more)

    refused("x is float64; pass bfloat16 or float16 or float32", half(2, 8).double(), half(8))
    refused(r"x has shape \(\); pass a last size of 0 to 32768", half(), half(8))
    refused(r"x has shape \(1, 32769\)", half(1, 32769), half(32769))
    refused(r"weight has shape \(7,\); x of 8 columns asks for \(8,\)", half(2, 8), half(7))
    refused("weight is float32; pass bfloat16", half(2, 8), half(8).float())
    refused(r"out has shape \(8, 2\)", half(2, 8), half(8), out=half(8, 2))
    refused("out is float16", half(2, 8), half(8), out=half(2, 8).half())
    x = half(2, 8)
    refused("out and x share memory", x, half(8), out=x)
    refused("weight is on meta, not on cpu", half(2, 8), half(8).to("meta"))
    assert launched == []


# Through the real compiler ----------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("name", SM90_AND_SLOW_ARCHS)
def test_rms_norm_compiles_and_its_default_spills_at_no_declared_width(name: str) -> None:
    arch = Arch.parse(name)
    for cols in sorted({p.size("cols") for p in rms_norm_tunable.typical_problems}):
        one = problem(dtype="bfloat16", rows=4096, cols=cols)
        assert (
            compiled(rms_norm_tunable, arch, one, rms_norm_tunable.default_config(arch, one)).stack_bytes == 0
        )


@pytest.mark.process
def test_rms_norm_compiles_across_its_space() -> None:
    arch = Arch.parse("sm90")
    for cols in (1, 100, 128, 8192, 32768):
        one = problem(dtype="float32", rows=7, cols=cols)
        compiled(rms_norm_tunable, arch, one, rms_norm_tunable.default_config(arch, one))
    one = problem(dtype="bfloat16", rows=4096, cols=4096)
    for config in rms_norm_tunable.candidates(arch, one):
        assert compiled(rms_norm_tunable, arch, one, config).stack_bytes == 0, config
