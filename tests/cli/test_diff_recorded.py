"""What changed between two recorded tables, problem by problem."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from aot_tune.cli.diff import TableDiff, diff_data, diff_lines, diff_paths, diff_tables
from aot_tune.cli.documents.recorded import RecordedDocument
from aot_tune.errors import UsageError
from aot_tune.replay.table import Library, RecordedTable
from aot_tune.replay.words import problem_in_words
from tests.support.recorded_tables import TABLE, entry, problem, with_entries, write
from tests.support.samples import scale_table
from tests.support.samples import write as write_declared

OTHER = {"SimpleNamespace": {"TILE": 32, "occupancy": 4}}


def diff_recorded(*tables: RecordedTable) -> TableDiff:
    old, new = (RecordedDocument(Path("x.json"), table) for table in tables)
    return diff_tables(old, new)


def test_problems_are_added_removed_and_have_other_winners_or_figures() -> None:
    old = with_entries(entry(), entry(problem=problem(4096)), entry(problem=problem(64)))
    new = with_entries(
        entry(config=OTHER, mean_us=10.0),
        entry(problem=problem(4096), mean_us=25.0),
        entry(problem=problem(8)),
    )
    diff = diff_recorded(old, new)
    kinds = {change.kind: (change.place, change.speedup) for change in diff.changes}
    assert kinds == {
        "config": (problem_in_words(problem()), 1.25),
        "figures": (problem_in_words(problem(4096)), 0.5),
        "added": (problem_in_words(problem(8)), None),
        "removed": (problem_in_words(problem(64)), None),
    }
    assert diff.speedups == (1.25, 0.5)
    assert diff_recorded(old, old).empty


def test_of_several_winners_the_one_that_is_replayed_is_compared() -> None:
    old = with_entries(entry(), entry(config=OTHER, count=3))
    new = with_entries(entry(config=OTHER, count=3), entry())
    assert [change.kind for change in diff_recorded(old, new).changes] == ["config"]


def test_library_source_and_device_are_remarks() -> None:
    built = dataclasses.replace(TABLE.built_with, device_name="NVIDIA H100")
    new = dataclasses.replace(
        TABLE, source_hash="0" * 16, library=Library(name="mylib", version="2.0"), built_with=built
    )
    assert diff_recorded(TABLE, new).remarks == (
        "source feedfacefeedface -> 0000000000000000",
        "library mylib 1.2 -> mylib 2.0",
        "device_name NVIDIA H200 -> NVIDIA H100",
    )


def test_folders_with_both_kinds_are_compared(tmp_path: Path) -> None:
    for name in ("old", "new"):
        write_declared(tmp_path / name, scale_table())
    write(tmp_path / "old", TABLE)
    write(tmp_path / "new", with_entries(entry(mean_us=10.0)))
    diffs = diff_paths(tmp_path / "old", tmp_path / "new")
    lines = diff_lines(diffs)
    assert lines[0] == "sm90/mylib.ops.scale_kernel"
    assert lines[2].startswith("  more    x=float16[1024]")
    assert "1.60x -> 2.00x  12.50 -> 10.00" in lines[2]
    assert lines[3].startswith("  gone    x=float16[4096]")
    assert lines[-1].startswith("2 tables: 2 entries changed (1 more, 1 gone); the 4 in")
    (told,) = diff_data(diffs)
    assert (told["kernel"], told["kind"], told["speedup"]) == ("mylib.ops.scale_kernel", "recorded", 1.25)


def test_two_files_are_compared_where_they_are_of_one_kernel(tmp_path: Path) -> None:
    old, new = write(tmp_path / "old", TABLE), write(tmp_path / "new", TABLE)
    assert diff_lines(diff_paths(old, new)) == ["no differences in 1 table"]
    other = write(tmp_path / "other", dataclasses.replace(TABLE, kernel="other_kernel"))
    with pytest.raises(UsageError, match=r"mylib\.ops\.scale_kernel on sm90 and .* mylib\.ops\.other_kernel"):
        diff_paths(old, other)
