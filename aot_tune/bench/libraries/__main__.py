"""Record the tables of FlashInfer and TileGym that are shipped, on all GPUs of this host.

make third-party flashinfer                            # where packages can be had
python -m aot_tune.bench.libraries --out build/libraries --limit-s 270
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from aot_tune.bench import words
from aot_tune.bench.libraries import fetched
from aot_tune.bench.libraries.runs import Run, Task, recorded_on, tasks
from aot_tune.bench.libraries.sites import HELD_OUT, MODELS, SITES
from aot_tune.errors import UsageError
from aot_tune.nvidia.nvml import driver_version, visible_gpus
from aot_tune.tuner.compile.pool import usable_cores
from aot_tune.values.text import aligned

_CORES = 4
"""Cores of a recording process. With 16 cores a GPU, four compile while one of them searches."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Record what the arguments request; return the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    return words.called(_recorded, given, "python -m aot_tune.bench.libraries")


def _recorded(
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder of tables; a later run goes on.")
    ] = Path("build/libraries"),
    site: Annotated[list[str] | None, typer.Option(help="A site; repeatable. By default all.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="A model; repeatable. By default all.")] = None,
    limit_s: Annotated[float, typer.Option(min=1, help="Seconds after which everything ends.")] = 3600.0,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="Call models that are not recorded with the tables: a miss fails."),
    ] = False,
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Fetch FlashInfer's cuTile code, and no more.")
    ] = False,
) -> int:
    """Record the tables of FlashInfer and TileGym that are shipped, on all GPUs of this host."""
    words.check_known(site or (), SITES, "no site is called")
    words.check_known(model or (), {**MODELS, **HELD_OUT}, "no model is called")
    if fetch:
        fetched.fetch()
        print(f"flashinfer-python {fetched.VERSION} is in {fetched.FOLDER}")
        return 0
    gpus = visible_gpus() or ()
    if not gpus:
        print("aot_tune.bench.libraries: no GPU here; run it on a GPU host", file=sys.stderr)
        return 1
    here, versions = (gpus[0].name, driver_version() or ""), fetched.versions()
    for name, driver, library in recorded_on(out):
        if (name, driver) != here:
            raise UsageError(f"{out} was recorded on {name} with driver {driver}; name another folder: --out")
        if (version := versions.get(library.name, library.version)) != library.version:
            known = f"{library.name} {library.version}"
            raise UsageError(f"{out} was recorded with {known}, not {version}; name another folder: --out")
    models = list(HELD_OUT) if held_out else model or list(MODELS)
    processes = max(1, usable_cores() // (_CORES * len(gpus)))
    run = Run(out, [gpu.uuid or str(gpu.index) for gpu in gpus], limit_s, processes=processes)
    wanted = tasks(site or list(SITES), models)
    run.record(wanted)
    return _reported(run, wanted)


def _reported(run: Run, wanted: Sequence[Task]) -> int:
    """Print the calls of each site that ended, and those that failed; return the exit status."""
    rows, count, failures = [("site", "shapes", "ended", "failed")], 0, 0
    for site in dict.fromkeys(task.site for task in wanted):
        of_site = [task for task in wanted if task.site == site]
        lines = [line for task in of_site for line in run.ended(task)]
        failed = sum("\t" in line for line in lines)
        rows.append((site, str(sum(task.shapes for task in of_site)), str(len(lines)), str(failed)))
        count, failures = count + len(lines), failures + failed
    print("\n".join(aligned(rows)))
    return 0 if count == sum(task.shapes for task in wanted) and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
