"""softmax without a GPU: the declaration, the arithmetic, what it compiles to and what it takes."""

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
from aot_tune.kernels.softmax import softmax, softmax_tunable
from aot_tune.problem import Problem
from tests.kernels import emulator
from tests.kernels.agree import assert_agrees, expected, poison, problem
from tests.kernels.test_compile import ARCHS, compiled
from tests.samples import SM90

CPU = torch.device("cpu")
CHUNKS, PERSISTENT = (
    Config(
        constants={"height": 1, "width": 2048, "chunked": True, "persistent": persistent},
        hints={"num_ctas": 1, "occupancy": 4, "num_worker_warps": 4},
    )
    for persistent in (False, True)
)


def shape(rows: int, cols: int, dtype: str = "bfloat16") -> Problem:
    return problem(dtype=dtype, rows=rows, cols=cols)


@pytest.mark.parametrize("arch", KNOWN_ARCHS, ids=str)
def test_the_default_is_a_candidate_at_every_declared_shape_and_any_width(arch: Arch) -> None:
    widths = (shape(1, cols) for cols in (1, 2, 100, 1000, 4097, 9000, 16385, 32768, 32769, 10**6))
    for one in (*softmax_tunable.typical_problems, *widths):
        assert softmax_tunable.default_config(arch, one) in softmax_tunable.candidates(arch, one), one


def test_the_sweep_stays_small() -> None:
    assert len(softmax_tunable.typical_problems) <= 64
    for one in softmax_tunable.typical_problems:
        assert len(softmax_tunable.candidates(SM90, one)) <= 24


def test_blocks_share_a_row_only_where_there_are_clusters() -> None:
    def most(name: str, cols: int) -> int:
        return max(c.hints["num_ctas"] for c in softmax_tunable.candidates(Arch.parse(name), shape(8, cols)))

    assert [most("sm90", cols) for cols in (8192, 32000, 128256)] == [1, 4, 4]
    assert [most("sm89", cols) for cols in (8192, 32000, 128256)] == [1, 1, 1]


def test_long_rows_have_a_block_each_and_short_ones_share() -> None:
    device = Device.reference(SM90)
    for one, blocks in ((shape(1000, 128256), 1000), (shape(100, 2048), 100), (shape(100, 128), 13)):
        default = softmax_tunable.default_config(SM90, one)
        assert softmax_tunable.grid_fn(default, device, one) == (blocks,)
        assert softmax_tunable.tiles is not None
        assert softmax_tunable.tiles(default, one) == blocks
    assert softmax_tunable.grid_fn(PERSISTENT, device, shape(1000, 128256)) == (132 * 4,)
    assert softmax_tunable.grid_fn(PERSISTENT, device, shape(3, 128256)) == (3,)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 1), (3, 5), (17, 100), (384, 8), (9, 128), (3, 1500), (2, 4096), (13, 9000)]
)
def test_the_kernel_agrees_with_the_reference_in_every_form(
    rows: int, cols: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = shape(rows, cols, dtype)
    args = softmax_tunable.make_args(one, CPU, 1)
    wanted = expected(softmax_tunable, args)
    for config in (softmax_tunable.default_config(SM90, one), CHUNKS, PERSISTENT):
        poison(softmax_tunable, args)
        emulator.run(softmax_tunable, args, config, monkeypatch)
        assert_agrees(softmax_tunable, args, wanted)


@pytest.mark.parametrize("cols", [7, 5000])
def test_infinities_nan_and_the_lowest_numbers_come_out_as_torchs_do(
    cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn((6, cols))
    x[0, 1:] = -torch.inf
    x[1] = -torch.inf
    x[2, 3], x[3, 3] = torch.nan, torch.inf
    x[4] = torch.finfo(torch.float32).min
    x[5, :5] = 3e38
    for config in (softmax_tunable.default_config(SM90, shape(6, cols)), CHUNKS):
        out = torch.empty_like(x)
        emulator.run(softmax_tunable, (x, out), config, monkeypatch)
        torch.testing.assert_close(out, torch.softmax(x, dim=1), equal_nan=True)


def test_the_reference_is_torchs_softmax() -> None:
    args = softmax_tunable.make_args(shape(7, 300), CPU, 2)
    value = expected(softmax_tunable, args)["out"].value
    assert value.dtype == torch.float64
    exponentials = args[0].double().exp()
    torch.testing.assert_close(value, exponentials / exponentials.sum(1, keepdim=True))


def test_a_sum_that_lacks_a_chunk_or_counts_padding_is_told_from_a_rounding() -> None:
    x, out = args = softmax_tunable.make_args(shape(4, 32000, "float32"), CPU, 0)
    wanted = expected(softmax_tunable, args)
    exponentials = x.double().exp()
    total = exponentials.sum(1, keepdim=True)
    for wrong in (total - exponentials[:, -2048:].sum(1, keepdim=True), total + 768):
        out.copy_(exponentials / wrong)
        with pytest.raises(AssertionError, match="are wrong"):
            assert_agrees(softmax_tunable, args, wanted)


def test_arguments_without_storage_pose_the_problem_that_made_them() -> None:
    for one in softmax_tunable.typical_problems[::9]:
        assert softmax_tunable.problem_of(*softmax_tunable.make_args(one, torch.device("meta"), 0)) == one


# What it compiles to ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHS)
def test_the_default_compiles_and_does_not_spill(name: str) -> None:
    arch = Arch.parse(name)
    for cols in (128, 128256):
        one = shape(1024, cols, "float32")
        default = softmax_tunable.default_config(arch, one)
        assert compiled(softmax_tunable, arch, one, default).stack_bytes == 0, one


@pytest.mark.parametrize("one", [shape(1024, 128256, "float32"), shape(1000, 32000)], ids=str)
def test_what_is_legal_on_sm90_does_not_spill(one: Problem) -> None:
    candidates = softmax_tunable.candidates(SM90, one)
    for config in candidates[:: -(-len(candidates) // 3)]:
        assert compiled(softmax_tunable, SM90, one, config).stack_bytes == 0, config


# The host function ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    module = sys.modules["aot_tune.kernels.softmax"]
    monkeypatch.setattr(module, "softmax_tunable", SimpleNamespace(launch=lambda *args: calls.append(args)))
    return calls


def half(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16)


@pytest.mark.parametrize("sizes", [(8,), (5, 8), (2, 3, 8)])
def test_leading_dimensions_are_flattened_into_rows(
    sizes: tuple[int, ...], launched: list[tuple[Any, ...]]
) -> None:
    x = half(*sizes)
    out = softmax(x)
    assert out.shape == x.shape
    [(rows, out_rows)] = launched
    assert rows.shape == out_rows.shape == (x.numel() // 8, 8)
    assert (rows.data_ptr(), out_rows.data_ptr()) == (x.data_ptr(), out.data_ptr())


def test_rows_of_a_wider_tensor_are_taken_where_they_are(launched: list[tuple[Any, ...]]) -> None:
    softmax(half(2, 3, 16)[:, :, :8])
    assert launched[0][0].stride() == (16, 1)


@pytest.mark.parametrize("sizes", [(0, 8), (2, 0, 8), (2, 0)])
def test_nothing_is_not_launched(sizes: tuple[int, ...], launched: list[tuple[Any, ...]]) -> None:
    assert softmax(half(*sizes)).shape == sizes
    assert launched == []


def test_each_unusable_argument_is_named(launched: list[tuple[Any, ...]]) -> None:
    def refused(says: str, *args: Any, **more: Any) -> None:
        with pytest.raises(LaunchError, match=says):
            softmax(*args, **more)

    refused("x is float64; pass bfloat16 or float16 or float32", half(2, 8).double())
    refused(r"x has shape \(\); pass one dimension or more", half())
    refused(r"out has shape \(8, 2\)", half(2, 8), out=half(8, 2))
    refused("out is float16", half(2, 8), out=half(2, 8).half())
    refused(r"x of shape \(3, 2, 8\).*call x\.contiguous\(\)", half(2, 3, 8).transpose(0, 1))
    refused("out is on meta, not on cpu", half(2, 8), out=half(2, 8).to("meta"))
    x = half(2, 8)
    refused("out and x share memory", x, out=x)
    assert launched == []
