"""What archives of cubins take, by kernel and arch: ``python -m aot_tune.cli.archive_sizes FOLDER``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from aot_tune.cli import command
from aot_tune.cubins.archive import FILE_NAME, Archive
from aot_tune.errors import AotTuneError
from aot_tune.values.text import aligned


def table(archives: Iterable[Archive]) -> list[str]:
    """A row a kernel, a column an arch: KB of 1000 bytes in the file; last the files themselves.

    Raises:
        ArchiveError: A section is damaged.
    """
    by_arch = sorted(archives, key=lambda archive: archive.arch)
    stored = {
        (name, archive.arch): section.sizes()[1]
        for archive in by_arch
        for name in archive.kernels
        if (section := archive.section(name)) is not None
    }
    archs = [archive.arch for archive in by_arch]
    rows = [("KB", *map(str, archs))]
    for kernel in sorted({name for name, _ in stored}):
        rows.append((kernel, *(_kilobytes(stored.get((kernel, arch))) for arch in archs)))
    rows.append(("the file", *(_kilobytes(archive.path.stat().st_size) for archive in by_arch)))
    return aligned(rows)


def _kilobytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1000:,.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read and print; 1 where an archive cannot be read or none is there."""
    parser = argparse.ArgumentParser(prog="python -m aot_tune.cli.archive_sizes", description=__doc__)
    parser.add_argument("folder", type=Path, help="what aot-tune compile --out was given")
    folder: Path = parser.parse_args(arguments).folder
    try:
        archives = [Archive(path) for path in sorted(folder.glob(f"*/{FILE_NAME}"))]
        lines = table(archives)
    except AotTuneError as error:
        command.say(f"archive-sizes: {error}")
        return command.EXIT_FAILED
    if not archives:
        command.say(
            f"archive-sizes: {folder} has no archives; write them there: aot-tune compile --out {folder}"
        )
        return command.EXIT_FAILED
    command.put(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
