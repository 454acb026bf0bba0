"""aot_tune.tables.table: values of a document and their order."""

from __future__ import annotations

import dataclasses

from aot_tune.tables.table import entry_order
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.problem import Problem
from tests.support.tables import TABLE


def test_an_entry_is_found_by_its_bucket_and_by_no_other():
    for entry in TABLE.entries:
        assert TABLE.entry(entry.bucket) is entry
        assert TABLE.entry(Problem(dict(reversed(list(entry.bucket.items()))))) is entry
    assert TABLE.entry(TABLE.entries[0].bucket.replaced(M=1)) is None
    assert TABLE.entry(Problem({"M": 64})) is None


def test_the_gain_of_an_entry_is_the_defaults_time_over_the_winners():
    [entry, *_] = TABLE.entries
    assert dataclasses.replace(entry, default_us=30.0, mean_us=20.0).gain == 1.5
    assert dataclasses.replace(entry, default_us=8.0, mean_us=8.0).gain == 1.0


def test_entries_are_ordered_by_classes_then_exact_sizes_then_bucketed_ones_as_numbers():
    axes = {"M": Pow2(), "N": Exact()}
    ordered = [
        Problem({"dtype": dtype, "M": m, "N": n})
        for dtype, n, m in [("a", 512, 16), ("a", 512, 128), ("a", 4096, 2), ("b", 64, 1)]
    ]
    backwards = ordered[::-1]
    assert sorted(backwards, key=lambda bucket: entry_order(axes, bucket)) == ordered
