"""What recorded searches of a kernel give its declaration: winners and problems. Launches nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aot_tune.cli.start.sketch import Sketch
from aot_tune.declare.kernel_source.layout import SizeAxis
from aot_tune.errors import AotTuneError, CutileError
from aot_tune.nvidia import cutile
from aot_tune.nvidia.signature import constants_of
from aot_tune.replay.files import listed_recorded, read_recorded, right_place_of
from aot_tune.replay.fit import hash_now, misfit
from aot_tune.replay.problem import Array, Items, Varying
from aot_tune.replay.table import RecordedEntry, RecordedTable, file_name
from aot_tune.values.config import HINTS, Config
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
    """The problems, each once, in the tables' order."""

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

    @property
    def hints(self) -> tuple[str, ...]:
        """The hints that every config has, in cuTile's order."""
        return tuple(name for name in HINTS if all(name in one.hints for one in self.configs))


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


def settle(sketch: Sketch, tables: Sequence[Found]) -> None:
    """Let the searches say which constants of the kernel belong to a config."""
    varied = {
        name
        for _, table in tables
        for entry in table.entries
        for name, one in zip(entry.problem.names, entry.problem.arguments, strict=True)
        if isinstance(one, Varying)
    }
    for one in sketch.parameters:
        if one.constant and one.name in varied and one.role in ("cover", "flag", "float", "integer"):
            one.role = "setting"


def recordings_of(sketch: Sketch, tables: Sequence[Found]) -> Recordings | None:
    """The configs and problems of the searches; None where no search can be told in a declaration's terms."""
    wins: dict[Config, int] = {}
    problems: list[dict[str, object]] = []
    searches = 0
    sources = []
    fixed: dict[str, set[object]] = {}
    for path, table in tables:
        before = searches
        for entry in table.entries:
            constants, problem = _constants(sketch, entry), _problem(sketch, entry)
            if constants is None or problem is None:
                continue
            config = Config(constants=constants, hints=entry.hints)
            wins[config] = wins.get(config, 0) + 1
            searches += entry.count
            if problem not in problems:
                problems.append(problem)
            arguments = dict(zip(entry.problem.names, entry.problem.arguments, strict=True))
            for name, value in constants.items():
                if not isinstance(arguments[name], Varying):
                    fixed.setdefault(name, set()).add(value)
        if searches > before:
            sources.append(_source(path, table))
    if not problems:
        return None
    return Recordings(
        configs=tuple(sorted(wins, key=lambda one: -wins[one])),
        problems=tuple(problems),
        searches=searches,
        sources=tuple(sources),
        unsettled=tuple(name for name, values in fixed.items() if len(values) > 1),
    )


def _constants(sketch: Sketch, entry: RecordedEntry) -> dict[str, Any] | None:
    """The constants of a winner's config; None where one cannot be told."""
    values = _compiled_in(entry)
    names = [one.name for one in sketch.parameters if one.role in ("tile", "setting")]
    if any(not isinstance(values.get(name), _PLAIN) for name in names):
        return None
    return {name: values[name] for name in names}


def _compiled_in(entry: RecordedEntry) -> dict[str, object]:
    """What the winner's launch had compiled in, by parameter."""
    try:
        values = constants_of(entry.signature)
    except CutileError:
        return {}
    return dict(zip(entry.problem.names, values, strict=False))


def _problem(sketch: Sketch, entry: RecordedEntry) -> dict[str, object] | None:
    """A search's problem in the terms of the declaration; None where a size or a dtype of it is not known."""
    arrays = {}
    for name, one in zip(entry.problem.names, entry.problem.arguments, strict=True):
        first = one.items[0] if isinstance(one, Items) and one.items else one
        if isinstance(first, Array):
            arrays[name] = first
    values = _compiled_in(entry)
    typed = sketch.typed
    found: dict[str, object] = {}
    if typed is not None:
        found["dtype"] = arrays[typed.name].dtype if typed.name in arrays else None
    for axis in sketch.used_axes:
        found[sketch.name_of(axis)] = _size(axis, arrays)
    for parameter in (*sketch.compiled_in("integer"), *sketch.compiled_in("flag")):
        found[parameter.name] = values.get(parameter.name)
    return found if all(isinstance(one, _PLAIN) for one in found.values()) else None


def _size(axis: SizeAxis, arrays: dict[str, Array]) -> int | None:
    """The size of an axis, 1 or more; None where no array tells it."""
    for name, place in axis.sizes:
        if name in arrays and place < len(arrays[name].shape):
            return arrays[name].shape[place] or None
    return None


def _source(path: Path, table: RecordedTable) -> str:
    place = "/".join(path.absolute().parts[-3:])
    library = f"{table.library.name} {table.library.version}, " if table.library.name else ""
    return f"{place} ({library}{table.built_with.device_name})"
