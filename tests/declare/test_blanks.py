"""aot_tune.declare.blanks: a declaration with blanks imports; each is named until it is filled in."""

from __future__ import annotations

import dataclasses
import inspect

from aot_tune import blank
from aot_tune.declare.blanks import blank_mistakes, blanks_of
from aot_tune.declare.checks import declaration_problems
from aot_tune.tunable import Tunable
from tests.support.samples import SM90, scale

TYPICAL = [{"dtype": "bfloat16", "M": 64, "N": 1024}]


def begun(**blanks: object) -> Tunable:
    return dataclasses.replace(scale, **{"typical": TYPICAL, **blanks})


def test_an_example_stands_for_what_is_blank() -> None:
    tunable = begun(typical=blank("your problems", TYPICAL), grid_fn=blank("the grid", scale.grid_fn))
    assert tunable.typical == TYPICAL
    assert list(blanks_of(tunable)) == [("grid_fn", "the grid"), ("typical", "your problems")]
    assert declaration_problems(tunable, SM90) == [f"scale: {one.text}" for one in blank_mistakes(tunable)]


def test_each_blank_is_a_mistake_that_says_what_to_write() -> None:
    tunable = begun(reference=blank("what out must hold", lambda x, out, *more: x.double()))
    assert [one.text for one in blank_mistakes(tunable)] == [
        "reference is blank: what out must hold; write it in place of blank(...)"
    ]
    assert declaration_problems(tunable, SM90)[0].startswith("scale: reference is blank: what out must hold")


def test_what_is_used_elsewhere_too_is_not_marked_there() -> None:
    marked = begun(typical=blank("your problems", TYPICAL), grid_fn=blank("the grid", scale.grid_fn))
    assert len(list(blanks_of(marked))) == 2
    assert list(blanks_of(begun(grid_fn=scale.grid_fn))) == []


def test_a_function_that_was_marked_is_called_and_asked_as_before() -> None:
    def takes(config: object, *, device: object = 1) -> object:
        return config, device

    marked = blank("another", takes)
    assert (marked(2), marked(2, device=3)) == ((2, 1), (2, 3))
    assert list(inspect.signature(marked).parameters) == ["config", "device"]
    assert blank("a bound one", [1, 2].index)(2) == 1
