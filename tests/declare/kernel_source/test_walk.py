"""aot_tune.declare.kernel_source.walk: what is found in a kernel, in its helpers and in what is not taken."""

from __future__ import annotations

import cuda.tile as ct
import pytest

from aot_tune.declare.kernel_source import walk
from aot_tune.declare.kernel_source.facts import Facts
from aot_tune.declare.kernel_source.walk import facts_of
from tests.support import example_kernels


def accesses(facts: Facts) -> list[tuple[str, str]]:
    return [(one.what, one.parameter) for one in facts.accesses]


def test_constants_have_the_types_of_their_annotations() -> None:
    assert facts_of(example_kernels.product_kernel).constants == {
        "TM": "int", "TN": "int", "TK": "int", "TURNED": "bool",
    }  # fmt: skip


def test_a_helpers_accesses_are_those_of_the_arrays_it_is_given() -> None:
    facts = facts_of(example_kernels.add_in_helper_kernel)
    assert accesses(facts) == [("load", "y"), ("load", "x"), ("store", "x")]


def test_tiled_views_are_parts_of_their_arrays() -> None:
    facts = facts_of(example_kernels.views_kernel)
    assert accesses(facts) == [("load", "x"), ("store", "out")]


def test_both_branches_are_followed_and_a_product_counts_once() -> None:
    facts = facts_of(example_kernels.product_kernel)
    assert [one.parameter for one in facts.accesses] == ["a", "b", "b", "c"]
    assert len(facts.products) == 1


def test_a_constant_is_a_tile_where_its_place_moves_and_none_covers_an_axis() -> None:
    assert facts_of(example_kernels.product_kernel).tiles == ("TM", "TN", "TK")
    assert facts_of(example_kernels.row_mean_kernel).tiles == ("ROWS",)
    assert facts_of(example_kernels.gather_kernel).tiles == ()
    assert facts_of(example_kernels.views_kernel).tiles == ("TILE",)


def test_arrays_have_as_many_axes_as_they_are_indexed_along() -> None:
    facts = facts_of(example_kernels.attention_kernel)
    assert facts.arrays == ("q", "k", "v", "out", "lse")
    assert [facts.rank(name) for name in facts.arrays] == [4, 4, 4, 4, 3]


def test_an_array_whose_values_bound_a_loop_is_one_of_indices() -> None:
    assert facts_of(example_kernels.segments_kernel).index_arrays == {"starts"}
    assert facts_of(example_kernels.scale_rows_kernel).index_arrays == set()


def test_atomic_operations_and_members_of_lists_are_found() -> None:
    assert ("add", "counts") in accesses(facts_of(example_kernels.count_kernel))
    assert facts_of(example_kernels.lists_kernel).lists == {"xs", "ws", "outs"}


def test_an_argument_of_a_function_without_source_has_escaped() -> None:
    assert facts_of(example_kernels.handed_away_kernel).escaped == {"x", "out"}


def test_a_kernel_without_source_is_not_readable() -> None:
    space: dict[str, object] = {"ct": ct}
    exec("@ct.kernel\ndef kernel(x):\n    ct.store(x, (0,), ct.load(x, (0,), (16,)))", space)
    facts = facts_of(space["kernel"])
    assert not facts.readable
    assert facts.parameters == ("x",)


def test_a_source_that_cannot_be_followed_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: object) -> None:
        raise AttributeError("a node that nobody thought of")

    monkeypatch.setattr(walk._Walk, "loop", lost)
    facts = facts_of(example_kernels.norm_in_parts_kernel)
    assert (facts.accesses, facts.readable) == ([], False)
    assert facts.escaped == {"x", "weight", "out", "N", "TILE"}
