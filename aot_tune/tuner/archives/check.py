"""`make wheel` and `aot-tune check`: whether archives of cubins fit the tables and sources beside them.

An archive lies beside the tables from whichever `aot-tune compile` came last. One that does not fit would not
be served, or would lack what a table chooses: a server without a compiler finds that out, and nobody before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aot_tune.cli import command
from aot_tune.cubins.archive import FILE_NAME, Archive, Section
from aot_tune.cubins.origin import difference
from aot_tune.declare.discovery import OWN_KERNELS, Found, find_tunables
from aot_tune.errors import AotTuneError
from aot_tune.tables import store
from aot_tune.tuner.archives.build import table_of
from aot_tune.tuner.archives.signatures import compilations
from aot_tune.tuner.plan.candidates import Kernel


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One archive beside the sources and tables of this checkout."""

    path: Path
    """The file."""

    bytes: int
    """Its size."""

    kernels: tuple[str, ...]
    """What it has cubins of."""

    missing: tuple[str, ...]
    """Kernels that it has none of; they are compiled at their first launch."""

    faults: tuple[str, ...]
    """Why it does not fit, a kernel each; none where it does."""


def check(folder: Path, kernels: Mapping[str, Found]) -> Iterator[Fit]:
    """Every archive below a folder of tables, and whatever else a wheel would take for one.

    Args:
        folder: The tables' folder.
        kernels: The declarations whose tables lie there.
    """
    for path in sorted(folder.rglob(f"*{Path(FILE_NAME).suffix}")):
        yield fit(path, folder, kernels)


def fit(path: Path, folder: Path, kernels: Mapping[str, Found]) -> Fit:
    """One archive beside the tables of a folder. Needs neither compiler nor GPU."""
    held: tuple[str, ...] = ()
    faults: list[str] = []
    try:
        archive = Archive(path)
        if path != folder / str(archive.arch) / FILE_NAME:
            faults.append(f"an archive of {archive.arch} lies in {archive.arch}/{FILE_NAME}")
        held = archive.kernels
        for name in held:
            fault = _fault(archive, name, kernels.get(name), folder)
            faults += [f"{name}: {fault}"] if fault else []
    except AotTuneError as error:
        faults.append(str(error))
    return Fit(
        path=path,
        bytes=path.lstat().st_size,
        kernels=held,
        missing=tuple(name for name in kernels if name not in held),
        faults=tuple(faults),
    )


def _fault(archive: Archive, name: str, found: Found | None, folder: Path) -> str | None:
    """What of a kernel's cubins does not fit, or None."""
    section = archive.section(name)
    assert section is not None
    if found is None:
        return "no such kernel is declared"
    changed = difference(found.tunable, section.origin)
    if changed is not None:
        return changed
    table = table_of(folder, archive.arch, found.tunable)
    kernel = Kernel(found, archive.arch)
    wanted = {(one.hints, one.signature) for one in compilations(kernel, [table] if table else [])}
    lacking = len(wanted - set(section.keys))
    if lacking:
        return f"{lacking} of the {len(wanted)} signatures that its table asks for have no cubin"
    return _damage(section)


def _damage(section: Section) -> str | None:
    try:
        for key in section.keys:
            section.cubin(*key)
    except AotTuneError as error:
        return str(error)
    return None


# The command ------------------------------------------------------------------------------------------------


def lines(fit: Fit) -> Iterator[str]:
    """An archive as text."""
    if fit.faults:
        yield f"{fit.path} does not fit the tables and sources here:"
        yield from (f"  {fault}" for fault in fit.faults)
        yield f"  build it again (make cubins ARCH={fit.path.parent.name}), or remove it: rm {fit.path}"
    else:
        lacks = f"; none of {' '.join(fit.missing)}" if fit.missing else ""
        yield f"{fit.path} fits: {fit.bytes / 1000:,.0f} KB, {len(fit.kernels)} kernels{lacks}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and print; 1 where an archive does not fit."""
    parser = argparse.ArgumentParser(prog="python -m aot_tune.tuner.archives.check", description=__doc__)
    parser.add_argument("--module", action="append", help="by default the shipped kernels")
    options = parser.parse_args(arguments)
    try:
        kernels = find_tunables(options.module or [OWN_KERNELS])
        folders: dict[Path, dict[str, Found]] = {}
        for name, found in kernels.items():
            folders.setdefault(store.package_folder(found.tunable), {})[name] = found
        fits = [fit for folder, of_it in folders.items() for fit in check(folder, of_it)]
    except AotTuneError as error:
        command.say(f"check-archives: {error}")
        return command.EXIT_FAILED
    command.put([line for fit in fits for line in lines(fit)] or ["no archives of cubins: tables alone"])
    return command.EXIT_FAILED if any(fit.faults for fit in fits) else 0


if __name__ == "__main__":
    sys.exit(main())
