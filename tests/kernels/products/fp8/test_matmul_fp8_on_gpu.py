"""matmul_fp8 on a real GPU: right over scales, ragged sizes, size 1, views and kinds of config."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aot_tune.kernels.products.fp8.matmul_fp8 import matmul_fp8, matmul_fp8_tunable
from aot_tune.kernels.products.fp8.matmul_fp8_block import matmul_fp8_block_tunable
from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from tests.support.agree import problem
from tests.support.kernels_on_gpu import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("defaults_only", "memory_given_back"),
    pytest.mark.skipif(
        any(gpu.arch is not None and gpu.arch < Arch(9, 0) for gpu in visible_gpus() or ()),
        reason="cuTile has fp8 from sm90 on",
    ),
]


BOTH = pytest.mark.parametrize(
    "tunable", [matmul_fp8_tunable, matmul_fp8_block_tunable], ids=lambda t: t.name
)


@BOTH
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (1, 4096, 4096), (16, 256, 64), (200, 300, 400), (129, 257, 513), (64, 1, 64), (33, 97, 4100),
     (320, 32576, 7168), (4096, 2112, 7168), (700, 4096, 14336)],
)  # fmt: skip
def test_it_agrees_with_the_reference(tunable: Tunable, m: int, n: int, k: int, dtype: str) -> None:
    check(tunable, problem(dtype=dtype, M=m, N=n, K=k))


@BOTH
@pytest.mark.parametrize("m", [8, 32, 100, 3000])
def test_it_agrees_in_every_config_of_its_space(tunable: Tunable, m: int) -> None:
    check(tunable, problem(dtype="bfloat16", M=m, N=1000, K=1040), every=1)


def tensors(tunable: Tunable, m: int, n: int, k: int) -> tuple[Any, ...]:
    one = problem(dtype="bfloat16", M=m, N=n, K=k)
    return tunable.make_args(one, torch.device("cuda"), 3)[:4]


def product(tunable: Tunable, *args: torch.Tensor, **more: Any) -> torch.Tensor:
    result = matmul_fp8(*args, **more)
    wanted = tunable.reference(*args, result)
    torch.testing.assert_close(result.double(), wanted.value, rtol=wanted.rtol, atol=wanted.atol)  # type: ignore[union-attr]
    return result


@BOTH
def test_it_takes_views_and_writes_nothing_beside_them(tunable: Tunable) -> None:
    a, b, scale_a, scale_b = tensors(tunable, 300, 264, 512)
    product(tunable, a[::3], b, scale_a if scale_a.dim() == 1 else scale_a[::3], scale_b)
    product(tunable, a, b[:, 128:], scale_a, scale_b if scale_b.dim() == 1 else scale_b[1:])
    product(
        tunable, a[:, 128:384], b[128:384], *(s if s.dim() == 1 else s[:, 1:3] for s in (scale_a, scale_b))
    )
    wide = torch.full((300, 528), torch.nan, device="cuda", dtype=torch.float16)
    product(tunable, a, b, scale_a, scale_b, out=wide[:, 264:])
    assert bool(wide[:, :264].isnan().all()), "written outside of out"


@pytest.mark.parametrize("m", [301, 16])
def test_block_scales_may_lie_along_the_tokens_or_along_k(m: int) -> None:
    a, b, scale_a, scale_b = tensors(matmul_fp8_block_tunable, m, 264, 512)
    for along_m in (scale_a, scale_a.t().contiguous().t()):  # padded as the copy engine wants it, or not
        product(matmul_fp8_block_tunable, a, b, along_m, scale_b.t().contiguous().t())
    product(matmul_fp8_block_tunable, a, b, scale_a.contiguous(), scale_b)


def test_a_scale_a_tensor_agrees_with_torch() -> None:
    a, b, scale_a, scale_b = tensors(matmul_fp8_tunable, 512, 1024, 4096)
    rival = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16)
    for shape in ((), (1,), (1, 1)):
        ours = matmul_fp8(a, b, scale_a.view(shape), scale_b.view(shape))
        torch.testing.assert_close(ours.float(), rival.float(), rtol=1e-2, atol=1e-2)


def test_rows_and_columns_outside_of_the_matrices_spoil_nothing() -> None:
    a, b, scale_a, scale_b = tensors(matmul_fp8_block_tunable, 70, 200, 272)
    for tensor in (a, b.t()):
        wide = torch.full((tensor.shape[0] + 64, tensor.shape[1] + 112), torch.nan, device="cuda")
        wide[: tensor.shape[0], : tensor.shape[1]] = tensor.float()
        beside = wide.to(torch.float8_e4m3fn)[: tensor.shape[0], : tensor.shape[1]]
        if tensor is a:
            product(matmul_fp8_block_tunable, beside, b, scale_a, scale_b)
        else:
            product(matmul_fp8_block_tunable, a, beside.t(), scale_a, scale_b)


@BOTH
def test_a_product_of_more_than_2_to_the_31_elements(tunable: Tunable) -> None:
    m, n, k = 66000, 32768, 128  # 4.3 GB
    a, b, scale_a, scale_b = tensors(tunable, m, n, k)
    out = matmul_fp8(a, b, scale_a, scale_b)
    for rows in (slice(0, 300), slice(m - 300, m)):
        scale = scale_a if scale_a.dim() == 1 else scale_a[rows]
        wanted = tunable.reference(a[rows], b, scale, scale_b, out[rows])
        torch.testing.assert_close(out[rows].double(), wanted.value, rtol=wanted.rtol, atol=wanted.atol)  # type: ignore[union-attr]


@BOTH
def test_an_operand_of_more_than_2_to_the_31_elements(tunable: Tunable) -> None:
    m, n, k = 2**31 // 8192 + 100, 128, 8192  # 2.1 GB
    a = torch.zeros((m, k), device="cuda", dtype=torch.float8_e4m3fn)
    some, b, scale_a, scale_b = tensors(tunable, 150, n, k)
    a[-150:].copy_(some)
    per_token = scale_a if scale_a.dim() == 1 else torch.cat([scale_a[:1].expand(m - 150, -1), scale_a])
    last = matmul_fp8(a, b, per_token, scale_b)[-150:]
    wanted = tunable.reference(some, b, scale_a, scale_b, last)
    torch.testing.assert_close(last.double(), wanted.value, rtol=wanted.rtol, atol=wanted.atol)  # type: ignore[union-attr]


@BOTH
def test_it_replays_in_a_graph(tunable: Tunable) -> None:
    args = tensors(tunable, 32, 512, 1024)
    out = product(tunable, *args).clone()
    graph, replayed = torch.cuda.CUDAGraph(), torch.empty_like(out)
    with torch.cuda.graph(graph):
        matmul_fp8(*args, out=replayed)
    graph.replay()
    torch.testing.assert_close(replayed, out, rtol=0, atol=0)
