"""What `aot-tune compile` is asked for and what it reports, as values and as text. Compiles nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aot_tune.declare.discovery import Found
from aot_tune.values.arch import Arch

CUBINS = Path("build") / "archive-cubins"
"""Where compiled cubins are kept for the next run. Apart from a sweep's: these name their kernel otherwise
inside."""


@dataclass(frozen=True, kw_only=True)
class CubinRequest:
    """One `aot-tune compile`."""

    kernels: tuple[Found, ...]
    """The kernels, each with the module a child process imports to find it again."""

    archs: tuple[Arch, ...]
    """Targets."""

    only_these: bool = False
    """Whether kernels were named, so that an archive's other kernels are kept."""

    modules: tuple[str, ...] = ()
    """Modules that were named, so that an archive's kernels of others are kept; none for all there are."""

    out: Path | None = None
    """Folder to write ``<arch>/cubins.aot`` to; None for each package's folder of tables."""

    jobs: int | None = None
    """Compiling processes; None for one a core."""

    cubins: Path = CUBINS
    """Folder of cubins to reuse and add to."""


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """What an archive holds of one kernel."""

    kernel: str
    """Its name."""

    signatures: int
    """(hints, signature) pairs that have a cubin."""

    cubins: int
    """Different cubins among them."""

    compiled: int
    """Cubins compiled by this run; the others were there."""

    stored_bytes: int
    """What its cubins take in the file."""

    bytes: int
    """What they take unpacked."""


@dataclass(frozen=True, kw_only=True)
class ArchiveReport:
    """One archive."""

    path: Path
    """The file."""

    arch: Arch
    """Its arch."""

    bytes: int
    """Its size."""

    changed: bool
    """Whether its bytes are others than before."""

    kernels: tuple[KernelReport, ...]
    """What it holds, by name."""

    failures: tuple[str, ...]
    """What was not compiled, and why; one line each."""


def report_lines(report: ArchiveReport) -> Iterator[str]:
    """A report as text, a line a kernel, sizes in KB of 1000 bytes."""
    state = "written" if report.changed else "unchanged"
    yield f"{report.path}  {report.bytes / 1000:,.0f} KB  {state}"
    for one in report.kernels:
        yield (
            f"  {report.arch}  {one.kernel:<16} {one.stored_bytes / 1000:>7,.0f} KB, "
            f"{one.bytes / 1000:,.0f} unpacked; {one.signatures} signatures, {one.cubins} different cubins, "
            f"{one.compiled} compiled now"
        )
