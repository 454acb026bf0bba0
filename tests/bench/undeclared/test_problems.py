"""The drawn problems: the draw stays as it was written down, and none of them is ever declared or a point."""

from __future__ import annotations

import hashlib

import pytest

from aot_tune.bench.undeclared.problems import BATCH, FACTOR, KERNELS, MODELS, PROBLEMS, SMALL, drawn
from aot_tune.tables import store
from aot_tune.tuner.plan.sizes import sizes_inside
from aot_tune.values.bucket import edge
from aot_tune.values.problem import Problem
from tests.support.samples import SM90
from tests.support.shipped import FOUND

WRITTEN_DOWN = "cebbb4e9714d162422ea2b1ae8541052dfd89807c83244a4907212409a183323"
"""The hash of all drawn problems. It was committed before the rule and the lists of declared shapes
were made anew, and must never change."""


def problems(kernel: str) -> list[Problem]:
    return [one.problem for one in drawn(kernel)]


def test_the_draw_is_the_one_that_was_written_down() -> None:
    every = [(kernel, one) for kernel in KERNELS for one in drawn(kernel)]
    lines = [f"{kernel} {one.problem} {one.whole} {one.capped}" for kernel, one in every]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == WRITTEN_DOWN


def test_there_are_as_many_as_the_figures_are_stated_for() -> None:
    assert sorted(KERNELS) == sorted(FOUND)
    assert {len(set(problems(kernel))) for kernel in KERNELS} == {PROBLEMS}
    every = [one for kernel in KERNELS for one in drawn(kernel)]
    assert (len(every), sum(one.whole for one in every), sum(one.capped for one in every)) == (640, 16, 28)


def test_the_products_are_of_six_models_or_more() -> None:
    shapes = {(one.size("N"), one.size("K")) for one in problems("matmul")}
    assert len([name for name, model in MODELS.items() if shapes & set(model.projections())]) >= 6


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_batch_is_a_power_of_two_and_a_third_are_small(kernel: str) -> None:
    sizes = [one.size(BATCH[kernel]) for one in problems(kernel)]
    assert all(edge(size) != size for size in sizes)
    assert sum(size % FACTOR == 0 for size in sizes) == PROBLEMS // 3
    assert sum(size < SMALL for size in sizes) >= PROBLEMS / 3


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_drawn_problem_is_declared_or_a_point_of_a_table(kernel: str) -> None:
    tunable = FOUND[kernel].tunable
    other = [name for name, axis in tunable.axes.items() if axis.kind == "exact"]
    declared = {tuple(one[name] for name in other) for one in (*tunable.typical_problems, *tunable.buckets)}
    shapes = {tuple(one[name] for name in other) for one in problems(kernel)}
    assert not shapes & declared, "these weights, heads or widths are declared"
    table = store.read_table(store.table_path(store.package_folder(tunable), SM90, kernel))
    taken = set(tunable.typical_problems) | set(tunable.buckets)
    for bucket in tunable.buckets:
        taken.update(sizes_inside(tunable.axes, bucket))
    for entry in table.entries:
        taken.update(entry.bucket.replaced(**point.size) for point in entry.points)
    assert not taken & set(problems(kernel))


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_problem_is_one_that_a_call_can_have(kernel: str) -> None:
    tunable = FOUND[kernel].tunable
    for one in problems(kernel):
        assert tunable.problem_of(*tunable.make_args(one, "meta", 0)) == one
        assert tunable.default_config(SM90, one) in tunable.candidates(SM90, one)
