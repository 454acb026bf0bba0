"""The shipped kernels on a real GPU: right over dtypes, ragged sizes, size 1, views and kinds of config."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aot_tune import environment
from aot_tune.kernels import rms_norm, rms_norm_tunable, rope, rope_tunable
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.problem import Problem
from tests.support.agree import assert_agrees, expected, poison, problem

pytestmark = pytest.mark.gpu

DTYPES = ("bfloat16", "float16")


@pytest.fixture(autouse=True)
def _defaults_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a table says, and what a miss would search, is not what is tested here.
    monkeypatch.setenv(environment.CONFIG, "default")
    monkeypatch.setenv(environment.DISABLE, "1")


@pytest.fixture(autouse=True)
def _memory_given_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def here() -> Arch:
    return Arch(*torch.cuda.get_device_capability())


def check(tunable: Tunable, one: Problem, *, every: int = 0) -> None:
    """Compare the default, and each `every`-th candidate, with the reference."""
    args = tunable.make_args(one, torch.device("cuda"), 1)
    wanted = expected(tunable, args)
    candidates = tunable.candidates(here(), one)
    chosen = [tunable.default_config(here(), one), *(candidates[::every] if every else ())]
    before = {
        name: arg.clone()
        for name, arg in zip(tunable.parameters, args, strict=True)
        if name in tunable.inplace
    }
    for config in dict.fromkeys(chosen):
        poison(tunable, args)
        for name, arg in zip(tunable.parameters, args, strict=True):
            if name in before:
                arg.copy_(before[name])
        tunable.launch(*args, config=config)
        torch.cuda.synchronize()
        assert_agrees(tunable, args, wanted, f"{one} with {config}")


def check_shared_sums(tunable: Tunable, one: Problem) -> None:
    """Compare every candidate whose blocks share sums with the reference, many times, on one scratch."""
    args = tunable.make_args(one, torch.device("cuda"), 1)
    wanted = expected(tunable, args)
    out, scratch = (args[tunable.parameters.index(name)] for name in ("out", "scratch"))
    sharing = [config for config in tunable.candidates(here(), one) if int(config["splits"]) > 1]
    assert sharing
    for config in sharing:
        for _ in range(20):
            out.fill_(torch.nan)
            tunable.launch(*args, config=config)
            assert_agrees(tunable, args, wanted, f"{one} with {config}")
            assert not bool(scratch.any()), "what blocks left is not zero again"


def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(sizes, device="cuda", dtype=dtype)


# rms_norm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
@pytest.mark.parametrize(
    ("rows", "cols"),
    [(1, 1), (1, 4096), (3, 5), (100, 128), (128, 128), (999, 1000), (17, 2880), (300, 7168), (5, 32768)],
)
def test_rms_norm_agrees_with_the_reference(rows: int, cols: int, dtype: str) -> None:
    check(rms_norm_tunable, problem(dtype=dtype, rows=rows, cols=cols))


@pytest.mark.parametrize("cols", [100, 128, 2880, 5120, 8192])
def test_rms_norm_agrees_across_its_space(cols: int) -> None:
    for rows in (1000, 1008):
        check(rms_norm_tunable, problem(dtype="bfloat16", rows=rows, cols=cols), every=1)


def test_rms_norm_takes_any_rank_and_rows_of_a_wider_tensor() -> None:
    weight = normal(256)
    for x in (normal(256), normal(2, 3, 256), normal(7, 512)[:, 128:384], normal(7, 300)[:, 5:261]):
        wanted = torch.nn.functional.rms_norm(x.double(), (256,), weight.double(), 1e-6)
        torch.testing.assert_close(rms_norm(x, weight).double(), wanted, rtol=1e-2, atol=1e-2)


def test_rms_norm_is_right_beyond_2_to_the_31_elements() -> None:
    rows, cols = 2**31 // 8192 + 100, 8192  # 4.3 GB
    x, weight = normal(rows, cols), normal(cols)
    out = rms_norm(x, weight)
    for part in (slice(0, 100), slice(rows - 200, rows)):
        wanted = torch.nn.functional.rms_norm(x[part].double(), (cols,), weight.double(), 1e-6)
        torch.testing.assert_close(out[part].double(), wanted, rtol=1e-2, atol=1e-2)


# rope -------------------------------------------------------------------------------------------


def rotation(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: str = "bfloat16", *,
    rotary_dim: int = 0, interleaved: bool = False,
) -> Problem:  # fmt: skip
    return problem(
        dtype=dtype, interleaved=interleaved, tokens=tokens, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, rotary_dim=rotary_dim or head_dim,
    )  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 2), (1, 32, 8, 128), (5, 40, 8, 128), (33, 64, 8, 64), (7, 3, 1, 16), (1000, 128, 128, 64)],
)
def test_rope_agrees_with_the_reference(
    sizes: tuple[int, int, int, int], dtype: str, interleaved: bool
) -> None:
    check(rope_tunable, rotation(*sizes, dtype, interleaved=interleaved))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(256, 64), (80, 32), (3, 2)])
def test_rope_rotates_a_part_of_each_head(head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    check(rope_tunable, rotation(50, 16, 2, head_dim, rotary_dim=rotary_dim, interleaved=interleaved))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(64, 8, 128), (40, 8, 128), (28, 4, 64), (71, 1, 64)])
def test_rope_agrees_across_its_space(heads: int, kv_heads: int, dim: int, interleaved: bool) -> None:
    check(rope_tunable, rotation(777, heads, kv_heads, dim, interleaved=interleaved), every=1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_rotates_views_into_a_fused_projection_and_nothing_beside_them(interleaved: bool) -> None:
    tokens, heads, kv_heads, dim = 50, 32, 8, 128
    fused = normal(tokens, (heads + 2 * kv_heads) * dim)
    before = fused.clone()
    q = fused[:, : heads * dim].view(tokens, heads, dim)
    k = fused[:, heads * dim : (heads + kv_heads) * dim].view(tokens, kv_heads, dim)
    _, _, cos, sin, _ = rope_tunable.make_args(
        rotation(tokens, heads, kv_heads, dim), torch.device("cuda"), 0
    )
    wanted = expected(rope_tunable, (q, k, cos, sin, interleaved))
    rope(q, k, cos, sin, interleaved=interleaved)
    assert_agrees(rope_tunable, (q, k, cos, sin, interleaved), wanted)
    assert torch.equal(fused[:, (heads + kv_heads) * dim :], before[:, (heads + kv_heads) * dim :])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_is_right_beyond_2_to_the_31_elements(interleaved: bool) -> None:
    tokens, heads, dim = 2**31 // 8192 + 100, 64, 128  # 4.3 GB
    q, k = normal(tokens, heads, dim), normal(tokens, 1, dim)
    angles = torch.rand((tokens, dim // 2), device="cuda") * 6.28
    cos, sin = angles.cos(), angles.sin()
    last = slice(tokens - 150, tokens)
    at_the_end = (q[last], k[last], cos[last], sin[last], interleaved)
    wanted = expected(rope_tunable, at_the_end)
    rope(q, k, cos, sin, interleaved=interleaved)
    assert_agrees(rope_tunable, at_the_end, wanted)
