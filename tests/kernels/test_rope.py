"""rope without a GPU: the declaration, the arithmetic, what the host function takes and refuses."""

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
from aot_tune.kernels import rope, rope_tunable
from aot_tune.problem import Problem
from tests.kernels import emulator
from tests.kernels.agree import assert_agrees, expected, problem
from tests.samples import SM90

CPU = torch.device("cpu")
CONFIG = Config(hints={"occupancy": 2})


def shape(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: str = "bfloat16") -> Problem:
    return problem(dtype=dtype, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("arch", KNOWN_ARCHS, ids=str)
def test_the_default_is_a_candidate_of_every_declared_problem(arch: Arch) -> None:
    for one in rope_tunable.typical_problems:
        assert rope_tunable.default_config(arch, one) in rope_tunable.candidates(arch, one), one


def test_the_declared_problems_are_a_sweep_of_minutes() -> None:
    assert len(rope_tunable.typical_problems) <= 120
    assert {p["tokens"] for p in rope_tunable.typical_problems} == {2**i for i in range(15)}


def test_a_token_is_a_block() -> None:
    assert rope_tunable.grid_fn(CONFIG, Device.reference(SM90), shape(100, 32, 8, 128)) == (100,)
    assert rope_tunable.tiles is not None
    assert rope_tunable.tiles(CONFIG, shape(100, 32, 8, 128)) == 100


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 2), (3, 4, 2, 8), (5, 5, 3, 64), (2, 40, 8, 128)])
def test_the_kernel_agrees_with_the_reference(
    sizes: tuple[int, int, int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = rope_tunable.make_args(shape(*sizes, dtype), CPU, 1)
    wanted = expected(rope_tunable, args)
    emulator.run(rope_tunable, args, CONFIG, monkeypatch)
    assert_agrees(rope_tunable, args, wanted)


def test_the_reference_is_a_rotation_in_the_plane_of_each_pair() -> None:
    q, k, cos, sin = rope_tunable.make_args(shape(6, 4, 2, 16, "float32"), CPU, 3)
    for name, x in (("q", q), ("k", k)):
        pairs = torch.complex(*x.double().chunk(2, dim=2))
        turned = pairs * torch.complex(cos.double(), sin.double())[:, None, :]
        wanted = expected(rope_tunable, (q, k, cos, sin))[name].value
        torch.testing.assert_close(wanted, torch.cat((turned.real, turned.imag), dim=2))


def test_the_angles_are_those_of_a_sequence_and_differ_between_seeds() -> None:
    _, _, cos, sin = rope_tunable.make_args(shape(9, 1, 1, 64), CPU, 0)
    positions, pairs = torch.arange(9.0)[:, None], torch.arange(32.0)[None, :]
    angles = positions / 500000 ** (pairs / 32)
    torch.testing.assert_close(cos, angles.cos(), rtol=0, atol=1e-3)
    torch.testing.assert_close(sin, angles.sin(), rtol=0, atol=1e-3)
    assert not torch.equal(cos, rope_tunable.make_args(shape(9, 1, 1, 64), CPU, 1)[2])


def test_a_rotation_the_wrong_way_is_told_from_a_rounding() -> None:
    q, k, cos, sin = args = rope_tunable.make_args(shape(16, 2, 1, 64), CPU, 0)
    wanted, backwards = expected(rope_tunable, args), expected(rope_tunable, (q, k, cos, -sin))
    q.copy_(backwards["q"].value)
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
    module = sys.modules["aot_tune.kernels.rope"]
    monkeypatch.setattr(module, "rope_tunable", SimpleNamespace(launch=lambda *args: calls.append(args)))
    return calls


def some(tokens: int = 3, heads: int = 4, kv_heads: int = 2, head_dim: int = 8) -> list[torch.Tensor]:
    return list(rope_tunable.make_args(shape(tokens, heads, kv_heads, head_dim), CPU, 0))


def test_views_into_a_fused_projection_are_rotated_where_they_are(launched: list[tuple[Any, ...]]) -> None:
    fused = torch.zeros((3, (4 + 2 + 2) * 8), dtype=torch.bfloat16)
    q, k = fused[:, :32].view(3, 4, 8), fused[:, 32:48].view(3, 2, 8)
    _, _, cos, sin = some()
    assert rope(q, k, cos, sin) == (q, k)
    [(passed_q, passed_k, *_)] = launched
    assert passed_q is q
    assert passed_k is k


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
    refused(
        r"cos has shape \(3, 8\); q of 3 tokens and a head_dim of 8 asks for \(3, 4\)", cos=cos.repeat(1, 2)
    )
    refused("sin is bfloat16; pass float32", sin=sin.bfloat16())
    refused("q has a head_dim of 12; it must be twice a power of two", q=torch.zeros(3, 4, 12).bfloat16())
    refused("q has 0 heads of 8", q=q[:, :0])
    refused(r"q has 5000 heads of 8.*1 to 4096 of them", q=q[:, :1].repeat(1, 5000, 1))
    refused("q and k share memory", q=q, k=q)
    refused("cos is on meta, not on cpu", cos=cos.to("meta"))
    assert launched == []
