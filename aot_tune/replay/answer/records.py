"""Recorded searches of one kernel on one arch: read, checked against the present kernel, looked up.

Folders are read in this order, and the first that answers counts: the folders of AOT_TUNE_TABLES, the
library's own package, the folders that `aot_tune.install` was given, for libraries in read-only folders, and
the tables that aot_tune ships. A table that cannot be read, or is for other source or another version of the
library, is left out with one warning. A shipped table is left out without a warning where the code is
another, and another version of the library is a remark.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from aot_tune import environment
from aot_tune.cubins.archive import FILE_NAME
from aot_tune.cubins.origin import changed_since, next_step
from aot_tune.errors import AotTuneError, TableWarning, UnspelledError
from aot_tune.nvidia import cutile
from aot_tune.replay.answer.places import further_folders
from aot_tune.replay.files import is_shipped, read_recorded
from aot_tune.replay.fit import hash_now, misfit, other_library
from aot_tune.replay.nearest import apart, distance, larger
from aot_tune.replay.problem import parameters_of, read_problem
from aot_tune.replay.spelling import Space, spelled, text_of
from aot_tune.replay.table import RecordedEntry, RecordedTable, file_name, name_of
from aot_tune.replay.words import difference_in_words, problem_in_words
from aot_tune.serve.kernels import opened
from aot_tune.tables import store
from aot_tune.values.arch import Arch
from aot_tune.values.text import counted, error_in_words
from aot_tune.warn import warn_once


@dataclass(frozen=True, kw_only=True)
class Found:
    """Recorded answer to a search."""

    entry: RecordedEntry
    """Recorded search."""

    place: int
    """Winner's place in the present search space."""

    doublings: int | None
    """Distance to the recorded problem; None where it is the same problem."""


_MOST_CLOSURES = 64
"""Most closures of one code object that have values: a closure may hold a size, of which there are many."""


class ByCode:
    """Values by a kernel's code, so that kernels which a library makes anew in each call share them.

    Two functions share if they have one code object, and equal closures and defaults: values of equal
    spelling, and functions that share. A reload makes another code object.
    """

    def __init__(self) -> None:
        self._values: dict[int, dict[object, dict[Any, Any]]] = {}
        self.clear = self._values.clear

    def of(self, kernel: Any) -> dict[Any, Any]:
        """Return the values of a kernel, which the caller may add to."""
        function = cutile.python_function(kernel)
        closure = _closure(function)
        owner = function if closure is None else function.__code__
        if id(owner) not in self._values:
            weakref.finalize(owner, self._values.pop, id(owner), None)
        values = self._values.setdefault(id(owner), {})
        if closure not in values and len(values) >= _MOST_CLOSURES:
            values.clear()
        return values.setdefault(closure, {})


def _closure(function: Any) -> tuple[object, ...] | None:
    """Return what identifies the values that a function was made with; None where something cannot."""
    try:
        values = [cell.cell_contents for cell in function.__closure__ or ()]
        return tuple(map(_identity, (*values, function.__defaults__)))
    except Exception:  # also an empty cell, and a function that is in its own closure
        return None


def _identity(value: Any) -> object:
    if isinstance(value, FunctionType):
        code, closure = value.__code__, _closure(value)
        if closure is not None:
            return id(code), code, closure  # equal code of another function is no proof
    elif not hasattr(value, "shape"):  # printing a tensor would wait for the GPU
        return text_of(spelled(value))
    raise UnspelledError(f"a {type(value).__name__} has no identity")


class KernelRecords:
    """Recorded searches of one kernel on one arch.

    Args:
        kernel: A ``@ct.kernel``.
        arch: The arch.
    """

    def __init__(self, kernel: Any, arch: Arch) -> None:
        self._parameters = parameters_of(kernel)
        read = tuple(_tables(kernel, arch))
        self.tables = tuple(one for one in read if isinstance(one, RecordedTable))
        """Tables that fit the kernel, in reading order."""
        self.left_out = tuple(one for one in read if isinstance(one, str))
        """Tables that do not, each with the reason."""

    def find(self, space: Space, args: Sequence[Any], sm_count: int, *, most: float) -> Found | None:
        """Return the recorded answer to a search; None where there is none.

        Args:
            space: The present search space.
            args: The kernel's arguments for one of the configs.
            sm_count: The GPU's multiprocessors.
            most: Most doublings between a dimension and the recorded one.

        Raises:
            NotRecordableError: The arguments cannot be identified.
        """
        entries = [(at, entry) for at, table in enumerate(self.tables) for entry in table.of(space)]
        varying = {entry.problem.varying for _, entry in entries}
        asked = {places: read_problem(self._parameters, args, places, sm_count) for places in varying}
        for _, entry in entries:  # measuring distances takes longer
            if entry.problem == asked[entry.problem.varying]:
                return Found(entry=entry, place=space.texts.index(entry.text), doublings=None)
        best: tuple[tuple[int, ...], Found] | None = None
        for at, entry in entries:
            doublings = distance(entry.problem, asked[entry.problem.varying], most)
            if doublings is None:
                continue
            # The nearer first, then that of the first folder, then the larger. Ties keep the file's order.
            rank = doublings, at, *(-size for size in larger(entry.problem))
            if best is None or rank < best[0]:
                place = space.texts.index(entry.text)
                best = rank, Found(entry=entry, place=place, doublings=doublings)
        return None if best is None else best[1]

    def why_not(self, space: Space, args: Sequence[Any], sm_count: int, *, most: float) -> str:
        """Return in words how a search without an answer differs from the nearest recorded one.

        Args:
            space: The present search space.
            args: As for `find`.
            sm_count: The GPU's multiprocessors.
            most: Most doublings between a dimension and the recorded one.
        """
        names = tuple(name for name, _ in self._parameters)  # another has a table that somebody edited
        entries = [entry for table in self.tables for entry in table.of(space)]
        same_space = any(entry.problem.names == names for entry in entries)
        if not same_space:
            entries = [entry for table in self.tables for entry in table.entries]
        best: tuple[tuple[int, int], str] | None = None
        for problem in (entry.problem for entry in entries if entry.problem.names == names):
            asked = read_problem(self._parameters, args, problem.varying, sm_count)
            places = apart(problem, asked, most)
            rank = len(places), sum(a != b for a, b in zip(problem.arguments, asked.arguments, strict=True))
            if best is None or rank < best[0]:
                difference = difference_in_words(problem, asked, places)
                best = rank, "; ".join(filter(None, (problem_in_words(problem), difference)))
        configs = counted(len(space.texts), "config")
        missing = "" if same_space else f"this search space, its {configs} and hints, was not recorded"
        nearest = "nearest recorded" if same_space else "nearest recorded in another"
        return "; ".join(filter(None, (missing, best and f"{nearest}: {best[1]}", *self.left_out)))


def folders_of(module: str | None) -> tuple[Path, ...]:
    """Return the folders of recorded tables and cubins of a module's kernels, in reading order.

    A function that a library makes by ``exec`` may have no module.
    """
    folders = list(environment.table_folders())
    with suppress(AotTuneError):  # a program's own module, or one without a folder
        folders.append(store.folder_of_package(module or ""))
    return tuple(dict.fromkeys((*folders, *further_folders(), store.libraries_folder())))


def paths_of(kernel: Any, arch: Arch) -> Iterator[Path]:
    """Yield the possible files of a kernel's recorded table, in reading order."""
    function = cutile.python_function(kernel)
    name = file_name(function.__module__, function.__qualname__)
    for folder in folders_of(function.__module__):
        yield folder / str(arch) / name


def _tables(kernel: Any, arch: Arch) -> Iterator[RecordedTable | str]:
    """Yield a kernel's tables in reading order; in place of one that is left out, the reason."""
    now: str | None = None
    for path in paths_of(kernel, arch):
        if not os.path.lexists(path):
            continue
        try:
            table, shipped = read_recorded(path), is_shipped(path)
            if now is None:
                now = _hash(kernel, arch)
            reason = misfit(table, kernel, arch, now, any_version=shipped)
            if shipped and reason is None and (version := other_library(table.library)):
                warn_once(f"a shipped table answers where the code is the same: {version}", TableWarning)
            if reason is not None and table.source_hash != now:
                reason += _changed(path, table)
        except Exception as error:  # whatever a file holds, serving goes on
            left_out = f"{error_in_words(error)}; it is left out"
            warn_once(f"{left_out}: restore {path}, or remove it", TableWarning)
            yield left_out
            continue
        if reason is None:
            yield table
            continue
        left_out = f"{path} is left out: {reason}"
        if not shipped:  # nobody is warned of tables that are not theirs
            warn_once(f"{left_out}; {next_step('record again: aot-tune record')}", TableWarning)
        yield left_out


def _hash(kernel: Any, arch: Arch) -> str:
    """Return a kernel's source hash: an archive's where nothing changed since, else made in 8 to 16 ms."""
    function = cutile.python_function(kernel)
    for folder in folders_of(function.__module__):
        with suppress(Exception):  # no archive, or whatever it holds
            section = opened(folder / str(arch) / FILE_NAME).section(
                name_of(function.__module__, function.__qualname__)
            )
            if section is not None and section.origin.complete and changed_since(section.origin) is None:
                return section.origin.source_hash
    return hash_now(kernel)


def _changed(path: Path, table: RecordedTable) -> str:
    """Return which file or global value differs from a table's code, as far as its archive shows it."""
    with suppress(AotTuneError):
        section = opened(path.with_name(FILE_NAME)).section(name_of(table.module, table.kernel))
        if section is not None and section.origin.source_hash == table.source_hash:
            changed = changed_since(section.origin)
            return f", {changed}" if changed is not None else ""
    return ""
