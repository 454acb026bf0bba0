"""rms_norm on a real GPU: right over dtypes, ragged sizes, size 1, views and its space."""

from __future__ import annotations

import pytest
import torch

from aot_tune.kernels import rms_norm, rms_norm_tunable
from tests.support.agree import problem
from tests.support.kernels_on_gpu import DTYPES, check, normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("defaults_only", "memory_given_back")]


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
