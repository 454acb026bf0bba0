"""`aot-tune show`: tables and the sizes of archives. Imports neither kernels nor torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from aot_tune.cli.documents.document import Document
from aot_tune.cli.documents.find import named_folders, package_folders
from aot_tune.cubins.archive import FILE_NAME, Archive
from aot_tune.declare.discovery import warn_of
from aot_tune.errors import AotTuneError, ArchiveError, UsageError
from aot_tune.values.arch import Arch
from aot_tune.values.text import aligned


def table_lines(tables: Sequence[Document], *, whole: bool) -> list[str]:
    """Return tables as text.

    Args:
        tables: The tables, sorted by kind.
        whole: Whether to print all entries, in place of one line for each table.
    """
    if whole:
        return [line for table in tables for line in table.lines()]
    groups = (list(group) for _, group in groupby(tables, key=type))
    return [
        line for group in groups for line in aligned([group[0].heads, *(table.overview() for table in group)])
    ]


# Archives of cubins -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KernelSizes:
    """Sizes of one kernel's cubins in an archive."""

    cubins: int
    """Number of different cubins."""

    stored_bytes: int
    """Bytes in the file."""

    bytes: int
    """Bytes unpacked."""


@dataclass(frozen=True, kw_only=True)
class ArchiveSizes:
    """Sizes of one archive."""

    path: Path
    """Archive's file."""

    arch: Arch
    """Arch of the cubins."""

    bytes: int
    """File's size, bytes."""

    kernels: Mapping[str, KernelSizes]
    """Sizes of each kernel's cubins, by the kernel's name."""


def archives_found(
    kernel: str | None, arch: Arch | None, modules: Sequence[str] = (), only: Path | None = None
) -> tuple[list[ArchiveSizes], list[AotTuneError]]:
    """Find the archives of cubins in the folders of tables, without importing kernels.

    Args:
        kernel: Read this kernel's part only.
        arch: Find this arch's archives only.
        modules: Modules that declare kernels; without them, the modules of all installed packages.
        only: Search this folder only, such as one given to `aot-tune compile --out`.

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
    sizes: list[ArchiveSizes] = []
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
        sizes += sorted(here, key=lambda archive: (archive.arch, archive.path))
    if not sizes and not unreadable:
        wanted = f" for {arch}" if arch else ""
        options = (f" --arch {arch}" if arch else "") + (f" --out {only}" if only else "")
        places = " ".join(map(str, folders))
        raise UsageError(f"no archive of cubins{wanted} is in {places}; make one: aot-tune compile{options}")
    if kernel is not None and kernel not in held and not unreadable:
        names = " ".join(sorted(held)) or "none of any kernel"
        raise UsageError(f"no archive has cubins of {kernel}; there is {names}")
    return sizes, unreadable


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
    """Return the sizes of archives, KB of 1000 bytes: a row for each kernel, a column for each arch.

    Each folder has a table of its own, and the table's last row has the sizes of the whole files.
    """
    lines = []
    for folder, group in groupby(archives, key=lambda archive: archive.path.parent.parent):
        columns = list(group)
        names = sorted({name for archive in columns for name in archive.kernels})
        rows = [
            ("KB", *(str(archive.arch) for archive in columns)),
            *((name, *(_kilobytes(archive.kernels.get(name)) for archive in columns)) for name in names),
            ("the file", *(f"{archive.bytes / 1000:,.0f}" for archive in columns)),
        ]
        lines += [f"archives of cubins in {folder}:", *aligned(rows)]
    return lines


def _kilobytes(sizes: KernelSizes | None) -> str:
    return "-" if sizes is None else f"{sizes.stored_bytes / 1000:,.0f}"
