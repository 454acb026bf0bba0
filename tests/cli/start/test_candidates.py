"""aot_tune.cli.start.candidates: what each kind of kernel searches."""

from __future__ import annotations

import pytest

from aot_tune.cli.start.candidates import MOST_CANDIDATES, Space, space_of
from aot_tune.cli.start.sketch import sketch_of
from aot_tune.declare.kernel_source.walk import facts_of
from tests.support import example_kernels

KERNELS = [name for name in vars(example_kernels) if name.endswith("_kernel")]


def space(name: str) -> Space:
    return space_of(sketch_of(facts_of(getattr(example_kernels, name))))


def test_there_are_enough_examples() -> None:
    assert len(KERNELS) > 12


@pytest.mark.parametrize("name", KERNELS)
def test_there_is_something_to_search_and_not_too_much(name: str) -> None:
    found = space(name)
    assert 2 <= found.most <= MOST_CANDIDATES
    assert found.shares_tiles == ("mma" in facts_of(getattr(example_kernels, name)).called)


@pytest.mark.parametrize("name", ["product_kernel", "persistent_kernel", "lists_kernel", "dual_kernel"])
def test_the_three_tiles_of_a_product_vary_together(name: str) -> None:
    first = space(name).choices[0]
    assert first.constants == ("TM", "TN", "TK")
    for place in range(3):
        assert len({row[place] for row in first.values}) > 1


def test_attention_varies_the_tiles_of_queries_and_keys() -> None:
    assert space("attention_kernel").choices[0].constants == ("TM", "TN")


def test_rows_that_are_covered_by_one_tile_are_taken_few_at_a_time() -> None:
    (rows,) = space("row_mean_kernel").choices
    assert (rows.constants, rows.values) == (("ROWS",), ((1,), (2,), (4,), (8,)))


def test_where_a_block_goes_down_its_columns_a_tile_has_many_rows() -> None:
    rows, columns = space("column_sum_kernel").choices
    assert rows.values == columns.values == ((32,), (64,), (128,))


def test_a_group_of_tiles_is_tuned_with_its_usual_size() -> None:
    (_, group) = space("persistent_kernel").choices
    assert (group.constants, group.values) == (("GROUP",), ((8,),))
