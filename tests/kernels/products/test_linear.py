"""linear without a GPU: space, tiles, arithmetic, what the host function takes and refuses, the compiler."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune import workspace
from aot_tune.errors import LaunchError
from aot_tune.kernels import activations
from aot_tune.kernels.products import dense, dense_space, split_k
from aot_tune.kernels.products.dense_space import config_of
from aot_tune.kernels.products.linear import _no_bias, linear, linear_tunable
from aot_tune.kernels.products.product_space import extent
from aot_tune.nvidia import cutile
from aot_tune.nvidia.cubin import resources
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import emulator
from tests.support.agree import assert_agrees, expected, poison, problem
from tests.support.pairs import constants, pairwise
from tests.support.samples import SM90
from tests.support.shared_sums import shares_left

CPU = torch.device("cpu")


def shape(
    m: int, n: int = 6144, k: int = 4096, dtype: str = "bfloat16", *, activation: str = "none"
) -> Problem:
    return problem(dtype=dtype, activation=activation, M=m, N=n, K=k)


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


# The space --------------------------------------------------------------------------------------


def test_the_sweep_is_one_of_minutes() -> None:
    problems = linear_tunable.typical_problems
    assert len(problems) <= 165
    assert max(len(linear_tunable.candidates(SM90, one)) for one in problems) <= 32


def test_what_does_not_fit_or_is_a_waste_is_refused_with_its_reason() -> None:
    def refusal(candidate: Config, arch: str = "sm90", m: int = 4096, dtype: str = "bfloat16") -> str:
        return linear_tunable.refusal(candidate, Arch.parse(arch), shape(m, dtype=dtype)) or ""

    assert "registers" in refusal(config(128, 256, 64))
    assert refusal(config(128, 256, 64, warps=8)) == ""
    assert "registers" in refusal(config(256, 256, 64, warps=8))
    assert refusal(config(256, 256, 64, warps=8, num_ctas=2)) == ""
    assert "clusters" in refusal(config(128, 128, 32, num_ctas=2), "sm80")
    assert refusal(config(128, 256, 64, num_ctas=2)) == ""
    assert "shared memory" in refusal(config(128, 128, 128), dtype="float32")
    assert "half empty" in refusal(config(128, 128, 64), m=32)
    assert "more than four times" in refusal(config(16, 64, 128), m=65)


def test_the_grid_is_what_the_gpu_holds_at_once_and_no_more_than_the_tiles() -> None:
    device, grid = Device.reference(SM90), linear_tunable.grid_fn
    assert grid(config(128, 128, 64), device, shape(4096)) == (132,)
    assert grid(config(128, 128, 64, occupancy=2), device, shape(4096)) == (264,)
    assert grid(config(128, 256, 64, num_ctas=2), device, shape(4096)) == (66,)
    assert grid(config(128, 128, 64), device, shape(1, 6145)) == (49,)


@pytest.mark.parametrize(("dtype", "item_bytes"), [("bfloat16", 2), ("float32", 4)])
def test_the_work_of_all_tiles_is_the_work_of_the_product(dtype: str, item_bytes: int) -> None:
    one, candidate = shape(4096, dtype=dtype), config(128, 256, 64, num_ctas=2)
    assert linear_tunable.tiles is not None
    assert linear_tunable.work is not None
    work, tiles = linear_tunable.work(candidate, one), linear_tunable.tiles(candidate, one)
    assert tiles * work.steps * work.flops == 2 * 4096 * 6144 * 4096
    assert tiles * work.store_bytes == 4096 * 6144 * item_bytes
    assert work.load_bytes == (128 + 256) * 64 * item_bytes


# The kernel -------------------------------------------------------------------------------------

FORMS = ["", "swapped=1", "more=8", "more=8 swapped=1", "peeled=0", "peeled=0 swapped=1"]
"""The ways to compute a tile."""


@pytest.mark.emulated
@pairwise(
    "m n k",
    {
        "dtype": ("bfloat16", "float16", "float32"),
        "form": FORMS,
    },
    [
        ((1, 1, 1), ("bfloat16", "swapped=1"), ("float16", "more=8"), ("float32", "peeled=0 swapped=1")),
        ((64, 96, 64), ("bfloat16", "swapped=1"), ("float16", "more=8"), ("float32", "peeled=0")),
        ((65, 97, 65), ("bfloat16", "more=8 swapped=1"), ("float16", "peeled=0 swapped=1"), ("float32", "")),
        (
            (5, 200, 31),
            ("bfloat16", "more=8 swapped=1"),
            ("float16", "more=8 swapped=1"),
            ("float32", "peeled=0"),
        ),
        ((257, 257, 33), ("bfloat16", "peeled=0"), ("float16", "swapped=1"), ("float32", "more=8 swapped=1")),
    ],
)
def test_the_kernel_agrees_with_the_reference(
    m: int, n: int, k: int, form: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = linear_tunable.make_args(shape(m, n, k, dtype), CPU, 1)
    poison(linear_tunable, args)
    wanted = expected(linear_tunable, args)
    chosen = config(16, 32, 32, **constants(form))
    twice = emulator.of_two_tiles(m, extent(chosen)[0], n)
    emulator.run(linear_tunable, args, chosen, monkeypatch, twice=twice)
    assert_agrees(linear_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("seed", [0, 1])  # without a bias, and with one
def test_what_the_last_wave_leaves_is_shared(seed: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 tiles, of which 4 are left for 20 blocks: 4 share each."""
    monkeypatch.setattr(split_k, "left", lambda rows, k, columns: 1 << 20)
    left = shares_left(monkeypatch)
    m, n = 32 * 5 + 3, 64 * 3 + 1
    args = linear_tunable.make_args(shape(m, n, 16 * 20, dtype, activation="silu"), CPU, seed)
    poison(linear_tunable, args)
    wanted = expected(linear_tunable, args)
    chosen, twice = config(32, 64, 16, splits=4, peeled=0), emulator.of_two_tiles(m, 32, 64 * 3)
    emulator.run(linear_tunable, args, chosen, monkeypatch, sms=20, twice=twice)
    assert sorted(left) == list(range(16))
    assert_agrees(linear_tunable, args, wanted)
    assert not bool(args[4].any())


@pytest.mark.emulated
@pytest.mark.parametrize("slices", [1, 4])
def test_a_row_of_a_whole_tile_and_a_shared_one_has_the_bits_of_the_whole_one(
    slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 tiles for 23 blocks. Block 22 has the one above the shared one, and no share; it may come last."""
    monkeypatch.setattr(split_k, "left", lambda rows, k, columns: 1 << 20)
    monkeypatch.setattr(dense_space, "_LEAST_SLICE", 32 * 64 // slices)
    finish = dense._finish
    m, n = 32 * 5 + 3, 64 * 4
    args = linear_tunable.make_args(shape(m, n, 16 * 20 + 5, "float32"), CPU, 0)
    chosen, twice = config(32, 64, 16, splits=4, peeled=0), emulator.of_two_tiles(m, 32, 64 * 3)

    def finished_late(*args: Any) -> None:
        if (dense.ct.bid(0), dense.ct.bid(1)) == (22, 0):
            emulator.come_last()
        finish(*args)

    results = []
    for at_end in (finish, finished_late):
        monkeypatch.setattr(dense, "_finish", at_end)
        poison(linear_tunable, args)
        wanted = expected(linear_tunable, args)
        emulator.run(linear_tunable, args, chosen, monkeypatch, sms=23, at_once=46, twice=twice)
        assert_agrees(linear_tunable, args, wanted)
        results.append(args[2].clone())
    assert torch.equal(*results)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "tile", [{"tile_m": 64, "tile_n": 64}, {"tile_m": 16, "tile_n": 256, "swapped": 1}], ids=str
)
@pytest.mark.parametrize("splits", [pytest.param(2, marks=pytest.mark.slow), 3, 4])
def test_parts_of_a_sum_are_added_up_by_whoever_comes_later(
    splits: int, tile: dict[str, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = shape(70, 300, 8192 + 40, dtype, activation="silu")
    for seed in (0, 1):  # without a bias, and with one
        args = linear_tunable.make_args(one, CPU, seed)
        poison(linear_tunable, args)
        wanted = expected(linear_tunable, args)
        chosen, twice = (
            config(tile_k=512, splits=splits, **tile),
            emulator.of_two_tiles(70, tile["tile_m"], 300),
        )
        emulator.run(linear_tunable, args, chosen, monkeypatch, twice=twice)
        assert_agrees(linear_tunable, args, wanted)
        assert not bool(args[4].any()), "what parts left is not zero again"


@pytest.mark.emulated
@pairwise(
    "activation",
    {
        "seed": (0, 1),
        "form": FORMS,
    },
    [
        ("none", (0, "more=8 swapped=1"), (1, "peeled=0")),
        ("relu", (0, ""), (0, "more=8"), (1, "peeled=0 swapped=1")),
        ("silu", (0, "peeled=0"), (1, "more=8 swapped=1")),
        ("gelu", (0, "more=8"), (1, "peeled=0 swapped=1")),
        ("gelu_tanh", (0, "more=8"), (1, "swapped=1"), (1, "peeled=0")),
    ],
)
def test_bias_and_activation_come_after_the_sum(
    activation: str, seed: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = linear_tunable.make_args(shape(20, 70, 64, activation=activation), CPU, seed)
    x, weight, out, bias, _, biased, _ = args
    assert biased == (seed == 1)
    wanted = expected(linear_tunable, args)
    chosen = config(16, 32, 32, **constants(form))
    twice = emulator.of_two_tiles(20, extent(chosen)[0], 70)
    emulator.run(linear_tunable, args, chosen, monkeypatch, twice=twice)
    assert_agrees(linear_tunable, args, wanted)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if biased else None)
    torch_has = {
        "none": exact,
        "relu": exact.relu(),
        "silu": torch.nn.functional.silu(exact),
        "gelu": torch.nn.functional.gelu(exact),
        "gelu_tanh": torch.nn.functional.gelu(exact, approximate="tanh"),
    }
    torch.testing.assert_close(wanted["out"].value, torch_has[activation])
    if biased or activation != "none":
        out.copy_(x.double() @ weight.double().t())
        with pytest.raises(AssertionError, match="of out are wrong"):
            assert_agrees(linear_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("sms", [1, 7, 200])
def test_every_tile_is_computed_once_on_any_number_of_multiprocessors(
    sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n = 16 * 11 + 3, 16 * 5 + 1
    args = linear_tunable.make_args(shape(m, n, 16), CPU, 0)
    wanted = expected(linear_tunable, args)
    twice = emulator.of_two_tiles(m, 16, n)
    blocks = emulator.run(linear_tunable, args, config(16, 16, 16), monkeypatch, sms=sms, twice=twice)
    assert blocks == min(sms, 12 * 6)
    assert_agrees(linear_tunable, args, wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_tolerance_tells_a_missing_step_from_a_rounding(dtype: str) -> None:
    args = linear_tunable.make_args(shape(64, 64, 28672, dtype), CPU, 0)
    wanted = expected(linear_tunable, args)
    x, weight, out, *_ = args
    out.copy_(as_multiplied(x) @ as_multiplied(weight).t())
    assert_agrees(linear_tunable, args, wanted)
    out.copy_(x[:, 64:].float() @ weight[:, 64:].float().t())
    with pytest.raises(AssertionError, match="of out are wrong"):
        assert_agrees(linear_tunable, args, wanted)


def as_multiplied(x: torch.Tensor) -> torch.Tensor:
    """What a matrix unit takes of float32: sign, exponent and 10 bits; all of the others."""
    if x.dtype != torch.float32:
        return x.float()
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def test_arguments_without_storage_pose_the_problem_that_made_them() -> None:
    for one in linear_tunable.typical_problems[::7]:
        assert linear_tunable.problem_of(*linear_tunable.make_args(one, torch.device("meta"), 0)) == one


# The host function ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    stand_in = SimpleNamespace(launch=lambda *args: calls.append(args))
    monkeypatch.setattr(sys.modules["aot_tune.kernels.products.linear"], "linear_tunable", stand_in)
    return calls


def half(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16)


def test_the_host_function_allocates_the_product_and_launches_once(launched: list[tuple[Any, ...]]) -> None:
    x, weight, bias = half(3, 8), torch.nn.Parameter(half(5, 8)), half(5)
    out = linear(x, weight, bias, activation="gelu")
    assert (tuple(out.shape), out.dtype) == ((3, 5), torch.bfloat16)
    [(passed_x, passed_weight, passed_out, passed_bias, _, biased, activation)] = launched
    assert passed_x is x
    assert passed_weight is weight
    assert passed_out is out
    assert passed_bias is bias
    assert (biased, activation) == (True, activations.GELU)


def test_without_a_bias_one_stand_in_is_passed_again_and_again(launched: list[tuple[Any, ...]]) -> None:
    for _ in range(2):
        linear(half(3, 4), half(5, 4))
    first, second = launched
    assert first[3] is second[3]
    assert (first[3].dtype, first[5:]) == (torch.bfloat16, (False, activations.NONE))


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (2, 3, 4)])
def test_any_leading_dimensions_are_launched_as_rows(
    leading: tuple[int, ...], launched: list[tuple[Any, ...]]
) -> None:
    out = linear(half(*leading, 4), half(5, 4))
    assert out.shape == (*leading, 5)
    x, _, written, *_ = launched[0]
    rows = torch.Size(leading).numel()
    assert (x.shape, written.shape) == ((rows, 4), (rows, 5))
    assert written.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("leading", [(3,), (2, 3)])
def test_the_host_function_writes_where_it_is_told(
    leading: tuple[int, ...], launched: list[tuple[Any, ...]]
) -> None:
    for out in (half(*leading, 5), half(*leading, 9)[..., 2:7]):
        assert linear(half(*leading, 4), half(5, 4), half(5), out=out) is out
        assert launched.pop()[2].data_ptr() == out.data_ptr()


def test_views_are_launched_where_they_are(launched: list[tuple[Any, ...]]) -> None:
    x, weight, bias = half(3, 24)[:, 8:16], half(8, 16)[:, :5].t(), half(10)[::2]
    linear(x, weight, bias)
    assert all(passed is given for passed, given in zip(launched[0], (x, weight), strict=False))
    assert launched[0][3] is bias


@pytest.mark.parametrize(("m", "n"), [(0, 5), (3, 0)])
def test_an_empty_product_is_not_launched(m: int, n: int, launched: list[tuple[Any, ...]]) -> None:
    assert linear(half(m, 4), half(n, 4)).shape == (m, n)
    assert linear(half(2, m, 4), half(n, 4), out=half(2, m, n)).shape == (2, m, n)
    assert launched == []


@pytest.mark.parametrize("sizes", [(0,), (3, 0), (0, 0), (2, 3, 0), (2, 0, 0)])
def test_a_sum_of_nothing_is_what_bias_and_activation_make_of_it(
    sizes: tuple[int, ...], launched: list[tuple[Any, ...]]
) -> None:
    x, weight, bias = half(*sizes), half(5, 0), half(5) + 1.5
    shape = (*sizes[:-1], 5)
    assert torch.equal(linear(x, weight), half(*shape))
    assert torch.equal(linear(x, weight, bias), bias.expand(shape))
    out = half(*shape)
    assert linear(x, weight, bias, activation="silu", out=out) is out
    assert torch.equal(out, torch.nn.functional.silu(bias).expand(shape))
    assert launched == []


def test_each_unusable_argument_is_named(launched: list[tuple[Any, ...]]) -> None:
    def refused(says: str, *args: Any, **more: Any) -> None:
        with pytest.raises(LaunchError, match=says):
            linear(*args, **more)

    x, weight = half(3, 4), half(5, 4)
    refused("x is a list", [1.0], weight)
    refused("x is float64; pass bfloat16 or float16 or float32", x.double(), weight)
    refused("weight is a list", x, [1.0])
    refused(r"weight is \(2, 5, 4\); pass a tensor of shape \(N, K\)", x, half(2, 5, 4))
    refused("weight is float16; pass bfloat16", x, weight.half())
    refused(r"x has shape \(3, 5\); weight of shape \(5, 4\) asks for \(..., 4\)", half(3, 5), weight)
    refused(r"x has shape \(\); weight", half(1)[0], weight)
    refused("call x.contiguous", half(4, 3, 2).permute(2, 1, 0), weight)
    refused("bias is a float", x, weight, 1.0)
    refused(r"bias has shape \(4,\); weight of 5 rows asks for \(5,\)", x, weight, half(4))
    refused("bias is float32; pass bfloat16", x, weight, half(5).float())
    refused("activation is 'tanh'; pass 'none' or 'relu'", x, weight, activation="tanh")
    refused(r"out has shape \(5, 3\)", x, weight, out=half(5, 3))
    refused("out is float32; pass bfloat16", x, weight, out=half(3, 5).float())
    refused("out is a list", x, weight, out=[1.0])
    square = half(4, 4)
    refused("out and x share memory", square, half(4, 4), out=square)
    refused("out and bias share memory", half(1, 4), half(4, 4), square[0], out=square[:1])
    refused("weight is on meta, not on cpu", x, weight.to("meta"))
    refused("bias is on meta, not on cpu", x, weight, half(5).to("meta"))
    refused("out is on meta, not on cpu", x, weight, out=half(3, 5).to("meta"))
    refused("at most 2147483647", half(1, 1).expand(2**31, 1).to("meta"), half(1, 1).to("meta"))
    assert launched == []


# The compiler -----------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize(("name", "m"), [("sm80", 4096), ("sm90", 8), ("sm90", 4096), ("sm100", 4096)])
def test_the_defaults_compile_without_spilling(name: str, m: int) -> None:
    arch = Arch.parse(name)
    assert stack_bytes(arch, shape(m), linear_tunable.default_config(arch, shape(m))) == 0


@pytest.mark.process
@pytest.mark.parametrize(
    "candidate",
    [
        config(16, 64, 128, swapped=1),
        config(128, 256, 32, warps=8, peeled=0),
        pytest.param(config(128, 128, 64, more=32, warps=8), marks=pytest.mark.slow),
        config(64, 128, 64, more=64),
        pytest.param(config(256, 128, 64, num_ctas=2), marks=pytest.mark.slow),
    ],
)
def test_configs_across_the_space_compile_without_spilling(candidate: Config) -> None:
    assert candidate in linear_tunable.space(SM90, shape(4096))
    assert stack_bytes(SM90, shape(4096, activation="gelu"), candidate) == 0


@pytest.mark.process
def test_float32_and_sizes_that_are_not_aligned_compile() -> None:
    default = linear_tunable.default_config(SM90, shape(4096, dtype="float32"))
    assert stack_bytes(SM90, shape(4096, dtype="float32"), default) == 0
    stack_bytes(SM90, shape(33, 97, 65, "float16"), config(16, 32, 32))


def stack_bytes(arch: Arch, one: Problem, candidate: Config) -> int:
    args = linear_tunable.make_args(one, torch.device("meta"), 0)
    signature = cutile.signature_of(linear_tunable.kernel, linear_tunable.args_fn(candidate, *args))
    cubin = cutile.compile_cubin(linear_tunable.kernel, candidate.hints, signature, arch, timeout_s=120)
    return resources(cubin).stack_bytes


def test_what_stands_for_no_bias_lies_in_memory_that_is_never_freed() -> None:
    """It is kept, and may first be asked for while torch.compile makes CUDA graphs, which free their own."""
    kept = _no_bias(torch.float16, CPU)
    assert (kept.shape, kept.dtype) == ((16,), torch.float16)
    assert kept.untyped_storage().data_ptr() == workspace(CPU, 1, 1).partials.untyped_storage().data_ptr()
