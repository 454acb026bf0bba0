"""aot_tune.declare.reference: a plain tensor is compared by its argument's dtype."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from aot_tune.declare.comparison import compare
from aot_tune.declare.declaration import Close
from aot_tune.declare.reference import TOLERANCES, closes_of
from aot_tune.errors import DeclarationError
from tests.support.samples import scale


def _closes(value: object, target: torch.Tensor) -> Close:
    return closes_of(scale, value, {"source": target, "target": target})["target"]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_plain_tensor_accepts_what_its_dtype_rounds_and_no_more(dtype: str) -> None:
    exact = torch.linspace(-3, 3, 1001, dtype=torch.float64)
    rounded = exact.to(getattr(torch, dtype))
    close = _closes(exact, rounded)
    assert compare("target", rounded, close) is None
    assert compare("target", exact, close) is None
    off = exact.clone()
    off[1000] *= 1 + 4 * close.rtol
    assert "1 of 1001 elements are wrong" in str(compare("target", off, close))


def test_elements_that_cancel_out_are_measured_by_the_others() -> None:
    value = torch.tensor([0.0, 100.0, -100.0])
    close = _closes(value, value.bfloat16())
    assert compare("target", torch.tensor([0.5, 100.0, -100.0]).bfloat16(), close) is None
    assert compare("target", torch.tensor([5.0, 100.0, -100.0]).bfloat16(), close) is not None


def test_integers_must_be_equal() -> None:
    value = torch.tensor([1, 2, 3])
    assert (_closes(value, value).rtol, _closes(value, value).atol) == (0.0, 0.0)


def test_a_plain_tensor_that_is_not_finite_needs_tolerances() -> None:
    value = torch.tensor([1.0, float("inf")])
    with pytest.raises(
        DeclarationError, match=r"reference gives target values that are not finite.*write Close"
    ):
        _closes(value, value)
    written = Close(value=value, rtol=0, atol=0)
    assert _closes(written, value) is written


def test_a_plain_tensor_for_several_arguments_is_refused() -> None:
    both = dataclasses.replace(scale, outputs=("source", "target"))
    with pytest.raises(
        DeclarationError, match=r"returns one Tensor and 2 arguments are mutated .*source, target"
    ):
        closes_of(both, torch.ones(2), {})


def test_a_list_has_one_value_for_each_member() -> None:
    members = [torch.ones(2), torch.ones(3)]
    found = closes_of(scale, [one.double() for one in members], {"source": members, "target": members})
    assert list(found) == ["target[0]", "target[1]"]


def test_an_absent_argument_has_no_value() -> None:
    both = dataclasses.replace(scale, outputs=("source", "target"))
    named = {"source": None, "target": torch.ones(2)}
    for value in (torch.ones(2), {"target": torch.ones(2)}, {"target": torch.ones(2), "source": None}):
        assert list(closes_of(both, value, named)) == ["target"]
    with pytest.raises(DeclarationError, match=r"a dict of source; return .*one for each of target"):
        closes_of(both, {"source": torch.ones(2)}, named)
