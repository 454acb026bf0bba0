"""Products whose rows no tile divides: what the sweep measured, beside the bucket's edge."""

from __future__ import annotations

import pytest

from aot_tune.kernels import (
    gate_up_swiglu_tunable,
    grouped_matmul_tunable,
    linear_tunable,
    matmul_fp8_block_tunable,
    matmul_fp8_tunable,
    matmul_tunable,
)
from aot_tune.tables import store
from aot_tune.tables.table import Point
from aot_tune.tunable import Tunable
from tests.support.samples import SM90

SLOWER = 1.15
"""Beyond what a partly filled tile may take. Loading rows outside of the factor it was up to 1.49."""

PRODUCTS = (
    matmul_tunable, linear_tunable, matmul_fp8_tunable, matmul_fp8_block_tunable, grouped_matmul_tunable,
    gate_up_swiglu_tunable,
)  # fmt: skip


@pytest.mark.parametrize("tunable", PRODUCTS, ids=[tunable.name for tunable in PRODUCTS])
def test_no_size_in_a_bucket_takes_longer_than_its_larger_edge(tunable: Tunable) -> None:
    entries = store.read_table(store.table_path(store.package_folder(tunable), SM90, tunable.name)).entries
    slow = [
        f"{point.size} of {entry.bucket}: {us:.1f} us, {edge:.1f} at the edge"
        for entry in entries
        for edge in [_fastest(entry.points[-1])]
        for point in entry.points[:-1]
        if (us := _fastest(point)) > SLOWER * edge
    ]
    assert slow == []


def _fastest(point: Point) -> float:
    """The shortest time of any config in any state: some samples met the GPU at a lower clock."""
    every = (point.us, *point.states.values())
    return min(each for us in every for each in us if each is not None)
