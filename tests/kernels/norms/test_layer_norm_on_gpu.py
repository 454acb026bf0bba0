"""layer_norm on a real GPU: right over dtypes, ragged sizes, size 1, views and its search space."""

from __future__ import annotations

import pytest
import torch

from aot_tune.kernels.norms.layer_norm import layer_norm, layer_norm_tunable
from tests.support.agree import problem
from tests.support.kernels_on_gpu import check, normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("defaults_only")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("rows", "cols"),
    [(1, 1), (1, 4096), (3, 5), (100, 128), (999, 1000), (17, 2880), (300, 14336), (5, 32768)],
)
def test_layer_norm_agrees_with_the_reference(rows: int, cols: int, bias: bool, dtype: str) -> None:
    check(layer_norm_tunable, problem(dtype=dtype, bias=bias, rows=rows, cols=cols))


@pytest.mark.parametrize("rows", [1001, 1024])
@pytest.mark.parametrize("cols", [100, 768, 1152, 4544, 6144, 14336])
def test_layer_norm_agrees_in_every_config(rows: int, cols: int) -> None:
    check(layer_norm_tunable, problem(dtype="bfloat16", bias=True, rows=rows, cols=cols), every=1)


def test_layer_norm_takes_any_rank_and_rows_of_a_wider_tensor() -> None:
    weight, bias = normal(256), normal(256)
    for x in (normal(256), normal(2, 3, 256), normal(7, 512)[:, 128:384], normal(7, 300)[:, 5:261]):
        wanted = torch.nn.functional.layer_norm(x.double(), (256,), weight.double(), bias.double())
        torch.testing.assert_close(layer_norm(x, weight, bias).double(), wanted, rtol=1e-2, atol=1e-2)
        wide = torch.full((7, 512), torch.nan, device="cuda", dtype=torch.bfloat16)
        if x.dim() == 2:
            layer_norm(x, weight, bias, out=wide[:, :256])
            torch.testing.assert_close(wide[:, :256].double(), wanted, rtol=1e-2, atol=1e-2)
            assert bool(wide[:, 256:].isnan().all()), "written outside of out"


def test_layer_norm_loses_no_digits_to_a_large_mean() -> None:
    x, weight, bias = normal(50, 4544, dtype=torch.float32) + 1000, torch.ones(4544).cuda(), None
    wanted = torch.nn.functional.layer_norm(x.double(), (4544,), weight.double())
    torch.testing.assert_close(layer_norm(x, weight, bias).double(), wanted, rtol=1e-3, atol=1e-3)


def test_layer_norm_is_right_beyond_2_to_the_31_elements() -> None:
    rows, cols = 2**31 // 8192 + 100, 8192  # 4.3 GB
    x, weight, bias = normal(rows, cols), normal(cols), normal(cols)
    out = layer_norm(x, weight, bias)
    for part in (slice(0, 100), slice(rows - 200, rows)):
        wanted = torch.nn.functional.layer_norm(x[part].double(), (cols,), weight.double(), bias.double())
        torch.testing.assert_close(out[part].double(), wanted, rtol=1e-2, atol=1e-2)
    torch.cuda.empty_cache()
