"""gated_activation without a GPU: the declaration, the arithmetic, the host function, the compiled code."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.cubins.size_classes import representatives
from aot_tune.errors import LaunchError
from aot_tune.kernels import activations
from aot_tune.kernels.elementwise.gated_activation import (
    ACTIVATIONS,
    gated_activation,
    gated_activation_tunable,
)
from aot_tune.nvidia import cutile
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import emulator
from tests.support.agree import assert_agrees, expected, poison, problem
from tests.support.compiling import ARCHS, SM90_AND_SLOW_ARCHS, compiled
from tests.support.pairs import pairwise
from tests.support.samples import SM90

CPU = torch.device("cpu")


def shape(rows: int, cols: int, dtype: str = "bfloat16", activation: str = "silu") -> Problem:
    return problem(dtype=dtype, activation=activation, rows=rows, cols=cols)


def config(tile: int) -> Config:
    return Config(constants={"tile": tile}, hints={"occupancy": 1, "num_worker_warps": 4})


def test_the_declared_problems_are_a_sweep_of_minutes() -> None:
    assert len(gated_activation_tunable.typical_problems) <= 132
    for one in (shape(1, 14336), shape(16384, 14336)):
        assert len(gated_activation_tunable.candidates(SM90, one)) == 12


@pytest.mark.parametrize(
    ("rows", "tile"), [(1, 256), (16, 256), (17, 512), (64, 512), (65, 1024), (16384, 1024)]
)
def test_few_elements_are_cut_into_small_tiles(rows: int, tile: int) -> None:
    assert gated_activation_tunable.default_config(SM90, shape(rows, 14336)) == config(tile)


@pytest.mark.parametrize(
    ("rows", "cols", "tile", "width", "grid"),
    [(100, 14336, 2048, 2048, (1, 7, 100)), (100, 14336, 4096, 2048, (1, 7, 50)),
     (1, 14336, 256, 256, (1, 56, 1)), (112, 2624, 2048, 256, (1, 11, 14)), (112, 768, 4096, 256, (1, 3, 7)),
     (100, 768, 1024, 256, (1, 3, 25)), (112, 2624, 1024, 64, (1, 41, 7)), (1, 25600, 2048, 2048, (1, 13, 1)),
     (100, 1000, 1024, 256, (1, 4, 25)), (100, 128, 1024, 128, (1, 1, 13)), (3, 1, 1024, 1, (1, 1, 1)),
     (1, 1000, 512, 512, (1, 2, 1)), (65535, 14336, 1024, 1024, (1, 14, 65535)),
     (1, 65535 * 256 - 1, 256, 256, (1, 65535, 1))],
)  # fmt: skip
def test_long_rows_take_several_blocks_and_short_ones_share(
    rows: int, cols: int, tile: int, width: int, grid: tuple[int, ...]
) -> None:
    device, one = Device.reference(SM90), shape(rows, cols)
    assert gated_activation_tunable.grid_fn(config(tile), device, one) == grid
    assert gated_activation_tunable.tiles is not None
    assert gated_activation_tunable.tiles(config(tile), one) == math.prod(grid)
    assert constants(rows, cols, tile)[:2] == (tile, width)


def constants(rows: int, cols: int, tile: int) -> tuple[int, int, bool]:
    """Tile, width, and whether the kernel is told that all tiles lie inside."""
    args = gated_activation_tunable.make_args(shape(rows, cols), torch.device("meta"), 0)
    *_, tile, width, even = gated_activation_tunable.args_fn(config(tile), *args)
    return tile, width, even


@pytest.mark.parametrize(
    ("rows", "cols", "tile", "even"),
    [(1, 14336, 256, True), (16384, 14336, 1024, True), (4095, 14336, 1024, True), (4095, 14336, 4096, False),
     (4096, 14336, 4096, True), (4096, 768, 1024, True), (4094, 768, 1024, False), (4096, 2624, 1024, True),
     (4088, 2624, 1024, False), (4096, 1000, 1024, False), (1, 25600, 2048, False), (1, 1, 256, False),
     (64, 64, 1024, True), (64, 32, 1024, False), (65535, 14336, 1024, True)],
)  # fmt: skip
def test_bounds_are_left_unchecked_where_all_tiles_lie_inside(
    rows: int, cols: int, tile: int, even: bool
) -> None:
    assert constants(rows, cols, tile)[2] is even


@pytest.mark.parametrize("cols", [4, 100, 768, 2624, 14336])
@pytest.mark.parametrize("tile", [256, 1024, 4096])
def test_what_is_compiled_for_a_bucket_serves_all_of_its_sizes(cols: int, tile: int) -> None:
    def signature(rows: int) -> str:
        args = gated_activation_tunable.make_args(shape(rows, cols), torch.device("meta"), 0)
        return cutile.signature_of(
            gated_activation_tunable.kernel, gated_activation_tunable.args_fn(config(tile), *args)
        )

    for edge in (1, 2, 4, 8, 16, 32, 64, 128):
        found = {
            signature(one.size("rows"))
            for one in representatives(gated_activation_tunable, shape(edge, cols))
        }
        assert {signature(rows) for rows in range(edge // 2 + 1, edge + 1)} <= found


@pytest.mark.emulated
@pairwise(
    "rows cols tile",
    {
        "dtype": ("bfloat16", "float16", "float32"),
        "activation": ACTIVATIONS,
    },
    [
        ((1, 1, 512), ("bfloat16", "gelu_tanh"), ("float16", "silu"), ("float32", "gelu")),
        ((3, 5, 256), ("bfloat16", "silu"), ("float16", "gelu_tanh"), ("float32", "gelu")),
        ((17, 100, 512), ("bfloat16", "silu"), ("float16", "gelu_tanh"), ("float32", "gelu")),
        ((9, 128, 1024), ("bfloat16", "gelu_tanh"), ("float16", "silu"), ("float32", "gelu")),
        ((4, 1024, 1024), ("bfloat16", "silu"), ("float16", "gelu_tanh"), ("float32", "gelu")),
        ((2, 2624, 1024), ("bfloat16", "gelu"), ("float16", "gelu_tanh"), ("float32", "silu")),
        ((16, 2624, 1024), ("bfloat16", "silu"), ("float16", "gelu_tanh"), ("float32", "gelu")),
        ((16, 2624, 2048), ("bfloat16", "gelu_tanh"), ("float16", "gelu"), ("float32", "silu")),
        ((6, 768, 1024), ("bfloat16", "gelu"), ("float16", "silu"), ("float32", "gelu_tanh")),
        ((8, 768, 1024), ("bfloat16", "silu"), ("float16", "gelu"), ("float32", "gelu_tanh")),
        ((1, 768, 256), ("bfloat16", "silu"), ("float16", "gelu"), ("float32", "gelu_tanh")),
        ((3, 1500, 4096), ("bfloat16", "gelu"), ("float16", "gelu_tanh"), ("float32", "silu")),
        ((16, 64, 1024), ("bfloat16", "gelu"), ("float16", "gelu_tanh"), ("float32", "silu")),
        ((32, 32, 1024), ("bfloat16", "gelu_tanh"), ("float16", "gelu"), ("float32", "silu")),
    ],
)
def test_the_kernel_agrees_with_the_reference(
    rows: int, cols: int, tile: int, dtype: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = gated_activation_tunable.make_args(shape(rows, cols, dtype, activation), CPU, 1)
    wanted = expected(gated_activation_tunable, args)
    poison(gated_activation_tunable, args)
    emulator.run(gated_activation_tunable, args, config(tile), monkeypatch)
    assert_agrees(gated_activation_tunable, args, wanted)


def x_in_a_wider_tensor(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, 2 * cols + 9)[:, 5 : 5 + 2 * cols]


def x_of_columns(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(2 * cols, rows).t()


def x_of_every_third_row(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(3 * rows, 2 * cols)[::3]


@pytest.mark.emulated
@pytest.mark.parametrize("make", [x_in_a_wider_tensor, x_of_columns, x_of_every_third_row])
@pytest.mark.parametrize(("rows", "cols", "even"), [(8, 512, True), (7, 512, False), (8, 300, False)])
def test_strides_and_ragged_tiles_go_together(
    make: Callable[[int, int], torch.Tensor],
    rows: int,
    cols: int,
    even: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = torch.empty(rows, cols + 3)[:, 1 : cols + 1]
    args = make(rows, cols), out, activations.SILU
    assert gated_activation_tunable.args_fn(config(1024), *args)[-1] is even
    wanted = expected(gated_activation_tunable, args)
    poison(gated_activation_tunable, args)
    emulator.run(gated_activation_tunable, args, config(1024), monkeypatch)
    assert_agrees(gated_activation_tunable, args, wanted)


@pytest.mark.parametrize("tile", [256, 1024])
def test_more_rows_of_blocks_than_the_grid_holds_are_refused(tile: int) -> None:
    one = shape(65536, 14336)
    assert gated_activation_tunable.refusal(config(tile), SM90, shape(65535, 14336)) is None
    assert "holds 65535 rows" in str(gated_activation_tunable.refusal(config(tile), SM90, one))
    assert gated_activation_tunable.refusal(config(tile), SM90, shape(10**6, 8)) is None


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_reference_is_torch_s_activation_of_the_gate_times_up(activation: str) -> None:
    x, out, number = gated_activation_tunable.make_args(shape(7, 33, "float32", activation), CPU, 3)
    gate, up = x.double()[:, :33], x.double()[:, 33:]
    wanted = {
        "silu": torch.nn.functional.silu(gate),
        "gelu": torch.nn.functional.gelu(gate),
        "gelu_tanh": torch.nn.functional.gelu(gate, approximate="tanh"),
    }[activation] * up
    [(_, close)] = expected(gated_activation_tunable, (x, out, number)).items()
    torch.testing.assert_close(close.value, wanted)


def test_wrong_results_are_told_from_roundings() -> None:
    x, out, silu = args = gated_activation_tunable.make_args(shape(64, 256), CPU, 0)
    wanted = expected(gated_activation_tunable, args)
    gate, up = x.double().chunk(2, dim=1)
    out.copy_(wanted["out"].value)
    assert_agrees(gated_activation_tunable, args, wanted)
    for wrong in (
        torch.nn.functional.silu(up) * gate,
        gate.sigmoid() * up,
        torch.nn.functional.gelu(gate) * up,
        torch.nn.functional.silu(gate) * up * 1.02,
    ):
        out.copy_(wrong)
        with pytest.raises(AssertionError, match="are wrong"):
            assert_agrees(gated_activation_tunable, args, wanted)
    assert silu == activations.SILU


def test_arguments_without_storage_pose_the_problem_that_made_them() -> None:
    for one in gated_activation_tunable.typical_problems[::11]:
        args = gated_activation_tunable.make_args(one, torch.device("meta"), 0)
        assert gated_activation_tunable.problem_of(*args) == one


# The host function ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    module = sys.modules["aot_tune.kernels.elementwise.gated_activation"]
    stand_in = SimpleNamespace(launch=lambda *args: calls.append(args))
    monkeypatch.setattr(module, "gated_activation_tunable", stand_in)
    return calls


def half(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16)


@pytest.mark.parametrize("sizes", [(8,), (5, 8), (2, 3, 8), (2, 1, 3, 8)])
def test_leading_dimensions_are_flattened_into_rows(
    sizes: tuple[int, ...], launched: list[tuple[Any, ...]]
) -> None:
    x = half(*sizes)
    out = gated_activation(x, activation="gelu_tanh")
    assert out.shape == (*sizes[:-1], 4)
    [(rows, out_rows, activation)] = launched
    assert (rows.shape, out_rows.shape) == ((x.numel() // 8, 8), (x.numel() // 8, 4))
    assert (rows.data_ptr(), out_rows.data_ptr()) == (x.data_ptr(), out.data_ptr())
    assert activation == activations.GELU_TANH


def test_rows_of_a_wider_tensor_are_taken_and_written_where_they_are(launched: list[tuple[Any, ...]]) -> None:
    out = half(2, 3, 6)[:, :, :4]
    assert gated_activation(half(2, 3, 16)[:, :, :8], out=out) is out
    assert [t.stride() for t in launched[0][:2]] == [(16, 1), (6, 1)]


def test_rows_beyond_the_grid_are_launched_apart(launched: list[tuple[Any, ...]]) -> None:
    x = half(140_000, 2)
    out = gated_activation(x)
    assert (
        [len(rows) for rows, _, _ in launched]
        == [len(rows) for _, rows, _ in launched]
        == [65520, 65520, 8960]
    )
    for tensor, parts in ((x, [call[0] for call in launched]), (out, [call[1] for call in launched])):
        assert [part.data_ptr() for part in parts] == [tensor[i:].data_ptr() for i in (0, 65520, 131040)]


def test_what_cannot_be_viewed_as_rows_is_refused_with_the_way_out(launched: list[tuple[Any, ...]]) -> None:
    with pytest.raises(LaunchError, match=r"x of shape \(3, 2, 8\).*call x\.contiguous\(\) first"):
        gated_activation(half(2, 3, 8).transpose(0, 1))
    assert launched == []


@pytest.mark.parametrize("sizes", [(0, 8), (2, 0, 8), (3, 0)])
def test_nothing_is_not_launched(sizes: tuple[int, ...], launched: list[tuple[Any, ...]]) -> None:
    assert gated_activation(half(*sizes)).shape == (*sizes[:-1], sizes[-1] // 2)
    assert launched == []


def test_each_unusable_argument_is_named(launched: list[tuple[Any, ...]]) -> None:
    def refused(says: str, *args: Any, **more: Any) -> None:
        with pytest.raises(LaunchError, match=says):
            gated_activation(*args, **more)

    refused("x is float64; pass bfloat16 or float16 or float32", half(2, 8).double())
    refused("x is a NoneType", None)
    refused(r"x has shape \(\); its last size must be even", half())
    refused(r"x has shape \(2, 7\); its last size must be even", half(2, 7))
    refused("gate and up may have 16776960 columns each", half(1, 1).expand(1, 2 * 16776961))
    refused("activation is 'relu'; pass 'silu' or 'gelu' or 'gelu_tanh'", half(2, 8), activation="relu")
    refused(r"out has shape \(2, 8\); x of shape \(2, 8\) asks for \(2, 4\)", half(2, 8), out=half(2, 8))
    refused("out is float16", half(2, 8), out=half(2, 4).half())
    refused("out is on meta, not on cpu", half(2, 8), out=half(2, 4).to("meta"))
    x = half(2, 8)
    refused("out and x share memory", x, out=x[:, :4])
    assert launched == []


# Through the real compiler ----------------------------------------------------------------------


@pytest.mark.process
@pairwise(
    "rows",
    {
        "activation dtype": [("silu", "bfloat16"), ("gelu", "float32"), ("gelu_tanh", "float16")],
        "name": ARCHS,
    },
    [
        (
            1,
            (("silu", "bfloat16"), "sm80"),
            (("gelu", "float32"), "sm90"),
            (("gelu_tanh", "float16"), "sm100"),
            (("gelu_tanh", "float16"), "sm120"),
        ),
        (
            64,
            (("silu", "bfloat16"), "sm90"),
            (("silu", "bfloat16"), "sm100"),
            (("gelu", "float32"), "sm120"),
            (("gelu_tanh", "float16"), "sm80"),
        ),
        (
            4096,
            (("silu", "bfloat16"), "sm120"),
            (("gelu", "float32"), "sm80"),
            (("gelu", "float32"), "sm100"),
            (("gelu_tanh", "float16"), "sm90"),
        ),
    ],
)
def test_the_default_compiles_and_spills_nothing(rows: int, activation: str, dtype: str, name: str) -> None:
    arch, one = Arch.parse(name), shape(rows, 14336, dtype, activation)
    default = gated_activation_tunable.default_config(arch, one)
    assert compiled(gated_activation_tunable, arch, one, default).stack_bytes == 0


@pytest.mark.process
@pytest.mark.parametrize("name", SM90_AND_SLOW_ARCHS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 14336), (4095, 14336), (4096, 2624)])
def test_the_space_compiles_and_spills_nothing(rows: int, cols: int, name: str) -> None:
    arch, one = Arch.parse(name), shape(rows, cols, activation="gelu")
    for candidate in gated_activation_tunable.space(arch, one):
        assert compiled(gated_activation_tunable, arch, one, candidate).stack_bytes == 0


@pytest.mark.process
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (7, 100), (33, 1000), (70000, 14336)])
def test_odd_sizes_compile(rows: int, cols: int) -> None:
    arch, one = SM90, shape(rows, cols, "float16")
    compiled(gated_activation_tunable, arch, one, gated_activation_tunable.default_config(arch, one))
