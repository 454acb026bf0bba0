"""Check whether a folder's archives of cubins fit the tables and sources of this checkout.

An archive stays in the folder of tables after `aot-tune compile`, whatever changes later. Serving refuses an
archive that does not fit, or misses the cubin of a table's config in it. Without this check the first to
notice would be a server that has no compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aot_tune.cubins.archive import FILE_NAME, Archive, Section
from aot_tune.cubins.origin import declared_code, difference
from aot_tune.declare.discovery import FoundKernel
from aot_tune.errors import AotTuneError
from aot_tune.tuner.archives.build import table_of
from aot_tune.tuner.archives.signatures import compilations
from aot_tune.tuner.archives.tabled import OtherTables, TabledKernel
from aot_tune.tuner.plan.candidates import DeviceKernel
from aot_tune.values.arch import Arch


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The fit of an archive to the sources and tables of this checkout."""

    path: Path
    """The archive's file."""

    bytes: int
    """The file's size, bytes."""

    kernels: tuple[str, ...]
    """The kernels with cubins in the archive."""

    missing: tuple[str, ...]
    """The kernels with tables but without cubins in the archive; their first launch compiles."""

    faults: tuple[str, ...]
    """The reasons why the archive does not fit, one line each; empty when it fits."""


def check(
    folder: Path, kernels: Mapping[str, FoundKernel], others: OtherTables | None = None
) -> Iterator[Fit]:
    """Check every archive below a folder of tables, and every file that a wheel would pack as an archive.

    Args:
        folder: The folder of tables, ``tuned_configs``; it need not exist.
        kernels: The declarations whose tables are in that folder.
        others: Reads the tables of kernels that no declaration names.
    """
    for path in sorted(folder.rglob(f"*{Path(FILE_NAME).suffix}")):
        yield fit(path, folder, kernels, others)


def fit(
    path: Path, folder: Path, kernels: Mapping[str, FoundKernel], others: OtherTables | None = None
) -> Fit:
    """Check one archive against the tables of a folder. This needs neither a compiler nor a GPU.

    Args:
        path: The archive.
        folder: The folder of tables that the archive must fit.
        kernels: The declarations whose tables are in that folder.
        others: Reads the tables of kernels that no declaration names.
    """
    tabled = [name for name in kernels if (path.parent / f"{name}.json").exists()]
    archived: tuple[str, ...] = ()
    undeclared: Sequence[str] = ()
    faults: list[str] = []
    try:
        archive = Archive(path)
        undeclared = others.names(folder / str(archive.arch)) if others is not None else ()
        if path != folder / str(archive.arch) / FILE_NAME:
            faults.append(f"an archive of {archive.arch} belongs in {archive.arch}/{FILE_NAME}")
        archived = archive.kernels
        for name in archived:
            if name in kernels:
                fault = _fault(archive, _declared(kernels[name], archive.arch, folder))
            elif others is not None and others.may_have(name):
                fault = _fault(archive, others.read(folder / str(archive.arch), name))
            else:
                fault = "no such kernel is declared"
            faults += [f"{name}: {fault}"] if fault else []
    except AotTuneError as error:
        faults.append(str(error))
    return Fit(
        path=path,
        bytes=path.lstat().st_size,
        kernels=archived,
        missing=tuple(name for name in (*tabled, *undeclared) if name not in archived),
        faults=tuple(faults),
    )


def _declared(kernel: FoundKernel, arch: Arch, folder: Path) -> TabledKernel:
    table = table_of(folder, arch, kernel.tunable)
    needed = compilations(DeviceKernel(kernel, arch), [table] if table else [])
    return TabledKernel(code=declared_code(kernel.tunable), arch=arch, folder=folder, compilations=needed)


def _fault(archive: Archive, kernel: TabledKernel | str) -> str | None:
    """Return why a kernel's cubins do not fit; None when they do."""
    if isinstance(kernel, str):
        return kernel
    section = archive.section(kernel.code.name)
    assert section is not None
    changed = difference(kernel.code, section.origin)
    if changed is not None:
        return changed
    needed = {(compilation.hints, compilation.signature) for compilation in kernel.compilations}
    lacking = len(needed - set(section.keys))
    if lacking:
        return f"{lacking} of the {len(needed)} signatures that its table needs have no cubin"
    return _damage(section)


def _damage(section: Section) -> str | None:
    """Return the error of the first unreadable cubin; None when all can be read."""
    try:
        for key in section.keys:
            section.cubin(*key)
    except AotTuneError as error:
        return str(error)
    return None
