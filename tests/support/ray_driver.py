"""A sweep of two kernels on a Ray cluster with fake GPUs, in a process of its own that a test kills."""

from __future__ import annotations

import sys
from pathlib import Path

from aot_tune.tuner.ray import cluster
from aot_tune.tuner.sweep import run as sweep
from aot_tune.tuner.sweep.progress import PlainProgress
from aot_tune.tuner.sweep.report import SweepRequest
from tests.support.other_source import other_in
from tests.support.ray_hosts import HashedHost
from tests.support.samples import SM90, scale_in


def tune(address: str, folder: Path) -> None:
    """Sweep; the journal, the cubins and the tables lie in the folder."""
    cluster.ACTOR = HashedHost
    request = SweepRequest(
        kernels=(scale_in(folder / "tables")["scale"], other_in(folder / "tables")),
        arch=SM90,
        jobs=2,
        journal=folder / "journal",
        cubins=folder / "cubins",
        ray=address,
    )
    sweep.run(request, PlainProgress())


if __name__ == "__main__":
    tune(sys.argv[1], Path(sys.argv[2]))
