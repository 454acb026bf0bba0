"""rope without a GPU: the declaration, the arithmetic, what the host function takes and refuses."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.errors import LaunchError
from aot_tune.kernels import rope, rope_tunable
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support import emulator
from tests.support.agree import assert_agrees, expected, problem
from tests.support.compiling import SM90_AND_SLOW_ARCHS, compiled
from tests.support.pairs import pairwise
from tests.support.samples import SM90

CPU = torch.device("cpu")


def config(tile_heads: int) -> Config:
    return Config(constants={"tile_heads": tile_heads}, hints={"occupancy": 1, "num_worker_warps": 4})


def shape(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: str = "bfloat16", *,
    rotary_dim: int = 0, interleaved: bool = False,
) -> Problem:  # fmt: skip
    return problem(
        dtype=dtype, interleaved=interleaved, tokens=tokens, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, rotary_dim=rotary_dim or head_dim,
    )  # fmt: skip


def test_the_declared_problems_are_a_sweep_of_minutes() -> None:
    assert len(rope_tunable.typical_problems) <= 130
    assert {p["tokens"] for p in rope_tunable.typical_problems} == {4**i for i in range(8)}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tile_heads", "blocks"),
    [(32, 8, 32, 1), (32, 8, 16, 3), (64, 8, 32, 3), (40, 8, 64, 6), (6, 1, 64, 1), (71, 1, 16, 6),
     (71, 1, 64, 3)],
)  # fmt: skip
def test_a_token_is_a_block_where_a_tile_holds_all_heads_and_else_several(
    heads: int, kv_heads: int, tile_heads: int, blocks: int
) -> None:
    device, one = Device.reference(SM90), shape(100, heads, kv_heads, 128)
    assert rope_tunable.grid_fn(config(tile_heads), device, one) == (100, blocks)
    assert rope_tunable.tiles is not None
    assert rope_tunable.tiles(config(tile_heads), one) == 100 * blocks


def test_tiles_are_refused_that_a_block_cannot_hold() -> None:
    refusal = rope_tunable.refusal(config(64), SM90, shape(1, 64, 8, 256))
    assert refusal == "64 heads of 256 elements to rotate exceed the 8192 elements of a block"
    assert rope_tunable.refusal(config(1), SM90, shape(1, 64, 8, 8192)) is None


@pytest.mark.emulated
@pairwise(
    "tokens heads kv_heads head_dim rotary_dim",
    {
        "dtype": ("bfloat16", "float16", "float32"),
        "interleaved": (False, True),
        "tile_heads": (1, 4, 64),
    },
    [
        ((1, 1, 1, 2, 2), ("bfloat16", False, 4), ("float16", False, 1), ("float32", True, 64)),
        ((3, 4, 2, 8, 8), ("bfloat16", True, 1), ("float16", True, 64), ("float32", False, 4)),
        ((5, 5, 3, 64, 64), ("bfloat16", True, 64), ("float16", False, 4), ("float32", True, 1)),
        ((2, 40, 8, 128, 128), ("bfloat16", True, 4), ("float16", True, 1), ("float32", False, 64)),
        ((4, 3, 1, 80, 32), ("bfloat16", False, 64), ("float16", True, 1), ("float32", True, 4)),
        ((2, 2, 1, 3, 2), ("bfloat16", False, 64), ("float16", False, 1), ("float32", True, 4)),
        ((3, 5, 5, 96, 24), ("bfloat16", False, 4), ("float16", False, 64), ("float32", True, 1)),
        ((2, 4, 4, 96, 96), ("bfloat16", False, 64), ("float16", False, 1), ("float32", True, 4)),
        ((2, 3, 1, 80, 80), ("bfloat16", True, 1), ("float16", False, 4), ("float32", True, 64)),
        ((2, 8, 2, 10, 6), ("bfloat16", True, 1), ("float16", True, 64), ("float32", False, 4)),
    ],
)
def test_the_kernel_agrees_with_the_reference(
    tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, dtype: str, interleaved: bool,
    tile_heads: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    one = shape(tokens, heads, kv_heads, head_dim, dtype, rotary_dim=rotary_dim, interleaved=interleaved)
    args = rope_tunable.make_args(one, CPU, 1)
    wanted = expected(rope_tunable, args)
    emulator.run(rope_tunable, args, config(tile_heads), monkeypatch)
    assert_agrees(rope_tunable, args, wanted)


def test_the_reference_is_a_rotation_in_the_plane_of_each_pair() -> None:
    q, k, cos, sin, _ = rope_tunable.make_args(shape(6, 4, 2, 16, "float32"), CPU, 3)
    turn = torch.complex(cos.double(), sin.double())[:, None, :]
    for name, x in (("q", q), ("k", k)):
        halves = torch.complex(*x.double().chunk(2, dim=2)) * turn
        wanted = expected(rope_tunable, (q, k, cos, sin, False))[name].value
        torch.testing.assert_close(wanted, torch.cat((halves.real, halves.imag), dim=2))
        neighbours = torch.view_as_complex(x.double().view(*x.shape[:2], 8, 2)) * turn
        wanted = expected(rope_tunable, (q, k, cos, sin, True))[name].value
        torch.testing.assert_close(wanted, torch.view_as_real(neighbours).flatten(2))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_reference_leaves_what_lies_beyond_the_rotated_elements(interleaved: bool) -> None:
    one = shape(6, 4, 2, 24, "float32", rotary_dim=8, interleaved=interleaved)
    q, k, cos, sin, _ = args = rope_tunable.make_args(one, CPU, 3)
    for name, x in (("q", q), ("k", k)):
        value = expected(rope_tunable, args)[name].value
        assert torch.equal(value[:, :, 8:], x[:, :, 8:].double())
        whole = (q[:, :, :8], k[:, :, :8], cos, sin, interleaved)
        assert torch.equal(value[:, :, :8], expected(rope_tunable, whole)[name].value)


def test_the_angles_are_those_of_a_sequence_and_differ_between_seeds() -> None:
    _, _, cos, sin, _ = rope_tunable.make_args(shape(9, 1, 1, 64), CPU, 0)
    positions, pairs = torch.arange(9.0)[:, None], torch.arange(32.0)[None, :]
    angles = positions / 500000 ** (pairs / 32)
    torch.testing.assert_close(cos, angles.cos(), rtol=0, atol=1e-3)
    torch.testing.assert_close(sin, angles.sin(), rtol=0, atol=1e-3)
    assert not torch.equal(cos, rope_tunable.make_args(shape(9, 1, 1, 64), CPU, 1)[2])


def test_a_rotation_the_wrong_way_is_told_from_a_rounding() -> None:
    for wrong in ("backwards", "the other pairs"):
        q, k, cos, sin, _ = args = rope_tunable.make_args(shape(16, 2, 1, 64), CPU, 0)
        wanted = expected(rope_tunable, args)
        other = (q, k, cos, -sin, False) if wrong == "backwards" else (q, k, cos, sin, True)
        q.copy_(expected(rope_tunable, other)["q"].value)
        k.copy_(wanted["k"].value)
        with pytest.raises(AssertionError, match="of q are wrong"):
            assert_agrees(rope_tunable, args, wanted)


def test_arguments_without_storage_pose_the_problem_that_made_them() -> None:
    for one in rope_tunable.typical_problems[::15]:
        assert rope_tunable.problem_of(*rope_tunable.make_args(one, torch.device("meta"), 0)) == one


# The host function ------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    module = sys.modules["aot_tune.kernels.elementwise.rope"]
    monkeypatch.setattr(module, "rope_tunable", SimpleNamespace(launch=lambda *args: calls.append(args)))
    return calls


def some(tokens: int = 3, heads: int = 4, kv_heads: int = 2, head_dim: int = 8) -> list[torch.Tensor]:
    return list(rope_tunable.make_args(shape(tokens, heads, kv_heads, head_dim), CPU, 0)[:4])


def test_views_into_a_fused_projection_are_rotated_where_they_are(launched: list[tuple[Any, ...]]) -> None:
    fused = torch.zeros((3, (4 + 2 + 2) * 8), dtype=torch.bfloat16)
    q, k = fused[:, :32].view(3, 4, 8), fused[:, 32:48].view(3, 2, 8)
    _, _, cos, sin = some()
    assert rope(q, k, cos, sin) == (q, k)
    assert rope(q, k, cos, sin, interleaved=True) == (q, k)
    for (passed_q, passed_k, *_, passed), interleaved in zip(launched, (False, True), strict=True):
        assert passed_q is q
        assert passed_k is k
        assert passed is interleaved


def test_no_tokens_are_not_launched(launched: list[tuple[Any, ...]]) -> None:
    rope(*some(tokens=0))
    assert launched == []


def test_each_unusable_argument_is_named(launched: list[tuple[Any, ...]]) -> None:
    def refused(says: str, **changed: Any) -> None:
        names = ("q", "k", "cos", "sin")
        args = {**dict(zip(names, some(), strict=True)), **changed}
        with pytest.raises(LaunchError, match=says):
            rope(**args)

    q, k, cos, sin = some()
    refused(r"q is \(12, 8\); pass a tensor of shape \(tokens, heads, head_dim\)", q=q.view(12, 8))
    refused("k is a NoneType; pass a tensor", k=None)
    refused("q is float64", q=q.double())
    refused("k is float16; pass bfloat16", k=k.half())
    refused(r"k has shape \(2, 2, 8\); q asks for \(3, 2, 8\)", k=k[:2])
    refused(r"cos is \(12,\); pass a tensor of shape \(tokens, rotary_dim/2\)", cos=cos.view(-1))
    refused(
        "cos has 8 columns; pass one for each pair.* at most 4 for the head_dim of q, 8",
        cos=cos.repeat(1, 2),
    )
    refused("cos has 0 columns", cos=cos[:, :0], sin=sin[:, :0])
    refused(r"cos has shape \(2, 4\); q of 3 tokens and cos of 4 columns asks for \(3, 4\)", cos=cos[:2])
    refused(r"sin has shape \(3, 2\).*asks for \(3, 4\)", sin=sin[:, :2])
    refused("sin is bfloat16; pass float32", sin=sin.bfloat16())
    refused("q has 0 heads", q=q[:, :0])
    refused(r"q has 32768 heads; pass 1 to 32767, q\[:, first:last\]", q=q[:, :1].expand(-1, 32768, -1))
    refused("q and k share memory", q=q, k=q)
    refused("cos is on meta, not on cpu", cos=cos.to("meta"))
    refused("interleaved is 'no'; pass True or False", interleaved="no")
    assert launched == []


def test_any_number_of_pairs_is_rotated(launched: list[tuple[Any, ...]]) -> None:
    q, k, cos, sin = some()
    rope(q, k, cos[:, :3], sin[:, :3])
    assert launched.pop()[2].shape == (3, 3)


# Through the real compiler ----------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("name", ["sm80", "sm90", "sm100", "sm120"])
@pytest.mark.parametrize(
    ("rotary_dim", "interleaved"), [(128, True), (64, True), (64, False), (96, False), (24, True)]
)
def test_the_default_compiles_and_spills_nothing_in_each_layout(
    rotary_dim: int, interleaved: bool, name: str
) -> None:
    arch, one = Arch.parse(name), shape(64, 32, 8, 128, rotary_dim=rotary_dim, interleaved=interleaved)
    found = compiled(rope_tunable, arch, one, rope_tunable.default_config(arch, one))
    assert found.stack_bytes == 0


@pytest.mark.process
@pytest.mark.parametrize("name", SM90_AND_SLOW_ARCHS)
def test_rope_compiles_and_its_default_spills_for_no_declared_model(name: str) -> None:
    arch = Arch.parse(name)
    for one in rope_tunable.typical_problems:
        if one["tokens"] == 1024:
            assert (
                compiled(rope_tunable, arch, one, rope_tunable.default_config(arch, one)).stack_bytes == 0
            ), one


@pytest.mark.slow
@pytest.mark.process
def test_rope_compiles_across_its_space() -> None:
    arch, one = Arch.parse("sm90"), rope_tunable.typical_problems[0].replaced(dtype="float16", tokens=64)
    for config in rope_tunable.space(arch, one):
        assert compiled(rope_tunable, arch, one, config).stack_bytes == 0, config
