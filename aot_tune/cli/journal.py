"""`aot-tune journal`: what journals of sweeps and recordings hold, for a person and as rows for a script.

It takes no lock and changes nothing, so one that is being written may be looked at.
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
"""The ends of journals' names: one that goes on, one whose table is published, one that --fresh set aside."""


def paths_of(words: Sequence[str], arch: Arch | None, folder: Path) -> list[Path]:
    """The journals that are asked for: files, all of folders, and all of kernels named.

    Args:
        words: Paths and names of kernels; all journals in `folder` where there is none.
        arch: Only those of this arch, where journals are looked for by name.
        folder: The folder of journals, ``build/journal`` unless another is named.

    Raises:
        UsageError: A path does not exist, or there is no such journal.
    """
    found: list[Path] = []
    for word in words or [""]:
        path = Path(word)
        if word and ("/" in word or path.suffix in (*SUFFIXES, ".damaged")):
            found += _at(path)
            continue
        here = [
            one for one in _below(folder, arch) if not word or word in (one.name.partition(".")[0], one.stem)
        ]
        if not here:
            of = f" of {word}" if word else ""
            on = f" on {arch}" if arch else ""
            raise UsageError(
                f"no journal{of}{on} is in {folder}; name the folder with --journal, or give a journal's path"
            )
        found += here
    return list(dict.fromkeys(found))


def _at(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            here = [one for suffix in SUFFIXES for one in sorted(path.rglob(f"*{suffix}"))]
            if here:
                return here
        elif path.is_file():
            return [path]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a journal's path or a kernel's name") from error
    raise UsageError(f"no journal is at {path}; give a journal's path or a kernel's name")


def _below(folder: Path, arch: Arch | None) -> list[Path]:
    found = [path for path in folder.glob(f"{arch or '*'}/*") if path.suffix in SUFFIXES]
    return sorted(found, key=lambda path: (path.parent.name, path.name.partition(".")[0], path.name))


def contents(paths: Sequence[Path]) -> tuple[list[JournalDocument], list[str]]:
    """The journals, and a line for each that cannot be read."""
    found, unreadable = [], []
    for path in paths:
        try:
            found.append(read_journal(path))
        except (JournalMismatchError, JournalWriteError) as error:
            unreadable.append(str(error))
    return found, unreadable


def summary_lines(journal: JournalDocument) -> list[str]:
    """One journal for a person: its conditions, its totals, its damage, and a row for each step or search."""
    identity = ", ".join(f"{name} {value}" for name, value in journal.content.identity.items())
    made_with = f"made with {identity or 'conditions that the lost first line named'}"
    return [f"{journal.path}:", made_with, journal.total(), *damage_lines(journal), *journal.rows()]


def damage_lines(journal: JournalDocument) -> list[str]:
    """What is wrong with a journal's file; nothing where it is intact."""
    lines, content = [], journal.content
    if content.damaged_places:
        lines.append(
            f"damaged in {counted(content.damaged_places, 'place')}: the next {journal.noun} sets "
            f"{counted(content.damaged_bytes, 'byte')} aside and measures again what they held"
        )
    if content.foreign:
        lines.append(f"{counted(content.foreign, 'record')} of other conditions: {journal.foreign}")
    return lines


def json_lines(found: Sequence[JournalDocument]) -> Iterator[str]:
    """Each record as one line of JSON, with its journal's path and conditions."""
    for one in found:
        for record in one.records:
            yield json.dumps({"journal": str(one.path), "made_with": one.content.identity, **record})


def seconds_lines(found: Sequence[JournalDocument]) -> tuple[list[str], list[str]]:
    """What the GPUs' seconds went into, a row for each kernel; and a line for each journal without any."""
    sweeps = [one for one in found if isinstance(one, SweepJournal)]
    others = [
        f"{one.path}: left out: a journal of aot-tune record tells no seconds"
        for one in found
        if one not in sweeps
    ]
    return table_lines([(one.path, one.content) for one in sweeps]), others
