"""What a node must have as the driver has it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import aot_tune
from aot_tune.declare.declaration import Close
from aot_tune.tuner.ray import identity
from aot_tune.tuner.ray.identity import described, differences
from tests.support.samples import MODULE, scale

KERNELS = [(MODULE, "scale")]


def test_a_node_with_the_same_agrees() -> None:
    assert differences(described(KERNELS), described(KERNELS)) == ""


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"grid_fn": lambda config, device, problem: (1, 1)}, "the source of scale is "),
        (
            {"reference": lambda source, target: Close(value=source * 2, rtol=0.5, atol=0.5)},
            "the check of scale is ",
        ),
    ],
)
def test_a_node_with_another_declaration_is_told_from_the_driver(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], named: str
) -> None:
    here = described(KERNELS)
    monkeypatch.setattr(identity, "load", lambda module, name: dataclasses.replace(scale, **changed))
    assert differences(here, described(KERNELS)).startswith(named)


def test_a_node_with_another_release_or_compiler_is_told_from_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = described(KERNELS)
    monkeypatch.setattr(aot_tune, "__version__", "0.0.1")
    monkeypatch.setattr(identity, "_source", lambda: "0" * 16)
    monkeypatch.setattr(identity.cutile, "compiler_version", lambda: None)
    said = differences(here, described(KERNELS))
    assert "aot_tune is 0.0.1 there and " in said
    assert "the source of aot_tune is 0000000000000000 there" in said
    assert "tileiras is not installed there" in said


def test_a_node_without_the_kernels_says_what_it_lacks() -> None:
    there = described([("no.such.module", "scale")])
    said = differences(described(KERNELS), there)
    assert "the source of scale is not available (" in said
    assert "no.such.module" in said


def test_code_that_cannot_be_hashed_refuses_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "unhashable", lambda tunable: ("its grid_fn is compiled",))
    assert differences(described(KERNELS), described(KERNELS)) == ""
