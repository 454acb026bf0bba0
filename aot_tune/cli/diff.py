"""`aot-tune diff`: what changed between two tables or two folders of tables. Needs no kernel and no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from aot_tune.cli.changes import SIGNS, WORDS, Change, TableChanges, built_with_remarks, kind_of
from aot_tune.cli.recorded import diff as recorded
from aot_tune.cli.recorded.diff import RecordedDiff, diff_recorded
from aot_tune.errors import NewerSchemaError, TableError, UsageError
from aot_tune.replay.files import has_recorded_name, is_recorded_file, read_recorded
from aot_tune.replay.table import RecordedTable, name_of
from aot_tune.tables import store
from aot_tune.tables.files import read_bytes
from aot_tune.tables.former import compared, parse_former
from aot_tune.tables.table import BySize, Entry, Table, entry_order, geometric_mean
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import aligned, counted


@dataclass(frozen=True, kw_only=True)
class EntryChange(Change[Entry]):
    """One bucket whose entry changed."""

    bucket: Problem
    """The bucket."""


class TableDiff(TableChanges[Table, EntryChange]):
    """The changes of a declared kernel's table for one arch."""

    @property
    def speedups(self) -> tuple[float, ...]:
        """The winner's time before / its time after, for each entry that both tables have."""
        before = {entry.bucket: entry for entry in self.old.entries} if self.old else {}
        after = self.new.entries if self.new else ()
        return tuple(
            before[entry.bucket].mean_us / entry.mean_us for entry in after if entry.bucket in before
        )


def diff_tables(old: Table | None, new: Table | None, form: str | None = None) -> TableDiff:
    """What `new` changes in `old`. Both are of one kernel and arch; one of them may be missing.

    Args:
        old: The table before.
        new: The table after.
        form: How the form of `old` differs from the present one, as `parse_former` returns it.
    """
    either = new or old
    assert either is not None
    if form is not None and new is not None:
        new = compared(new)
    before = {entry.bucket: entry for entry in old.entries} if old else {}
    after = {entry.bucket: entry for entry in new.entries} if new else {}
    # A bucket's names may differ where the axes changed: each table's entries sort by that table's own axes.
    ordered = sorted(after, key=lambda bucket: entry_order(new.axes, bucket)) if new else []
    ordered += [bucket for bucket in before if bucket not in after]
    changes = []
    for bucket in ordered:
        kind = kind_of(before.get(bucket), after.get(bucket), attrgetter("config"))
        if kind is not None:
            changes.append(
                EntryChange(bucket=bucket, kind=kind, old=before.get(bucket), new=after.get(bucket))
            )
    return TableDiff(
        kernel=either.kernel,
        arch=either.arch,
        old=old,
        new=new,
        changes=tuple(changes),
        remarks=(*([form] if form else []), *_remarks(old, new)) if old and new else (),
    )


AnyDiff = TableDiff | RecordedDiff
"""The changes of a declared kernel's table, or of a recorded one."""


def diff_paths(old: Path, new: Path) -> tuple[AnyDiff, ...]:
    """The differences between two tables, or between all tables of two folders, by arch and kernel.

    Recorded tables come after those of declared kernels.

    A folder is one arch's folder, or the folder that holds those.

    A table of `old` may have an earlier form: it is compared by the keys that both forms have.

    Raises:
        UsageError: One path is missing, one is a file and the other a folder, the tables are of different
            kernels or archs, or neither folder has a table.
        TableError: A file is not a table.
        StoreError: A file cannot be read.
    """
    for path in (old, new):
        try:
            exists = path.exists()
        except (OSError, ValueError) as error:  # a name too long, a NUL: no file can have it
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(f"{path!s:.80}: {reason}; give two tables or two folders of tables") from error
        if not exists:
            raise UsageError(f"{path} does not exist; give two tables or two folders of tables")
    if old.is_dir() != new.is_dir():
        raise UsageError(f"{old} and {new}: one is a folder and the other a file; give two of a kind")
    if not old.is_dir():
        if is_recorded_file(old) or is_recorded_file(new):
            return (_recorded_files(old, new),)
        (before, form), after = _read_old(old), store.read_table(new)
        if (before.kernel, before.arch) != (after.kernel, after.arch):
            raise UsageError(
                f"{old} is {before.kernel} on {before.arch} and {new} is {after.kernel} on {after.arch}; "
                "give two tables of one kernel and arch"
            )
        return (diff_tables(before, after, form),)
    listed = _listed(old, new)
    forms = {
        (table.kernel, table.arch): (table, form) for table, form in map(_read_old, _declared(listed[0]))
    }
    tables = {(table.kernel, table.arch): table for table in map(store.read_table, _declared(listed[1]))}
    names = sorted({*forms, *tables})
    neither: tuple[None, None] = (None, None)
    declared = (
        diff_tables(before, tables.get(name), form)
        for name, (before, form) in ((name, forms.get(name, neither)) for name in names)
    )
    recorded_before, recorded_after = map(_recorded_tables, listed)
    names = sorted({*recorded_before, *recorded_after})
    return (
        *declared,
        *(diff_recorded(recorded_before.get(name), recorded_after.get(name)) for name in names),
    )


def _recorded_files(old: Path, new: Path) -> RecordedDiff:
    before, after = read_recorded(old), read_recorded(new)
    here, there = ((one.module, one.kernel, one.arch) for one in (before, after))
    if here != there:
        raise UsageError(
            f"{old} is {name_of(*here[:2])} on {before.arch} and {new} is {name_of(*there[:2])} on "
            f"{after.arch}; give two tables of one kernel and arch"
        )
    return diff_recorded(before, after)


def diff_lines(diffs: Sequence[AnyDiff]) -> list[str]:
    """The differences for a person: each changed table with its entries, then one line that sums up."""
    if all(diff.empty for diff in diffs):
        return [f"no differences in {counted(len(diffs), 'table')}"]
    lines = [line for diff in diffs if not diff.empty for line in _lines(diff)]
    kinds = [change.kind for diff in diffs for change in diff.changes]
    counts = ", ".join(f"{kinds.count(kind)} {words}" for kind, words in WORDS.items() if kind in kinds)
    entries = f"{counted(len(kinds), 'entry', 'entries')} changed" + (f" ({counts})" if counts else "")
    kept = [ratio for diff in diffs for ratio in diff.speedups]
    speed = f"; the {len(kept)} in both run {geometric_mean(kept):.3f}x as fast as before" if kept else ""
    return [*lines, f"{counted(len(diffs), 'table')}: {entries}{speed}"]


def diff_data(diffs: Iterable[AnyDiff]) -> list[dict[str, object]]:
    """The differences for a script: for each table its changed entries, with times and configs of both."""
    return [
        recorded.data(diff) if isinstance(diff, RecordedDiff) else _table_data(diff)
        for diff in diffs
        if not diff.empty
    ]


def _table_data(diff: TableDiff) -> dict[str, object]:
    return {
        "kernel": diff.kernel,
        "arch": diff.arch,
        "added": diff.old is None,
        "removed": diff.new is None,
        "remarks": diff.remarks,
        "speedup": geometric_mean(diff.speedups),
        "changes": [_change_data(change) for change in diff.changes],
    }


def _change_data(change: EntryChange) -> dict[str, object]:
    sides = {"before": change.old, "after": change.new}
    return {"bucket": change.bucket, "kind": change.kind, "speedup": change.speedup} | {
        side: None
        if entry is None
        else {
            "config": entry.config,
            "mean_us": entry.mean_us,
            "default_us": entry.default_us,
            "evidence": entry.evidence,
        }
        for side, entry in sides.items()
    }


def _listed(old: Path, new: Path) -> tuple[list[Path], list[Path]]:
    """The tables' files in two archs' folders, or in two folders of archs' folders."""
    roots = store.listed(old), store.listed(new)
    if not any(roots):
        roots = store.listed_in(old), store.listed_in(new)
        if not any(roots):
            raise UsageError(f"no tables in {old} and {new}; give two archs' folders or two folders of those")
    for root, listed, other in zip((old, new), roots, (new, old), strict=True):
        if not listed and store.listed_in(root):
            raise UsageError(
                f"{root} is one arch's folder and {other} holds archs' folders; give two of a kind"
            )
    return roots


def _declared(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if not has_recorded_name(path)]


def _read_old(path: Path) -> tuple[Table, str | None]:
    """Read the table before, and how its form differs from the present one; None where it does not."""
    try:
        return store.read_table(path), None
    except NewerSchemaError:
        raise
    except TableError as error:
        try:
            former = parse_former(read_bytes(path))
        except TableError:
            former = None
        if former is None:
            raise error from None
        return former


def _recorded_tables(paths: Iterable[Path]) -> dict[tuple[str, Arch], RecordedTable]:
    tables = (read_recorded(path) for path in paths if has_recorded_name(path))
    return {(name_of(table.module, table.kernel), table.arch): table for table in tables}


def _remarks(old: Table, new: Table) -> Iterable[str]:
    if old.source_hash != new.source_hash:
        yield f"source {old.source_hash} -> {new.source_hash}"
    yield from built_with_remarks(old.built_with, new.built_with)
    if dict(old.axes) != dict(new.axes):
        yield f"axes {_axes(old)} -> {_axes(new)}"
    if old.portfolio != new.portfolio:
        added, removed = _without(new.portfolio, old.portfolio), _without(old.portfolio, new.portfolio)
        words = [*(f"+ {config}" for config in added), *(f"- {config}" for config in removed)]
        yield f"portfolio: {'; '.join(words) or 'another order'}"
    if old.portfolio_regret != new.portfolio_regret:
        yield f"portfolio regret {old.portfolio_regret:.1%} -> {new.portfolio_regret:.1%}"
    if old.near_exponent != new.near_exponent:
        yield f"near_exponent {_told(old.near_exponent)} -> {_told(new.near_exponent)}"


def _told(exponent: float | BySize | None) -> str:
    return "of each bucket" if exponent is None else str(exponent)


def _axes(table: Table) -> str:
    return " ".join(f"{name}:{axis.kind}" for name, axis in table.axes.items())


def _without(configs: Iterable[Config], others: Iterable[Config]) -> list[Config]:
    there = set(others)
    return [config for config in configs if config not in there]


def _lines(diff: AnyDiff) -> list[str]:
    return recorded.lines(diff) if isinstance(diff, RecordedDiff) else _table_lines(diff)


def _table_lines(diff: TableDiff) -> list[str]:
    state = "" if diff.old and diff.new else (" (new table)" if diff.new else " (table removed)")
    lines = [f"{diff.arch}/{diff.kernel}{state}", *(f"  {remark}" for remark in diff.remarks)]
    rows = []
    for change in diff.changes:
        gain = "" if change.speedup is None else f"{change.speedup:.3f}x"
        configs = [str(entry.config) for entry in (change.old, change.new) if entry is not None]
        same = len(configs) == 2 and configs[0] == configs[1]
        times = [f"{entry.mean_us:.2f}" for entry in (change.old, change.new) if entry is not None]
        evidence = dict.fromkeys(entry.evidence for entry in (change.old, change.new) if entry is not None)
        gains = [f"{entry.gain:.2f}x" for entry in (change.old, change.new) if entry is not None]
        rows.append((
            f"  {SIGNS[change.kind]} {change.bucket}",
            f"{' -> '.join(times)} us" + (f", {' -> '.join(evidence)}" if len(evidence) > 1 else ""),
            gain,
            f"over default {' -> '.join(gains)}",
            configs[0] if same else " -> ".join(configs),
        ))  # fmt: skip
    return lines + aligned(rows)
