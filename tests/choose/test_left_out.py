"""The rule judged by a table's own points: as counted by hand, and the exponent that is chosen by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

from aot_tune.bench.gpu import shipped
from aot_tune.bench.left_out import summary
from aot_tune.choose import left_out
from aot_tune.choose.left_out import Left, across, inside, near_exponent
from aot_tune.tables.store import package_folder, read_table
from aot_tune.tables.table import BySize, Entry, Point, Table, size_of
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support.samples import DEFAULT, entry, scale, scale_table

TABLE = scale_table()
FIRST, SECOND = TABLE.portfolio


def test_a_point_is_told_from_the_others_of_its_bucket() -> None:
    large = TABLE.entries[2]
    us = {149: (10.0, 9.0, 20.0), 213: (11.0, 12.0, 20.0), 256: (12.0, 13.0, 24.0)}
    points = tuple(Point(size={"M": size}, us=times) for size, times in us.items())
    table = dataclasses.replace(TABLE, entries=(dataclasses.replace(large, points=points),))
    assert list(inside(scale, table)) == [
        pytest.approx((1 / 9, 20 / 9 - 1)),
        pytest.approx((0.0, 20 / 11 - 1)),
    ]


def with_shapes(entry_at: Callable[[int], Entry], *shapes: int) -> Table:
    """The table with an entry for each N."""
    return dataclasses.replace(TABLE, entries=tuple(map(entry_at, shapes)))


def test_a_bucket_is_told_from_those_of_other_sizes_on_the_exact_axes() -> None:
    winners = {1024: FIRST, 1536: SECOND, 8192: DEFAULT}
    bucket = TABLE.entries[1].bucket
    table = with_shapes(lambda n: entry(bucket.replaced(N=n), winners[n], TABLE.portfolio), *winners)
    each = len(table.entries[0].points)
    near = list(across(scale, table, near=True))
    assert len(near) == each * 2, "8192 is far from all"
    assert near[0] == pytest.approx((0.5, 0.5))
    assert len(list(across(scale, table, near=False))) == each
    assert list(across(scale, table, near=True, shapes={(1536,)})) == near[each:]


# The exponent near a table's buckets ------------------------------------------------------------------------


def waves_told(config: Config, problem: Problem) -> int:
    """The narrow tiles fill the GPU once for each 1024 columns, the wide ones once in all."""
    return 132 * problem.size("N") // 1024 if config == FIRST else 132


COUNTED = dataclasses.replace(scale, tiles=waves_told)


def of_times(us: Callable[[int], tuple[float, float]], *shapes: int) -> Table:
    """A table in which FIRST and SECOND take these times, microseconds, at each N."""

    def at(n: int) -> Entry:
        first, second = us(n)
        points = tuple(Point(size={"M": size}, us=(first, second, 60.0)) for size in (149, 213, 256))
        large = TABLE.entries[2]
        return dataclasses.replace(large, bucket=large.bucket.replaced(N=n), points=points)

    return with_shapes(at, *shapes)


SHAPES = (1024, 2048)


@pytest.mark.parametrize(
    ("us", "exponent"),
    [
        (lambda n: (10.0 * n / 1024, 17.0), 1.0),
        (lambda n: (10.0 * (n / 1024) ** 0.5, 12.0), None),  # each bucket says 1/2, and so does the table
        (lambda n: (10.0, 12.0), 0.0),
    ],
    ids=["whole waves", "their root", "none"],
)
def test_the_exponent_near_buckets_is_what_tells_them_from_each_other(
    us: Callable[[int], tuple[float, float]], exponent: float | None
) -> None:
    table = of_times(us, *SHAPES)
    assert near_exponent(COUNTED, table) == exponent
    chosen = dataclasses.replace(table, near_exponent=exponent)
    assert [one.chosen for one in across(COUNTED, chosen, near=True)] == [0.0] * 6
    assert near_exponent(scale, dataclasses.replace(table, entries=())) is None
    assert near_exponent(dataclasses.replace(COUNTED, tiles=None), table) is None


def test_the_root_of_waves_is_chosen_where_buckets_say_otherwise() -> None:
    """Inside a bucket waves cost nothing, from one width to the next their root: each bucket says none.

    At the first two widths SECOND wins at the wider one, which no waves would miss; at the other two, far
    from them, FIRST wins at both, which whole waves would miss.
    """
    last = {149: 2, 213: 2, 256: 3}

    def tiles(config: Config, problem: Problem) -> int:
        return 132 * problem.size("N") // 1024 * last[problem.size("M")] if config == FIRST else 132

    first = {1024: 10.0, 2048: 14.1, 65536: 10.0, 131072: 14.1}
    second = {1024: 11.5, 2048: 11.5, 65536: 16.0, 131072: 16.0}
    table = of_times(lambda n: (first[n], second[n]), *first)
    tunable = dataclasses.replace(scale, tiles=tiles)
    assert near_exponent(tunable, table) == 0.5
    assert near_exponent(tunable, table, 1.0) == 0.5


def test_where_no_shape_is_near_another_there_is_no_exponent() -> None:
    table = of_times(lambda n: (10.0, 12.0), 1024, 8192)
    assert near_exponent(COUNTED, table, 1.0) is None


@pytest.mark.parametrize(("slower", "stays"), [(10.005, True), (10.02, False)])
def test_the_present_exponent_stays_unless_another_leaves_clearly_less(slower: float, stays: bool) -> None:
    # By whole waves SECOND is taken at 2048, which costs 0.05 or 0.2 % there and half of it in the mean.
    table = of_times(lambda n: (10.0, slower), *SHAPES)
    assert near_exponent(COUNTED, table, 1.0) == (1.0 if stays else 0.0)


def test_a_table_of_thousands_of_shapes_is_judged_by_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of all kinds: of 150 widths at two depths, both depths."""
    large, asked = TABLE.entries[2], []
    shapes = [(n, k) for n in range(1024, 1024 + 16 * 150, 16) for k in (64, 128)]
    entries = [dataclasses.replace(large, bucket=large.bucket.replaced(N=n, K=k)) for n, k in shapes]
    axes = {**TABLE.axes, "K": Exact()}
    table = dataclasses.replace(TABLE, axes=axes, entries=tuple(entries))

    def counted(
        *args: Any, shapes: Collection[tuple[int, ...]], **options: Any
    ) -> Iterator[tuple[Entry, list[Left]]]:
        asked.append(shapes)
        return iter([(large, [Left(0.0, 0.0)] * 4)])

    monkeypatch.setattr(left_out, "_across", counted)
    near_exponent(COUNTED, table)
    assert [len(one) for one in asked] == [32]
    assert {k for _, k in asked[0]} == {64, 128}


def of_two_sizes(shapes: int) -> Table:
    """A table in which waves cost nothing up to M = 4, and whole waves above."""

    def at(n: int, m: int) -> Entry:
        large = TABLE.entries[2]
        first = 10.0 * (n // 1024 if m > 4 else 1)
        points = tuple(Point(size={"M": size}, us=(first, 12.0, 60.0)) for size in (m - 1, m))
        return dataclasses.replace(large, bucket=large.bucket.replaced(N=n, M=m), points=points)

    entries = tuple(at(1024 * n, m) for n in range(1, shapes + 1) for m in (4, 256))
    return dataclasses.replace(TABLE, entries=entries)


def test_small_and_large_buckets_may_have_exponents_of_their_own() -> None:
    tunable = dataclasses.replace(
        scale, tiles=lambda config, problem: 132 * problem.size("N") // 1024 if config == FIRST else 132
    )
    table = of_two_sizes(8)
    two = BySize(4, small=0.0, large=1.0)
    assert near_exponent(tunable, table) == two
    assert near_exponent(tunable, table, 0.5) == two
    assert near_exponent(tunable, table, two) == two
    chosen = dataclasses.replace(table, near_exponent=two)
    assert {one.chosen for one in across(tunable, chosen, near=True)} == {0.0}
    small, large = (entry.bucket for entry in table.entries[:2])
    assert (chosen.near_exponent_at(small), chosen.near_exponent_at(large)) == (0.0, 1.0)


def test_a_few_points_are_no_evidence_for_a_second_exponent() -> None:
    tunable = dataclasses.replace(
        scale, tiles=lambda config, problem: 132 * problem.size("N") // 1024 if config == FIRST else 132
    )
    assert not isinstance(near_exponent(tunable, of_two_sizes(7)), BySize)  # 14 points of each size


def test_a_bucket_is_as_large_as_the_product_of_its_sizes_on_pow2_axes() -> None:
    axes = {"batch": Pow2(), "tokens": Pow2(), "heads": Exact()}
    assert size_of(axes, Problem({"batch": 8, "tokens": 512, "heads": 3})) == 4096
    assert size_of(axes, Problem({"batch": 0, "tokens": 512, "heads": 3})) == 512
    assert str(BySize(64, 0.5, 1.0)) == "0.5 for buckets up to 64, 1.0 above"


@pytest.mark.parametrize("kernel", shipped())
def test_the_shipped_tables_have_the_exponent_that_a_sweep_would_choose(kernel: str) -> None:
    tunable = shipped()[kernel].tunable
    table = read_table(package_folder(tunable) / "sm90" / f"{kernel}.json")
    assert near_exponent(tunable, table, table.near_exponent) == table.near_exponent


def test_near_the_buckets_of_attention_no_waves_leave_less_than_what_each_bucket_says() -> None:
    """Its blocks differ in length under a causal mask. The tuner's README has figures: 3.1 and 1.7 %."""
    tunable = shipped()["attention"].tunable
    table = read_table(package_folder(tunable) / "sm90" / "attention.json")

    def mean(exponent: float | None) -> float:
        one = dataclasses.replace(table, near_exponent=exponent)
        found = summary(across(tunable, one, near=True))
        assert found is not None
        return found.mean

    assert mean(0.0) < 0.6 * mean(None)
