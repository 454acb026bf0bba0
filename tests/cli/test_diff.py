"""What changed between tables: entries, configs, times, and what was built with."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from aot_tune.cli.diff import MOST_CHARACTERS, TableDiff, diff_data, diff_lines, diff_markdown, diff_paths
from aot_tune.cli.diff import diff_tables as diff_documents
from aot_tune.cli.documents.declared import DeclaredDocument
from aot_tune.cli.json_text import json_text
from aot_tune.errors import TableError, UsageError
from aot_tune.tables import store
from aot_tune.tables.table import Slopes, Table
from aot_tune.tables.writer import dump
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from tests.support.samples import DEFAULT, SPACE, scale_table, with_entry, write

SHIPPED = Path(__file__).parents[2] / "tuned_configs"


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


def test_a_changed_entry_is_one_line_of_gains_times_and_the_parts_that_differ() -> None:
    old = scale_table()
    new = with_entry(old, 1, config=DEFAULT, mean_us=8.0, default_us=16.0)
    head, heads, line, summary = diff_lines([diff_tables(old, new)])
    assert head == "sm90/scale"
    assert re.split("   *", heads.strip()) == ["change", "bucket", "over default", "us", "config"]
    assert re.split("   *", line.strip()) == [
        "more",
        "dtype=bfloat16 M=64 N=1024",
        "1.50x -> 2.00x",
        "10.00 -> 8.00",
        "tile_m 32 -> 16",
    ]
    # The geometric mean of 1, 1.25 and 1.
    assert summary == "1 table: 1 entry changed (1 more); the 3 in both run 1.077x as fast as before"


def test_entries_are_listed_worst_first_and_those_that_tie_are_counted() -> None:
    old = scale_table()
    new = with_entry(old, 0, mean_us=1.99)
    new = with_entry(new, 1, config=SPACE[1], mean_us=10.1)
    new = with_entry(new, 2, mean_us=50.0)
    lines = diff_lines([diff_tables(old, new)])
    assert [line.split()[0] for line in lines[2:4]] == ["less", "other"]
    assert lines[4] == "  1 entry tied: --json has the figures"
    assert lines[5].startswith("1 table: 3 entries changed (1 less, 1 other config, 1 tied)")
    assert len(diff_data([diff_tables(old, new)])[0]["changes"]) == 3  # type: ignore[arg-type]


def _with_constants(table: Table, names: dict[str, str]) -> Table:
    """The table with other names of constants."""

    def renamed(config: Config) -> Config:
        constants = {names.get(name, name): value for name, value in config.constants.items()}
        return Config(constants=constants, hints=config.hints, kernel=config.kernel)

    return dataclasses.replace(
        table,
        portfolio=tuple(map(renamed, table.portfolio)),
        entries=tuple(dataclasses.replace(entry, config=renamed(entry.config)) for entry in table.entries),
    )


def test_a_renamed_constant_is_one_remark_and_no_other_config() -> None:
    old = scale_table()
    new = _with_constants(old, {"tile_m": "rows_a_tile"})
    diff = diff_tables(old, new)
    assert diff.changes == ()
    assert diff_lines([diff])[1:-1] == ["  constants renamed: tile_m -> rows_a_tile"]
    moved = diff_tables(old, with_entry(new, 1, config=new.portfolio[1]))
    assert [(change.kind, change.config) for change in moved.changes] == [
        ("config", "rows_a_tile 32 -> 64, occupancy 1 -> 2")
    ]


def test_a_constant_that_replaces_another_with_other_values_is_not_renamed() -> None:
    old = scale_table()
    new = _with_constants(old, {"tile_m": "stages"})
    for place, entry in enumerate(new.entries):
        constants = dict(entry.config.constants) | {"stages": 3}
        new = with_entry(new, place, config=Config(constants=constants, hints=entry.config.hints))
    diff = diff_tables(old, new)
    assert not [remark for remark in diff.remarks if "renamed" in remark]
    assert {change.kind for change in diff.changes} == {"config"}
    assert "tile_m 16 -> none, stages none -> 3" in diff.changes[0].config


def test_the_worst_table_comes_first_in_text_too() -> None:
    old, other = scale_table(), dataclasses.replace(scale_table(), kernel="worse")
    diffs = [
        diff_tables(old, with_entry(old, 1, mean_us=5.0)),
        diff_tables(other, with_entry(other, 1, mean_us=15.0)),
    ]
    assert [line for line in diff_lines(diffs) if line.startswith("sm90/")] == ["sm90/worse", "sm90/scale"]


def test_values_that_more_than_two_listed_buckets_share_are_one_line() -> None:
    new = scale_table()
    none, third = (dataclasses.replace(new, entries=entries) for entries in ((), new.entries[:1]))
    diff = diff_tables(none, new)
    lines = diff_lines([diff])
    assert lines[1] == "  all listed: dtype=bfloat16 N=1024"
    assert [line.split()[1] for line in lines[3:6]] == [f"M={entry.bucket['M']}" for entry in new.entries]
    assert "- `all listed: dtype=bfloat16 N=1024`" in diff_markdown([diff])
    assert "dtype=bfloat16 M=256 N=1024" in "".join(diff_lines([diff_tables(third, new)]))


# Markdown ---------------------------------------------------------------------------------------------------


def test_markdown_shows_the_worst_table_first_and_folds_the_details() -> None:
    old = scale_table()
    better = with_entry(old, 1, mean_us=5.0)
    worse = with_entry(dataclasses.replace(old, kernel="scaled"), 1, config=DEFAULT, mean_us=15.0)
    before = dataclasses.replace(old, kernel="scaled")
    text = diff_markdown([diff_tables(old, better), diff_tables(old, old), diff_tables(before, worse)])
    assert text == GOLDEN


GOLDEN = """\
### 2 of 3 tables changed: ⚠️ 1 entry gains less

2 entries changed (1 less, 1 more). *Less* and *more* are gains over the default that changed by over 5%. \
*Over default* is each side's mean of all its entries, *portfolio regret* the worst that the portfolio \
leaves against all candidates.

| table | over default | portfolio regret | less | more | other config | new | gone | tied |
|---|---|---|---|---|---|---|---|---|
| `sm90/scaled` | 1.310x → 1.145x |  | 1 |  |  |  |  |  |
| `sm90/scale` | 1.310x → 1.651x |  |  | 1 |  |  |  |  |

<details><summary>sm90/scaled: 1 listed, 0 tied</summary>

| change | bucket | over default | us | config |
|---|---|---|---|---|
| less | `dtype=bfloat16 M=64 N=1024` | `1.50x -> 1.00x` | `10.00 -> 15.00` | `tile_m 32 -> 16` |

</details>

<details><summary>sm90/scale: 1 listed, 0 tied</summary>

| change | bucket | over default | us | config |
|---|---|---|---|---|
| more | `dtype=bfloat16 M=64 N=1024` | `1.50x -> 3.00x` | `10.00 -> 5.00` |  |

</details>
"""


@pytest.mark.parametrize(("after", "cell"), [(0.5, "⚠️ 1.0% → 50.0%"), (0.005, "1.0% → 0.5%")])
def test_a_portfolio_that_leaves_more_than_before_is_marked(after: float, cell: str) -> None:
    old = scale_table()
    text = diff_markdown([diff_tables(old, dataclasses.replace(old, portfolio_regret=after))])
    assert f"| {cell} |" in text


def _every_entry_changed(table: Table) -> Table:
    """The table, with each entry a fifth slower and with another config."""
    configs = (*table.portfolio, table.entries[0].config)
    changed = [
        dataclasses.replace(
            entry,
            mean_us=entry.mean_us * 1.2,
            config=next(config for config in configs if config != entry.config),
        )
        for entry in table.entries
    ]
    return dataclasses.replace(table, entries=tuple(changed))


def test_markdown_of_any_shipped_tables_fits_a_comment_and_counts_what_does_not() -> None:
    shipped = [store.read_table(path) for path in store.listed(SHIPPED)]
    diffs = [diff_tables(table, _every_entry_changed(table)) for table in shipped]
    assert sum(len(diff.changes) for diff in diffs) > 1000
    text = diff_markdown(diffs)
    assert MOST_CHARACTERS - 5000 < len(text) <= MOST_CHARACTERS
    assert text.count("<details>") == text.count("</details>")
    assert re.search(r"\n\d+ more rows\n", text)
    assert re.search(r"The details of \d+ tables do not fit here\.$", text)
    for diff in diffs:
        assert f"| `{diff.either.table.arch}/{diff.either.name}` |" in text


def test_names_break_neither_a_cell_nor_a_span_of_the_markdown() -> None:
    old = _with_constants(scale_table(), {"tile_m": "a|`b<i>"})
    new = with_entry(dataclasses.replace(old, kernel="scale"), 1, config=old.portfolio[1])
    rows = [line for line in diff_markdown([diff_tables(old, new)]).splitlines() if line.startswith("|")]
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) in (6, 10)
        assert row.count("`") % 2 == 0


def test_markdown_counts_what_json_lists() -> None:
    old = scale_table()
    new = dataclasses.replace(with_entry(old, 1, mean_us=20.0), entries=old.entries[:1])
    for diff in (
        diff_tables(old, new),
        diff_tables(new, old),
        diff_tables(old, with_entry(old, 1, mean_us=20.0)),
    ):
        (table,) = diff_data([diff])
        rows = re.findall(r"^\| (less|more|other config|new|gone) \|", diff_markdown([diff]), re.MULTILINE)
        assert len(rows) == len(table["changes"])  # type: ignore[arg-type]


def test_what_changed_outside_the_entries_is_remarked() -> None:
    old = scale_table()
    new = dataclasses.replace(
        old,
        source_hash="0123456789abcdef",
        built_with=dataclasses.replace(old.built_with, driver="590.1", device_name="NVIDIA H100"),
        portfolio=(old.portfolio[0], SPACE[3]),
        portfolio_regret=0.05,
        slopes=Slopes((0.5,) * 2, (-1.0,) * 2),
    )
    assert diff_tables(old, new).remarks == (
        f"source {old.source_hash} -> 0123456789abcdef",
        "device_name NVIDIA H200 -> NVIDIA H100",
        "driver 580.159.04 -> 590.1",
        "portfolio of 2 configs: 1 added, 1 removed",
        "portfolio regret 1.0% -> 5.0%",
        "slopes of the estimates between sizes: other values",
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
    assert "1.50x -> 1.50x, measured -> predicted  10.00 -> 10.00" in diff_lines([diff])[2]
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
    del document["check_hash"]
    old = tmp_path / "before" / "sm90" / "scale.json"
    old.parent.mkdir(parents=True)
    old.write_text(json.dumps(document))
    after = write(tmp_path / "after", new)
    for diffs in (diff_paths(old, after), diff_paths(tmp_path / "before", tmp_path / "after")):
        [diff] = diffs
        assert diff.remarks == (
            "another form (schema 1, read 2; with rule; without check_hash): entries are compared by config, "
            "mean_us, default_us, evidence",
        )
        assert [(change.kind, change.place["M"]) for change in diff.changes] == [("figures", 64)]
    with pytest.raises(TableError, match="an earlier release"):
        diff_paths(after, old)


def test_a_wrong_value_before_is_refused_with_its_place(tmp_path: Path) -> None:
    old = write(tmp_path / "before", scale_table())
    old.write_bytes(old.read_bytes().replace(b'"mean_us": 10.0', b'"mean_us": -10.0'))
    with pytest.raises(TableError, match=r"entries\[1\]\.mean_us"):
        diff_paths(old, write(tmp_path / "after", scale_table()))
