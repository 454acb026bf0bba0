"""The request and the report of `aot-tune compile`, as values and as text. Compiles nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aot_tune.declare.discovery import FoundKernel
from aot_tune.values.arch import Arch

CUBINS = Path("build") / "archive-cubins"
"""Folder of compiled cubins to keep for the next run. It is not a sweep's folder, because the kernel has
another name in these cubins."""


@dataclass(frozen=True, kw_only=True)
class CubinRequest:
    """The request of an `aot-tune compile`."""

    kernels: tuple[FoundKernel, ...]
    """The kernels, each with the module that a child process imports."""

    archs: tuple[Arch, ...]
    """The targets."""

    only_these: bool = False
    """Whether kernels were named, so that an archive's other kernels are kept."""

    modules: tuple[str, ...] = ()
    """The named modules; an archive's kernels of other modules are kept. Empty for all modules."""

    elsewhere: tuple[str, ...] = ()
    """Kernels that may have their table in another folder than their cubins; an archive's cubins stay."""

    out: Path | None = None
    """Folder to write ``<arch>/cubins.aot`` to; None for the folder of each kernel's tables."""

    jobs: int | None = None
    """Number of compiling processes; None for one per usable core."""

    cubins: Path = CUBINS
    """Folder of cubins to reuse and add to."""


@dataclass(frozen=True, kw_only=True)
class ArchivedKernel:
    """The content of an archive for one kernel."""

    kernel: str
    """The kernel's name."""

    signatures: int
    """Number of (hints, signature) pairs that have a cubin."""

    cubins: int
    """Number of different cubins for these pairs."""

    compiled: int
    """Number of cubins that this run compiled; an earlier run compiled the others."""

    stored_bytes: int
    """Size of the kernel's cubins in the file, bytes."""

    bytes: int
    """Size of the kernel's cubins unpacked, bytes."""


@dataclass(frozen=True, kw_only=True)
class ArchiveReport:
    """The result for one archive."""

    path: Path
    """The archive's file."""

    arch: Arch
    """The archive's arch."""

    bytes: int
    """Size of the file, bytes."""

    changed: bool
    """Whether the file's bytes changed."""

    kernels: tuple[ArchivedKernel, ...]
    """The archive's kernels, by name."""

    failures: tuple[str, ...]
    """The failed compilations with their reasons, one line each."""


def report_lines(report: ArchiveReport) -> Iterator[str]:
    """Format a report, one line for each kernel, sizes in KB of 1000 bytes."""
    state = "written" if report.changed else "unchanged"
    yield f"{report.path}  {report.bytes / 1000:,.0f} KB  {state}"
    for kernel in report.kernels:
        yield (
            f"  {report.arch}  {kernel.kernel:<16} {kernel.stored_bytes / 1000:>7,.0f} KB, "
            f"{kernel.bytes / 1000:,.0f} unpacked; {kernel.signatures} signatures, "
            f"{kernel.cubins} different cubins, {kernel.compiled} compiled now"
        )
