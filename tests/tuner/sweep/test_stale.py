"""What is stale of a table, and why: all of it, single buckets, or nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from aot_tune.tables.table import Table
from aot_tune.tuner.sweep import stale
from tests.support.samples import SM90, SPACE, scale, scale_table, with_entry


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """A table that the compiler of this machine made."""
    monkeypatch.setattr(stale.cutile, "version", lambda: "1.7.0")
    monkeypatch.setattr(stale.cutile, "compiler_version", lambda: "13.4.92")
    return scale_table()


def test_nothing_is_stale_of_a_table_of_this_source_and_compiler(table: Table) -> None:
    assert stale.whole_reason(scale, SM90, table) is None
    assert stale.stale_buckets(scale, table) == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source_hash": "0" * 16}, "its source has changed"),
        ({"kernel": "other"}, "it is the table of 'other'"),
        ({"portfolio": (SPACE[-1],)}, "portfolio: "),
    ],
)
def test_all_of_a_table_of_another_source_or_space_is_stale(
    table: Table, change: dict[str, Any], reason: str
) -> None:
    found = stale.whole_reason(scale, SM90, dataclasses.replace(table, **change))
    assert found is not None
    assert found.startswith(reason)
    assert stale.whole_reason(scale, SM90, None) == "it has no table"


def test_all_of_a_table_of_another_compiler_is_stale(table: Table) -> None:
    older = dataclasses.replace(table.built_with, tileiras="13.3.1")
    found = stale.whole_reason(scale, SM90, dataclasses.replace(table, built_with=older))
    assert found == "the compiler was 13.3.1, is 13.4.92"


def test_a_bucket_without_an_entry_or_with_an_illegal_one_is_stale(table: Table) -> None:
    illegal = next(config for config in SPACE if config["tile_m"] == 64 and config["tile_n"] == 128)
    broken = with_entry(table, 1, config=illegal)
    less = dataclasses.replace(broken, entries=broken.entries[:2])
    assert list(stale.stale_buckets(scale, less)) == [scale.buckets[1], scale.buckets[2]]
    assert stale.stale_buckets(scale, less)[scale.buckets[2]] == "it has no entry"
