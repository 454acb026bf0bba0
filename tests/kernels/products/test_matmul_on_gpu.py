"""matmul on a real GPU: right over dtypes, ragged sizes, size 1, views and kinds of config."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aot_tune.bench.kernels.contest import contest
from aot_tune.kernels import matmul, matmul_tunable
from aot_tune.kernels.products import split_k
from aot_tune.kernels.products.dense_space import config_of
from aot_tune.tuner.measure.worker.clock import EventRound
from tests.support.agree import problem
from tests.support.kernels_on_gpu import DTYPES, check, check_shared_sums, normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("defaults_only")]


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


@pytest.mark.parametrize("m", [133, 149, 213])
def test_a_last_tile_of_few_rows_takes_no_longer_than_a_full_one(m: int) -> None:
    chosen = config_of(64, 128, 0, 64, 0, 8, num_ctas=1, occupancy=1, warps=4)
    whole, weight = normal(256, 14336), normal(4096, 14336).t()
    outs = {rows: torch.empty(rows, 4096, device="cuda", dtype=torch.bfloat16) for rows in (m, 256)}

    def product_of(rows: int) -> None:
        factor = whole[:rows]
        matmul_tunable.launch(factor, weight, outs[rows], split_k.scratch(factor, 4096), config=chosen)

    product_of(m)
    product_of(256)
    times = contest({"few": lambda: product_of(m), "full": lambda: product_of(256)}, EventRound())
    assert torch.equal(outs[m], outs[256][:m])
    assert times["few"] < 1.15 * times["full"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 4096, 14336), (40, 1000, 12296), (256, 5120, 25600), (885, 6144, 4096), (1100, 5120, 4096)],
)
def test_blocks_that_share_a_sum_agree_again_and_again(m: int, n: int, k: int, dtype: str) -> None:
    check_shared_sums(matmul_tunable, problem(dtype=dtype, M=m, N=n, K=k))


def product(a: torch.Tensor, b: torch.Tensor, **more: Any) -> torch.Tensor:
    result = matmul(a, b, **more)
    torch.testing.assert_close(result.double(), a.double() @ b.double(), rtol=2e-2, atol=2e-2)
    return result


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


def test_factors_that_are_launched_as_they_lie_agree_too() -> None:
    a, b, out = normal(129, 513), normal(513, 257) * 513**-0.5, normal(129, 257)
    matmul_tunable.launch(a, b, out, split_k.scratch(a, 257))
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=2e-2, atol=2e-2)


def test_matmul_of_nothing_is_empty_or_zero() -> None:
    assert matmul(normal(0, 8), normal(8, 4)).shape == (0, 4)
    assert bool((matmul(normal(3, 0), normal(0, 4)) == 0).all())


def test_matmul_writes_a_product_of_more_than_2_to_the_31_elements() -> None:
    m, n, k = 66000, 32768, 64  # 4.3 GB
    a, b = normal(m, k), normal(k, n) * k**-0.5
    out = matmul(a, b)
    for rows in (slice(0, 300), slice(m - 300, m)):
        torch.testing.assert_close(out[rows].double(), a[rows].double() @ b.double(), rtol=2e-2, atol=2e-2)
