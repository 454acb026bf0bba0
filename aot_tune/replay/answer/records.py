"""The recorded searches of one kernel on one arch: found, checked against the kernel that is here, looked up.

Folders are read in this order, and the first that answers counts: those of AOT_TUNE_TABLES, the library's own
package, and those that `aot_tune.install` was given, for libraries that lie in read-only folders. A table for
other source or of another version of the library is left out with one warning, as is one that cannot be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aot_tune import environment
from aot_tune.errors import AotTuneError, TableWarning
from aot_tune.nvidia import cutile
from aot_tune.replay.answer.places import further_folders
from aot_tune.replay.files import read_recorded
from aot_tune.replay.fit import hash_now, misfit
from aot_tune.replay.nearest import distance, larger
from aot_tune.replay.problem import Problem, read_problem
from aot_tune.replay.table import RecordedEntry, RecordedTable, file_name
from aot_tune.tables.store import folder_of_package
from aot_tune.values.arch import Arch
from aot_tune.values.text import error_in_words
from aot_tune.warn import warn


@dataclass(frozen=True, kw_only=True)
class Found:
    """A recorded answer."""

    entry: RecordedEntry
    """The recorded search."""

    place: int
    """The winner's place in the present search space."""

    doublings: int | None
    """The distance to the problem that was recorded; None where it is the same problem."""


class KernelRecords:
    """All that was recorded of one kernel on one arch.

    Args:
        kernel: A ``@ct.kernel``.
        arch: The arch.
    """

    def __init__(self, kernel: Any, arch: Arch) -> None:
        constants = set(cutile.constant_parameters(kernel))
        self._parameters = [(name, name in constants) for name, _ in cutile.parameters(kernel)]
        self.tables = tuple(_tables(kernel, arch))
        """The tables that fit the kernel, in reading order."""

    def find(
        self, texts: Sequence[str], space: str, args: Sequence[Any], sm_count: int, *, most: float | None
    ) -> Found | None:
        """The recorded answer to a search.

        Args:
            texts: The configs of the present search space, spelled.
            space: Their hash.
            args: The kernel's arguments for one of the configs.
            sm_count: The GPU's multiprocessors.
            most: The most doublings between a dimension and the recorded one; None for the same problem only.

        Raises:
            NotRecordableError: The arguments cannot be told from others.
        """
        best: Found | None = None
        for table in self.tables:
            problems: dict[tuple[int, ...], Problem] = {}
            for entry in table.by_space.get(space, ()):
                varying = entry.problem.varying
                if varying not in problems:
                    problems[varying] = read_problem(self._parameters, args, varying, sm_count)
                asked = problems[varying]
                same = entry.problem == asked
                doublings = None if same or most is None else distance(entry.problem, asked, most)
                if (not same and doublings is None) or entry.text not in texts:
                    continue
                found = Found(
                    entry=entry, place=texts.index(entry.text), doublings=None if same else doublings
                )
                if same:
                    return found
                if best is None or _rank(found) < _rank(best):
                    best = found
        return best


def _rank(found: Found) -> tuple[int, int]:
    """The nearer first, and of equally near ones the larger; the file's order decides what is left."""
    assert found.doublings is not None
    return found.doublings, -larger(found.entry.problem)


def folders_of(kernel: Any) -> tuple[Path, ...]:
    """The folders of recorded tables and of cubins of a kernel, in reading order."""
    folders = list(environment.table_folders())
    with suppress(AotTuneError):  # a program's own module, or one without a folder
        folders.append(folder_of_package(cutile.python_function(kernel).__module__))
    return tuple(dict.fromkeys((*folders, *further_folders())))


def paths_of(kernel: Any, arch: Arch) -> Iterator[Path]:
    """The files where recorded searches of a kernel may lie, in reading order."""
    function = cutile.python_function(kernel)
    name = file_name(function.__module__, function.__qualname__)
    for folder in folders_of(kernel):
        yield folder / str(arch) / name


def _tables(kernel: Any, arch: Arch) -> Iterator[RecordedTable]:
    now: str | None = None
    for path in paths_of(kernel, arch):
        if not os.path.lexists(path):
            continue
        try:
            table = read_recorded(path)
            if now is None:
                now = hash_now(kernel)
            reason = misfit(table, kernel, arch, now)
        except Exception as error:  # whatever a file holds, serving goes on
            warn(f"{error_in_words(error)}; it is left out: restore {path}, or remove it", TableWarning)
            continue
        if reason is not None:
            warn(f"{path} is left out: {reason}; record again: aot-tune record", TableWarning)
            continue
        yield table
