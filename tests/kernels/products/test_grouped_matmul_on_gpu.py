"""grouped_matmul on a real GPU: right over dtypes, uneven and empty experts, ragged sizes, views, configs."""

from __future__ import annotations

import pytest
import torch

from aot_tune.kernels.products.grouped_matmul import grouped_matmul, grouped_matmul_tunable
from tests.support.agree import problem
from tests.support.kernels_on_gpu import check, normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("defaults_only")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("tokens", "experts", "n", "k"),
    [(1, 1, 1, 1), (8, 128, 2048, 768), (33, 4, 97, 65), (700, 7, 264, 520), (5000, 8, 1000, 1032)],
)  # fmt: skip
def test_it_agrees_with_the_reference(tokens: int, experts: int, n: int, k: int, dtype: str) -> None:
    check(grouped_matmul_tunable, problem(dtype=dtype, tokens=tokens, experts=experts, N=n, K=k))


@pytest.mark.parametrize(("tokens", "every"), [(20, 3), (3000, 2)])
def test_it_agrees_across_its_configs(tokens: int, every: int) -> None:
    one = problem(dtype="bfloat16", tokens=tokens, experts=9, N=1000, K=1032)
    check(grouped_matmul_tunable, one, every=every)


def product(a: torch.Tensor, b: torch.Tensor, ends: list[int], out: torch.Tensor | None = None) -> None:
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    result = grouped_matmul(a, b, offsets, out=out)
    start = 0
    for expert, stop in enumerate(ends):
        wanted = a[start:stop].double() @ b[expert].double()
        torch.testing.assert_close(result[start:stop].double(), wanted, rtol=2e-2, atol=2e-2)
        start = stop


@pytest.mark.parametrize(
    "ends", [[0, 0, 300], [300, 300, 300], [1, 2, 300], [128, 256, 300], [0, 299, 300], [63, 64, 65]]
)
def test_experts_may_have_any_number_of_rows(ends: list[int]) -> None:
    product(normal(ends[-1], 512), normal(3, 512, 264) * 512**-0.5, ends)


def test_it_takes_transposed_sliced_and_unaligned_views() -> None:
    k, ends = 512, [100, 100, 300]
    a, b = normal(300, k), normal(3, k, 264) * k**-0.5
    product(a, (normal(3, 264, k) * k**-0.5).transpose(1, 2), ends)
    product(normal(k, 300).t(), b, ends)
    product(normal(300, 2 * k)[:, :k], b, ends)
    product(normal(300, k + 1)[:, 1:], b, ends)
    product(a, normal(3, k, 400)[:, :, 3:267] * k**-0.5, ends)
    product(a, normal(6, k, 264)[::2] * k**-0.5, ends)
    wide = torch.full((300, 528), torch.nan, device="cuda", dtype=torch.bfloat16)
    product(a, b, ends, out=wide[:, 264:])
    assert bool(wide[:, :264].isnan().all()), "written outside of out"


def test_rows_after_the_last_offset_keep_what_they_hold() -> None:
    out = torch.full((300, 264), 7.0, device="cuda", dtype=torch.bfloat16)
    product(normal(300, 512), normal(3, 512, 264) * 512**-0.5, [10, 10, 131], out=out)
    assert bool((out[131:] == 7).all())


def test_offsets_beyond_the_rows_write_nothing_beyond_them() -> None:
    around = torch.full((400, 264), 7.0, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([100, 50, 10_000], dtype=torch.int32, device="cuda")
    grouped_matmul(normal(300, 512), normal(3, 512, 264), offsets, out=around[:300])
    assert bool((around[300:] == 7).all())


def test_it_writes_a_product_of_more_than_2_to_the_31_elements() -> None:
    tokens, n, k, ends = 66000, 32768, 64, [40000, 40001, 66000]  # 4.3 GB
    a, b = normal(tokens, k), normal(3, k, n) * k**-0.5
    out = grouped_matmul(a, b, torch.tensor(ends, dtype=torch.int32, device="cuda"))
    for rows, expert in ((slice(0, 300), 0), (slice(40000, 40001), 1), (slice(tokens - 300, tokens), 2)):
        wanted = a[rows].double() @ b[expert].double()
        torch.testing.assert_close(out[rows].double(), wanted, rtol=2e-2, atol=2e-2)


def test_it_reads_weights_of_more_than_2_to_the_31_elements() -> None:
    experts, n, k = 80, 4096, 7168  # 4.7 GB
    weights = normal(experts, n, k) * k**-0.5
    product(normal(40, k), weights.transpose(1, 2), [*[0] * 78, 20, 40])
