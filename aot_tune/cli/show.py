"""`aot-tune show`: find tables and archives without importing their kernels (nor torch), and print them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from aot_tune import environment
from aot_tune.cubins.archive import FILE_NAME, Archive
from aot_tune.declare.discovery import OWN_KERNELS, Broken, broken_point, find_tunables, module_names, warn_of
from aot_tune.errors import AotTuneError, ArchiveError, StoreError, TableError, UsageError
from aot_tune.replay.files import has_recorded_name, read_recorded
from aot_tune.replay.table import RecordedTable
from aot_tune.serve.choose import loader
from aot_tune.tables import store, writer
from aot_tune.tables.table import Entry, Table, geometric_mean
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.text import aligned, counted


def tables_found(
    kernel: str | None, arch: Arch | None, modules: Sequence[str] = (), only: Path | None = None
) -> tuple[list[tuple[Path, Table | RecordedTable]], list[AotTuneError]]:
    """Find the tables in AOT_TUNE_TABLES, then those of the installed packages or of `modules`.

    Tables of declared kernels and recorded ones are found.

    Kernels are imported only when no table is found without: a declaration may name a folder of its own.

    Args:
        kernel: Find this kernel's tables only.
        arch: Find this arch's tables only.
        modules: Modules that declare kernels.
        only: Search this folder only.

    Returns:
        The tables, and one error for each file that is not a table.

    Raises:
        UsageError: There is no such table; the message lists those there are.
        StoreError: A folder cannot be read.
    """
    if only is not None:
        paths = store.listed(only)
        chosen = _chosen(paths, kernel, arch)
    else:
        chosen, paths = _installed_tables(kernel, arch, modules)
    if not chosen:
        wanted = (f"of {kernel} " if kernel else "") + (f"for {arch} " if arch else "")
        where = "there" if only is None else f"in {only}"
        there = " ".join(f"{path.parent.name}/{path.stem}" for path in paths)
        step = f"make one with aot-tune tune, or name a folder of tables in {environment.TABLES}"
        raise UsageError(f"no table {wanted}is {where}; {f'there is {there}' if there else step}")
    tables: list[tuple[Path, Table | RecordedTable]] = []
    unreadable: list[AotTuneError] = []
    for path in chosen:
        try:
            tables.append((path, (read_recorded if has_recorded_name(path) else store.read_table)(path)))
        except (TableError, StoreError) as error:
            unreadable.append(error)
    return tables, unreadable


def _installed_tables(
    kernel: str | None, arch: Arch | None, modules: Sequence[str]
) -> tuple[list[Path], list[Path]]:
    """The chosen tables' files, and those of all tables that were found."""
    installed, broken = package_folders(modules)
    folders = [*named_folders(), *installed]
    paths = [path for folder in dict.fromkeys(folders) for path in store.listed(folder)]
    chosen = _chosen(paths, kernel, arch)
    if chosen:
        warn_of(broken)
    else:  # find_tunables warns of the broken entry points itself
        own = [store.package_folder(found.tunable) for found in find_tunables(modules).values()]
        paths = [path for folder in dict.fromkeys((*folders, *own)) for path in store.listed(folder)]
        chosen = _chosen(paths, kernel, arch)
    return chosen, paths


def named_folders() -> list[Path]:
    """The folders of AOT_TUNE_TABLES that may hold tables; `folder_remarks` has a line for each other one."""
    return [folder for folder in environment.table_folders() if _folder_mistake(folder) is None]


def folder_remarks() -> list[str]:
    """What is wrong with each folder of AOT_TUNE_TABLES that no verb looks into, and what to do about it."""
    mistakes = map(_folder_mistake, environment.table_folders())
    return [mistake for mistake in mistakes if mistake is not None]


def _folder_mistake(folder: Path) -> str | None:
    if (mistake := loader.folder_mistake(folder)) is not None:
        return mistake
    try:
        store.listed(folder)
    except StoreError as error:
        return f"{environment.TABLES}: {error}; let it be read or leave it out"
    return None


def package_folders(modules: Sequence[str]) -> tuple[list[Path], list[Broken]]:
    """The folders of tables of the named modules' packages, or of all installed packages that can be found.

    The second list has the entry points whose package cannot be found.
    """
    folders, broken = [], []
    for module in module_names(modules):
        try:
            folders.append(store.folder_of_package(module))
        except StoreError:
            if modules or module == OWN_KERNELS:
                raise
            broken.append(broken_point(module, f"no package is called {module.partition('.')[0]!r}"))
    return folders, broken


def _chosen(paths: Sequence[Path], kernel: str | None, arch: Arch | None) -> list[Path]:
    return [
        path
        for path in paths
        if kernel in (None, path.stem) and (arch is None or str(arch) == path.parent.name)
    ]


def overview_lines(tables: Sequence[tuple[Path, Table]]) -> list[str]:
    """One line for each table: how many entries it has and what they gain over the default."""
    heads = (
        "arch",
        "kernel",
        "entries",
        "over default",
        "best",
        "worst regret",
        "evidence",
        "tuned on",
        "file",
    )
    rows = [
        (
            str(table.arch),
            table.kernel,
            str(len(table.entries)),
            f"{geometric_mean(entry.gain for entry in table.entries):.2f}x",
            f"{max((entry.gain for entry in table.entries), default=1.0):.2f}x",
            f"{max((entry.regret for entry in table.entries), default=0.0):.1%}",
            "+".join(sorted({entry.evidence for entry in table.entries})) or "none",
            table.built_with.device_name,
            str(path),
        )
        for path, table in tables
    ]
    return aligned([heads, *rows])


def table_lines(path: Path, table: Table) -> list[str]:
    """A whole table: what it was built with, its portfolio as P0, P1 and so on, and its entries.

    Below them are the entries whose samples were disturbed, and the times in the GPU's other states.
    """
    built = table.built_with
    versions = f"cuda-tile {built.cuda_tile}, tileiras {built.tileiras}"
    versions += f", driver {built.driver}" if built.driver else ""
    names = {config: f"P{place}" for place, config in enumerate(table.portfolio)}
    heads = ("bucket", "us", "+-", "default us", "gain", "regret", "evidence", "points", "config")
    return [
        f"{table.kernel} on {table.arch}: {path}",
        f"{built.device_name}, {built.sm_count} multiprocessors, {versions}; source {table.source_hash}",
        f"portfolio of {counted(len(table.portfolio), 'config')}, worst regret {table.portfolio_regret:.1%}"
        + ("" if table.near_exponent is None else f"; near_exponent {table.near_exponent}"),
        *(f"  {name}: {config}" for config, name in names.items()),
        *aligned([heads, *(_entry_row(entry, names) for entry in table.entries)]),
        *(f"disturbed: {entry.bucket}: {entry.disturbed}" for entry in table.entries if entry.disturbed),
        *(_states_line(entry) for entry in table.entries if entry.states),
        *_batch_lines(table),
    ]


def _batch_lines(table: Table) -> list[str]:
    """Where launches take one config for every batch, what says which: a table does not name batch axes."""
    if not environment.batch_invariant():
        return []
    return [
        f"{environment.BATCH_INVARIANT} is set: launches take one config of the portfolio for every batch; "
        f"aot-tune doctor {table.kernel} says which"
    ]


def table_data(path: Path, table: Table) -> dict[str, object]:
    """A table for a script: its document, and the path of its file."""
    return {"path": path, **json.loads(writer.dump(table))}


def _states_line(entry: Entry) -> str:
    """The times at the edge in the GPU's other states, which `_entry_row` has no room for."""
    states = ", ".join(
        f"{name} {times.mean_us:.2f} us, default {times.default_us:.2f} us"
        for name, times in entry.states.items()
    )
    return f"in other states: {entry.bucket}: {states}"


def _entry_row(entry: Entry, names: dict[Config, str]) -> tuple[str, ...]:
    inside = " ".join("x".join(str(size) for size in point.size.values()) for point in entry.points[:-1])
    return (
        str(entry.bucket),
        f"{entry.mean_us:.2f}",
        f"{entry.error_margin_us:.2f}",
        f"{entry.default_us:.2f}",
        f"{entry.gain:.2f}x",
        f"{entry.regret:.1%}",
        entry.evidence,
        inside or "-",
        f"{names.get(entry.config, 'default')}: {entry.config}",
    )


# Archives of cubins -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KernelSizes:
    """What one kernel's cubins take in an archive."""

    cubins: int
    """Different cubins."""

    stored_bytes: int
    """Bytes that they take in the file."""

    bytes: int
    """Bytes that they take unpacked."""


@dataclass(frozen=True, kw_only=True)
class ArchiveSizes:
    """What one archive takes."""

    path: Path
    """The archive's file."""

    arch: Arch
    """The arch that its cubins are for."""

    bytes: int
    """The file's size, bytes."""

    kernels: Mapping[str, KernelSizes]
    """Each kernel's part, by the kernel's name."""


def archives_found(
    kernel: str | None, arch: Arch | None, modules: Sequence[str] = (), only: Path | None = None
) -> tuple[list[ArchiveSizes], list[AotTuneError]]:
    """Find the archives of cubins in the folders of tables, without importing kernels.

    Args:
        kernel: Read this kernel's part only.
        arch: Find this arch's archives only.
        modules: Modules that declare kernels; without them, those of all installed packages.
        only: Search this folder only, such as one that `aot-tune compile --out` was given.

    Returns:
        The archives, by folder and arch, and one error for each file that is damaged or is not an archive.

    Raises:
        UsageError: There is no such archive, or none of them has cubins of `kernel`.
        StoreError: A named module's package has no folder.
    """
    if only is not None:
        folders = [only]
    else:
        installed, broken = package_folders(modules)
        warn_of(broken)
        folders = list(dict.fromkeys((*named_folders(), *installed)))
    found: list[ArchiveSizes] = []
    unreadable: list[AotTuneError] = []
    held: set[str] = set()
    for folder in folders:
        here = []
        for path in folder.glob(f"{arch or '*'}/{FILE_NAME}"):
            try:
                archive = Archive(path)
                here.append(_sizes(archive, kernel))
            except ArchiveError as error:
                unreadable.append(error)
            else:
                held.update(archive.kernels)
        found += sorted(here, key=lambda one: (one.arch, one.path))
    if not found and not unreadable:
        wanted = f" for {arch}" if arch else ""
        options = (f" --arch {arch}" if arch else "") + (f" --out {only}" if only else "")
        places = " ".join(map(str, folders))
        raise UsageError(f"no archive of cubins{wanted} is in {places}; make one: aot-tune compile{options}")
    if kernel is not None and kernel not in held and not unreadable:
        there = " ".join(sorted(held)) or "none of any kernel"
        raise UsageError(f"no archive has cubins of {kernel}; there is {there}")
    return found, unreadable


def _sizes(archive: Archive, kernel: str | None) -> ArchiveSizes:
    kernels = {}
    for name in archive.kernels:
        if kernel in (None, name) and (section := archive.section(name)) is not None:
            cubins, stored, unpacked = section.sizes()
            kernels[name] = KernelSizes(cubins=cubins, stored_bytes=stored, bytes=unpacked)
    return ArchiveSizes(
        path=archive.path, arch=archive.arch, bytes=archive.path.stat().st_size, kernels=kernels
    )


def archive_lines(archives: Sequence[ArchiveSizes]) -> list[str]:
    """What archives take, KB of 1000 bytes in the file: a row for each kernel and a column for each arch.

    Each folder has a table of its own, and the table's last row has the sizes of the whole files.
    """
    lines = []
    for folder, group in groupby(archives, key=lambda one: one.path.parent.parent):
        columns = list(group)
        names = sorted({name for one in columns for name in one.kernels})
        rows = [
            ("KB", *(str(one.arch) for one in columns)),
            *((name, *(_kilobytes(one.kernels.get(name)) for one in columns)) for name in names),
            ("the file", *(f"{one.bytes / 1000:,.0f}" for one in columns)),
        ]
        lines += [f"archives of cubins in {folder}:", *aligned(rows)]
    return lines


def _kilobytes(sizes: KernelSizes | None) -> str:
    return "-" if sizes is None else f"{sizes.stored_bytes / 1000:,.0f}"
