"""The shipped kernels on a real GPU: right over dtypes, ragged sizes, size 1, views and kinds of config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aot_tune import environment
from aot_tune.arch import Arch
from aot_tune.kernels import matmul, matmul_tunable, rms_norm, rms_norm_tunable, rope, rope_tunable
from aot_tune.problem import Problem
from aot_tune.tunable import Tunable
from tests.kernels.agree import assert_agrees, expected, poison, problem

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


# matmul -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (1, 4096, 4096), (16, 256, 64), (200, 300, 400), (129, 257, 513), (64, 1, 64),
     (700, 2880, 2880), (4096, 6144, 4096), (33, 97, 4100)],
)  # fmt: skip
def test_matmul_agrees_with_the_reference(m: int, n: int, k: int, dtype: str) -> None:
    check(matmul_tunable, problem(dtype=dtype, M=m, N=n, K=k))


@pytest.mark.parametrize("m", [8, 100, 3000])
def test_matmul_agrees_in_configs_across_its_space(m: int) -> None:
    check(matmul_tunable, problem(dtype="bfloat16", M=m, N=1000, K=1032), every=3)


def product(a: torch.Tensor, b: torch.Tensor, **more: Any) -> torch.Tensor:
    result = matmul(a, b, **more)
    torch.testing.assert_close(result.double(), a.double() @ b.double(), rtol=2e-2, atol=2e-2)
    return result


def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(sizes, device="cuda", dtype=dtype)


def test_matmul_takes_transposed_sliced_and_unaligned_views() -> None:
    k = 512
    a, b = normal(300, k), normal(k, 264) * k**-0.5
    product(a, (normal(264, k) * k**-0.5).t())
    product(normal(k, 300).t(), b)
    product(normal(300, 2 * k)[:, :k], b)
    product(normal(300, k + 1)[:, 1:], b)
    product(a, normal(k, 400)[:, 3:267] * k**-0.5)
    product(a[::3], b)
    wide = torch.full((300, 528), torch.nan, device="cuda", dtype=torch.bfloat16)
    product(a, b, out=wide[:, 264:])
    assert bool(wide[:, :264].isnan().all()), "written outside of out"


def test_matmul_of_nothing_is_empty_or_zero() -> None:
    assert matmul(normal(0, 8), normal(8, 4)).shape == (0, 4)
    assert bool((matmul(normal(3, 0), normal(0, 4)) == 0).all())


def test_matmul_writes_a_product_of_more_than_2_to_the_31_elements() -> None:
    m, n, k = 66000, 32768, 64  # 4.3 GB
    a, b = normal(m, k), normal(k, n) * k**-0.5
    out = matmul(a, b)
    for rows in (slice(0, 300), slice(m - 300, m)):
        torch.testing.assert_close(out[rows].double(), a[rows].double() @ b.double(), rtol=2e-2, atol=2e-2)


# rms_norm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
@pytest.mark.parametrize(
    ("rows", "cols"),
    [(1, 1), (1, 4096), (3, 5), (100, 128), (999, 1000), (17, 2880), (300, 7168), (5, 32768)],
)
def test_rms_norm_agrees_with_the_reference(rows: int, cols: int, dtype: str) -> None:
    check(rms_norm_tunable, problem(dtype=dtype, rows=rows, cols=cols))


@pytest.mark.parametrize("cols", [2880, 8192])
def test_rms_norm_agrees_at_every_occupancy(cols: int) -> None:
    check(rms_norm_tunable, problem(dtype="bfloat16", rows=1000, cols=cols), every=1)


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


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 2), (1, 32, 8, 128), (5, 40, 8, 128), (33, 64, 8, 64), (7, 3, 1, 16), (1000, 128, 128, 64)],
)
def test_rope_agrees_with_the_reference(sizes: tuple[int, int, int, int], dtype: str) -> None:
    tokens, heads, kv_heads, head_dim = sizes
    check(
        rope_tunable, problem(dtype=dtype, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    )


def test_rope_agrees_at_every_occupancy() -> None:
    one = problem(dtype="bfloat16", tokens=777, heads=64, kv_heads=8, head_dim=128)
    check(rope_tunable, one, every=1)


def test_rope_rotates_views_into_a_fused_projection_and_nothing_beside_them() -> None:
    tokens, heads, kv_heads, dim = 50, 32, 8, 128
    fused = normal(tokens, (heads + 2 * kv_heads) * dim)
    before = fused.clone()
    q = fused[:, : heads * dim].view(tokens, heads, dim)
    k = fused[:, heads * dim : (heads + kv_heads) * dim].view(tokens, kv_heads, dim)
    one = problem(dtype="bfloat16", tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=dim)
    _, _, cos, sin = rope_tunable.make_args(one, torch.device("cuda"), 0)
    wanted = expected(rope_tunable, (q, k, cos, sin))
    rope(q, k, cos, sin)
    assert_agrees(rope_tunable, (q, k, cos, sin), wanted)
    assert torch.equal(fused[:, (heads + kv_heads) * dim :], before[:, (heads + kv_heads) * dim :])


def test_rope_is_right_beyond_2_to_the_31_elements() -> None:
    tokens, heads, dim = 2**31 // 8192 + 100, 64, 128  # 4.3 GB
    q, k = normal(tokens, heads, dim), normal(tokens, 1, dim)
    angles = torch.rand((tokens, dim // 2), device="cuda") * 6.28
    cos, sin = angles.cos(), angles.sin()
    last = slice(tokens - 150, tokens)
    wanted = expected(rope_tunable, (q[last], k[last], cos[last], sin[last]))
    rope(q, k, cos, sin)
    assert_agrees(rope_tunable, (q[last], k[last], cos[last], sin[last]), wanted)
