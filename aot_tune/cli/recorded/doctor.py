"""Which recorded tables this process would read, and what they answer. Imports kernels, launches nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aot_tune import environment
from aot_tune.cli.recorded import find
from aot_tune.cli.recorded.show import entry_row, summary
from aot_tune.cubins.archive import FILE_NAME, Archive, Section
from aot_tune.cubins.origin import difference
from aot_tune.errors import AotTuneError, StoreError
from aot_tune.replay.files import listed_recorded, read_recorded, right_place_of
from aot_tune.replay.fit import hash_now, is_local, kernel_of, misfit, other_library, recorded_code
from aot_tune.replay.nearest import NEAR
from aot_tune.replay.table import RecordedTable, name_of
from aot_tune.values.arch import Arch
from aot_tune.values.text import aligned


@dataclass(frozen=True, kw_only=True)
class RecordedState:
    """One file of a recorded table."""

    kernel: str
    """The kernel's module and qualified name, as the file's name tells it."""

    path: Path
    """The file."""

    state: str
    """How many problems it answers, or why it is left out."""

    usable: bool
    """Whether replaying would read it."""

    cubins: str
    """What the archive beside it has of the kernel, in words."""


def states(folders: Sequence[Path], arch: Arch) -> Iterator[RecordedState]:
    """The recorded tables for an arch in folders, in reading order."""
    for folder in folders:
        try:
            paths = listed_recorded([folder])
        except StoreError as error:
            yield RecordedState(
                kernel="-", path=folder, state=f"left out: {error}", usable=False, cubins="not asked for"
            )
            continue
        yield from (_state(path, arch) for path in paths if path.parent.name == str(arch))


def _state(path: Path, arch: Arch) -> RecordedState:
    try:
        table = read_recorded(path)
        reason = left_out(path, table, arch)
    except AotTuneError as error:
        return RecordedState(
            kernel=path.stem, path=path, state=f"left out: {error}", usable=False, cubins="not asked for"
        )
    return RecordedState(
        kernel=path.stem,
        path=path,
        state=summary(table) if reason is None else f"left out: {reason}",
        usable=reason is None,
        cubins="not asked for" if reason is not None else _cubins(path, table)[1],
    )


def left_out(path: Path, table: RecordedTable, arch: Arch) -> str | None:
    """Why replaying would not read a table; None where it would.

    Raises:
        UsageError: The module of its kernel cannot be imported, or has no such kernel.
    """
    if (right := right_place_of(path, table)) is not None:
        return f"it belongs in {right}"
    if (reason := other_library(table.library)) is not None or is_local(table):
        return reason
    kernel = kernel_of(table.module, table.kernel)
    return misfit(table, kernel, arch, hash_now(kernel))


def _cubins(path: Path, table: RecordedTable) -> tuple[Section | None, str]:
    """The section of the archive beside a table that may be served, and what there is in words."""
    archive = path.parent / FILE_NAME
    if is_local(table) or not archive.exists():
        return None, "no cubins"
    try:
        section = Archive(archive).section(name_of(table.module, table.kernel))
        if section is None:
            return None, "no cubins"
        reason = difference(recorded_code(kernel_of(table.module, table.kernel)), section.origin)
    except AotTuneError as error:
        return None, f"cubins left out: {error}"
    if reason is not None:
        return None, f"cubins left out: {reason}"
    asked = {(one.hints, one.signature) for one in table.compilations}
    return section, f"cubins for {len(asked & set(section.keys))} of {len(asked)} launches"


def overview_lines(found: Iterable[RecordedState], folders: Sequence[Path], arch: Arch) -> list[str]:
    """The recorded tables, in reading order, and the folders where they were looked for."""
    rows = [("  " + one.kernel, one.state, one.cubins, str(one.path)) for one in found]
    where = " ".join(map(str, folders)) or "no folder"
    return [f"recorded tables for {arch} in {where}:", *(aligned(rows) or ["  none"])]


def kernel_lines(name: str, folders: Sequence[Path], arch: Arch) -> list[str]:
    """Which problems of a recorded kernel are answered, from which table, and what the others get.

    Raises:
        UsageError: The kernel was recorded on no arch; the message lists what was.
    """
    paths = listed_recorded(folders)
    recorded_on = find.archs_of(paths, name)
    on_miss = f"{environment.ON_MISS}={environment.on_miss()} decides"
    if arch not in recorded_on:
        others = " and ".join(map(str, sorted(recorded_on)))
        return [
            f"nothing was recorded of {name} on {arch}, where no problem of it is answered: {on_miss}",
            f"it was recorded on {others}: aot-tune doctor {name} --arch {min(recorded_on)} prints what is "
            "answered there",
        ]
    lines = []
    for path in paths:
        if (path.stem, path.parent.name) != (name, str(arch)):
            continue
        state = _state(path, arch)
        lines.append(f"{name} on {arch}: {path}: {state.state}; {state.cubins}")
        if state.usable:
            lines += _entry_lines(path, read_recorded(path))
    return [
        *lines,
        f"other problems of a recorded search space take the nearest, at most {2**NEAR}x away in each "
        f"dimension; where there is none, {on_miss}",
    ]


def _entry_lines(path: Path, table: RecordedTable) -> list[str]:
    section, _ = _cubins(path, table)
    heads = ("problem", "us", "+-", "first us", "gain", "count", "winner", "cubin")
    rows = []
    for entry in table.entries:
        there = section is not None and section.has(tuple(entry.hints.items()), entry.signature)
        rows.append((*entry_row(table, entry), "yes" if there else "no"))
    return aligned([heads, *rows])
