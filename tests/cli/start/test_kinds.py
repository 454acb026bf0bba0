"""aot_tune.cli.start.kinds: the kind that the source of each example kernel proves, or none."""

from __future__ import annotations

import importlib

import pytest

from aot_tune.cli.start.kinds import KINDS, TEMPLATES, proven_kind, template
from aot_tune.declare.kernel_source.walk import facts_of
from tests.support import example_kernels

PROVEN = {
    "scale_rows": "elementwise",
    "gather": "elementwise",
    "views": "elementwise",
    "add_in_helper": "in-place",
    "add_rows": "in-place",
    "row_mean": "row-reduction",
    "norm_in_parts": "row-reduction",
    "column_sum": None,  # along the columns
    "count": None,  # adds atomically
    "largest": None,  # data says where it adds
    "segments": None,  # data says where it loads
    "stepping": None,  # blocks go on to further tiles
    "handed_away": None,  # to a function without source
    "product": "product",
    "persistent": "persistent-product",
    "fp8": "product",
    "lists": "grouped-product",
    "grouped": "grouped-product",
    "dual": "dual-product",
    "attention": "attention",
    "varlen": "varlen-attention",
}

SHIPPED = {
    "decode.attention_decode": None,  # pages are looked up
    "norms.rms_norm": "row-reduction",
    "prefill.attention": "attention",
    "products.gate_up_swiglu": "dual-product",
    "products.fp8.matmul_fp8_block": "persistent-product",
}
"""Kernels of aot_tune by their modules."""


def test_kernels_that_are_larger_than_examples_prove_no_other_kind() -> None:
    for place, kind in SHIPPED.items():
        module = importlib.import_module(f"aot_tune.kernels.{place}")
        kernel = getattr(module, f"{place.rpartition('.')[2]}_kernel")
        assert proven_kind(facts_of(kernel)) == kind, place


@pytest.mark.parametrize("name", PROVEN)
def test_a_kind_is_taken_only_where_the_source_proves_it(name: str) -> None:
    assert proven_kind(facts_of(getattr(example_kernels, f"{name}_kernel"))) == PROVEN[name]


def test_the_nine_templates_have_the_same_parts() -> None:
    assert len(KINDS) == 9
    for kind in KINDS:
        assert template(kind).keys() - {"tiles"} == {
            "axes", "problem", "typical", "space", "grid", "blocks", "shapes", "value",
        }  # fmt: skip
        assert len(TEMPLATES[kind].strip().splitlines()) <= 20
