"""What the rule leaves with points or buckets left out, summed up and printed."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest

from aot_tune.bench import __main__ as bench
from aot_tune.bench import left_out
from aot_tune.choose.left_out import Left
from tests.support.samples import SM90, scale_table
from tests.support.shipped import FOUND


def test_a_summary_counts_where_the_choice_loses_to_the_default() -> None:
    found = left_out.summary([Left(0.0, 0.2), Left(0.1, 0.0), Left(0.02, 0.0)])
    assert found is not None
    assert (found.sizes, found.worst, found.high) == (3, pytest.approx(10.0), pytest.approx(10.0))
    assert found.lost == pytest.approx(100 / 3)
    assert left_out.summary([]) is None


def test_a_bucket_left_out_is_near_where_others_of_its_classes_are_within_a_doubling() -> None:
    table = scale_table()
    one = table.entries[1]
    entries = [dataclasses.replace(one, bucket=one.bucket.replaced(N=n)) for n in (1024, 1536, 8192)]
    table = dataclasses.replace(table, entries=tuple(entries))
    assert [left_out.way(table, entry.bucket) for entry in entries] == ["near", "near", "far"]
    assert left_out.way(dataclasses.replace(table, entries=(one,)), one.bucket) is None


@pytest.mark.slow
def test_no_kernel_s_choice_is_worse_than_its_default_by_two_standard_errors() -> None:
    judge = left_out.Judge(FOUND, SM90)
    for name, by_way in judge.lefts(judge.refitted).items():
        for way, sizes in by_way.items():
            if len(sizes) >= 20:
                behind = [math.log1p(chosen) - math.log1p(default) for chosen, default in sizes]
                error = statistics.stdev(behind) / math.sqrt(len(behind))
                assert statistics.fmean(behind) <= 2 * error, f"{name} {way}"


def test_it_is_printed_with_a_row_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--left-out", "fused_add_rms_norm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [
        ["fused_add_rms_norm", way] for way in ("inside", "near")
    ]
    assert [line.split()[:2] for line in lines[3:]] == [["all", "inside"], ["all", "near"]]
    assert bench.main(["--left-out", "gemm"]) == 2
    assert "no kernel is called gemm" in capsys.readouterr().err
