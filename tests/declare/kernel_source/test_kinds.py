"""aot_tune.declare.kernel_source.kinds: the kind of each of the example kernels."""

from __future__ import annotations

import pytest

from aot_tune.declare.kernel_source.kinds import index_arrays, kinds_of
from aot_tune.declare.kernel_source.walk import facts_of
from tests.support import example_kernels

KINDS = {
    "scale_rows": ("elementwise",),
    "gather": ("elementwise",),
    "views": ("elementwise",),
    "add_in_helper": ("elementwise", "in place"),
    "row_mean": ("reduction",),
    "norm_in_parts": ("reduction",),
    "column_sum": ("reduction",),
    "count": ("reduction", "atomic"),
    "segments": ("reduction", "variable length"),
    "product": ("matmul",),
    "persistent": ("matmul", "persistent"),
    "stepping": ("elementwise", "persistent"),
    "fp8": ("matmul", "fp8"),
    "lists": ("matmul", "grouped"),
    "dual": ("dual matmul",),
    "attention": ("attention",),
}


@pytest.mark.parametrize("name", KINDS)
def test_each_kernel_is_of_its_kind(name: str) -> None:
    assert kinds_of(facts_of(getattr(example_kernels, f"{name}_kernel"))) == KINDS[name]


def test_an_array_whose_values_bound_a_loop_is_one_of_indices() -> None:
    assert index_arrays(facts_of(example_kernels.segments_kernel)) == {"starts"}
    assert index_arrays(facts_of(example_kernels.scale_rows_kernel)) == set()
