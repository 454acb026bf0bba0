"""Record the tables of FlashInfer and TileGym that are shipped, on all GPUs of this host.

python -m aot_tune.bench.libraries --fetch             # where packages can be had
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
from aot_tune.bench.libraries.runs import Run, tasks
from aot_tune.bench.libraries.sites import MODELS, SITES
from aot_tune.nvidia.nvml import visible_gpus


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
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Fetch FlashInfer's cuTile code, and no more.")
    ] = False,
) -> int:
    """Record the tables of FlashInfer and TileGym that are shipped, on all GPUs of this host."""
    words.check_known(site or (), SITES, "no site is called")
    words.check_known(model or (), MODELS, "no model is called")
    if fetch:
        fetched.fetch()
        print(f"flashinfer-python {fetched.VERSION} is in {fetched.FOLDER}")
        return 0
    gpus = visible_gpus() or ()
    if not gpus:
        print("aot_tune.bench.libraries: no GPU here; run it on a GPU host", file=sys.stderr)
        return 1
    run, wanted = (
        Run(out, [gpu.index for gpu in gpus], limit_s),
        tasks(site or list(SITES), model or list(MODELS)),
    )
    run.record(wanted)
    ended = {task: run.ended(task) for task in wanted}
    failed = [f"{task.site} {task.model} {line}" for task in wanted for line in ended[task] if "\t" in line]
    count, every = sum(map(len, ended.values())), sum(task.shapes for task in wanted)
    print(f"{count} of {every} shapes are recorded, {len(failed)} of them failed; tables: {out / 'tables'}")
    print("\n".join(failed))
    return 0 if count == every and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
