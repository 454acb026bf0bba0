"""The activation functions without a GPU: as accurate as they say, also of huge values and NaN."""

from __future__ import annotations

import pytest
import torch

from aot_tune.errors import LaunchError
from aot_tune.kernels import activations
from tests.support import emulator

EACH = tuple(activations.NUMBERS)


def applied(x: torch.Tensor, activation: str, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.setattr(activations, "ct", emulator._tile_functions((0, 0, 0), (1, 1, 1)))
    result: torch.Tensor = activations.apply(emulator.Tile(x), activations.NUMBERS[activation]).values
    return result


@pytest.mark.parametrize("activation", EACH)
def test_errors_are_as_small_as_said(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(-40, 40, 2**20)
    found, exact = applied(x, activation, monkeypatch).double(), activations.reference(x, activation)
    allowed = torch.where(exact.abs() > 1e-6, 5e-6 * exact.abs(), 1e-11)
    assert bool(((found - exact).abs() <= allowed).all())


@pytest.mark.parametrize("activation", EACH)
def test_huge_values_infinity_and_nan_come_out_as_from_torch(
    activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.tensor([0.0, 88.0, -88.0, 200.0, -200.0, 1e30, torch.inf, torch.nan])
    found, exact = applied(x, activation, monkeypatch), activations.reference(x, activation)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-11, equal_nan=True)


def test_the_two_forms_of_gelu_are_apart() -> None:
    x = torch.tensor([-3.0])
    forms = [float(activations.reference(x, name)) for name in ("gelu", "gelu_tanh")]
    assert forms == pytest.approx([-0.00404969, -0.00363739], rel=1e-5)


def test_an_unknown_activation_is_refused_with_the_known_ones() -> None:
    activations.check_activation("kernel", "silu", "silu", "gelu")
    with pytest.raises(LaunchError, match="kernel: activation is 'swish'; pass 'silu' or 'gelu'"):
        activations.check_activation("kernel", "swish", "silu", "gelu")


def test_a_name_s_number_is_its_place() -> None:
    assert [activations.NUMBERS[name] for name in activations.NAMES] == list(range(len(EACH)))
