"""What recorded searches of a kernel give its declaration: winners and problems. Launches nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from aot_tune.errors import AotTuneError, CutileError
from aot_tune.nvidia import cutile
from aot_tune.nvidia.signature import constants_of
from aot_tune.replay.files import listed_recorded, read_recorded, right_place_of
from aot_tune.replay.fit import hash_now, misfit
from aot_tune.replay.problem import Array, Varying
from aot_tune.replay.table import RecordedEntry, RecordedTable, file_name
from aot_tune.values.config import Config
from aot_tune.values.text import counted

Found = tuple[Path, RecordedTable]
"""A recorded table and its file."""

_PLAIN = (bool, int, float, str)
"""Types of constants that a config can hold."""


@dataclass(frozen=True, kw_only=True)
class Recordings:
    """What was recorded of one kernel, in the terms of its declaration."""

    configs: tuple[Config, ...]
    """The winners, each once, the one that won most problems first."""

    problems: tuple[dict[str, object], ...]
    """The problems by the example of the field `problem`, each once, in the tables' order."""

    searches: int
    """The number of searches that they are of."""

    sources: tuple[str, ...]
    """Each table in words: its place, its library and its GPU."""

    unsettled: tuple[str, ...]
    """Constants of the configs that no search varied, and that differ between problems."""

    @property
    def origin(self) -> str:
        """Where they come from: ``3 recorded searches: tables/sm90/mylib.kernel.json (NVIDIA H200)``."""
        searches = counted(self.searches, "recorded search", "recorded searches")
        return f"{searches}: {'; '.join(self.sources)}"


def tables_of(kernel: Any, folders: Iterable[Path]) -> tuple[list[Found], list[str]]:
    """The recorded tables of a kernel as its code is now, and a line for each one that is left out.

    Args:
        kernel: The ``@ct.kernel``.
        folders: Folders of tables, in reading order.

    Raises:
        StoreError: A folder cannot be listed.
    """
    function = cutile.python_function(kernel)
    name, now = file_name(function.__module__, function.__qualname__), hash_now(kernel)
    found: list[Found] = []
    notes = []
    for path in listed_recorded(folders):
        if path.name != name:
            continue
        try:
            table = read_recorded(path)
        except AotTuneError as error:
            notes.append(f"left out: {error}")
            continue
        right = right_place_of(path, table)
        why = f"it belongs in {right}" if right is not None else misfit(table, kernel, table.arch, now)
        if why is None:
            found.append((path, table))
        else:
            notes.append(f"{path} is left out: {why}")
    return found, notes


def tuned_in(tables: Iterable[Found]) -> frozenset[str]:
    """Return the constants that a recorded search varied with its configs."""
    return frozenset(
        name
        for _, table in tables
        for entry in table.entries
        for name, one in zip(entry.problem.names, entry.problem.arguments, strict=True)
        if isinstance(one, Varying)
    )


def recordings_of(
    tables: Sequence[Found], tuned: Sequence[str], launched: Sequence[str], problem_code: str
) -> Recordings | None:
    """Return the configs and problems of the searches; None where no search has a value of each constant.

    Args:
        tables: The recorded tables.
        tuned: The constants of a config.
        launched: The arguments of a launch.
        problem_code: The example of the field ``problem``, by which problems are written.
    """
    wins: dict[Config, int] = {}
    problems: list[dict[str, object]] = []
    searches = 0
    sources = []
    fixed: dict[str, set[object]] = {}
    for path, table in tables:
        before = searches
        for entry in table.entries:
            constants = _constants(tuned, entry)
            if constants is None:
                continue
            config = Config(constants=constants, hints=entry.hints)
            wins[config] = wins.get(config, 0) + 1
            searches += entry.count
            problem = _problem(entry, launched, problem_code)
            if problem is not None and problem not in problems:
                problems.append(problem)
            arguments = dict(zip(entry.problem.names, entry.problem.arguments, strict=True))
            for name, value in constants.items():
                if not isinstance(arguments[name], Varying):
                    fixed.setdefault(name, set()).add(value)
        if searches > before:
            sources.append(_source(path, table))
    if not wins:
        return None
    return Recordings(
        configs=tuple(sorted(wins, key=lambda one: -wins[one])),
        problems=tuple(problems),
        searches=searches,
        sources=tuple(sources),
        unsettled=tuple(name for name, values in fixed.items() if len(values) > 1),
    )


def _constants(tuned: Sequence[str], entry: RecordedEntry) -> dict[str, Any] | None:
    """The constants of a winner's config; None where the launch had no plain value of one compiled in."""
    try:
        compiled_in = constants_of(entry.signature)
    except CutileError:
        return None
    values = dict(zip(entry.problem.names, compiled_in, strict=False))
    if any(not isinstance(values.get(name), _PLAIN) for name in tuned):
        return None
    return {name: values[name] for name in tuned}


class _Shaped:
    """An array as the example of `problem` reads it."""

    def __init__(self, array: Array) -> None:
        self.dtype, self.shape = array.dtype, array.shape

    def numel(self) -> int:
        return prod(self.shape)


def _problem(entry: RecordedEntry, launched: Sequence[str], problem_code: str) -> dict[str, object] | None:
    """A search's problem by the example of `problem`; None where that does not suit its arguments."""
    arguments = dict(zip(entry.problem.names, entry.problem.arguments, strict=True))
    given = [arguments.get(name) for name in launched]
    try:
        found: dict[str, object] = eval(problem_code)(
            *(_Shaped(one) if isinstance(one, Array) else one for one in given)
        )
    except Exception:  # an array of another rank, or a list
        return None
    return found if all(isinstance(one, _PLAIN) and one for one in found.values()) else None


def _source(path: Path, table: RecordedTable) -> str:
    place = "/".join(path.absolute().parts[-3:])
    library = f"{table.library.name} {table.library.version}, " if table.library.name else ""
    return f"{place} ({library}{table.built_with.device_name})"
