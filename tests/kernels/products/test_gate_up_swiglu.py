"""gate_up_swiglu without a GPU: space, tiles, arithmetic, refusals of the host function, the compiler."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.errors import LaunchError
from aot_tune.kernels.products.gate_up_swiglu import gate_up_swiglu, gate_up_swiglu_tunable
from aot_tune.kernels.products.product_space import config_of
from aot_tune.nvidia import cutile
from aot_tune.nvidia.cubin import resources
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import emulator
from tests.support.agree import assert_agrees, expected, poison, problem
from tests.support.compiling import SM90_AND_SLOW_ARCHS
from tests.support.samples import SM90

CPU = torch.device("cpu")
SMALL = config_of(16, 16, 32, 1, 1)


def shape(tokens: int, n: int = 14336, k: int = 4096, dtype: str = "bfloat16") -> Problem:
    return problem(dtype=dtype, tokens=tokens, N=n, K=k)


# The space --------------------------------------------------------------------------------------


def test_the_sweep_is_one_of_minutes() -> None:
    problems = gate_up_swiglu_tunable.typical_problems
    assert len(problems) <= 65
    assert max(len(gate_up_swiglu_tunable.candidates(SM90, one)) for one in problems) <= 24


def test_both_products_count_against_what_an_arch_holds() -> None:
    def refusal(config: Config, arch: str = "sm90") -> str:
        return gate_up_swiglu_tunable.refusal(config, Arch.parse(arch), shape(4096)) or ""

    assert "a tile of 128 x 256 over 1 blocks overflows the registers" in refusal(
        config_of(128, 128, 64, 1, 1)
    )
    assert refusal(config_of(128, 128, 64, 2, 1)) == ""
    assert "clusters" in refusal(config_of(128, 64, 32, 2, 1), "sm80")
    assert "shared memory" in refusal(config_of(128, 64, 128, 1, 1), "sm120")


def test_the_grid_is_what_the_gpu_holds_at_once_and_no_more_than_the_tiles() -> None:
    device = Device.reference(SM90)
    grid = gate_up_swiglu_tunable.grid_fn
    assert grid(config_of(128, 64, 64, 1, 2), device, shape(4096)) == (264,)
    assert grid(config_of(128, 128, 64, 2, 1), device, shape(4096)) == (66,)
    assert grid(config_of(64, 64, 64, 1, 1), device, shape(1, 100)) == (2,)


def test_the_work_of_all_tiles_is_the_work_of_both_products() -> None:
    tunable, one, config = gate_up_swiglu_tunable, shape(4096), config_of(128, 64, 64, 1, 1)
    assert tunable.tiles is not None
    assert tunable.work is not None
    work, tiles = tunable.work(config, one), tunable.tiles(config, one)
    assert tiles * work.steps * work.flops == 2 * 4096 * (2 * 14336) * 4096
    assert tiles * work.store_bytes == 4096 * 14336 * 2
    assert work.load_bytes == (128 + 128) * 64 * 2


# The kernel -------------------------------------------------------------------------------------


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("tokens", "n", "k"), [(1, 1, 1), (16, 16, 32), (17, 33, 65), (5, 100, 31), (150, 20, 40), (33, 15, 64)]
)
def test_the_kernel_agrees_with_the_reference(
    tokens: int, n: int, k: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = gate_up_swiglu_tunable.make_args(shape(tokens, n, k, dtype), CPU, 1)
    poison(gate_up_swiglu_tunable, args)
    wanted = expected(gate_up_swiglu_tunable, args)
    twice = emulator.of_two_tiles(tokens, 16, n)
    emulator.run(gate_up_swiglu_tunable, args, SMALL, monkeypatch, twice=twice)
    assert_agrees(gate_up_swiglu_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("sms", [1, 7, 200])
def test_every_tile_is_computed_once_on_any_number_of_multiprocessors(
    sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, n = 16 * 9 + 3, 16 * 3 + 1
    args = gate_up_swiglu_tunable.make_args(shape(tokens, n, 32), CPU, 0)
    wanted = expected(gate_up_swiglu_tunable, args)
    twice = emulator.of_two_tiles(tokens, 16, n)
    blocks = emulator.run(gate_up_swiglu_tunable, args, SMALL, monkeypatch, sms=sms, twice=twice)
    assert blocks == min(sms, 10 * 4)
    assert_agrees(gate_up_swiglu_tunable, args, wanted)


def test_the_reference_is_the_layer_that_torch_computes() -> None:
    x, weight, out = gate_up_swiglu_tunable.make_args(shape(9, 20, 30), CPU, 2)
    merged = torch.nn.functional.linear(x.double(), weight.flatten(0, 1).double())
    wanted = torch.nn.functional.silu(merged[:, :20]) * merged[:, 20:]
    torch.testing.assert_close(expected(gate_up_swiglu_tunable, (x, weight, out))["out"].value, wanted)


def test_swapped_halves_and_a_missing_step_are_told_from_a_rounding() -> None:
    x, weight, out = args = gate_up_swiglu_tunable.make_args(shape(32, 64, 8192), CPU, 0)
    wanted = expected(gate_up_swiglu_tunable, args)

    def written(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> None:
        out.copy_(torch.nn.functional.silu(x.float() @ gate.float().t()) * (x.float() @ up.float().t()))

    written(x, *weight)
    assert_agrees(gate_up_swiglu_tunable, args, wanted)
    for wrong in ((x, *weight.flip(0)), (x[:, 64:], *weight[:, :, 64:])):
        written(*wrong)
        with pytest.raises(AssertionError, match="are wrong"):
            assert_agrees(gate_up_swiglu_tunable, args, wanted)


def test_arguments_without_storage_pose_the_problem_that_made_them() -> None:
    for one in gate_up_swiglu_tunable.typical_problems[::7]:
        args = gate_up_swiglu_tunable.make_args(one, torch.device("meta"), 0)
        assert gate_up_swiglu_tunable.problem_of(*args) == one


# The host function ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    stand_in = SimpleNamespace(launch=lambda *args: calls.append(args))
    monkeypatch.setattr(
        sys.modules["aot_tune.kernels.products.gate_up_swiglu"], "gate_up_swiglu_tunable", stand_in
    )
    return calls


def half(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16)


def test_the_merged_weight_is_launched_as_gate_and_up(launched: list[tuple[Any, ...]]) -> None:
    x, weight = half(3, 8), torch.arange(80).reshape(10, 8).bfloat16()
    out = gate_up_swiglu(x, weight)
    assert (tuple(out.shape), out.dtype) == ((3, 5), torch.bfloat16)
    [(passed_x, both, passed_out)] = launched
    assert passed_x is x
    assert passed_out is out
    assert torch.equal(both[0], weight[:5])
    assert torch.equal(both[1], weight[5:])
    assert both.data_ptr() == weight.data_ptr()


def test_a_weight_of_any_strides_is_taken_where_it_is(launched: list[tuple[Any, ...]]) -> None:
    columns, rows = half(8, 32)[:, :16].t(), half(20, 24)[::2, 8:16]
    gate_up_swiglu(half(3, 8), columns)
    gate_up_swiglu(half(3, 8), rows)
    assert [call[1].stride() for call in launched] == [(8, 1, 32), (240, 48, 1)]
    assert [call[1].data_ptr() for call in launched] == [columns.data_ptr(), rows.data_ptr()]


def test_the_host_function_writes_where_it_is_told(launched: list[tuple[Any, ...]]) -> None:
    out = half(3, 5)
    assert gate_up_swiglu(half(3, 4), half(10, 4), out=out) is out
    assert launched[0][2] is out


@pytest.mark.parametrize(("tokens", "n"), [(0, 5), (3, 0)])
def test_an_empty_product_is_not_launched(tokens: int, n: int, launched: list[tuple[Any, ...]]) -> None:
    assert gate_up_swiglu(half(tokens, 4), half(2 * n, 4)).shape == (tokens, n)
    assert launched == []


def test_a_sum_of_nothing_is_zero_without_a_launch(launched: list[tuple[Any, ...]]) -> None:
    out = torch.ones((3, 5), dtype=torch.bfloat16)
    assert bool((gate_up_swiglu(half(3, 0), half(10, 0), out=out) == 0).all())
    assert launched == []


def test_each_unusable_argument_is_named(launched: list[tuple[Any, ...]]) -> None:
    def refused(says: str, *args: Any, **more: Any) -> None:
        with pytest.raises(LaunchError, match=says):
            gate_up_swiglu(*args, **more)

    x, weight = half(3, 4), half(10, 4)
    refused(r"x is \(2, 3, 4\); pass a tensor of shape \(tokens, K\)", half(2, 3, 4), weight)
    refused("weight is a list", x, [1.0])
    refused("x is float32; pass bfloat16 or float16", x.float(), weight)
    refused("weight is float16; pass bfloat16", x, weight.half())
    refused("weight has 9 rows; pass as many rows of up as of the gate", x, half(9, 4))
    refused(r"weight has shape \(4, 10\); x of 4 columns asks for \(4, 4\)", x, half(4, 10))
    refused(r"out has shape \(3, 10\)", x, weight, out=half(3, 10))
    refused("out is float32; pass bfloat16", x, weight, out=half(3, 5).float())
    square = half(4, 4)
    refused("out and x share memory", square, half(8, 4), out=square)
    refused("weight is on meta, not on cpu", x, weight.to("meta"))
    assert launched == []


# The compiler -----------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("name", SM90_AND_SLOW_ARCHS)
def test_the_defaults_compile_without_spilling(name: str) -> None:
    arch = Arch.parse(name)
    for tokens in (8, 4096):
        config = gate_up_swiglu_tunable.default_config(arch, shape(tokens))
        assert stack_bytes(arch, shape(tokens), config) == 0, config


@pytest.mark.process
@pytest.mark.parametrize(
    "config", [config_of(16, 64, 128, 1, 2), config_of(64, 128, 64, 1, 1), config_of(128, 128, 64, 2, 1)]
)
def test_configs_across_the_space_compile_without_spilling(config: Config) -> None:
    assert config in gate_up_swiglu_tunable.space(SM90, shape(4096))
    assert stack_bytes(SM90, shape(4096, 25600, 5120), config) == 0


@pytest.mark.process
def test_sizes_that_are_not_aligned_compile() -> None:
    stack_bytes(SM90, shape(33, 97, 65, "float16"), SMALL)


def stack_bytes(arch: Arch, one: Problem, config: Config) -> int:
    args = gate_up_swiglu_tunable.make_args(one, torch.device("meta"), 0)
    kernel = gate_up_swiglu_tunable.kernel
    signature = cutile.signature_of(kernel, gate_up_swiglu_tunable.args_fn(config, *args))
    return resources(cutile.compile_cubin(kernel, config.hints, signature, arch, timeout_s=120)).stack_bytes
