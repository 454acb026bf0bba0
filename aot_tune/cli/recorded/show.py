"""Lines of `aot-tune show` about recorded tables. Imports no kernel."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from aot_tune.replay.document import dump
from aot_tune.replay.table import Launched, Library, RecordedEntry, RecordedTable, name_of
from aot_tune.replay.words import config_in_words, problem_in_words
from aot_tune.tables.table import geometric_mean
from aot_tune.values.text import aligned, counted


def overview_lines(tables: Sequence[tuple[Path, RecordedTable]]) -> list[str]:
    """One line for each table: how many problems it answers, and what it gains over the first config."""
    heads = ("arch", "recorded kernel", "library", "problems", "searches", "over first", "best", "on", "file")
    return aligned([heads, *(_overview_row(path, table) for path, table in tables)])


def _overview_row(path: Path, table: RecordedTable) -> tuple[str, ...]:
    gains = [entry.gain for entry in table.entries if entry.gain is not None]
    return (
        str(table.arch),
        name_of(table.module, table.kernel),
        library_in_words(table.library),
        str(problems_of(table)),
        str(sum(entry.count for entry in table.entries)),
        f"{geometric_mean(gains):.2f}x" if gains else "-",
        f"{max(gains):.2f}x" if gains else "-",
        table.built_with.device_name,
        str(path),
    )


def table_lines(path: Path, table: RecordedTable) -> list[str]:
    """A whole table: where it comes from, and one row for each winner."""
    built = table.built_with
    versions = f"cuda-tile {built.cuda_tile}, tileiras {built.tileiras}"
    versions += f", driver {built.driver}" if built.driver else ""
    heads = ("problem", "us", "+-", "first us", "gain", "count", "winner")
    return [
        f"{name_of(table.module, table.kernel)} on {table.arch}, recorded: {path}",
        f"{library_in_words(table.library)}; {built.device_name}, {built.sm_count} multiprocessors, "
        f"{versions}; source {table.source_hash}",
        *aligned([heads, *(entry_row(table, entry) for entry in table.entries)]),
        *(f"launched, but not searched: {hints_in_words(one)}" for one in table.launched),
    ]


def hints_in_words(launched: Launched) -> str:
    """The hints of a launch, and the kernel's signature, which holds its constants."""
    hints = " ".join(f"{name}={value}" for name, value in launched.hints) or "no hints"
    return f"{hints}, {launched.signature}"


def entry_row(table: RecordedTable, entry: RecordedEntry) -> tuple[str, ...]:
    """The cells of one winner."""
    other = "" if entry.problem.sm_count == table.built_with.sm_count else f"{entry.problem.sm_count} SMs: "
    return (
        other + problem_in_words(entry.problem),
        f"{entry.mean_us:.2f}",
        f"{entry.error_margin_us:.2f}",
        "failed" if entry.first_us is None else f"{entry.first_us:.2f}",
        "-" if entry.gain is None else f"{entry.gain:.2f}x",
        str(entry.count),
        config_in_words(entry),
    )


def table_data(path: Path, table: RecordedTable) -> dict[str, object]:
    """A table for a script: its document, and the path of its file."""
    return {"path": path, **json.loads(dump(table))}


def problems_of(table: RecordedTable) -> int:
    """The number of different problems: some have several winners."""
    return len(_distinct(table.entries))


def _distinct(entries: Iterable[RecordedEntry]) -> set[object]:
    return {(entry.space, entry.problem) for entry in entries}


def library_in_words(library: Library) -> str:
    """Name and version; a program's own module has none."""
    return f"{library.name} {library.version}" if library.name else "no library"


def summary(table: RecordedTable) -> str:
    """How many problems a table answers, and the GPU that it was recorded on."""
    return f"{counted(problems_of(table), 'problem')}, recorded on {table.built_with.device_name}"
