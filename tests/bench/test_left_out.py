"""What the rule leaves with points or buckets left out: as counted by hand, and as it is printed."""

from __future__ import annotations

import dataclasses

import pytest

from aot_tune.bench import __main__ as bench
from aot_tune.bench import left_out
from aot_tune.tables.table import Point
from tests.support.samples import DEFAULT, entry, scale, scale_table

TABLE = scale_table()
FIRST, SECOND = TABLE.portfolio


def test_a_point_is_told_from_the_others_of_its_bucket() -> None:
    large = TABLE.entries[2]
    us = {149: (10.0, 9.0, 20.0), 213: (11.0, 12.0, 20.0), 256: (12.0, 13.0, 24.0)}
    points = tuple(Point(size={"M": size}, us=times) for size, times in us.items())
    table = dataclasses.replace(TABLE, entries=(dataclasses.replace(large, points=points),))
    assert list(left_out.inside(scale, table)) == [
        pytest.approx((1 / 9, 20 / 9 - 1)),
        pytest.approx((0.0, 20 / 11 - 1)),
    ]


def test_a_bucket_is_told_from_those_of_other_sizes_on_the_exact_axes() -> None:
    buckets = [TABLE.entries[1].bucket.replaced(N=n) for n in (1024, 1536, 8192)]
    winners = (FIRST, SECOND, DEFAULT)
    entries = [entry(*one, TABLE.portfolio) for one in zip(buckets, winners, strict=True)]
    table = dataclasses.replace(TABLE, entries=tuple(entries))
    near = list(left_out.across(scale, table, near=True))
    assert len(near) == len(entries[0].points) * 2, "8192 is far from all"
    assert near[0] == pytest.approx((0.5, 0.5))
    assert len(list(left_out.across(scale, table, near=False))) == len(entries[0].points)


def test_a_summary_counts_where_the_choice_loses_to_the_default() -> None:
    found = left_out.summary([(0.0, 0.2), (0.1, 0.0), (0.02, 0.0)])
    assert found is not None
    assert (found.sizes, found.worst, found.high) == (3, pytest.approx(10.0), pytest.approx(10.0))
    assert found.lost == pytest.approx(100 / 3)
    assert left_out.summary([]) is None


def test_it_is_printed_with_a_row_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--left-out", "fused_add_rms_norm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [
        ["fused_add_rms_norm", way] for way in ("inside", "near")
    ]
    assert [line.split()[:2] for line in lines[3:]] == [["all", "inside"], ["all", "near"]]
    assert bench.main(["--left-out", "gemm"]) == 1
    assert "no kernel is called gemm" in capsys.readouterr().err
