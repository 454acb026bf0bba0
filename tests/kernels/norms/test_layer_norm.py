"""layer_norm without a GPU: the declaration, the arithmetic, what it compiles to and what it takes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.errors import LaunchError
from aot_tune.kernels.norms.layer_norm import layer_norm, layer_norm_tunable
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


HEADS = (88, 160)
"""Columns of the norms of heads, which have more rows."""


def shape(rows: int, cols: int, dtype: str = "bfloat16", *, bias: bool = True) -> Problem:
    return problem(dtype=dtype, bias=bias, rows=rows, cols=cols)


def test_the_default_is_a_candidate_at_any_width() -> None:
    for arch in KNOWN_ARCHS:
        widths = (shape(1, cols) for cols in (1, 2, 100, 1000, 4097, 9000, 16385, 32768))
        for one in widths:
            default = layer_norm_tunable.default_config(arch, one)
            assert default in layer_norm_tunable.candidates(arch, one), (arch, one)


def test_rows_that_no_config_holds_are_an_error_that_says_so() -> None:
    for cols in (65536, 2**20):
        with pytest.raises(
            LaunchError, match=f"no config holds rows of {cols} columns; pass rows of at most"
        ):
            layer_norm_tunable.default_config(SM90, shape(7, cols))


def test_the_sweep_stays_small() -> None:
    of_heads = [one for one in layer_norm_tunable.typical_problems if one.size("cols") in HEADS]
    assert len(of_heads) <= 6
    assert len(layer_norm_tunable.typical_problems) - len(of_heads) <= 90
    for one in layer_norm_tunable.typical_problems:
        assert len(layer_norm_tunable.candidates(SM90, one)) <= 24


def test_every_size_has_a_declared_bucket_within_one_doubling() -> None:
    rows = {p.size("rows") for p in layer_norm_tunable.typical_problems if p.size("cols") not in HEADS}
    assert rows == {4**i for i in range(8)}


def config(width: int, *, persistent: bool = False, occupancy: int = 4, warps: int = 4) -> Config:
    return Config(
        constants={"width": width, "persistent": persistent},
        hints={"occupancy": occupancy, "num_worker_warps": warps},
    )


def test_long_rows_have_a_block_each_and_short_ones_share() -> None:
    device = Device.reference(SM90)
    assert layer_norm_tunable.tiles is not None
    for one, width, blocks in ((shape(1000, 4096), 1024, 1000), (shape(1000, 768), 256, 250)):
        assert layer_norm_tunable.grid_fn(config(width), device, one) == (blocks,)
        assert layer_norm_tunable.tiles(config(width), one) == blocks
    assert layer_norm_tunable.grid_fn(config(1024, persistent=True), device, shape(1000, 4096)) == (132 * 4,)
    assert layer_norm_tunable.grid_fn(config(1024, persistent=True), device, shape(5, 4096)) == (5,)


def test_a_row_is_held_without_empty_lanes_where_parts_divide_it() -> None:
    def widths(cols: int) -> set[object]:
        return {c["width"] for c in layer_norm_tunable.candidates(SM90, shape(4096, cols))}

    assert widths(6144) == {1024, 2048}
    assert widths(1152) == {128, 1024, 2048}
    assert widths(4544) == {1024, 2048}
    assert widths(1024) == {256, 1024}  # in four parts beside one
    assert widths(1) == {1}


@pytest.mark.emulated
@pairwise(
    "rows cols",
    {
        "dtype": ("bfloat16", "float16", "float32"),
        "bias": (True, False),
    },
    [
        ((1, 1), ("bfloat16", True), ("float16", False), ("float32", False)),
        ((3, 5), ("bfloat16", False), ("float16", False), ("float32", True)),
        ((17, 100), ("bfloat16", True), ("float16", True), ("float32", False)),
        ((16, 128), ("bfloat16", True), ("float16", True), ("float32", False)),
        ((4, 1024), ("bfloat16", False), ("float16", True), ("float32", False)),
        ((3, 1500), ("bfloat16", True), ("float16", False), ("float32", True)),
        ((7, 768), ("bfloat16", True), ("float16", False), ("float32", True)),
        ((8, 768), ("bfloat16", False), ("float16", True), ("float32", False)),
        ((13, 768), ("bfloat16", False), ("float16", False), ("float32", True)),
    ],
)
def test_the_kernel_agrees_with_the_reference(
    rows: int, cols: int, bias: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = shape(rows, cols, dtype, bias=bias)
    args = layer_norm_tunable.make_args(one, CPU, 1)
    wanted = expected(layer_norm_tunable, args)
    candidates = layer_norm_tunable.candidates(SM90, one)
    chosen = {(c["width"], c["persistent"]): c for c in candidates}
    for each in (layer_norm_tunable.default_config(SM90, one), *chosen.values()):
        poison(layer_norm_tunable, args)
        twice = emulator.of_two_tiles(rows, height(each), cols)
        emulator.run(layer_norm_tunable, args, each, monkeypatch, twice=twice)
        assert_agrees(layer_norm_tunable, args, wanted)


def height(config: Config) -> int:
    """Rows of a block."""
    return max(1, 8 * 32 * config.hints["num_worker_warps"] // int(config["width"]))


def test_no_load_of_a_row_is_checked_for_the_sake_of_the_last_block() -> None:
    def constants(rows: int) -> list[object]:
        args = layer_norm_tunable.make_args(shape(rows, 1024), torch.device("meta"), 0)
        return [arg for arg in layer_norm_tunable.args_fn(config(256), *args) if type(arg) is int]

    assert height(config(256)) == 4
    assert constants(14325) == constants(16384) == constants(4)
    assert constants(3) == [4, 256, 4, 0, 4]  # fewer than a block has


@pytest.mark.emulated
def test_a_mean_far_above_the_deviation_costs_no_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    one = shape(4, 1000, "float32")
    x, *rest = layer_norm_tunable.make_args(one, CPU, 3)
    args = (x + 1000, *rest)
    wanted = torch.nn.functional.layer_norm(args[0].double(), (1000,), args[1].double(), args[2].double())
    emulator.run(layer_norm_tunable, args, layer_norm_tunable.default_config(SM90, one), monkeypatch)
    torch.testing.assert_close(args[3].double(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bias", [True, False])
def test_the_reference_is_the_norm_by_its_definition(bias: bool) -> None:
    x, weight, shift, _, eps = args = layer_norm_tunable.make_args(shape(7, 300, bias=bias), CPU, 2)
    centred = x.double() - x.double().mean(1, keepdim=True)
    norm = centred / (centred.square().mean(1, keepdim=True) + eps).sqrt() * weight.double()
    value = expected(layer_norm_tunable, args)["out"].value
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, norm + shift.double() if bias else norm)


def test_a_wrong_norm_is_told_from_a_rounding() -> None:
    x, weight, bias, out, eps = args = layer_norm_tunable.make_args(shape(4, 1280), CPU, 0)
    wanted = expected(layer_norm_tunable, args)
    right = wanted["out"].value
    second_moment = torch.nn.functional.rms_norm(x.double(), (1280,), weight.double(), eps) + bias.double()
    for wrong in (right - bias.double(), second_moment, right * (2048 / 1280) ** 0.5):
        out.copy_(wrong)
        with pytest.raises(AssertionError, match="are wrong"):
            assert_agrees(layer_norm_tunable, args, wanted)


def test_arguments_without_storage_pose_the_problem_that_made_them() -> None:
    for one in layer_norm_tunable.typical_problems[::9]:
        args = layer_norm_tunable.make_args(one, torch.device("meta"), 0)
        assert layer_norm_tunable.problem_of(*args) == one


# What it compiles to ----------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("name", SM90_AND_SLOW_ARCHS)
def test_the_default_compiles_and_does_not_spill(name: str) -> None:
    arch = Arch.parse(name)
    for cols in (1152, 6144, 32768):
        one = shape(4096, cols)
        default = layer_norm_tunable.default_config(arch, one)
        assert compiled(layer_norm_tunable, arch, one, default).stack_bytes == 0, one


SPILLABLE = [shape(4096, 6144), shape(4096, 1152), shape(1000, 4544), shape(4096, 14336)]


@pytest.mark.process
@pytest.mark.parametrize("one", SPILLABLE, ids=str)
def test_what_is_legal_on_sm90_does_not_spill(one: Problem) -> None:
    candidates = layer_norm_tunable.candidates(SM90, one)
    for each in candidates[:: -(-len(candidates) // 3)]:
        assert compiled(layer_norm_tunable, SM90, one, each).stack_bytes == 0, each


@pytest.mark.process
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cols", [4240, 9216, 13312])
def test_many_blocks_a_multiprocessor_do_not_spill(cols: int, dtype: str) -> None:
    one = shape(4096, cols, dtype)
    many = [
        c
        for c in layer_norm_tunable.candidates(SM90, one)
        if c.hints["occupancy"] * c.hints["num_worker_warps"] > 16 and not c["persistent"]
    ]
    assert many or dtype == "float16"  # whose registers are estimated as those of float32
    for each in many:
        assert compiled(layer_norm_tunable, SM90, one, each).stack_bytes == 0, each


# The host function ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    module = sys.modules["aot_tune.kernels.norms.layer_norm"]
    monkeypatch.setattr(
        module, "layer_norm_tunable", SimpleNamespace(launch=lambda *args: calls.append(args))
    )
    return calls


def half(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16)


@pytest.mark.parametrize("sizes", [(8,), (5, 8), (2, 3, 8)])
def test_leading_dimensions_are_flattened_into_rows(
    sizes: tuple[int, ...], launched: list[tuple[Any, ...]]
) -> None:
    x, bias = half(*sizes), half(8)
    out = layer_norm(x, half(8), bias, 1e-6)
    assert out.shape == x.shape
    [(rows, _, shift, out_rows, eps)] = launched
    assert rows.shape == out_rows.shape == (x.numel() // 8, 8)
    assert (rows.data_ptr(), out_rows.data_ptr(), eps) == (x.data_ptr(), out.data_ptr(), 1e-6)
    assert shift is bias


def test_without_a_bias_none_is_added(launched: list[tuple[Any, ...]]) -> None:
    layer_norm(half(2, 8), half(8))
    assert launched[0][2] is None
    assert launched[0][4] == 1e-5


def test_rows_of_a_wider_tensor_are_taken_where_they_are(launched: list[tuple[Any, ...]]) -> None:
    layer_norm(half(2, 3, 16)[:, :, :8], half(8))
    assert launched[0][0].stride() == (16, 1)


@pytest.mark.parametrize("sizes", [(0, 8), (2, 0, 8), (4, 0), (0, 0), (2, 3, 0)])
def test_nothing_is_not_launched(sizes: tuple[int, ...], launched: list[tuple[Any, ...]]) -> None:
    assert layer_norm(half(*sizes), half(sizes[-1])).shape == sizes
    assert launched == []


def test_each_unusable_argument_is_named(launched: list[tuple[Any, ...]]) -> None:
    def refused(says: str, *args: Any, **more: Any) -> None:
        with pytest.raises(LaunchError, match=says):
            layer_norm(*args, **more)

    refused("x is float64; pass bfloat16 or float16 or float32", half(2, 8).double(), half(8))
    refused(r"x has shape \(\); pass a last size of 0 to 32768", half(), half(8))
    refused(r"x has shape \(1, 32769\)", half(1, 32769), half(32769))
    refused(r"weight has shape \(7,\); x of 8 columns asks for \(8,\)", half(2, 8), half(7))
    refused(r"bias has shape \(7,\); x of 8 columns asks for \(8,\)", half(2, 8), half(8), half(7))
    refused("bias is float32; pass bfloat16", half(2, 8), half(8), half(8).float())
    refused(r"out has shape \(8, 2\)", half(2, 8), half(8), out=half(8, 2))
    refused("out is float16", half(2, 8), half(8), out=half(2, 8).half())
    refused(r"x of shape \(3, 2, 8\).*call x\.contiguous\(\)", half(2, 3, 8).transpose(0, 1), half(8))
    x = half(2, 8)
    refused("out and x share memory", x, half(8), out=x)
    refused("bias is on meta, not on cpu", half(2, 8), half(8), half(8).to("meta"))
    assert launched == []
