"""What changed between two recorded tables, problem by problem. Needs no kernel and no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from aot_tune.cli.changes import SIGNS, Change, TableChanges, built_with_remarks, kind_of
from aot_tune.cli.recorded.show import library_in_words
from aot_tune.replay.problem import Problem
from aot_tune.replay.table import RecordedEntry, RecordedTable, name_of
from aot_tune.replay.words import config_in_words, problem_in_words
from aot_tune.tables.table import geometric_mean
from aot_tune.values.text import aligned


@dataclass(frozen=True, kw_only=True)
class ProblemChange(Change[RecordedEntry]):
    """One problem of one search space whose winner changed."""

    problem: Problem
    """The problem."""


class RecordedDiff(TableChanges[RecordedTable, ProblemChange]):
    """The changes of one kernel's recorded table for one arch."""

    @property
    def speedups(self) -> tuple[float, ...]:
        """The winner's time before / its time after, for each problem that both tables have."""
        before, after = _first_winners(self.old), _first_winners(self.new)
        return tuple(before[key].mean_us / entry.mean_us for key, entry in after.items() if key in before)


Key = tuple[str, Problem]
"""A search: the hash of its space, and its problem."""


def diff_recorded(old: RecordedTable | None, new: RecordedTable | None) -> RecordedDiff:
    """What `new` changes in `old`. Both are of one kernel and arch; one of them may be missing."""
    either = new or old
    assert either is not None
    before, after = _first_winners(old), _first_winners(new)
    changes = []
    for key in (*after, *(key for key in before if key not in after)):
        kind = kind_of(before.get(key), after.get(key), lambda entry: (entry.text, dict(entry.hints)))
        if kind is not None:
            changes.append(ProblemChange(problem=key[1], kind=kind, old=before.get(key), new=after.get(key)))
    return RecordedDiff(
        kernel=name_of(either.module, either.kernel),
        arch=either.arch,
        old=old,
        new=new,
        changes=tuple(changes),
        remarks=tuple(_remarks(old, new)) if old and new else (),
    )


def _first_winners(table: RecordedTable | None) -> dict[Key, RecordedEntry]:
    """The entries that are replayed: of several winners of one problem the first."""
    winners: dict[Key, RecordedEntry] = {}
    for entry in table.entries if table is not None else ():
        winners.setdefault((entry.space, entry.problem), entry)
    return winners


def _remarks(old: RecordedTable, new: RecordedTable) -> Iterator[str]:
    if old.source_hash != new.source_hash:
        yield f"source {old.source_hash} -> {new.source_hash}"
    if old.library != new.library:
        yield f"library {library_in_words(old.library)} -> {library_in_words(new.library)}"
    yield from built_with_remarks(old.built_with, new.built_with)


def lines(diff: RecordedDiff) -> list[str]:
    """One changed table: its remarks, then one line for each problem."""
    state = "" if diff.old and diff.new else (" (new table)" if diff.new else " (table removed)")
    rows = []
    for change in diff.changes:
        sides = [entry for entry in (change.old, change.new) if entry is not None]
        times = [f"{entry.mean_us:.2f}" for entry in sides]
        gains = ["-" if entry.gain is None else f"{entry.gain:.2f}x" for entry in sides]
        configs = list(dict.fromkeys(map(config_in_words, sides)))
        rows.append((
            f"  {SIGNS[change.kind]} {problem_in_words(change.problem)}",
            f"{' -> '.join(times)} us",
            "" if change.speedup is None else f"{change.speedup:.3f}x",
            f"over first {' -> '.join(gains)}",
            " -> ".join(configs),
        ))  # fmt: skip
    return [f"{diff.arch}/{diff.kernel}{state}", *(f"  {one}" for one in diff.remarks), *aligned(rows)]


def data(diff: RecordedDiff) -> dict[str, object]:
    """One changed table for a script."""
    return {
        "kernel": diff.kernel,
        "arch": diff.arch,
        "kind": "recorded",
        "added": diff.old is None,
        "removed": diff.new is None,
        "remarks": diff.remarks,
        "speedup": geometric_mean(diff.speedups),
        "changes": list(_changes_data(diff.changes)),
    }


def _changes_data(changes: Iterable[ProblemChange]) -> Iterator[dict[str, object]]:
    for change in changes:
        sides = {"before": change.old, "after": change.new}
        yield {
            "problem": problem_in_words(change.problem), "kind": change.kind, "speedup": change.speedup
        } | {
            side: None
            if entry is None
            else {
                "config": entry.config,
                "hints": dict(entry.hints),
                "mean_us": entry.mean_us,
                "first_us": entry.first_us,
            }
            for side, entry in sides.items()
        }  # fmt: skip
