"""What changed between tables: entries, configs, times, and what was built with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from aot_tune.cli.diff import TableDiff, diff_data, diff_lines, diff_paths
from aot_tune.cli.diff import diff_tables as diff_documents
from aot_tune.cli.documents.declared import DeclaredDocument
from aot_tune.cli.json_text import json_text
from aot_tune.errors import TableError, UsageError
from aot_tune.tables.table import Slopes, Table
from aot_tune.tables.writer import dump
from aot_tune.values.arch import Arch
from tests.support.samples import DEFAULT, SPACE, scale_table, with_entry, write


def diff_tables(*tables: Table) -> TableDiff:
    old, new = (DeclaredDocument(Path("scale.json"), table) for table in tables)
    return diff_documents(old, new)


def test_equal_tables_have_no_difference_and_one_line_says_so() -> None:
    diff = diff_tables(scale_table(), scale_table())
    assert diff.empty
    assert diff_lines([diff]) == ["no differences in 1 table"]
    assert diff_data([diff]) == []


def test_an_entry_is_added_removed_given_another_config_or_other_figures() -> None:
    old = scale_table()
    new = with_entry(old, 1, config=SPACE[1], mean_us=8.0, default_us=16.0)
    new = dataclasses.replace(new, entries=new.entries[1:])
    changes = diff_tables(old, new).changes
    assert [(change.kind, change.place["M"], change.speedup) for change in changes] == [
        ("config", 64, 10.0 / 8.0),
        ("removed", 1, None),
    ]
    back = diff_tables(new, old).changes
    assert [(change.kind, change.place["M"]) for change in back] == [("added", 1), ("config", 64)]
    figures = diff_tables(old, with_entry(old, 2, mean_us=50.0)).changes
    assert [(change.kind, change.speedup) for change in figures] == [("figures", 0.8)]


def test_a_changed_entry_is_one_line_with_time_gain_and_config_before_and_after() -> None:
    old = scale_table()
    new = with_entry(old, 1, config=DEFAULT, mean_us=8.0, default_us=16.0)
    head, line, summary = diff_lines([diff_tables(old, new)])
    assert head == "sm90/scale"
    assert line.split("  ")[1] == "! dtype=bfloat16 M=64 N=1024"
    for told in ("10.00 -> 8.00 us", "1.250x", "over default 1.50x -> 2.00x"):
        assert told in line
    assert line.endswith(f"{old.entries[1].config} -> {DEFAULT}")
    # The geometric mean of 1, 1.25 and 1.
    assert (
        summary
        == "1 table: 1 entry changed (1 with another config); the 3 in both run 1.077x as fast as before"
    )


def test_what_changed_outside_the_entries_is_remarked() -> None:
    old = scale_table()
    new = dataclasses.replace(
        old,
        source_hash="0123456789abcdef",
        built_with=dataclasses.replace(old.built_with, driver="590.1", device_name="NVIDIA H100"),
        portfolio=(old.portfolio[0], SPACE[3]),
        portfolio_regret=0.05,
        slopes=Slopes((0.5,) * 8, (-1.0,) * 8),
    )
    assert diff_tables(old, new).remarks == (
        f"source {old.source_hash} -> 0123456789abcdef",
        "device_name NVIDIA H200 -> NVIDIA H100",
        "driver 580.159.04 -> 590.1",
        f"portfolio: + {SPACE[3]}; - {old.portfolio[1]}",
        "portfolio regret 1.0% -> 5.0%",
        f"slopes of all tables -> inside{' 0.5' * 8}, outside{' -1.0' * 8}",
    )


def test_folders_are_compared_by_arch_and_kernel(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write(old, scale_table())
    write(new, scale_table())
    write(new, scale_table(Arch.parse("sm100")))
    same, added = sorted(diff_paths(old, new), key=lambda diff: diff.either.table.arch)
    assert same.empty
    assert added.old is None
    assert [change.kind for change in added.changes] == ["added"] * 3
    assert diff_lines([same, added])[0] == "sm100/scale (new table)"
    assert diff_data([same, added])[0]["added"] is True


def test_two_archs_folders_are_compared_whatever_they_are_called(tmp_path: Path) -> None:
    old = write(tmp_path / "old", scale_table()).parent
    new = write(tmp_path / "new", with_entry(scale_table(), 1, mean_us=5.0)).parent
    (diff,) = diff_paths(old, new.rename(tmp_path / "after"))
    assert [change.kind for change in diff.changes] == ["figures"]


def test_folders_that_hold_no_table_are_refused_and_not_found_equal(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        (folder / "sm90").mkdir(parents=True)
    for tail in ("", "sm90"):
        with pytest.raises(UsageError, match=f"no tables in {old / tail} and {new / tail}; give two"):
            diff_paths(old / tail, new / tail)
    write(new, scale_table())
    assert [diff.old for diff in diff_paths(old, new)] == [None]
    assert [diff.old for diff in diff_paths(old / "sm90", new / "sm90")] == [None]
    write(old, scale_table())
    for one, other in ((old, new / "sm90"), (old / "sm90", new)):
        with pytest.raises(UsageError, match="give two of a kind"):
            diff_paths(one, other)


def test_a_change_of_evidence_is_named_in_its_line() -> None:
    old = scale_table()
    diff = diff_tables(old, with_entry(old, 1, evidence="predicted"))
    assert "10.00 -> 10.00 us, measured -> predicted  1.000x" in diff_lines([diff])[1]
    (change,) = json.loads(json_text(diff_data([diff])))[0]["changes"]
    assert [change[side]["evidence"] for side in ("before", "after")] == ["measured", "predicted"]
    same = diff_tables(old, with_entry(old, 1, mean_us=5.0))
    assert "measured" not in "".join(diff_lines([same]))


def test_paths_that_cannot_be_compared_are_refused_with_the_reason(tmp_path: Path) -> None:
    sm90 = write(tmp_path, scale_table())
    sm100 = write(tmp_path, scale_table(Arch.parse("sm100")))
    with pytest.raises(UsageError, match="does not exist"):
        diff_paths(tmp_path / "nowhere", sm90)
    with pytest.raises(UsageError, match="one is a folder and the other a file"):
        diff_paths(tmp_path, sm90)
    with pytest.raises(UsageError, match=r"scale on sm90 and .* is scale on sm100"):
        diff_paths(sm90, sm100)
    sm100.write_bytes(sm100.read_bytes()[:100])
    with pytest.raises(TableError):
        diff_paths(tmp_path, tmp_path)


def test_the_side_before_may_have_an_earlier_form_which_is_remarked(tmp_path: Path) -> None:
    new = scale_table()
    document = json.loads(dump(with_entry(new, 1, mean_us=8.0)))
    document |= {"schema": 1, "rule": "steps"}
    old = tmp_path / "before" / "sm90" / "scale.json"
    old.parent.mkdir(parents=True)
    old.write_text(json.dumps(document))
    after = write(tmp_path / "after", new)
    for diffs in (diff_paths(old, after), diff_paths(tmp_path / "before", tmp_path / "after")):
        [diff] = diffs
        assert diff.remarks == (
            "another form (schema 1, read 2; with rule): entries are compared by config, mean_us, "
            "default_us, evidence",
        )
        assert [(change.kind, change.place["M"]) for change in diff.changes] == [("figures", 64)]
    with pytest.raises(TableError, match="an earlier release"):
        diff_paths(after, old)


def test_a_wrong_value_before_is_refused_with_its_place(tmp_path: Path) -> None:
    old = write(tmp_path / "before", scale_table())
    old.write_bytes(old.read_bytes().replace(b'"mean_us": 10.0', b'"mean_us": -10.0'))
    with pytest.raises(TableError, match=r"entries\[1\]\.mean_us"):
        diff_paths(old, write(tmp_path / "after", scale_table()))
