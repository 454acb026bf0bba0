"""gated_activation on a real GPU: right over dtypes, sizes, views and its space."""

from __future__ import annotations

import pytest
import torch

from aot_tune.kernels import activations
from aot_tune.kernels.elementwise.gated_activation import (
    ACTIVATIONS,
    gated_activation,
    gated_activation_tunable,
)
from tests.support.agree import problem
from tests.support.kernels_on_gpu import DTYPES, check, normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("defaults_only", "memory_given_back")]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
@pytest.mark.parametrize(
    ("rows", "cols"),
    [(1, 1), (1, 14336), (3, 5), (100, 128), (999, 1000), (17, 2624), (304, 2624), (300, 25600), (5000, 768)],
)
def test_it_agrees_with_the_reference(rows: int, cols: int, dtype: str, activation: str) -> None:
    check(gated_activation_tunable, problem(dtype=dtype, activation=activation, rows=rows, cols=cols))


@pytest.mark.parametrize(("rows", "cols"), [(1000, 14336), (3, 768), (1000, 768), (777, 1000), (100, 2624)])
def test_it_agrees_across_its_space(rows: int, cols: int) -> None:
    one = problem(dtype="bfloat16", activation="silu", rows=rows, cols=cols)
    check(gated_activation_tunable, one, every=1)


@pytest.mark.parametrize(("rows", "cols"), [(1, 14336), (64, 14336), (64, 768), (3, 25600), (16, 2624)])
def test_it_agrees_across_its_space_of_small_tiles(rows: int, cols: int) -> None:
    for dtype in ("bfloat16", "float32"):
        one = problem(dtype=dtype, activation="gelu", rows=rows, cols=cols)
        check(gated_activation_tunable, one, every=1)


@pytest.mark.parametrize(
    ("rows", "cols"),
    [(65535, 1024), (65536, 1024), (140_001, 1024), (1, 65535 * 64 + 64), (3, 65535 * 128 + 5)],
)
def test_it_is_right_where_a_dimension_of_the_grid_is_full_and_beyond(rows: int, cols: int) -> None:
    x = torch.randn((rows, 2 * cols), device="cuda", dtype=torch.bfloat16)
    wanted = activations.reference(x[:, :cols], "silu") * x[:, cols:]
    torch.testing.assert_close(gated_activation(x).double(), wanted, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_errors_are_as_small_as_said_on_the_gpu_too(activation: str) -> None:
    gate = torch.linspace(-40, 40, 2**20, device="cuda").view(1024, 1024)
    found = gated_activation(torch.cat((gate, torch.ones_like(gate)), dim=1), activation=activation).double()
    exact = activations.reference(gate, activation)
    allowed = torch.where(exact.abs() > 1e-6, 5e-6 * exact.abs(), 1e-11)
    assert bool(((found - exact).abs() <= allowed).all())


def test_huge_gates_overflow_to_what_they_should_be() -> None:
    gate = torch.tensor([-3e38, -1e30, -200.0, -0.0, 0.0, 200.0, 1e30, torch.inf, torch.nan], device="cuda")
    for activation in ACTIVATIONS:
        found = gated_activation(torch.cat((gate, torch.ones_like(gate))), activation=activation)
        exact = activations.reference(gate, activation)
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-11, equal_nan=True)


def test_it_takes_any_rank_rows_of_a_wider_tensor_and_strides() -> None:
    for x in (
        normal(512),
        normal(2, 3, 512),
        normal(7, 1024)[:, 256:768],
        normal(7, 600)[:, 5:517],
        normal(512, 9).t(),
        normal(9, 512)[::3],
    ):
        gate, up = x.double().chunk(2, dim=-1)
        wanted = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(gated_activation(x).double(), wanted, rtol=1e-2, atol=1e-6)


def test_it_writes_into_a_part_of_a_wider_tensor_and_nothing_beside_it() -> None:
    x, wide = normal(100, 600), torch.full((100, 700), torch.nan, device="cuda", dtype=torch.bfloat16)
    out = gated_activation(x, out=wide[:, 200:500])
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(out.double(), torch.nn.functional.silu(gate) * up, rtol=1e-2, atol=1e-6)
    assert bool(wide[:, :200].isnan().all())
    assert bool(wide[:, 500:].isnan().all())


def test_of_nothing_it_is_empty() -> None:
    assert gated_activation(normal(0, 8)).shape == (0, 4)
    assert gated_activation(normal(3, 0)).shape == (3, 0)


def test_it_is_right_beyond_2_to_the_31_elements() -> None:
    rows, cols = 2**31 // 14336 + 100, 14336  # out alone has more: 4.3 GB, and 8.6 GB of x
    x = normal(rows, 2 * cols)
    out = gated_activation(x)
    for part in (slice(0, 50), slice(rows - 150, rows)):
        gate, up = x[part].double().chunk(2, dim=1)
        wanted = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(out[part].double(), wanted, rtol=1e-2, atol=1e-6)
