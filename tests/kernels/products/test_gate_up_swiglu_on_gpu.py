"""gate_up_swiglu on a real GPU: right over dtypes, ragged sizes, size 1, views and kinds of config."""

from __future__ import annotations

import pytest
import torch

from aot_tune.kernels.products.gate_up_swiglu import gate_up_swiglu, gate_up_swiglu_tunable
from tests.support.agree import problem
from tests.support.kernels_on_gpu import check, normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("defaults_only")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("tokens", "n", "k"),
    [(1, 1, 1), (1, 14336, 4096), (129, 257, 513), (64, 1, 64), (700, 2880, 2880)],
)  # fmt: skip
def test_it_agrees_with_the_reference(tokens: int, n: int, k: int, dtype: str) -> None:
    check(gate_up_swiglu_tunable, problem(dtype=dtype, tokens=tokens, N=n, K=k))


@pytest.mark.parametrize("tokens", [16, 3000])
def test_it_agrees_in_every_config(tokens: int) -> None:
    check(gate_up_swiglu_tunable, problem(dtype="bfloat16", tokens=tokens, N=1000, K=1032), every=1)


def layer(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> None:
    result = gate_up_swiglu(x, weight, out=out)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=1)
    wanted = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(result.double(), wanted, rtol=2e-2, atol=2e-2)


def test_it_takes_transposed_sliced_and_unaligned_views() -> None:
    k = 512
    x, weight = normal(300, k), normal(528, k) * k**-0.5
    layer(x, (normal(k, 528) * k**-0.5).t())
    layer(normal(k, 300).t(), weight)
    layer(normal(300, k + 1)[:, 1:], weight)
    layer(x, normal(528, k + 3)[:, 3:] * k**-0.5)
    layer(x[::3], weight[::2])
    layer(x, normal(530, k)[:530] * k**-0.5)
    wide = torch.full((300, 528), torch.nan, device="cuda", dtype=torch.bfloat16)
    layer(x, weight, out=wide[:, 264:])
    assert bool(wide[:, :264].isnan().all()), "written outside of out"


def test_large_gates_saturate_and_do_not_become_nan() -> None:
    x = torch.tensor([[200.0], [-200.0]], device="cuda", dtype=torch.bfloat16)
    weight = torch.ones((2, 1), device="cuda", dtype=torch.bfloat16)
    assert gate_up_swiglu(x, weight).tolist() == [[40000.0 // 256 * 256], [0.0]]


def test_it_writes_more_than_2_to_the_31_elements() -> None:
    tokens, n, k = 66000, 32768, 64  # 4.3 GB
    x, weight = normal(tokens, k), normal(2 * n, k) * k**-0.5
    out = gate_up_swiglu(x, weight)
    for rows in (slice(0, 300), slice(tokens - 300, tokens)):
        gate, up = (x[rows].double() @ weight.double().t()).chunk(2, dim=1)
        wanted = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(out[rows].double(), wanted, rtol=2e-2, atol=2e-2)
