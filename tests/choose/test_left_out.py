"""The rule judged by a table's own points, each left out, and the slopes that are fitted to them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aot_tune.bench.gpu import shipped
from aot_tune.bench.left_out import Judge, summary, way
from aot_tune.choose.choice import Options
from aot_tune.choose.index import Index
from aot_tune.choose.left_out import Case, Equations, LeaveOut, Left, fitted, fitted_slopes
from aot_tune.choose.legality import Legality
from aot_tune.choose.nearest import NEAR_DOUBLINGS
from aot_tune.choose.points import COMMON, NO_SLOPES, RULE, Estimator
from aot_tune.choose.resolve import resolve
from aot_tune.declare.declaration import Declaration
from aot_tune.tables.states import in_worst_state
from aot_tune.tables.store import package_folder, read_table
from aot_tune.tables.table import Entry, Point, Slopes, Table
from aot_tune.values.bucket import classes_of
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support.samples import DEFAULT, SM90, entry, scale, scale_table

TABLE = scale_table()
FIRST, SECOND = TABLE.portfolio


def test_a_point_is_told_from_the_others_of_its_bucket() -> None:
    large = TABLE.entries[2]
    us = {149: (10.0, 9.0, 20.0), 213: (11.0, 12.0, 20.0), 256: (12.0, 13.0, 24.0)}
    points = tuple(Point(size={"M": size}, us=times) for size, times in us.items())
    table = dataclasses.replace(TABLE, entries=(dataclasses.replace(large, points=points),))
    cases = LeaveOut(scale, table).inside
    assert [case.left(NO_SLOPES) for case in cases[:2]] == [
        pytest.approx((1 / 9, 20 / 9 - 1)),
        pytest.approx((0.0, 20 / 11 - 1)),
    ]


def test_changes_of_counts_that_are_rounding_alone_leave_the_prior() -> None:
    noise = Equations([1e-32] * 2 * 2 + [1e-17] * 2, 100)
    assert noise.slopes(COMMON.inside) == COMMON.inside


def with_shapes(entry_at: Callable[[int], Entry], *shapes: int) -> Table:
    """The table with an entry for each N."""
    return dataclasses.replace(TABLE, entries=tuple(map(entry_at, shapes)))


def test_a_bucket_is_told_from_those_of_other_sizes_on_the_exact_axes() -> None:
    winners = {1024: FIRST, 1536: SECOND, 8192: DEFAULT}
    bucket = TABLE.entries[1].bucket
    table = with_shapes(lambda n: entry(bucket.replaced(N=n), winners[n], TABLE.portfolio), *winners)
    each = len(table.entries[0].points)
    cases = LeaveOut(scale, table).outside()
    assert cases[0].left(NO_SLOPES) == pytest.approx((0.5, 0.5))
    assert {case.nearest.bucket["N"] for case in cases[:each]} == {1536}
    without = LeaveOut(scale, table).outside(without=(1536,))
    assert {case.nearest.bucket["N"] for case in without} == {1024, 8192}


# Slopes -----------------------------------------------------------------------------------------------------


def counted(config: Config, problem: Problem) -> int:
    """The narrow tiles fill the GPU once for each 1024 columns, the wide ones once in all."""
    return 132 * problem.size("N") // 1024 if config == FIRST else 132


COUNTED = dataclasses.replace(scale, tiles=counted)


def of_times(us: Callable[[int], tuple[float, float]], *shapes: int) -> Table:
    """A table in which FIRST and SECOND take these times, microseconds, at each N."""

    def at(n: int) -> Entry:
        first, second = us(n)
        points = tuple(Point(size={"M": size}, us=(first, second, 60.0)) for size in (149, 213, 256))
        large = TABLE.entries[2]
        return dataclasses.replace(large, bucket=large.bucket.replaced(N=n), points=points)

    return with_shapes(at, *shapes)


SHAPES = tuple(1024 * n for n in range(1, 9))


@pytest.mark.parametrize("exponent", [1.0, 0.5, 0.0])
def test_slopes_tell_each_shape_from_the_others_where_times_grow_by_a_power_of_waves(exponent: float) -> None:
    table = of_times(lambda n: (10.0 * (n / 1024) ** exponent, 20.0), *SHAPES)
    slopes = fitted(LeaveOut(COUNTED, table).equations(), NO_SLOPES)
    cases = LeaveOut(COUNTED, table).outside()
    assert math.fsum(case.left(slopes).chosen for case in cases) < 0.01
    wide = COUNTED.buckets[2].replaced(N=16384)
    estimator = Estimator(dataclasses.replace(table, slopes=slopes), counted, lambda problem: DEFAULT)
    estimates = estimator.estimates(wide, DEFAULT, estimator.near(wide))
    by_place = {place: slowdown for slowdown, place in estimates.ranked}
    grown = math.log(10.0 * 16**exponent / 20.0)
    assert by_place[0] - by_place[1] == pytest.approx(grown, abs=0.2 + 0.1 * exponent)


def test_the_estimate_of_a_case_is_what_serving_would_estimate() -> None:
    """Two ways to compute: one sum of rests for serving, sums of all counts for a fit."""
    tunable = shipped()["matmul"].tunable
    table = read_table(package_folder(tunable) / "sm90" / "matmul.json")
    judged = LeaveOut(tunable, table)
    for case in judged.outside()[::37]:
        source, slopes = case.source, judged.estimator.slopes
        near = judged.estimator.nearest(source.entry.bucket, {judged.exact(case)})
        points = judged.estimator.points_of(source.entry.bucket, near)
        default = judged.estimator.default_at(source.problem)
        estimates = judged.estimator.estimates(source.problem, default, points)
        served = {place: slowdown for slowdown, place in estimates.ranked}
        for row in case.rows:
            changed = sum(slope * change for slope, change in zip(slopes.outside, row.changes, strict=True))
            told = case.scale * (row.near + RULE.unseen * row.unseen + changed)
            assert served[row.place] == pytest.approx(told, abs=1e-9)
            near_part, unseen = estimates.parts(row.place)
            assert near_part == pytest.approx(case.scale * row.near)
            assert unseen == pytest.approx(case.scale * RULE.unseen * row.unseen)


def test_without_tiles_or_entries_there_are_no_slopes() -> None:
    table = of_times(lambda n: (10.0, 12.0), *SHAPES)
    assert fitted_slopes(dataclasses.replace(COUNTED, tiles=None), table) is None
    assert fitted_slopes(COUNTED, dataclasses.replace(table, entries=())) is None


def test_a_table_of_which_nothing_can_be_learnt_has_the_common_slopes() -> None:
    alone = of_times(lambda n: (10.0, 12.0), 1024)
    alone = dataclasses.replace(
        alone, entries=(dataclasses.replace(alone.entries[0], points=alone.entries[0].points[-1:]),)
    )
    assert fitted_slopes(COUNTED, alone) == COMMON


def test_few_cases_are_held_to_the_prior_more_than_many() -> None:
    table = of_times(lambda n: (10.0 * n / 1024, 20.0), *SHAPES)
    _, outside = LeaveOut(COUNTED, table).equations()
    many = Equations([100 * value for value in outside.sums], 100 * outside.cases)
    prior = (3.0,) * 2

    def off(equations: Equations) -> float:
        return sum(abs(slope - 3.0) for slope in equations.slopes(prior))

    assert off(outside) < off(many)
    joined = Equations.joined([outside] * 100)
    assert (joined.sums, joined.cases) == (pytest.approx(many.sums), many.cases)


@pytest.mark.parametrize(("slower", "stays"), [(10.001, True), (10.5, False)])
def test_the_present_slopes_stay_unless_others_leave_clearly_less(slower: float, stays: bool) -> None:
    """By ten times the waves SECOND is taken at wider shapes, although both take equally long."""
    table = of_times(lambda n: (10.0, slower), *SHAPES)
    present = Slopes(inside=(10.0, 0.0), outside=(10.0, 0.0))
    assert (fitted_slopes(COUNTED, table, present) == present) is stays


@pytest.mark.parametrize("kernel", shipped())
def test_the_shipped_tables_have_the_slopes_that_a_sweep_would_fit(kernel: str) -> None:
    tunable = shipped()[kernel].tunable
    table = read_table(package_folder(tunable) / "sm90" / f"{kernel}.json")
    assert fitted_slopes(tunable, table) == table.slopes


def test_the_slopes_of_a_table_without_its_own_fit_all_shipped_tables() -> None:
    fitted = Judge(shipped(), SM90).common()
    assert COMMON.inside == pytest.approx(fitted.inside, abs=0.04)
    assert COMMON.outside == pytest.approx(fitted.outside, abs=0.04)


def test_slopes_that_were_fitted_leave_less_than_none() -> None:
    tunable = shipped()["matmul"].tunable
    table = read_table(package_folder(tunable) / "sm90" / "matmul.json")
    cases = [
        case for case in LeaveOut(tunable, table).outside() if way(table, case.source.entry.bucket) == "near"
    ]
    assert table.slopes is not None

    def mean(cases: list[Case], slopes: Slopes) -> float:
        return math.fsum(case.left(slopes).chosen for case in cases) / len(cases)

    assert mean(cases, table.slopes) < 0.5 * mean(cases, NO_SLOPES)


@pytest.mark.slow
def test_choices_two_doublings_from_every_other_bucket_leave_no_more_than_at_one() -> None:
    """Why a bucket is near within `NEAR_DOUBLINGS`. Prints the means over the shipped tables."""
    judge, left = Judge(shipped(), SM90), dict[int, list[Left]]()
    for name, cases in judge.tables.items():
        tunable = shipped()[name].tunable
        for one in cases.table.entries:
            doublings = _doublings_to_others(cases.table, one)
            if one.is_timed() and doublings <= NEAR_DOUBLINGS:
                others = tuple(other for other in cases.table.entries if other is not one)
                slopes = judge.slopes(name, cases.estimator.exact(one.bucket))
                table = dataclasses.replace(cases.table, entries=others, slopes=slopes)
                left.setdefault(max(math.ceil(doublings), 1), []).extend(_chosen(tunable, table, one))
    means = {}
    for doublings, regrets in sorted(left.items()):
        told = summary(regrets)
        assert told is not None
        means[doublings] = told.mean
        print(f"{doublings}: {told.sizes} sizes, {told.mean:.2f} %, the default {told.default:.2f} %")
    assert means[2] <= means[1]


def _doublings_to_others(table: Table, entry: Entry) -> float:
    """Return the doublings to the nearest other bucket of its classes, on the farthest axis."""
    classes = classes_of(table.axes, entry.bucket)
    others = (other.bucket for other in table.entries if other is not entry)
    return min(
        (
            max(
                abs(math.log2((entry.bucket.size(name) or 1) / (other.size(name) or 1)))
                for name in table.axes
            )
            for other in others
            if classes_of(table.axes, other) == classes
        ),
        default=math.inf,
    )


def _chosen(tunable: Declaration, table: Table, entry: Entry) -> Iterator[Left]:
    """Yield the regrets of choices, and of the default, at an entry's points by a table without it."""
    index, legality = Index(table.axes, tunable.tiles, {Path("table"): table}), Legality(tunable, SM90)
    for point in entry.points:
        problem = entry.bucket.replaced(**point.size)
        default = tunable.default_config(SM90, problem)
        columns = zip((*table.portfolio, default), in_worst_state(point).us, strict=True)
        us = {config: time for config, time in reversed([*columns]) if time is not None}
        chosen = resolve(problem, index, legality, Options(on_miss="nearest")).config
        if default in us:
            least = min(us.values())
            yield Left(us.get(chosen, us[default]) / least - 1, us[default] / least - 1)
