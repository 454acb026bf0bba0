"""`aot-tune diff`: changes between two tables or two folders of tables. Needs no kernel and no GPU."""

from __future__ import annotations

import html
from collections import Counter
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
from aot_tune.values.problem import Problem
from aot_tune.values.text import aligned, counted

Kind = Literal["added", "removed", "config", "figures"]
"""Kind of change: added, removed, another config won, or only the figures differ."""

Verdict = Literal["less", "more", "config", "added", "removed", "tie"]
"""What a change means to a user of the table."""

_WORDS: Mapping[Verdict, str] = {
    "less": "less",
    "more": "more",
    "config": "other config",
    "added": "new",
    "removed": "gone",
    "tie": "tied",
}
"""Words of each verdict, in the order of the listed entries."""

BAND = 0.05
"""Fraction by which a gain must change to count: it is the ratio of two times that tie within 2 % each."""


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
    def ratio(self) -> float:
        """Return the gain after / the gain before; of the times where a gain is missing."""
        before, after = self.sides
        if before is None or after is None:
            return 1.0
        if before.entry.gain is None or after.entry.gain is None:
            return float(before.entry.mean_us / after.entry.mean_us)
        return float(after.entry.gain / before.entry.gain)

    @property
    def verdict(self) -> Verdict:
        """Return what the change means."""
        if self.kind in ("added", "removed"):
            return self.kind
        if not 1 / (1 + BAND) <= self.ratio <= 1 + BAND:
            return "less" if self.ratio < 1 else "more"
        evidence = {side.evidence for side in self.winners}
        return "config" if self.kind == "config" or len(evidence) > 1 else "tie"

    @property
    def config(self) -> str:
        """Return the parts of the config that differ; of an entry with one side, the config."""
        before, after = self.sides
        if before is None or after is None:
            return self.winners[0].config
        names = [
            name
            for name in {**before.parts, **after.parts}
            if before.parts.get(name) != after.parts.get(name)
        ]
        sides = ((before.parts.get(name, "none"), after.parts.get(name, "none")) for name in names)
        return ", ".join(f"{name} {old} -> {new}" for name, (old, new) in zip(names, sides, strict=True))

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
    def listed(self) -> tuple[Change, ...]:
        """Return the changes that do not tie, worst first."""
        order = [*_WORDS]
        listed = [change for change in self.changes if change.verdict != "tie"]
        return tuple(sorted(listed, key=lambda change: (order.index(change.verdict), change.ratio)))

    @property
    def empty(self) -> bool:
        """Return whether nothing changed."""
        return not self.changes and not self.remarks


def diff_tables(old: Document | None, new: Document | None) -> TableDiff:
    """Compare two tables of one kind, kernel and arch. One of them may be missing."""
    names: tuple[str, ...] = ()
    if old is not None and new is not None:
        old, names = old.in_names_of(new)
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
        remarks=(*names, *new.remarks(old)) if old and new else (),
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
    if old.parts != new.parts:
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
    """Return the differences as text: changed tables and their entries, worst first, then a summary."""
    changed = sorted((diff for diff in diffs if not diff.empty), key=_badness)
    if not changed:
        return [f"no differences in {counted(len(diffs), 'table')}"]
    lines = [line for diff in changed for line in _table_lines(diff)]
    kept = [ratio for diff in diffs for ratio in diff.speedups]
    speed = f"; the {len(kept)} in both run {geometric_mean(kept):.3f}x as fast as before" if kept else ""
    return [*lines, f"{counted(len(diffs), 'table')}: {_summary(diffs)}{speed}"]


def _summary(diffs: Iterable[TableDiff]) -> str:
    """Return the number of changed entries, and of those with each verdict."""
    counts = Counter(change.verdict for diff in diffs for change in diff.changes)
    words = ", ".join(f"{counts[verdict]} {words}" for verdict, words in _WORDS.items() if counts[verdict])
    return f"{counted(counts.total(), 'entry', 'entries')} changed" + (f" ({words})" if words else "")


def _named(diff: TableDiff) -> str:
    state = "" if diff.old and diff.new else (" (new table)" if diff.new else " (table removed)")
    return f"{diff.either.table.arch}/{diff.either.name}{state}"


def _table_lines(diff: TableDiff) -> list[str]:
    tied = len(diff.changes) - len(diff.listed)
    return [
        _named(diff),
        *(f"  {remark}" for remark in _remarks(diff)),
        *(f"  {line}" for line in aligned(_rows(diff))),
        *([f"  {counted(tied, 'entry', 'entries')} tied: --json has the figures"] if tied else []),
    ]


def _rows(diff: TableDiff) -> list[tuple[str, ...]]:
    """Return the heads and the listed entries as rows; nothing where none is listed."""
    heads = ("change", diff.either.place_name, f"over {diff.either.baseline}", "us", "config")
    common = _common(diff)
    return [heads, *(_cells(change, common) for change in diff.listed)] if diff.listed else []


def _remarks(diff: TableDiff) -> tuple[str, ...]:
    """Return the remarks, and the values that all listed buckets have."""
    common = " ".join(_common(diff))
    return (*diff.remarks, f"all listed: {common}") if common else diff.remarks


def _common(diff: TableDiff) -> list[str]:
    """Return the parts of the text that all listed buckets have, where there are more than two."""
    parts = [str(change.place).split(" ") for change in diff.listed if isinstance(change.place, Problem)]
    return [part for part in parts[0] if all(part in other for other in parts)] if len(parts) > 2 else []


def _cells(change: Change, common: Sequence[str]) -> tuple[str, ...]:
    """Return an entry's verdict, place, gains, times, and the parts of the config that differ."""
    sides = change.winners
    place = str(change.place)
    if common:
        place = " ".join(part for part in place.split(" ") if part not in common)
    gains = " -> ".join("-" if side.entry.gain is None else f"{side.entry.gain:.2f}x" for side in sides)
    evidence = dict.fromkeys(side.evidence for side in sides)
    return (
        _WORDS[change.verdict],
        place,
        gains + (f", {' -> '.join(evidence)}" if len(evidence) > 1 else ""),
        " -> ".join(f"{side.entry.mean_us:.2f}" for side in sides),
        change.config,
    )


# Markdown ---------------------------------------------------------------------------------------------------

MOST_CHARACTERS = 65_000
"""Most characters of the Markdown: a comment on GitHub holds 65,536, a job's summary more."""

_CLOSING = 200
"""Characters kept free for the ends of a table and of the text."""


def diff_markdown(diffs: Sequence[TableDiff]) -> str:
    """Return the differences as GitHub's Markdown, tables and entries worst first.

    Details are folded. Rows that exceed `MOST_CHARACTERS` are counted.
    """
    changed = sorted((diff for diff in diffs if not diff.empty), key=_badness)
    if not changed:
        return f"### No differences in {counted(len(diffs), 'table')}"
    worse = sum(change.verdict == "less" for diff in changed for change in diff.changes)
    mark = f"⚠️ {counted(worse, 'entry gains', 'entries gain')} less" if worse else "✅ no entry gains less"
    heads = ["table", "over default", "portfolio regret", *_WORDS.values()]
    lines = [
        f"### {len(changed)} of {counted(len(diffs), 'table')} changed: {mark}",
        "",
        f"{_summary(changed)}. *Less* and *more* are gains over the default that changed by over {BAND:.0%}. "
        "*Over default* is each side's mean of all its entries, *portfolio regret* the worst that "
        "the portfolio leaves against all candidates.",
        "",
        *_head(heads),
    ]
    room = MOST_CHARACTERS - _CLOSING - sum(len(line) + 1 for line in lines)
    overview, room = _fitting([_overview_row(diff) for diff in changed], room)
    lines += [*overview, ""]
    shown = 0
    for diff in changed:
        counts = f"{len(diff.listed)} listed, {len(diff.changes) - len(diff.listed)} tied"
        opening = [f"<details><summary>{html.escape(_named(diff))}: {counts}</summary>", ""]
        opening += [*(f"- {_code(remark)}" for remark in remarks), ""] if (remarks := _remarks(diff)) else []
        cells = _rows(diff)
        opening += _head(cells[0]) if cells else []
        left = room - sum(len(line) + 1 for line in opening) - _CLOSING
        if left < 0:
            break
        rows = [_row(verdict, *map(_code, others)) for verdict, *others in cells[1:]]
        fitting, room = _fitting(rows, left)
        more = [f"\n{len(rows) - len(fitting)} more rows"] if len(fitting) < len(rows) else []
        lines += [*opening, *fitting, *more, "", "</details>", ""]
        shown += 1
    if shown < len(changed):
        lines.append(f"The details of {counted(len(changed) - shown, 'table')} do not fit here.")
    return "\n".join(lines)


def _badness(diff: TableDiff) -> tuple[int, float, str]:
    """Return a sort key: most entries that gain less first, then the worst of them."""
    less = [change.ratio for change in diff.changes if change.verdict == "less"]
    return -len(less), min(less, default=1.0), _named(diff)


def _overview_row(diff: TableDiff) -> str:
    sides = ([] if side is None else side.gains for side in (diff.old, diff.new))
    means = " → ".join(f"{geometric_mean(gains):.3f}x" if gains else "-" for gains in sides)
    counts = Counter(change.verdict for change in diff.changes)
    cells = (str(counts[verdict] or "") for verdict in _WORDS)
    return _row(_code(_named(diff)), means, _portfolio_regret(diff), *cells)


def _portfolio_regret(diff: TableDiff) -> str:
    """Return both sides' worst regret of the portfolio, marked where it grows; empty where it is the same."""
    regrets = [side.portfolio_regret for side in (diff.old, diff.new) if side is not None]
    if len({*regrets}) < 2:
        return ""
    mark = "⚠️ " if regrets[1] > regrets[0] + BAND else ""
    return f"{mark}{regrets[0]:.1%} → {regrets[1]:.1%}"


def _fitting(lines: Sequence[str], room: int) -> tuple[list[str], int]:
    """Return the first lines that fit into some characters, and the characters left."""
    fitting: list[str] = []
    for line in lines:
        if len(line) + 1 > room:
            break
        fitting.append(line)
        room -= len(line) + 1
    return fitting, room


def _head(cells: Sequence[str]) -> list[str]:
    return [_row(*cells), "|---" * len(cells) + "|"]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _code(text: str) -> str:
    """Return a text as code that neither ends a cell nor a span, whatever names it holds."""
    words = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return f"`{words}`" if words else ""


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
