"""fused_add_rms_norm without a GPU: the declaration, the arithmetic, the host function, the compiled code."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.errors import LaunchError
from aot_tune.kernels.norms.fused_add_rms_norm import fused_add_rms_norm, fused_add_rms_norm_tunable
from aot_tune.values.arch import KNOWN_ARCHS, Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import emulator
from tests.support.agree import assert_agrees, expected, problem
from tests.support.compiling import compiled
from tests.support.pairs import pairwise
from tests.support.samples import SM90

CPU = torch.device("cpu")


def shape(rows: int, cols: int, dtype: str = "bfloat16") -> Problem:
    return problem(dtype=dtype, rows=rows, cols=cols)


def config(warps: int) -> Config:
    return Config(constants={"width": 256 * warps}, hints={"occupancy": 2, "num_worker_warps": warps})


def test_the_declared_problems_are_a_sweep_of_minutes() -> None:
    assert len(fused_add_rms_norm_tunable.typical_problems) <= 75
    assert len(fused_add_rms_norm_tunable.candidates(SM90, shape(1, 4096))) == 12


def test_what_a_block_s_registers_do_not_hold_is_refused() -> None:
    assert fused_add_rms_norm_tunable.refusal(config(8), SM90, shape(1, 16384)) is None
    refusal = fused_add_rms_norm_tunable.refusal(config(8), SM90, shape(1, 32768))
    assert refusal == "32768 elements over 256 threads spill at an occupancy of 2"


@pytest.mark.parametrize("arch", KNOWN_ARCHS, ids=str)
def test_a_tile_has_an_element_for_each_thread_lest_it_be_read_again(arch: Arch) -> None:
    columns = (5, 7, 8, 9, 15, 16, 17, 100, 2880, 32768)
    for rows, cols in itertools.product((1, 3, 16, 1000), columns):
        one = shape(rows, cols)
        candidates = fused_add_rms_norm_tunable.candidates(arch, one)
        assert fused_add_rms_norm_tunable.default_config(arch, one) in candidates
        for candidate in candidates:
            *_, height, width, _, _ = fused_add_rms_norm_tunable.args_fn(candidate, *made(one))
            assert height * width >= 32 * candidate.hints["num_worker_warps"], candidate


def made(one: Problem) -> tuple[Any, ...]:
    return fused_add_rms_norm_tunable.make_args(one, torch.device("meta"), 0)


def test_rows_too_short_for_that_have_no_config() -> None:
    assert fused_add_rms_norm_tunable.candidates(SM90, shape(100, 4)) == ()
    refusal = fused_add_rms_norm_tunable.refusal(config(8), SM90, shape(3, 5))
    assert refusal == (
        "128 elements are fewer than 256 threads, which may read them again after they were overwritten"
    )
    with pytest.raises(LaunchError, match="no config changes rows of 4 columns in place; pass 5 or more"):
        fused_add_rms_norm_tunable.default_config(SM90, shape(100, 4))


def test_long_rows_have_a_block_each_and_short_ones_share() -> None:
    for cols, blocks in ((4096, 100), (1000, 100), (128, 13), (1, 7)):
        grid = fused_add_rms_norm_tunable.grid_fn(config(4), Device.reference(SM90), shape(100, cols))
        assert grid == (blocks,)


@pytest.mark.emulated
@pairwise(
    "rows cols",
    {
        "dtype": ("bfloat16", "float16", "float32"),
        "warps": (4, 8),
    },
    [
        ((1, 1), ("bfloat16", 4), ("float16", 8), ("float32", 8)),
        ((3, 5), ("bfloat16", 8), ("float16", 8), ("float32", 4)),
        ((17, 100), ("bfloat16", 4), ("float16", 4), ("float32", 8)),
        ((9, 128), ("bfloat16", 4), ("float16", 4), ("float32", 8)),
        ((32, 128), ("bfloat16", 8), ("float16", 4), ("float32", 8)),
        ((4, 1024), ("bfloat16", 4), ("float16", 8), ("float32", 4)),
        ((2, 2880), ("bfloat16", 4), ("float16", 8), ("float32", 4)),
        ((3, 1500), ("bfloat16", 8), ("float16", 4), ("float32", 8)),
        ((1, 5120), ("bfloat16", 8), ("float16", 8), ("float32", 4)),
    ],
)
def test_the_kernel_agrees_with_the_reference(
    rows: int, cols: int, dtype: str, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = fused_add_rms_norm_tunable.make_args(shape(rows, cols, dtype), CPU, 1)
    wanted = expected(fused_add_rms_norm_tunable, args)
    emulator.run(fused_add_rms_norm_tunable, args, config(warps), monkeypatch)
    assert_agrees(fused_add_rms_norm_tunable, args, wanted)


def test_the_reference_is_torch_s_sum_and_the_norm_of_it() -> None:
    args = fused_add_rms_norm_tunable.make_args(shape(7, 96), CPU, 3)
    x, residual, weight, eps = args
    total = x + residual
    wanted = expected(fused_add_rms_norm_tunable, args)
    torch.testing.assert_close(wanted["residual"].value.bfloat16(), total, rtol=0, atol=0)
    norm = torch.nn.functional.rms_norm(total.double(), (96,), weight.double(), eps)
    torch.testing.assert_close(wanted["x"].value, norm)


def test_wrong_results_are_told_from_roundings() -> None:
    args = fused_add_rms_norm_tunable.make_args(shape(16, 2880), CPU, 0)
    x, residual, weight, eps = args
    total = (x + residual).double()
    before = x.double(), residual.double()
    wanted = expected(fused_add_rms_norm_tunable, args)

    def norm(of: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.nn.functional.rms_norm(of, (2880,), weight.double(), eps) * scale

    def agrees(new_x: torch.Tensor, new_residual: torch.Tensor) -> None:
        x.copy_(new_x)
        residual.copy_(new_residual)
        assert_agrees(fused_add_rms_norm_tunable, args, wanted)

    agrees(norm(total), total)
    for new_x, new_residual in (
        (norm(total), before[1]),
        (norm(before[0]), total),
        (norm(total) / weight.double(), total),
        (norm(total, (4096 / 2880) ** 0.5), total),
        (norm(total), total * 1.01),
    ):
        with pytest.raises(AssertionError, match="are wrong"):
            agrees(new_x, new_residual)


def test_arguments_without_storage_pose_the_problem_that_made_them() -> None:
    for one in fused_add_rms_norm_tunable.typical_problems[::11]:
        args = fused_add_rms_norm_tunable.make_args(one, torch.device("meta"), 0)
        assert fused_add_rms_norm_tunable.problem_of(*args) == one


# The host function ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    module = sys.modules["aot_tune.kernels.norms.fused_add_rms_norm"]
    stand_in = SimpleNamespace(launch=lambda *args: calls.append(args))
    monkeypatch.setattr(module, "fused_add_rms_norm_tunable", stand_in)
    return calls


def half(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16)


@pytest.mark.parametrize("sizes", [(8,), (5, 8), (2, 3, 8), (2, 1, 3, 8)])
def test_leading_dimensions_are_flattened_into_rows(
    sizes: tuple[int, ...], launched: list[tuple[Any, ...]]
) -> None:
    x, residual = half(*sizes), half(*sizes)
    changed = fused_add_rms_norm(x, residual, half(8), 1e-5)
    assert changed[0] is x
    assert changed[1] is residual
    [(rows, residual_rows, _, eps)] = launched
    assert rows.shape == residual_rows.shape == (x.numel() // 8, 8)
    assert (rows.data_ptr(), residual_rows.data_ptr(), eps) == (x.data_ptr(), residual.data_ptr(), 1e-5)


def test_rows_of_a_wider_tensor_are_changed_where_they_are(launched: list[tuple[Any, ...]]) -> None:
    fused_add_rms_norm(half(2, 3, 16)[:, :, :8], half(2, 3, 8), half(8))
    assert [t.stride() for t in launched[0][:2]] == [(16, 1), (8, 1)]


def test_what_cannot_be_viewed_as_rows_is_refused_with_the_way_out(launched: list[tuple[Any, ...]]) -> None:
    with pytest.raises(
        LaunchError, match=r"residual of shape \(3, 2, 8\).*call residual\.contiguous\(\) first"
    ):
        fused_add_rms_norm(half(3, 2, 8), half(2, 3, 8).transpose(0, 1), half(8))
    assert launched == []


@pytest.mark.process
def test_its_import_is_not_that_of_the_kernel_for_rows_too_short() -> None:
    code = (
        "import sys; from aot_tune.kernels import fused_add_rms_norm; "
        "sys.exit('aot_tune.kernels.norms.rms_norm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("cols", [1, 2, 4, 5])
def test_rows_too_short_for_one_kernel_are_a_sum_and_its_norm(
    cols: int, launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("aot_tune.kernels.norms.rms_norm")

    def norm(total: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor) -> None:
        out.copy_(torch.nn.functional.rms_norm(total.double(), (cols,), weight.double(), eps))

    monkeypatch.setattr(module, "rms_norm", norm)
    x, residual, weight, eps = args = fused_add_rms_norm_tunable.make_args(shape(6, cols), CPU, 1)
    wanted = expected(fused_add_rms_norm_tunable, args)
    changed = fused_add_rms_norm(x.view(2, 3, cols), residual.view(2, 3, cols), weight, eps)
    if cols < 5:
        assert launched == []
        assert [one.shape for one in changed] == [(2, 3, cols)] * 2
        assert_agrees(fused_add_rms_norm_tunable, args, wanted)
    else:
        assert len(launched) == 1


@pytest.mark.parametrize("sizes", [(0, 8), (2, 0, 8), (4, 0), (0, 0), (2, 3, 0)])
def test_nothing_is_not_launched(sizes: tuple[int, ...], launched: list[tuple[Any, ...]]) -> None:
    x, residual = half(*sizes), half(*sizes)
    assert fused_add_rms_norm(x, residual, half(sizes[-1])) == (x, residual)
    assert launched == []


def test_each_unusable_argument_is_named(launched: list[tuple[Any, ...]]) -> None:
    def refused(says: str, **changed: Any) -> None:
        args = {"x": half(2, 8), "residual": half(2, 8), "weight": half(8), **changed}
        with pytest.raises(LaunchError, match=says):
            fused_add_rms_norm(**args)

    refused("x is float64; pass bfloat16 or float16 or float32", x=half(2, 8).double())
    refused(r"x has shape \(\); pass a last size of 0 to 32768", x=half())
    refused(r"x has shape \(1, 32769\)", x=half(1, 32769))
    refused(r"residual has shape \(1, 8\); x asks for \(2, 8\)", residual=half(1, 8))
    refused("residual is float32; pass bfloat16", residual=half(2, 8).float())
    refused("residual is a NoneType", residual=None)
    refused(r"weight has shape \(7,\); x of 8 columns asks for \(8,\)", weight=half(7))
    refused("weight is float32; pass bfloat16", weight=half(8).float())
    refused("weight is on meta, not on cpu", weight=half(8).to("meta"))
    same = half(2, 8)
    refused("x and residual share memory", x=same, residual=same)
    refused("residual and weight share memory", residual=same, weight=same[0])
    assert launched == []


# Through the real compiler ----------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("name", ["sm80", "sm90", "sm100", "sm120"])
@pytest.mark.parametrize("cols", [2880, 7168, 8192])
def test_the_default_compiles_and_spills_nothing(cols: int, name: str) -> None:
    arch, one = Arch.parse(name), shape(4096, cols)
    default = fused_add_rms_norm_tunable.default_config(arch, one)
    assert compiled(fused_add_rms_norm_tunable, arch, one, default).stack_bytes == 0


@pytest.mark.process
def test_the_space_compiles_and_spills_nothing_on_sm90() -> None:
    one = shape(4096, 5120)
    for candidate in fused_add_rms_norm_tunable.candidates(SM90, one):
        assert compiled(fused_add_rms_norm_tunable, SM90, one, candidate).stack_bytes == 0, candidate


@pytest.mark.process
@pytest.mark.parametrize(
    ("rows", "cols", "dtype"), [(1, 5, "float16"), (7, 100, "float32"), (3, 32768, "float32")]
)
def test_odd_sizes_compile(rows: int, cols: int, dtype: str) -> None:
    one = shape(rows, cols, dtype)
    default = fused_add_rms_norm_tunable.default_config(SM90, one)
    compiled(fused_add_rms_norm_tunable, SM90, one, default)
