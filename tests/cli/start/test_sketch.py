"""aot_tune.cli.start.sketch: what each parameter of a kernel is, and what axes are called."""

from __future__ import annotations

import pytest

from aot_tune.cli.start.sketch import Sketch, sketch_of
from aot_tune.declare.kernel_source.walk import facts_of
from tests.support import example_kernels


def sketch(name: str) -> Sketch:
    return sketch_of(facts_of(getattr(example_kernels, f"{name}_kernel")))


ROLES = {
    "scale_rows": {"x": "array", "out": "array", "factor": "float", "TILE": "tile"},
    "gather": {"x": "array", "out": "array", "N": "size", "TILE": "tile"},
    "row_mean": {"x": "array", "out": "array", "eps": "float", "COLS": "cover", "ROWS": "tile"},
    "lists": {"xs": "list", "ws": "list", "outs": "list", "TM": "tile", "TN": "tile", "TK": "tile"},
    "guarded": {"x": "array", "out": "array", "TILE": "tile", "CHECK_BOUNDS": "flag", "TURNED": "flag"},
    "attention": {
        "q": "array", "k": "array", "v": "array", "out": "array", "lse": "array", "scale": "float",
        "D": "cover", "H": "size", "TM": "tile", "TN": "tile", "RATIO": "ratio",
    },
}  # fmt: skip

AXES = {
    "scale_rows": {"rows": True, "cols": False},
    "gather": {"length": False},  # a constant follows it
    "product": {"M": True, "K": False, "N": False},
    "attention": {
        "batch": True, "heads": False, "queries": True, "head_dim": False, "kv_heads": False,
        "kv_length": True,
    },
}  # fmt: skip
"""The axes of a kernel, and whether each is bucketed."""


@pytest.mark.parametrize("name", ROLES)
def test_each_parameter_has_its_role(name: str) -> None:
    assert {one.name: one.role for one in sketch(name).parameters} == ROLES[name]


@pytest.mark.parametrize("name", AXES)
def test_axes_have_usual_names_and_are_bucketed_unless_compiled_in(name: str) -> None:
    found = sketch(name)
    assert {found.name_of(axis): found.is_pow2(axis) for axis in found.layout.axes} == AXES[name]


def test_what_is_written_is_named_as_the_declaration_names_it() -> None:
    assert sketch("add_in_helper").inplace == ("x",)
    assert sketch("count").reset == ("counts",)
    assert sketch("attention").outputs == ("out", "lse")
