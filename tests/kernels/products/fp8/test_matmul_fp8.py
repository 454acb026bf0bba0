"""matmul_fp8 without a GPU: both spaces, tiles, arithmetic, scales, refusals, and the real compiler."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.declare.checks import declaration_problems
from aot_tune.errors import CutileError, LaunchError
from aot_tune.kernels.products.fp8.matmul_fp8 import matmul_fp8, matmul_fp8_tunable
from aot_tune.kernels.products.fp8.matmul_fp8_block import matmul_fp8_block_tunable
from aot_tune.nvidia import cutile
from aot_tune.nvidia.cubin import Resources, resources
from aot_tune.tunable import Tunable
from aot_tune.values.arch import KNOWN_ARCHS, Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import emulator
from tests.support.agree import assert_agrees, expected, poison, problem
from tests.support.pairs import pairwise
from tests.support.samples import SM90

CPU = torch.device("cpu")
TUNABLES = {one.name: one for one in (matmul_fp8_tunable, matmul_fp8_block_tunable)}
BOTH = pytest.mark.parametrize("tunable", TUNABLES.values(), ids=TUNABLES)
WITH_FP8 = [arch for arch in KNOWN_ARCHS if arch >= Arch(9, 0)]


def shape(m: int, n: int = 7168, k: int = 7168, dtype: str = "bfloat16") -> Problem:
    return problem(dtype=dtype, M=m, N=n, K=k)


def config(
    tunable: Tunable,
    tile_m: int,
    tile_n: int,
    *,
    tile_k: int = 128,
    group: int = 8,
    peeled: int = 0,
    **hints: int,
) -> Config:
    constants = {"tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k, "group": group, "peeled": peeled}
    return Config(constants={name: constants[name] for name in tunable.constant_names}, hints=hints)


# The space --------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm120"])
def test_the_declaration_has_no_mistake(tunable: Tunable, arch: str) -> None:
    assert declaration_problems(tunable, Arch.parse(arch)) == []


@BOTH
@pytest.mark.parametrize("arch", [a for a in KNOWN_ARCHS if a < Arch(9, 0)], ids=str)
def test_before_sm90_every_config_is_refused_with_what_to_do(tunable: Tunable, arch: Arch) -> None:
    for candidate in tunable.space(arch, shape(64)):
        refusal = tunable.refusal(candidate, arch, shape(64))
        assert refusal is not None
        assert "fp8 from sm90 on" in refusal
        assert "call matmul" in refusal


@BOTH
def test_a_sweep_takes_minutes(tunable: Tunable) -> None:
    assert len(tunable.typical_problems) <= 80
    for one in tunable.typical_problems:
        assert 4 <= len(tunable.candidates(SM90, one)) <= 24, one


@BOTH
def test_the_shape_of_an_odd_number_of_columns_is_declared(tunable: Tunable) -> None:
    assert problem(dtype="bfloat16", M=320, N=32576, K=7168) in tunable.typical_problems


def test_deep_steps_are_searched() -> None:
    for arch in (SM90, Arch(10, 0)):
        candidates = matmul_fp8_tunable.candidates(arch, shape(16))
        assert {c["tile_k"] for c in candidates} == {128, 256}


@BOTH
def test_what_does_not_fit_or_is_a_waste_is_refused_with_its_reason(tunable: Tunable) -> None:
    def refusal(candidate: Config, arch: str = "sm90", m: int = 4096) -> str:
        return tunable.refusal(candidate, Arch.parse(arch), shape(m)) or ""

    assert "4 warps overflows the registers" in refusal(config(tunable, 128, 128))
    assert refusal(config(tunable, 128, 128, num_worker_warps=8)) == ""
    assert refusal(config(tunable, 128, 128, num_ctas=2)) == ""
    assert "shared memory" in refusal(config(tunable, 128, 64, occupancy=3), "sm120")
    assert "tensor memory" in refusal(config(tunable, 512, 128, occupancy=2), "sm100")
    assert "half empty" in refusal(config(tunable, 128, 64), m=32)
    assert refusal(config(tunable, 64, 64), m=1) == refusal(config(tunable, 64, 64)) == ""  # for every batch
    assert "B more than twice" in refusal(config(tunable, 16, 64), m=33)
    assert "as group 8" in refusal(config(tunable, 64, 64, group=16), m=512)


def test_a_loop_begins_with_the_first_step_or_the_second() -> None:
    for wrong in (-1, 2):
        said = matmul_fp8_tunable.refusal(config(matmul_fp8_tunable, 64, 64, peeled=wrong), SM90, shape(4096))
        assert f"peeled is {wrong}; it must be 1" in (said or "")


def test_a_tile_as_wide_as_two_blocks_has_several_scales() -> None:
    wide = config(matmul_fp8_block_tunable, 64, 256, num_worker_warps=8)
    assert "several scales" in (matmul_fp8_block_tunable.refusal(wide, SM90, shape(64)) or "")


# Tiles and grid ---------------------------------------------------------------------------------


@BOTH
def test_the_grid_is_what_the_gpu_holds_at_once_and_no_more_than_the_tiles(tunable: Tunable) -> None:
    device = Device.reference(SM90)
    assert tunable.grid_fn(config(tunable, 64, 64), device, shape(4096)) == (132,)
    assert tunable.grid_fn(config(tunable, 64, 64, occupancy=2), device, shape(4096)) == (264,)
    assert tunable.grid_fn(config(tunable, 128, 128, num_ctas=2), device, shape(4096)) == (66,)
    assert tunable.grid_fn(config(tunable, 16, 64), device, shape(1)) == (112,)


@BOTH
def test_the_work_of_all_tiles_is_the_work_of_the_product(tunable: Tunable) -> None:
    assert tunable.work is not None
    assert tunable.tiles is not None
    one, candidate = shape(4096), config(tunable, 128, 128, num_ctas=2)
    work, tiles = tunable.work(candidate, one), tunable.tiles(candidate, one)
    assert tiles * work.steps * work.flops == 2 * 4096 * 7168 * 7168
    assert tiles * work.store_bytes == 4096 * 7168 * 2
    assert work.load_bytes == (128 + 128) * 128


# The kernels ------------------------------------------------------------------------------------


def of_two_tiles(tunable: Tunable, m: int, tile_m: int, n: int) -> int:
    """With block scales no tile begins earlier: it would need the scales of other rows."""
    return emulator.of_two_tiles(m, tile_m, n) if tunable is matmul_fp8_tunable else 0


@pytest.mark.emulated
@pairwise(
    "m n k dtype",
    {
        "tile_m": (16, 64),
        "kernel": tuple(TUNABLES),
    },
    [
        ((1, 1, 1, "bfloat16"), (16, "matmul_fp8"), (64, "matmul_fp8_block")),
        ((64, 96, 128, "float16"), (16, "matmul_fp8"), (64, "matmul_fp8_block")),
        ((65, 97, 129, "bfloat16"), (16, "matmul_fp8_block"), (64, "matmul_fp8")),
        ((5, 300, 31, "float16"), (16, "matmul_fp8_block"), (64, "matmul_fp8")),
        ((130, 257, 400, "bfloat16"), (16, "matmul_fp8_block"), (64, "matmul_fp8")),
    ],
)
def test_the_kernel_agrees_with_the_reference(
    m: int, n: int, k: int, dtype: str, tile_m: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tunable = TUNABLES[kernel]
    args = tunable.make_args(shape(m, n, k, dtype), CPU, 1)
    wanted = expected(tunable, args)
    for peeled in (0, 1) if "peeled" in tunable.constant_names else (0,):
        poison(tunable, args)
        chosen = config(tunable, tile_m, 64, peeled=peeled)
        emulator.run(tunable, args, chosen, monkeypatch, twice=of_two_tiles(tunable, m, tile_m, n))
        assert_agrees(tunable, args, wanted)


@pytest.mark.emulated
@BOTH
@pytest.mark.parametrize("group", [1, 3, 8])
def test_every_tile_is_computed_once_in_any_group_and_on_any_number_of_multiprocessors(
    tunable: Tunable, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sms in (1, 7, 200):
        m, n = 16 * 11 + 3, 32 * 5 + 1
        args = tunable.make_args(shape(m, n, 16), CPU, 0)
        wanted = expected(tunable, args)
        chosen, twice = config(tunable, 16, 32, group=group), of_two_tiles(tunable, m, 16, n)
        blocks = emulator.run(tunable, args, chosen, monkeypatch, sms=sms, twice=twice)
        assert blocks == min(sms, 12 * 6)
        assert_agrees(tunable, args, wanted)


@BOTH
def test_a_step_left_out_or_wrong_scales_are_told_from_rounding(tunable: Tunable) -> None:
    args = tunable.make_args(shape(64, 128, 16384), CPU, 1)
    a, b, scale_a, scale_b, out = args
    wanted = expected(tunable, args)
    out.copy_(wanted["out"].value)
    assert_agrees(tunable, args, wanted)
    some_a, some_b = (scale_a[:, 1:], scale_b[:, 1:]) if scale_a.dim() == 2 else (scale_a, scale_b)
    wrong = [expected(tunable, (a[:, 128:], b[128:], some_a, some_b, out))]
    if scale_a.dim() == 2:
        wrong.append(expected(tunable, (a, b, scale_a.roll(1, 1), scale_b, out)))
        wrong.append(expected(tunable, (a, b, scale_a, scale_b.roll(1, 1), out)))
    for other in wrong:
        out.copy_(other["out"].value)
        with pytest.raises(AssertionError, match="are wrong"):
            assert_agrees(tunable, args, wanted)


def test_the_reference_of_a_scale_a_tensor_is_torchs_own() -> None:
    args = matmul_fp8_tunable.make_args(shape(48, 96, 256), CPU, 1)
    a, b, scale_a, scale_b, out = args
    out.copy_(torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16))
    assert_agrees(matmul_fp8_tunable, args, expected(matmul_fp8_tunable, args))


@pytest.mark.long
def test_the_reference_of_block_scales_is_deepseeks() -> None:
    m, n, k = 5, 300, 200
    a, b, scale_a, scale_b, out = matmul_fp8_block_tunable.make_args(shape(m, n, k), CPU, 1)
    assert (tuple(scale_a.shape), tuple(scale_b.shape)) == ((5, 2), (3, 2))
    assert scale_a.stride() == (1, 8)  # along M, padded to 16 bytes
    weight = b.t().float()
    for row in range(n):  # as the checkpoint is dequantized: weight_scale_inv, a block of weight at a time
        for column in range(k):
            weight[row, column] *= scale_b[row // 128, column // 128]
    tokens = torch.stack([a[:, i].float() * scale_a[:, i // 128] for i in range(k)], 1)
    wanted = expected(matmul_fp8_block_tunable, (a, b, scale_a, scale_b, out))["out"].value
    torch.testing.assert_close(tokens @ weight.t(), wanted.float(), rtol=1e-4, atol=1e-4)


@BOTH
def test_arguments_without_storage_pose_the_problem_that_made_them(tunable: Tunable) -> None:
    for one in tunable.typical_problems:
        assert tunable.problem_of(*tunable.make_args(one, torch.device("meta"), 0)) == one


# The host function ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    module = sys.modules["aot_tune.kernels.products.fp8.matmul_fp8"]
    for name in ("matmul_fp8_tunable", "matmul_fp8_block_tunable"):
        stand_in = SimpleNamespace(launch=lambda *args, name=name: calls.append((name, *args)))
        monkeypatch.setattr(module, name, stand_in)
    return calls


def fp8(rows: int, columns: int) -> torch.Tensor:
    return torch.zeros((rows, columns), dtype=torch.float8_e4m3fn)


def scales(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes)


def test_the_scales_choose_the_kernel(launched: list[tuple[Any, ...]]) -> None:
    a, b = fp8(3, 256), fp8(130, 256).t()
    for scale in (scales(), scales(1), scales(1, 1)):
        assert matmul_fp8(a, b, scale, scale).dtype == torch.bfloat16
        name, passed_a, passed_b, scale_a, scale_b, out = launched.pop()
        assert name == "matmul_fp8_tunable"
        assert (passed_a is a, passed_b is b) == (True, True)
        assert (tuple(scale_a.shape), tuple(scale_b.shape), tuple(out.shape)) == ((1,), (1,), (3, 130))
    per_token, per_block = scales(3, 2), scales(2, 2)
    assert matmul_fp8(a, b, per_token, per_block, out_dtype=torch.float16).dtype == torch.float16
    name, _, _, scale_a, scale_b, _ = launched.pop()
    assert name == "matmul_fp8_block_tunable"
    assert (scale_a is per_token, scale_b is per_block) == (True, True)


def test_it_writes_where_it_is_told(launched: list[tuple[Any, ...]]) -> None:
    out = torch.empty((3, 5), dtype=torch.float16)
    assert matmul_fp8(fp8(3, 16), fp8(5, 16).t(), scales(1), scales(1), out=out) is out
    assert launched[0][-1] is out


def test_a_slice_of_padded_rows_is_launched(launched: list[tuple[Any, ...]]) -> None:
    matmul_fp8(fp8(3, 32)[:, :17], fp8(5, 32)[:, :17].t(), scales(1), scales(1))
    assert len(launched) == 1


@pytest.mark.parametrize(("m", "n"), [(0, 5), (3, 0)])
def test_an_empty_product_is_not_launched(m: int, n: int, launched: list[tuple[Any, ...]]) -> None:
    assert matmul_fp8(fp8(m, 16), fp8(n, 16).t(), scales(1), scales(1)).shape == (m, n)
    assert launched == []


def test_a_sum_of_nothing_is_zero_without_a_launch(launched: list[tuple[Any, ...]]) -> None:
    out = torch.ones((3, 5), dtype=torch.bfloat16)
    assert bool((matmul_fp8(fp8(3, 0), fp8(0, 5), scales(1), scales(1), out=out) == 0).all())
    assert launched == []


@pytest.mark.parametrize(("m", "n", "k"), [(1, 5, 20), (5, 1, 20), (1, 1, 20), (1, 5, 1)])
def test_strides_that_are_never_used_need_not_be_aligned(
    m: int, n: int, k: int, launched: list[tuple[Any, ...]]
) -> None:
    a = fp8(m, k) if m == 1 else fp8(m, 32)[:, :k]
    b = (fp8(n, k) if n == 1 else fp8(n, 32)[:, :k]).t()
    matmul_fp8(a if k > 1 else a.as_strided((m, k), (16, 16)), b, scales(1), scales(1))
    [(_, passed_a, passed_b, *_)] = launched
    assert (passed_a.shape, passed_b.shape) == ((m, k), (k, n))
    assert (passed_a.data_ptr(), passed_b.data_ptr()) == (a.data_ptr(), b.data_ptr())
    assert (passed_a.stride(), passed_b.stride()) == ((32 if k > 1 else 16, 1), (1, 32))


def test_each_unusable_argument_is_named(launched: list[tuple[Any, ...]]) -> None:
    a, b, one = fp8(3, 256), fp8(130, 256).t(), scales(1)

    def refused(says: str, *args: Any, **more: Any) -> None:
        with pytest.raises(LaunchError, match=says):
            matmul_fp8(*args, **more)

    refused(r"a is \(3,\); pass a tensor of shape \(M, K\)", a[:, 0], b, one, one)
    refused(
        r"b has shape \(130, 256\); a of 256 columns asks for \(256, 256\)",
        fp8(3, 256),
        fp8(130, 256),
        one,
        one,
    )
    refused("a is bfloat16; pass float8_e4m3fn", a.bfloat16(), b, one, one)
    refused("b is float8_e5m2; pass float8_e4m3fn", a, b.to(torch.float8_e5m2), one, one)
    refused("scale_a is float16; pass float32", a, b, one.half(), one)
    refused("scale_b is a float", a, b, one, 1.0)
    refused(r"scale_a has shape \(3, 1\); .* asks for \(3, 2\)", a, b, scales(3, 1), scales(2, 2))
    refused(r"scale_b has shape \(3, 2\); .* asks for \(2, 2\)", a, b, scales(3, 2), scales(3, 2))
    refused("scale_a has shape", a, b, one, scales(2, 2))
    refused("out_dtype is torch.float32; pass torch.bfloat16", a, b, one, one, out_dtype=torch.float32)
    refused("out is float32; pass bfloat16", a, b, one, one, out=torch.empty(3, 130))
    refused(r"out has shape \(130, 3\)", a, b, one, one, out=torch.empty((130, 3), dtype=torch.bfloat16))
    refused("b is on meta, not on cpu", a, b.to("meta"), one, one)
    refused(
        r"b has stride 130 along K.*the t\(\) of a contiguous \(N, K\) weight", a, fp8(256, 130), one, one
    )
    refused(r"a has stride 3 along K; pass \(M, K\) with stride 1 there", fp8(256, 3).t(), b, one, one)
    assert launched == []


@pytest.mark.parametrize(("m", "n", "k"), [(3, 5, 17), (3, 5, 100), (4, 7, 1), (1, 1, 1), (1, 5, 17)])
@pytest.mark.parametrize("begin", [0, 8])
def test_rows_that_do_not_start_at_multiples_of_16_bytes_are_copied(
    m: int, n: int, k: int, begin: int, launched: list[tuple[Any, ...]]
) -> None:
    a, weight = (torch.randn(rows, begin + k).to(torch.float8_e4m3fn)[:, begin:] for rows in (m, n))
    matmul_fp8(a, weight.t(), torch.ones(1), torch.ones(1))
    [(_, one, other, *_)] = launched
    for rows, given in ((one, a), (other.t(), weight)):
        assert torch.equal(rows.float(), given.float())
        assert rows.stride(1) == 1
        assert (rows.stride(0) | rows.data_ptr()) % 16 == 0


def test_rows_that_are_aligned_are_not_copied(launched: list[tuple[Any, ...]]) -> None:
    a, weight = fp8(3, 112)[:, :100], fp8(5, 112)[:, :100]
    matmul_fp8(a, weight.t(), torch.ones(1), torch.ones(1))
    assert [one.data_ptr() for one in launched[0][1:3]] == [a.data_ptr(), weight.data_ptr()]


# The real compiler ------------------------------------------------------------------------------


def compiled(tunable: Tunable, arch: str, one: Problem, candidate: Config) -> Resources:
    return compiled_with(tunable, arch, candidate, tunable.make_args(one, torch.device("meta"), 0))


def compiled_with(tunable: Tunable, arch: str, candidate: Config, args: tuple[Any, ...]) -> Resources:
    signature = cutile.signature_of(tunable.kernel, tunable.args_fn(candidate, *args))
    return resources(
        cutile.compile_cubin(tunable.kernel, candidate.hints, signature, Arch.parse(arch), timeout_s=120)
    )


@pytest.mark.process
@BOTH
@pytest.mark.parametrize(("arch", "m"), [("sm90", 1), ("sm90", 4096), ("sm100", 4096), ("sm120", 1)])
def test_the_defaults_compile_without_spilling(tunable: Tunable, arch: str, m: int) -> None:
    one = shape(m)
    assert compiled(tunable, arch, one, tunable.default_config(Arch.parse(arch), one)).stack_bytes == 0


@pytest.mark.process
@BOTH
def test_the_widest_tiles_compile_without_spilling_on_sm90(tunable: Tunable) -> None:
    widest = max(tunable.candidates(SM90, shape(4096)), key=lambda c: (int(c["tile_m"]), int(c["tile_n"])))
    assert compiled(tunable, "sm90", shape(4096), widest).stack_bytes == 0


@pytest.mark.process
@pytest.mark.parametrize("warps", [4, 8])
def test_block_scales_along_k_compile_without_spilling(warps: int) -> None:
    hints = {"occupancy": 2} if warps == 4 else {"num_worker_warps": 8}
    one, candidate = shape(4096), config(matmul_fp8_block_tunable, 16 * warps, 128, **hints)
    a, b, scale_a, scale_b, out = matmul_fp8_block_tunable.make_args(one, torch.device("meta"), 0)
    along_k = (a, b, scale_a.contiguous(), scale_b, out)
    assert compiled_with(matmul_fp8_block_tunable, "sm90", candidate, along_k).stack_bytes == 0


@pytest.mark.process
@BOTH
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (33, 97, 65)])
def test_sizes_that_are_not_aligned_compile(tunable: Tunable, m: int, n: int, k: int) -> None:
    compiled(tunable, "sm90", shape(m, n, k, "float16"), tunable.default_config(SM90, shape(m)))


@pytest.mark.process
@BOTH
def test_before_sm90_the_compiler_refuses_fp8_as_the_declaration_does(tunable: Tunable) -> None:
    with pytest.raises(CutileError, match="float8_e4m3fn is not supported on sm_89"):
        compiled(tunable, "sm89", shape(64), tunable.default_config(SM90, shape(64)))
