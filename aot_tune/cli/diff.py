"""`aot-tune diff`: changes between two tables or two folders of tables. Needs no kernel and no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aot_tune.cli.documents.document import Document, Winner
from aot_tune.cli.documents.find import KINDS, kind_named, kind_of
from aot_tune.errors import UsageError
from aot_tune.tables import store
from aot_tune.tables.table import geometric_mean
from aot_tune.values.arch import Arch
from aot_tune.values.text import aligned, counted

Kind = Literal["added", "removed", "config", "figures"]
"""Kind of change: added, removed, another config won, or only the figures differ."""

_SIGNS: Mapping[Kind, str] = {"added": "+", "removed": "-", "config": "!", "figures": "~"}
"""Mark at the beginning of an entry's line."""

_WORDS: Mapping[Kind, str] = {
    "added": "added",
    "removed": "removed",
    "config": "with another config",
    "figures": "with other figures only",
}
"""Words of the summary for each kind of change."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Entry that changed."""

    kind: Kind
    """Kind of the change."""

    sides: tuple[Winner | None, Winner | None]
    """Entry before and after; None where it is missing."""

    @property
    def winners(self) -> tuple[Winner, ...]:
        """Return the sides that exist: one or two."""
        return tuple(side for side in self.sides if side is not None)

    @property
    def place(self) -> object:
        """Return the bucket or the problem."""
        return self.winners[-1].place

    @property
    def speedup(self) -> float | None:
        """Return the winner's time before / its time after; None when one side is missing."""
        before, after = self.sides
        return None if before is None or after is None else before.entry.mean_us / after.entry.mean_us


@dataclass(frozen=True, kw_only=True)
class TableDiff:
    """Changes of one kernel's table for one arch."""

    old: Document | None
    """Table before; None when the table was added."""

    new: Document | None
    """Table after; None when the table was removed."""

    changes: tuple[Change, ...]
    """Changed and added entries in the new table's order, then removed ones."""

    remarks: tuple[str, ...]
    """Changes outside the entries, such as of source, device or compiler, a line each."""

    speedups: tuple[float, ...]
    """Winner's time before / its time after, for each entry that both tables have."""

    @property
    def either(self) -> Document:
        """Return the new table, or the old one where the table was removed."""
        either = self.new or self.old
        assert either is not None
        return either

    @property
    def empty(self) -> bool:
        """Return whether nothing changed."""
        return not self.changes and not self.remarks


def diff_tables(old: Document | None, new: Document | None) -> TableDiff:
    """Compare two tables of one kind, kernel and arch. One of them may be missing."""
    before, after = old.winners() if old else {}, new.winners(older=old) if new else {}
    changes = []
    for key in (*after, *(key for key in before if key not in after)):
        sides = before.get(key), after.get(key)
        if (kind := _kind(*sides)) is not None:
            changes.append(Change(kind=kind, sides=sides))
    return TableDiff(
        old=old,
        new=new,
        changes=tuple(changes),
        remarks=tuple(new.remarks(old)) if old and new else (),
        speedups=tuple(
            before[key].entry.mean_us / winner.entry.mean_us for key, winner in after.items() if key in before
        ),
    )


def _kind(old: Winner | None, new: Winner | None) -> Kind | None:
    """Return how an entry changed; None where it did not."""
    if old is None:
        return "added"
    if new is None:
        return "removed"
    if old.choice != new.choice:
        return "config"
    return None if old.entry == new.entry else "figures"


def diff_paths(old: Path, new: Path) -> tuple[TableDiff, ...]:
    """Compare two tables, or all tables of two folders, by arch and kernel.

    Recorded tables come after those of declared kernels. A folder is one arch's folder, or a folder of archs'
    folders. A table of `old` may have an earlier form: it is compared by the keys that both forms have.

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
    if old.is_dir():
        listed = _listed(old, new)
        before = _keyed(kind_named(path).read_old(path) for path in listed[0])
        after = _keyed(kind_named(path).read(path) for path in listed[1])
        return tuple(diff_tables(before.get(key), after.get(key)) for key in sorted({*before, *after}))
    kind = kind_of(old, new)
    former, later = kind.read_old(old), kind.read(new)
    if (former.name, former.table.arch) != (later.name, later.table.arch):
        raise UsageError(
            f"{old} is {former.name} on {former.table.arch} and {new} is {later.name} on "
            f"{later.table.arch}; give two tables of one kernel and arch"
        )
    return (diff_tables(former, later),)


def _listed(old: Path, new: Path) -> tuple[list[Path], list[Path]]:
    """Return the tables' files in two archs' folders, or in two folders of archs' folders."""
    roots = store.listed(old), store.listed(new)
    if not any(roots):
        roots = store.listed_in(old), store.listed_in(new)
        if not any(roots):
            raise UsageError(f"no tables in {old} and {new}; give two archs' folders or two that hold some")
    for root, listed, other in zip((old, new), roots, (new, old), strict=True):
        if not listed and store.listed_in(root):
            raise UsageError(
                f"{root} is one arch's folder and {other} holds archs' folders; give two of a kind"
            )
    return roots


def _keyed(tables: Iterable[Document]) -> dict[tuple[int, str, Arch], Document]:
    """Return tables by kind, kernel and arch."""
    return {(KINDS.index(type(table)), table.name, table.table.arch): table for table in tables}


def diff_lines(diffs: Sequence[TableDiff]) -> list[str]:
    """Return the differences as text: each changed table with its entries, then a summary line."""
    if all(diff.empty for diff in diffs):
        return [f"no differences in {counted(len(diffs), 'table')}"]
    lines = [line for diff in diffs if not diff.empty for line in _table_lines(diff)]
    kinds = [change.kind for diff in diffs for change in diff.changes]
    counts = ", ".join(f"{kinds.count(kind)} {words}" for kind, words in _WORDS.items() if kind in kinds)
    entries = f"{counted(len(kinds), 'entry', 'entries')} changed" + (f" ({counts})" if counts else "")
    kept = [ratio for diff in diffs for ratio in diff.speedups]
    speed = f"; the {len(kept)} in both run {geometric_mean(kept):.3f}x as fast as before" if kept else ""
    return [*lines, f"{counted(len(diffs), 'table')}: {entries}{speed}"]


def _table_lines(diff: TableDiff) -> list[str]:
    table = diff.either
    state = "" if diff.old and diff.new else (" (new table)" if diff.new else " (table removed)")
    lines = [f"{table.table.arch}/{table.name}{state}", *(f"  {remark}" for remark in diff.remarks)]
    return lines + aligned([_row(change, table.baseline) for change in diff.changes])


def _row(change: Change, baseline: str) -> tuple[str, ...]:
    sides = change.winners
    times = " -> ".join(f"{side.entry.mean_us:.2f}" for side in sides)
    evidence = dict.fromkeys(side.evidence for side in sides)
    gains = " -> ".join("-" if side.entry.gain is None else f"{side.entry.gain:.2f}x" for side in sides)
    return (
        f"  {_SIGNS[change.kind]} {change.place}",
        f"{times} us" + (f", {' -> '.join(evidence)}" if len(evidence) > 1 else ""),
        "" if change.speedup is None else f"{change.speedup:.3f}x",
        f"over {baseline} {gains}",
        " -> ".join(dict.fromkeys(side.config for side in sides)),
    )


def diff_data(diffs: Iterable[TableDiff]) -> list[dict[str, object]]:
    """Return the differences as data: each table's changed entries, with times and configs of both."""
    return [_table_data(diff) for diff in diffs if not diff.empty]


def _table_data(diff: TableDiff) -> dict[str, object]:
    table = diff.either
    return {
        "kernel": table.name,
        "arch": table.table.arch,
        **({"kind": table.kind} if table.kind != "declared" else {}),  # as in the files
        "added": diff.old is None,
        "removed": diff.new is None,
        "remarks": diff.remarks,
        "speedup": geometric_mean(diff.speedups),
        "changes": [_change_data(change, table.place_name) for change in diff.changes],
    }


def _change_data(change: Change, place_name: str) -> dict[str, object]:
    before, after = (None if side is None else side.data for side in change.sides)
    place = {place_name: change.place, "kind": change.kind, "speedup": change.speedup}
    return {**place, "before": before, "after": after}
