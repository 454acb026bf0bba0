"""aot_tune.declare.kernel_source.layout: which sizes are one axis, what tiles them, what the grid counts."""

from __future__ import annotations

from aot_tune.declare.kernel_source.layout import Layout, layout_of
from aot_tune.declare.kernel_source.walk import facts_of
from tests.support import example_kernels


def layout(name: str) -> Layout:
    return layout_of(facts_of(getattr(example_kernels, f"{name}_kernel")))


def sizes(found: Layout) -> list[list[tuple[str, int]]]:
    return [sorted(one.sizes) for one in found.axes]


def tiles(found: Layout) -> list[str]:
    return [one.tile.key if one.tile else "" for one in found.axes]


def grid(found: Layout) -> list[list[int]]:
    return [[found.axes.index(one) for one in part] for part in found.grid]


def test_arrays_share_the_axes_that_one_block_indexes() -> None:
    found = layout("scale_rows")
    assert sizes(found) == [[("out", 0), ("x", 0)], [("out", 1), ("x", 1)]]
    assert (tiles(found), grid(found)) == (["1", "TILE"], [[0], [1]])


def test_consecutive_offsets_are_tiles_and_their_mask_is_the_size() -> None:
    found = layout("gather")
    assert (sizes(found), tiles(found), grid(found)) == ([[("out", 0), ("x", 0)]], ["TILE"], [[0]])
    assert found.axes[0].parameters == ["N"]


def test_a_tile_at_index_0_covers_its_axis() -> None:
    rows, cols = layout("row_mean").axes
    assert (rows.sizes, rows.covers) == ([("x", 0), ("out", 0)], None)
    assert cols.covers is not None
    assert cols.covers.key == "COLS"


def test_loops_over_tiles_of_a_parameter_run_over_its_size() -> None:
    _, cols = layout("norm_in_parts").axes
    assert cols.parameters == ["N"]
    assert sorted(cols.sizes) == [("out", 1), ("weight", 0), ("x", 1)]


def test_a_product_has_three_axes_as_its_constants_lay_it_out() -> None:
    found = layout("product")
    assert sizes(found) == [[("a", 0), ("c", 0)], [("a", 1), ("b", 0)], [("b", 1), ("c", 1)]]
    assert (tiles(found), grid(found)) == (["TM", "TK", "TN"], [[0], [2]])


def test_a_persistent_grid_counts_the_tiles_that_it_stores() -> None:
    found = layout("persistent")
    assert [one.parameters for one in found.axes] == [["M"], ["K"], ["N"]]
    assert grid(found) == [[0, 2]]


def test_an_order_of_axes_is_turned_back() -> None:
    found = layout("attention")
    keys = found.axis_of("k", 2)
    assert keys is not None
    assert sorted(keys.sizes) == [("k", 2), ("v", 2)]
    assert grid(found) == [[2], [0, 1]]


def test_an_axis_stored_as_a_whole_is_that_of_the_array_like_it() -> None:
    found = layout("attention")
    depth = found.axis_of("out", 3)
    assert depth is not None
    assert ("q", 3) in depth.sizes


def test_what_is_stored_in_float32_and_indices_have_their_dtypes() -> None:
    assert layout("attention").dtypes == {"lse": "float32"}
    assert layout("segments").dtypes == {"out": "float32", "starts": "int32"}
