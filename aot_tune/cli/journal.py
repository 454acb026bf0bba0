"""`aot-tune journal`: contents of journals of sweeps and recordings, as text and as JSON lines.

Takes no lock and writes nothing, so a journal may be read while it is being written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from aot_tune.cli.documents.journals import JournalDocument, SweepJournal, read_journal
from aot_tune.cli.seconds import table_lines
from aot_tune.errors import JournalMismatchError, UsageError
from aot_tune.tuner.sweep.journal import JournalWriteError
from aot_tune.values.arch import Arch
from aot_tune.values.text import counted

SUFFIXES = (".jsonl", ".done", ".old")
"""Suffixes of journals: unfinished, with a published table, set aside by --fresh."""


def paths_of(words: Sequence[str], arch: Arch | None, folder: Path) -> list[Path]:
    """Return the journals of files, of folders and of named kernels.

    Args:
        words: Paths and names of kernels; without any, all journals in `folder`.
        arch: With it, kernels' journals of this arch only.
        folder: The folder of journals.

    Raises:
        UsageError: A path does not exist, or there is no such journal.
    """
    paths: list[Path] = []
    for word in words or [""]:
        path = Path(word)
        if word and ("/" in word or path.suffix in (*SUFFIXES, ".damaged")):
            paths += _at(path)
            continue
        named = [
            journal
            for journal in _below(folder, arch)
            if not word or word in (journal.name.partition(".")[0], journal.stem)
        ]
        if not named:
            of = f" of {word}" if word else ""
            on = f" on {arch}" if arch else ""
            raise UsageError(
                f"no journal{of}{on} is in {folder}; name the folder with --journal, or give a journal's path"
            )
        paths += named
    return list(dict.fromkeys(paths))


def _at(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            journals = [journal for suffix in SUFFIXES for journal in sorted(path.rglob(f"*{suffix}"))]
            if journals:
                return journals
        elif path.is_file():
            return [path]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a journal's path or a kernel's name") from error
    raise UsageError(f"no journal is at {path}; give a journal's path or a kernel's name")


def _below(folder: Path, arch: Arch | None) -> list[Path]:
    journals = [path for path in folder.glob(f"{arch or '*'}/*") if path.suffix in SUFFIXES]
    return sorted(journals, key=lambda path: (path.parent.name, path.name.partition(".")[0], path.name))


def contents(paths: Sequence[Path]) -> tuple[list[JournalDocument], list[str]]:
    """Read journals; return them, and a line for each that cannot be read."""
    journals, unreadable = [], []
    for path in paths:
        try:
            journals.append(read_journal(path))
        except (JournalMismatchError, JournalWriteError) as error:
            unreadable.append(str(error))
    return journals, unreadable


def summary_lines(journal: JournalDocument) -> list[str]:
    """Return a journal as text: conditions, totals, damage, and a row for each step or search."""
    identity = ", ".join(f"{name} {value}" for name, value in journal.content.identity.items())
    made_with = f"made with {identity or 'conditions that the lost first line named'}"
    return [f"{journal.path}:", made_with, journal.total(), *damage_lines(journal), *journal.rows()]


def damage_lines(journal: JournalDocument) -> list[str]:
    """Return lines about damage to a journal's file; none where it is intact."""
    lines, content = [], journal.content
    if content.damaged_places:
        lines.append(
            f"damaged in {counted(content.damaged_places, 'place')}: the next {journal.noun} sets "
            f"{counted(content.damaged_bytes, 'byte')} aside and measures their contents again"
        )
    if content.foreign:
        lines.append(f"{counted(content.foreign, 'record')} of other conditions: {journal.foreign}")
    return lines


def json_lines(journals: Sequence[JournalDocument]) -> Iterator[str]:
    """Yield each record as a line of JSON, with its journal's path and conditions."""
    for journal in journals:
        for record in journal.records:
            made_with = journal.content.identity
            yield json.dumps({"journal": str(journal.path), "made_with": made_with, **record})


def seconds_lines(journals: Sequence[JournalDocument]) -> tuple[list[str], list[str]]:
    """Return the use of GPU seconds, a row for each kernel; and a line for each journal without any."""
    sweeps = [journal for journal in journals if isinstance(journal, SweepJournal)]
    others = [
        f"{journal.path}: left out: a journal of aot-tune record has no seconds"
        for journal in journals
        if journal not in sweeps
    ]
    return table_lines([(journal.path, journal.content) for journal in sweeps]), others
