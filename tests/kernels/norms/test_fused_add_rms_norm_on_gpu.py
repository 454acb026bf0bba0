"""fused_add_rms_norm on a real GPU: right over dtypes, sizes, views and its space."""

from __future__ import annotations

import pytest
import torch

from aot_tune.kernels.norms.fused_add_rms_norm import fused_add_rms_norm, fused_add_rms_norm_tunable
from tests.support.agree import assert_agrees, expected, problem
from tests.support.kernels_on_gpu import DTYPES, check, normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("defaults_only", "memory_given_back")]


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
@pytest.mark.parametrize(
    ("rows", "cols"),
    [
        *((1, 5), (3, 5), (16, 8), (40, 9), (1, 4096), (100, 128), (128, 128), (999, 1000)),
        *((17, 2880), (300, 7168), (5, 32768)),
    ],
)
def test_it_agrees_with_the_reference(rows: int, cols: int, dtype: str) -> None:
    check(fused_add_rms_norm_tunable, problem(dtype=dtype, rows=rows, cols=cols))


@pytest.mark.parametrize("cols", [7, 16, 100, 2880, 4096, 5120, 8192])
def test_it_agrees_across_its_space(cols: int) -> None:
    check(fused_add_rms_norm_tunable, problem(dtype="bfloat16", rows=1000, cols=cols), every=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cols", [1, 2, 3, 4, 5, 8])
def test_rows_of_a_few_columns_are_right_too(cols: int, dtype: torch.dtype) -> None:
    for rows in (1, 3, 1000):
        args = *(normal(rows, cols, dtype=dtype) for _ in range(2)), normal(cols, dtype=dtype), 1e-6
        wanted = expected(fused_add_rms_norm_tunable, args)
        fused_add_rms_norm(*args)
        assert_agrees(fused_add_rms_norm_tunable, args, wanted)


def test_it_takes_any_rank_and_rows_of_a_wider_tensor_and_changes_nothing_beside_them() -> None:
    weight = normal(256)
    wide, odd = normal(7, 512), normal(7, 300)
    before = wide.clone(), odd.clone()
    for x, residual in (
        (normal(256), normal(256)),
        (normal(2, 3, 256), normal(2, 3, 256)),
        (wide[:, 128:384], odd[:, 5:261]),
    ):
        total = x + residual
        wanted = torch.nn.functional.rms_norm(total.double(), (256,), weight.double(), 1e-6)
        fused_add_rms_norm(x, residual, weight)
        assert torch.equal(residual, total)
        torch.testing.assert_close(x.double(), wanted, rtol=1e-2, atol=1e-5)
    assert torch.equal(wide[:, :128], before[0][:, :128])
    assert torch.equal(wide[:, 384:], before[0][:, 384:])
    assert torch.equal(odd[:, :5], before[1][:, :5])
    assert torch.equal(odd[:, 261:], before[1][:, 261:])


def test_of_no_rows_nothing_is_changed() -> None:
    x, residual = normal(0, 8), normal(0, 8)
    assert fused_add_rms_norm(x, residual, normal(8)) == (x, residual)


def test_it_is_right_beyond_2_to_the_31_elements() -> None:
    rows, cols = 2**31 // 8192 + 100, 8192  # 4.3 GB, twice
    x, residual, weight = normal(rows, cols), normal(rows, cols), normal(cols)
    parts = (slice(0, 100), slice(rows - 200, rows))
    of = [(x[part], residual[part], weight, 1e-6) for part in parts]
    wanted = [expected(fused_add_rms_norm_tunable, args) for args in of]
    fused_add_rms_norm(x, residual, weight)
    for args, close in zip(of, wanted, strict=True):
        assert_agrees(fused_add_rms_norm_tunable, args, close)
