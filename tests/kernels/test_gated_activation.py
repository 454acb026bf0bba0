"""gated_activation without a GPU: the declaration, the arithmetic, the host function, the compiled code."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.arch import KNOWN_ARCHS, Arch
from aot_tune.config import Config
from aot_tune.device import Device
from aot_tune.errors import LaunchError
from aot_tune.kernels import activations
from aot_tune.kernels.gated_activation import ACTIVATIONS, gated_activation, gated_activation_tunable
from aot_tune.problem import Problem
from tests.kernels import emulator
from tests.kernels.agree import assert_agrees, expected, poison, problem
from tests.kernels.test_compile import compiled
from tests.samples import SM90

CPU = torch.device("cpu")


def shape(rows: int, cols: int, dtype: str = "bfloat16", activation: str = "silu") -> Problem:
    return problem(dtype=dtype, activation=activation, rows=rows, cols=cols)


def config(tile: int) -> Config:
    return Config(constants={"tile": tile}, hints={"num_worker_warps": 4})


@pytest.mark.parametrize("arch", KNOWN_ARCHS, ids=str)
def test_the_default_is_a_candidate_of_every_declared_problem(arch: Arch) -> None:
    for one in gated_activation_tunable.typical_problems:
        default = gated_activation_tunable.default_config(arch, one)
        assert default in gated_activation_tunable.candidates(arch, one), one


def test_the_declared_problems_are_a_sweep_of_minutes() -> None:
    assert len(gated_activation_tunable.typical_problems) <= 80
    assert len(gated_activation_tunable.candidates(SM90, shape(1, 14336))) == 6


@pytest.mark.parametrize(
    ("rows", "cols", "tile", "blocks"),
    [(100, 14336, 2048, (100, 7)), (100, 14336, 4096, (50, 7)), (100, 768, 1024, (25, 3)),
     (100, 2624, 1024, (25, 11)), (100, 128, 1024, (13, 1)), (3, 1, 1024, (1, 1)), (1, 1000, 512, (1, 4))],
)  # fmt: skip
def test_long_rows_take_several_blocks_and_short_ones_share(
    rows: int, cols: int, tile: int, blocks: tuple[int, int]
) -> None:
    device, one = Device.reference(SM90), shape(rows, cols)
    assert gated_activation_tunable.grid_fn(config(tile), device, one) == blocks
    assert gated_activation_tunable.tiles is not None
    assert gated_activation_tunable.tiles(config(tile), one) == blocks[0] * blocks[1]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "cols", "tile"),
    [(1, 1, 512), (3, 5, 512), (17, 100, 512), (9, 128, 1024), (4, 1024, 1024), (2, 2624, 1024),
     (6, 768, 1024), (3, 1500, 4096)],
)  # fmt: skip
def test_the_kernel_agrees_with_the_reference(
    rows: int, cols: int, tile: int, dtype: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = gated_activation_tunable.make_args(shape(rows, cols, dtype, activation), CPU, 1)
    wanted = expected(gated_activation_tunable, args)
    poison(gated_activation_tunable, args)
    emulator.run(gated_activation_tunable, args, config(tile), monkeypatch)
    assert_agrees(gated_activation_tunable, args, wanted)


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
    module = sys.modules["aot_tune.kernels.gated_activation"]
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


@pytest.mark.parametrize("name", ["sm80", "sm90", "sm100", "sm120"])
@pytest.mark.parametrize(
    ("activation", "dtype"), [("silu", "bfloat16"), ("gelu", "float32"), ("gelu_tanh", "float16")]
)
def test_the_default_compiles_and_spills_nothing(activation: str, dtype: str, name: str) -> None:
    arch, one = Arch.parse(name), shape(4096, 14336, dtype, activation)
    default = gated_activation_tunable.default_config(arch, one)
    assert compiled(gated_activation_tunable, arch, one, default).stack_bytes == 0


@pytest.mark.parametrize("name", ["sm90", "sm100"])
def test_the_space_compiles(name: str) -> None:
    arch, one = Arch.parse(name), shape(4096, 14336)
    for candidate in gated_activation_tunable.space(arch, one)[::2]:
        compiled(gated_activation_tunable, arch, one, candidate)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (7, 100), (33, 1000)])
def test_odd_sizes_compile(rows: int, cols: int) -> None:
    arch, one = SM90, shape(rows, cols, "float16")
    compiled(gated_activation_tunable, arch, one, gated_activation_tunable.default_config(arch, one))
