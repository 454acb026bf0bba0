"""The index answers as the rule in `aot_tune.choose.nearest` does, and finds what the tables hold."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aot_tune.choose.index import Index
from aot_tune.choose.nearest import Buckets
from aot_tune.errors import TableError
from aot_tune.tables.reader import UnreadEntry
from aot_tune.tables.table import Table
from aot_tune.values.bucket import Exact, Pow2, bucket_of
from aot_tune.values.problem import Problem
from tests.support.samples import DEFAULT, entry, scale, scale_table

AXES = {"M": Pow2(), "N": Exact(), "K": Exact()}
problems = st.builds(
    lambda m, n, k, dtype: Problem({"dtype": dtype, "M": m, "N": n, "K": k}),
    st.integers(1, 5000), st.sampled_from([64, 128, 192, 256, 4096]), st.sampled_from([64, 128, 1000]),
    st.sampled_from(["bfloat16", "float16"]),
)  # fmt: skip


def table_of(buckets: list[Problem]) -> Table:
    template = scale_table()
    entries = tuple(dataclasses.replace(template.entries[0], bucket=bucket) for bucket in buckets)
    return dataclasses.replace(template, axes=AXES, entries=entries)


def index_of(*tables: Table) -> Index:
    shipped = {Path(f"table{place}.json"): table for place, table in enumerate(tables)}
    return Index(tables[0].axes, None, shipped)


@settings(max_examples=300, deadline=None)
@given(st.lists(problems, max_size=20), problems, st.sampled_from([1.0, 2.0, math.inf]))
def test_the_nearest_entry_is_the_one_the_rule_names(
    swept: list[Problem], wanted: Problem, within: float
) -> None:
    buckets = list(dict.fromkeys(bucket_of(AXES, problem) for problem in swept))
    found = index_of(table_of(buckets)).nearest(wanted, within)
    of_dtype = [bucket for bucket in buckets if bucket["dtype"] == wanted["dtype"]]
    own = [bucket_of(AXES, wanted).size(name) for name in AXES]

    def apart(bucket: Problem) -> list[float]:
        return [abs(math.log2(size / bucket.size(name))) for size, name in zip(own, AXES, strict=True)]

    expected = min(
        (bucket for bucket in of_dtype if max(apart(bucket)) <= within + 1e-9),
        key=lambda bucket: (round(sum(apart(bucket)), 9), *(-bucket.size(name) for name in AXES)),
        default=None,
    )
    assert (found.entry.bucket if found else None) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(problems, max_size=20), problems)
def test_a_problem_finds_its_own_bucket_and_no_other(swept: list[Problem], wanted: Problem) -> None:
    buckets = list(dict.fromkeys(bucket_of(AXES, problem) for problem in swept))
    found = index_of(table_of(buckets)).own(wanted)
    own = bucket_of(AXES, wanted)
    assert (found.entry.bucket if found else None) == (own if own in buckets else None)


def test_the_first_table_that_has_a_bucket_tells_its_config() -> None:
    bucket = Problem({"dtype": "bfloat16", "M": 64, "N": 1024})
    table = scale_table()
    first = dataclasses.replace(table, entries=(entry(bucket, DEFAULT, table.portfolio),))
    found = index_of(first, table).own(bucket)
    assert found is not None
    assert found.table is first


def test_the_estimator_of_a_table_is_made_once() -> None:
    tables = {Path("t.json"): scale_table(), Path("other.json"): scale_table()}
    index = Index(scale.axes, scale.tiles, tables)
    first, *_, last = index.matches()
    estimators = [index.estimator(match, lambda problem: DEFAULT) for match in (first, last)]
    assert estimators[0] is estimators[1]
    assert estimators[0].table is tables[Path("t.json")]


def test_entries_that_another_thread_leaves_out_meanwhile_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look-up has the tables of one moment, also where they change in its middle."""
    buckets = [Problem({"dtype": "bfloat16", "M": m, "N": 64, "K": 64}) for m in (16, 64)]
    table = table_of(buckets)
    malformed = UnreadEntry(buckets[0], DEFAULT, True, lambda: (_ for _ in ()).throw(TableError("no number")))
    index = index_of(dataclasses.replace(table, entries=(malformed, table.entries[1])))
    own = Buckets.nearest

    def nearest(self: Buckets, bucket: Problem, within: float) -> Any:
        near = own(self, bucket, within)
        monkeypatch.setattr(Buckets, "nearest", own)
        index.leave_malformed_out()
        return near

    monkeypatch.setattr(Buckets, "nearest", nearest)
    found = index.nearest(buckets[0], math.inf)
    assert found is not None
    assert found.entry.bucket == buckets[1]
