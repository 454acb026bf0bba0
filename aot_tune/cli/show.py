"""Find tables without importing their kernels (nor torch), and say them as lines for a person."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from aot_tune import environment
from aot_tune.declare.discovery import OWN_KERNELS, Broken, broken_point, find_tunables, module_names, warn_of
from aot_tune.errors import AotTuneError, StoreError, TableError, UsageError
from aot_tune.tables import store, writer
from aot_tune.tables.table import Entry, Table, geometric_mean
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.text import aligned, counted


def tables_found(
    kernel: str | None, arch: Arch | None, modules: Sequence[str] = ()
) -> tuple[list[tuple[Path, Table]], list[AotTuneError]]:
    """The tables of the installed packages, or of those of `modules`; AOT_TUNE_TABLES first.

    Kernels are imported only where nothing is found otherwise: a declaration may name a folder of its own.

    Args:
        kernel: Only this kernel's.
        arch: Only this arch's.
        modules: Modules that declare kernels.

    Returns:
        The tables, and what is wrong with each file that is none.

    Raises:
        UsageError: There is no such table; the message lists what there is.
        StoreError: A folder cannot be read.
    """
    installed, broken = _package_folders(modules)
    folders = [*environment.table_folders(), *installed]
    paths = [path for folder in dict.fromkeys(folders) for path in store.listed(folder)]
    chosen = _chosen(paths, kernel, arch)
    if chosen:
        warn_of(broken)
    else:  # which warns of them itself
        own = [store.package_folder(found.tunable) for found in find_tunables(modules).values()]
        paths = [path for folder in dict.fromkeys((*folders, *own)) for path in store.listed(folder)]
        chosen = _chosen(paths, kernel, arch)
    if not chosen:
        wanted = (f"of {kernel} " if kernel else "") + (f"for {arch} " if arch else "")
        there = " ".join(f"{path.parent.name}/{path.stem}" for path in paths)
        step = f"make one with aot-tune tune, or name a folder of tables in {environment.TABLES}"
        raise UsageError(f"no table {wanted}is there; {f'there is {there}' if there else step}")
    tables: list[tuple[Path, Table]] = []
    unreadable: list[AotTuneError] = []
    for path in chosen:
        try:
            tables.append((path, store.read_table(path)))
        except (TableError, StoreError) as error:
            unreadable.append(error)
    return tables, unreadable


def _package_folders(modules: Sequence[str]) -> tuple[list[Path], list[Broken]]:
    """The folders of tables of the named modules' packages, or of the installed ones that are there."""
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
    """One line a table: what it holds and what it gains."""
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
            f"{geometric_mean(map(_gain, table.entries)):.2f}x",
            f"{max(map(_gain, table.entries), default=1.0):.2f}x",
            f"{max((entry.regret for entry in table.entries), default=0.0):.1%}",
            "+".join(sorted({entry.evidence for entry in table.entries})) or "none",
            table.built_with.device_name,
            str(path),
        )
        for path, table in tables
    ]
    return aligned([heads, *rows])


def table_lines(path: Path, table: Table) -> list[str]:
    """A whole table: what it was built with, its portfolio by letter, its entries."""
    built = table.built_with
    versions = f"cuda-tile {built.cuda_tile}, tileiras {built.tileiras}"
    versions += f", driver {built.driver}" if built.driver else ""
    names = {config: f"P{place}" for place, config in enumerate(table.portfolio)}
    heads = ("bucket", "us", "+-", "default us", "gain", "regret", "evidence", "points", "config")
    return [
        f"{table.kernel} on {table.arch}: {path}",
        f"{built.device_name}, {built.sm_count} multiprocessors, {versions}; source {table.source_hash}",
        f"portfolio of {counted(len(table.portfolio), 'config')}, worst regret {table.portfolio_regret:.1%}",
        *(f"  {name}: {config}" for config, name in names.items()),
        *aligned([heads, *(_entry_row(entry, names) for entry in table.entries)]),
    ]


def table_data(path: Path, table: Table) -> dict[str, object]:
    """A table for a script: the document itself, and where it lies."""
    return {"path": path, **json.loads(writer.dump(table))}


def _entry_row(entry: Entry, names: dict[Config, str]) -> tuple[str, ...]:
    inside = " ".join("x".join(str(size) for size in point.size.values()) for point in entry.points[:-1])
    return (
        str(entry.bucket),
        f"{entry.mean_us:.2f}",
        f"{entry.error_margin_us:.2f}",
        f"{entry.default_us:.2f}",
        f"{_gain(entry):.2f}x",
        f"{entry.regret:.1%}",
        entry.evidence,
        inside or "-",
        f"{names.get(entry.config, 'default')}: {entry.config}",
    )


def _gain(entry: Entry) -> float:
    """The default's time over the winner's."""
    return entry.default_us / entry.mean_us
