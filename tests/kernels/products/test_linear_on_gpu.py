"""linear on a real GPU: right over dtypes, ragged sizes, views, activations, graphs and kinds of config."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aot_tune.bench.kernels.contest import contest
from aot_tune.kernels import activations
from aot_tune.kernels.products import split_k
from aot_tune.kernels.products.linear import _no_bias, linear, linear_tunable
from aot_tune.tuner.measure.worker.clock import EventRound
from tests.support.agree import problem
from tests.support.kernels_on_gpu import check, check_shared_sums, normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("defaults_only")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 4096, 4096), (129, 257, 513), (2048, 6144, 4096)])
def test_it_agrees_with_the_reference(m: int, n: int, k: int, dtype: str) -> None:
    check(linear_tunable, problem(dtype=dtype, activation="none", M=m, N=n, K=k))


@pytest.mark.parametrize(("dtype", "m"), [("bfloat16", 8), ("float16", 300)])
def test_it_agrees_in_configs_across_its_space(m: int, dtype: str) -> None:
    check(linear_tunable, problem(dtype=dtype, activation="silu", M=m, N=1000, K=1032), every=3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 4096, 14336), (40, 1000, 12296), (256, 5120, 25600), (885, 6144, 4096), (1100, 5120, 4096)],
)
def test_blocks_that_share_a_sum_agree_again_and_again(m: int, n: int, k: int, dtype: str) -> None:
    check_shared_sums(linear_tunable, problem(dtype=dtype, activation="silu", M=m, N=n, K=k))


def layer(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gelu: bool = False,
    **more: Any,
) -> torch.Tensor:
    result = linear(x, weight, bias, activation="gelu" if gelu else None, **more)
    wanted = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if gelu:
        wanted = torch.nn.functional.gelu(wanted)
    torch.testing.assert_close(result.double(), wanted, rtol=2e-2, atol=2e-2)
    return result


@pytest.mark.parametrize("leading", [(), (7,), (2, 3), (0, 4)])
@pytest.mark.parametrize("gelu", [False, True])
def test_it_is_torchs_linear_with_and_without_bias_and_activation(
    leading: tuple[int, ...], gelu: bool
) -> None:
    x, weight = normal(*leading, 264), normal(104, 264) * 264**-0.5
    layer(x, weight, gelu=gelu)
    layer(x, weight, normal(104), gelu=gelu)


def test_it_takes_transposed_sliced_and_unaligned_views() -> None:
    k = 512
    x, weight = normal(300, k), normal(264, k) * k**-0.5
    layer(x, (normal(k, 264) * k**-0.5).t())
    layer(normal(300, 2 * k)[:, :k], weight[::2])
    layer(normal(300, k + 1)[:, 1:], weight, normal(528)[::2])
    wide = torch.full((300, 528), torch.nan, device="cuda", dtype=torch.bfloat16)
    layer(x, weight, out=wide[:, 264:])
    assert bool(wide[:, :264].isnan().all()), "written outside of out"


@pytest.mark.parametrize("k", [256, 257])
def test_a_captured_layer_replays(k: int) -> None:
    x, weight, bias = normal(5, k), normal(512, k) * k**-0.5, normal(512)
    wanted = layer(x, weight, bias, gelu=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x, weight, bias, activation="gelu")
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(("m", "n", "k"), [(2048, 4097, 4097), (2048, 4096, 4100), (64, 4096, 4097)])
def test_odd_sizes_take_less_than_loading_them_by_elements(m: int, n: int, k: int) -> None:
    x, weight, product = normal(m, k), normal(n, k), normal(m, n)
    args = product, _no_bias(x.dtype, x.device), split_k.scratch(x, n), False, activations.NONE
    times = contest(
        {
            "copied": lambda: linear(x, weight, out=product),
            "as they lie": lambda: linear_tunable.launch(x, weight, *args),
        },
        EventRound(),
    )
    assert times["copied"] < 0.6 * times["as they lie"]


def test_it_writes_more_than_2_to_the_31_elements() -> None:
    m, n, k = 66000, 32768, 64  # 4.3 GB
    x, weight = normal(m, k), normal(n, k) * k**-0.5
    out = linear(x, weight)
    for rows in (slice(0, 300), slice(m - 300, m)):
        wanted = x[rows].double() @ weight.double().t()
        torch.testing.assert_close(out[rows].double(), wanted, rtol=2e-2, atol=2e-2)


def test_it_reads_a_weight_of_more_than_2_to_the_31_elements() -> None:
    n, k = 66000, 32768  # 4.3 GB
    x, weight = normal(5, k), normal(n, k).mul_(k**-0.5)
    out = linear(x, weight)
    for rows in (slice(0, 300), slice(n - 300, n)):
        wanted = x.double() @ weight[rows].double().t()
        torch.testing.assert_close(out[:, rows].double(), wanted, rtol=2e-2, atol=2e-2)
