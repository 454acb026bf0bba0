"""aot_tune.declare.blanks: a declaration with blanks imports and does nothing else."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from aot_tune import blank
from aot_tune.declare.blanks import blank_mistakes, blanks_of
from aot_tune.declare.checks import declaration_problems
from aot_tune.errors import DeclarationError
from aot_tune.tunable import Tunable
from aot_tune.values.bucket import Exact, Pow2
from tests.support.samples import SM90, scale

TYPICAL = [{"dtype": "bfloat16", "M": 64, "N": 1024}]


def begun(**blanks: object) -> Tunable:
    return dataclasses.replace(scale, **{"typical": TYPICAL, **blanks})


def test_each_blank_is_named_and_nothing_else_is_checked() -> None:
    tunable = begun(typical=blank("your problems", TYPICAL), grid_fn=blank("the grid", lambda *_: 1 / 0))
    assert list(blanks_of(tunable)) == [("grid_fn", "the grid"), ("typical", "your problems")]
    assert declaration_problems(tunable, SM90) == [f"scale: {one.text}" for one in blank_mistakes(tunable)]


def test_each_blank_is_a_mistake_that_says_what_to_write() -> None:
    tunable = begun(reference=blank("what out must hold", lambda x, out, *more: x.double()))
    assert [one.text for one in blank_mistakes(tunable)] == [
        "reference is blank: what out must hold; write it in place of blank(...)"
    ]
    assert declaration_problems(tunable, SM90)[0].startswith("scale: reference is blank: what out must hold")


def test_what_is_used_elsewhere_too_is_not_marked_there() -> None:
    axes, outputs = {"M": Pow2(), "N": Exact()}, ("target",)
    marked = begun(
        typical=blank("your problems", TYPICAL), grid_fn=blank("the grid", scale.grid_fn),
        axes=blank("sizes", axes), outputs=blank("what is written", outputs),
    )  # fmt: skip
    assert (marked.axes, marked.outputs, marked.typical) == (axes, outputs, TYPICAL)
    assert [field for field, _ in blanks_of(marked)] == ["axes", "grid_fn", "typical", "outputs"]
    assert list(blanks_of(begun(grid_fn=scale.grid_fn, axes=axes, outputs=outputs))) == []


def test_an_example_is_never_computed_by() -> None:
    def takes(config: object, *, device: object = 1) -> object:
        return config, device

    marked = blank("another", takes)
    assert list(inspect.signature(marked).parameters) == ["config", "device"]
    with pytest.raises(DeclarationError, match="another; write it in place of blank"):
        marked(2)


def test_a_declaration_with_a_blank_is_not_launched() -> None:
    tunable = begun(reference=blank("what out must hold", lambda x, out: x))
    for method in (tunable.launch, tunable.config_for):
        with pytest.raises(DeclarationError, match="scale: reference is blank: what out must hold"):
            method(None, None)
