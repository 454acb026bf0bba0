"""grouped_matmul without a GPU: space, tiles, arithmetic, refusals of the host function, the compiler."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.errors import LaunchError
from aot_tune.kernels.products.grouped_matmul import grouped_matmul, grouped_matmul_tunable
from aot_tune.kernels.products.grouped_matmul_space import with_search
from aot_tune.kernels.products.product_space import config_of
from aot_tune.nvidia import cutile
from aot_tune.nvidia.cubin import resources
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import emulator
from tests.support.agree import assert_agrees, expected, poison, problem
from tests.support.pairs import pairwise
from tests.support.samples import SM90

CPU = torch.device("cpu")
SMALL = with_search(config_of(16, 32, 32, 1, 1), search=True)
WALKED = with_search(config_of(16, 32, 32, 1, 1), search=False)
WAYS = {"search": SMALL, "walk": WALKED}


def tile(tile_m: int, tile_n: int, tile_k: int, num_ctas: int = 1, *, search: bool = True) -> Config:
    return with_search(config_of(tile_m, tile_n, tile_k, num_ctas, 1), search)


def shape(tokens: int, experts: int, n: int, k: int, dtype: str = "bfloat16") -> Problem:
    return problem(dtype=dtype, tokens=tokens, experts=experts, N=n, K=k)


def made(*ends: int, tokens: int | None = None, n: int = 40, k: int = 48, seed: int = 1) -> tuple[Any, ...]:
    """Arguments in which experts' rows end where they are told to."""
    tokens = ends[-1] if tokens is None else tokens
    a, b, offsets, out = grouped_matmul_tunable.make_args(shape(tokens, len(ends), n, k), CPU, seed)
    offsets.copy_(torch.tensor(ends))
    return a, b, offsets, out


# The space --------------------------------------------------------------------------------------


def test_the_sweep_is_one_of_minutes() -> None:
    problems = grouped_matmul_tunable.typical_problems
    assert len(problems) <= 90
    assert max(len(grouped_matmul_tunable.candidates(SM90, one)) for one in problems) <= 24


def test_blocks_that_share_a_tile_walk_to_their_expert() -> None:
    searching, walking = (tile(128, 256, 64, 2, search=search) for search in (True, False))
    for experts in (8, 256):
        one = shape(32768, experts, 4096, 4096)
        assert "miss experts" in (grouped_matmul_tunable.refusal(searching, SM90, one) or "")
        assert grouped_matmul_tunable.refusal(walking, SM90, one) is None
    assert not any(c["search"] and c.hints["num_ctas"] > 1 for c in grouped_matmul_tunable.space(SM90, one))


def test_what_is_a_waste_for_the_average_expert_is_refused_with_its_reason() -> None:
    def refusal(config: Config, tokens: int) -> str:
        return grouped_matmul_tunable.refusal(config, SM90, shape(tokens, 8, 4096, 4096)) or ""

    assert "half empty" in refusal(tile(128, 128, 64), 256)
    assert refusal(tile(128, 128, 64), 257) == ""
    assert "more than four times" in refusal(tile(16, 64, 128), 513)
    assert refusal(tile(16, 64, 128), 512) == ""
    assert "registers" in refusal(tile(128, 256, 64), 4096)


def test_few_rows_are_searched_and_many_walked() -> None:
    def searched(tokens: int) -> object:
        return grouped_matmul_tunable.default_config(SM90, shape(tokens, 8, 4096, 4096))["search"]

    assert (searched(8), searched(1024), searched(1025)) == (True, True, False)


def test_the_grid_holds_each_experts_last_tile_and_no_more_than_the_gpu() -> None:
    device = Device.reference(SM90)
    grid = grouped_matmul_tunable.grid_fn
    assert grid(SMALL, device, shape(1, 8, 32, 64)) == (1,)
    assert grid(SMALL, device, shape(33, 8, 32, 64)) == (2 + 8,)
    assert grid(tile(128, 256, 64, 2), device, shape(4096, 8, 4096, 64)) == (66,)


def test_tiles_and_work_are_those_of_an_even_spread() -> None:
    tunable, one = grouped_matmul_tunable, shape(4096, 8, 4096, 2048)
    assert tunable.tiles is not None
    assert tunable.work is not None
    config = tile(128, 128, 64)
    work, tiles = tunable.work(config, one), tunable.tiles(config, one)
    assert tiles * work.steps * work.flops == 2 * 4096 * 4096 * 2048
    assert tunable.tiles(config, shape(3, 8, 128, 64)) == 3


# The kernel -------------------------------------------------------------------------------------


@pytest.mark.emulated
@pairwise(
    "tokens experts n k",
    {
        "dtype": ("bfloat16", "float16"),
        "way": WAYS,
    },
    [
        ((1, 1, 1, 1), ("bfloat16", "search"), ("float16", "walk")),
        ((1, 4, 33, 65), ("bfloat16", "search"), ("float16", "walk")),
        ((100, 3, 64, 64), ("bfloat16", "walk"), ("float16", "search")),
        ((257, 8, 40, 100), ("bfloat16", "walk"), ("float16", "search")),
        ((40, 64, 31, 33), ("bfloat16", "walk"), ("float16", "search")),
    ],
)
def test_the_kernel_agrees_with_the_reference(
    tokens: int, experts: int, n: int, k: int, dtype: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = grouped_matmul_tunable.make_args(shape(tokens, experts, n, k, dtype), CPU, 1)
    poison(grouped_matmul_tunable, args)
    wanted = expected(grouped_matmul_tunable, args)
    emulator.run(grouped_matmul_tunable, args, WAYS[way], monkeypatch)
    assert_agrees(grouped_matmul_tunable, args, wanted)


@pytest.mark.emulated
@pairwise(
    "ends",
    {
        "sms": (1, 5, 200),
        "way": WAYS,
    },
    [
        ((0, 0, 7), (1, "search"), (5, "walk"), (200, "walk")),
        ((7, 7, 7), (1, "walk"), (5, "search"), (200, "search")),
        ((0, 16, 16, 33, 33), (1, "walk"), (5, "search"), (200, "walk")),
        ((15, 31, 47, 64), (1, "walk"), (5, "walk"), (200, "search")),
        ((150, 150, 301), (1, "walk"), (5, "walk"), (200, "search")),
        ((1, 2, 3, 4, 5), (1, "search"), (5, "search"), (200, "walk")),
    ],
)
def test_every_row_is_computed_once_however_uneven_the_experts(
    ends: tuple[int, ...], sms: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(*ends)
    wanted = expected(grouped_matmul_tunable, args)
    emulator.run(grouped_matmul_tunable, args, WAYS[way], monkeypatch, sms=sms)
    assert_agrees(grouped_matmul_tunable, args, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("config", [SMALL, WALKED], ids=["search", "walk"])
@pytest.mark.parametrize("ends", [(3, 20, 20), (0, 0, 0)])
def test_rows_that_no_offset_covers_are_left_alone(
    ends: tuple[int, ...], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, offsets, out = made(*ends, tokens=50)
    wide = torch.full((50, 80), 7.0, dtype=out.dtype)
    partly = replace(grouped_matmul_tunable, outputs=(), reset=("out",))  # outputs are written whole
    emulator.run(partly, (a, b, offsets, wide[:, :40]), config, monkeypatch)
    start = 0
    for expert, stop in enumerate(ends):
        torch.testing.assert_close(wide[start:stop, :40], a[start:stop] @ b[expert], rtol=2e-2, atol=2e-2)
        start = stop
    assert bool((wide[start:] == 7).all())
    assert bool((wide[:, 40:] == 7).all())


@pytest.mark.emulated
@pytest.mark.parametrize("config", [SMALL, WALKED], ids=["search", "walk"])
@pytest.mark.parametrize("ends", [(30, 10, 25), (-5, 10, 30), (10, 60, 45)])
def test_wrong_offsets_stay_inside_of_the_arrays(
    ends: tuple[int, ...], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(*ends, tokens=50)
    partly = replace(grouped_matmul_tunable, outputs=(), reset=("out",))
    emulator.run(partly, args, config, monkeypatch)  # which refuses any slice outside of its array


def test_the_reference_is_the_grouped_product_that_torch_computes() -> None:
    a, b, _, _ = args = made(5, 5, 29, 64)
    wanted = expected(grouped_matmul_tunable, args)["out"].value
    each = torch.tensor([5, 0, 24, 35])
    rows = torch.repeat_interleave(torch.arange(4), each)
    torch.testing.assert_close(wanted, torch.einsum("mk,mkn->mn", a.double(), b.double()[rows]))


def test_the_tolerance_tells_another_expert_and_a_missing_step_from_a_rounding() -> None:
    a, b, _, out = args = made(64, n=64, k=14336)
    wanted = expected(grouped_matmul_tunable, args)
    out.copy_(a.float() @ b[0].float())
    assert_agrees(grouped_matmul_tunable, args, wanted)
    out.copy_(a[:, 64:].float() @ b[0, 64:].float())
    with pytest.raises(AssertionError, match="are wrong"):
        assert_agrees(grouped_matmul_tunable, args, wanted)


def test_arguments_are_uneven_other_for_each_seed_and_end_with_the_last_row() -> None:
    one = shape(4096, 32, 1, 1)
    first, second = (grouped_matmul_tunable.make_args(one, CPU, seed)[2] for seed in (0, 1))
    assert not torch.equal(first, second)
    for offsets in (first, second):
        counts = offsets.diff(prepend=torch.zeros(1, dtype=torch.int32))
        assert (offsets.dtype, int(offsets[-1])) == (torch.int32, 4096)
        assert int(counts.min()) >= 0
        assert 1.3 * 128 < int(counts.max()) < 5 * 128
    few = grouped_matmul_tunable.make_args(shape(8, 256, 1, 1), CPU, 0)[2]
    assert len(set(few.tolist())) <= 9, "most experts have no rows"


def test_arguments_without_storage_pose_the_problem_that_made_them() -> None:
    for one in grouped_matmul_tunable.typical_problems[::7]:
        args = grouped_matmul_tunable.make_args(one, torch.device("meta"), 0)
        assert grouped_matmul_tunable.problem_of(*args) == one


# The host function ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    stand_in = SimpleNamespace(launch=lambda *args: calls.append(args))
    monkeypatch.setattr(
        sys.modules["aot_tune.kernels.products.grouped_matmul"], "grouped_matmul_tunable", stand_in
    )
    return calls


def half(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16)


def ends(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def test_the_host_function_allocates_the_product_and_launches_once(launched: list[tuple[Any, ...]]) -> None:
    a, b, offsets = half(6, 8), half(3, 5, 8).transpose(1, 2), ends(3)
    out = grouped_matmul(a, b, offsets)
    assert (tuple(out.shape), out.dtype) == ((6, 5), torch.bfloat16)
    [passed] = launched
    assert all(one is other for one, other in zip(passed, (a, b, offsets, out), strict=True))


def test_the_host_function_writes_where_it_is_told(launched: list[tuple[Any, ...]]) -> None:
    out = half(6, 5)
    assert grouped_matmul(half(6, 4), half(3, 4, 5), ends(3), out=out) is out
    assert launched[0][3] is out


@pytest.mark.parametrize(("tokens", "experts", "n"), [(0, 3, 5), (6, 3, 0), (6, 0, 5)])
def test_an_empty_product_is_not_launched(
    tokens: int, experts: int, n: int, launched: list[tuple[Any, ...]]
) -> None:
    assert grouped_matmul(half(tokens, 4), half(experts, 4, n), ends(experts)).shape == (tokens, n)
    assert launched == []


def test_a_sum_of_nothing_is_zero_without_a_launch(launched: list[tuple[Any, ...]]) -> None:
    out = torch.ones((3, 5), dtype=torch.bfloat16)
    assert bool((grouped_matmul(half(3, 0), half(2, 0, 5), ends(2), out=out) == 0).all())
    assert launched == []


def test_each_unusable_argument_is_named(launched: list[tuple[Any, ...]]) -> None:
    def refused(says: str, *args: Any, **more: Any) -> None:
        with pytest.raises(LaunchError, match=says):
            grouped_matmul(*args, **more)

    a, b = half(6, 4), half(3, 4, 5)
    refused(r"a is \(4,\); pass a tensor of shape \(tokens, K\)", half(4), b, ends(3))
    refused(r"b is \(4, 5\); pass a tensor of shape \(experts, K, N\)", a, half(4, 5), ends(3))
    refused("offsets is a list", a, b, [1, 2, 3])
    refused("a is float32; pass bfloat16 or float16", a.float(), b, ends(3))
    refused("b is float16; pass bfloat16", a, b.half(), ends(3))
    refused("offsets is int64; pass int32", a, b, ends(3).long())
    refused(r"b has shape \(3, 5, 4\); a of 4 columns asks for \(3, 4, 4\)", a, half(3, 5, 4), ends(3))
    refused(r"offsets has shape \(4,\); b of 3 experts asks for \(3,\)", a, b, ends(4))
    refused(r"out has shape \(5, 6\)", a, b, ends(3), out=half(5, 6))
    refused("out is float32; pass bfloat16", a, b, ends(3), out=half(6, 5).float())
    square = half(4, 4)
    refused("out and a share memory", square, half(3, 4, 4), ends(3), out=square)
    refused("offsets is on meta, not on cpu", a, b, ends(3).to("meta"))
    assert launched == []


# The compiler -----------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("name", ["sm80", "sm100", "sm120"])
def test_the_default_of_few_rows_compiles(name: str) -> None:
    arch, one = Arch.parse(name), shape(8, 8, 4096, 14336)
    stack_bytes(arch, one, grouped_matmul_tunable.default_config(arch, one))


@pytest.mark.process
@pytest.mark.parametrize(
    "config", [tile(16, 64, 128), tile(128, 128, 64), tile(128, 128, 64, search=False)], ids=str
)
def test_configs_across_the_space_compile_without_spilling(config: Config) -> None:
    one = shape(4096, 128, 2880, 2880)
    assert config in grouped_matmul_tunable.space(SM90, one)
    assert stack_bytes(SM90, one, config) == 0


@pytest.mark.process
def test_sizes_that_are_not_aligned_compile() -> None:
    stack_bytes(SM90, shape(33, 5, 97, 65, "float16"), SMALL)


def stack_bytes(arch: Arch, one: Problem, config: Config) -> int:
    args = grouped_matmul_tunable.make_args(one, torch.device("meta"), 0)
    kernel = grouped_matmul_tunable.kernel
    signature = cutile.signature_of(kernel, grouped_matmul_tunable.args_fn(config, *args))
    return resources(cutile.compile_cubin(kernel, config.hints, signature, arch, timeout_s=120)).stack_bytes
