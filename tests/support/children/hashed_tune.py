"""In place of ``aot-tune tune`` on GPUs: the same words, and times that are a hash of problem and config."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

import pytest

from aot_tune.declare.discovery import find_tunables
from aot_tune.tuner.sweep import run as sweep
from aot_tune.tuner.sweep.progress import PlainProgress
from aot_tune.tuner.sweep.report import SweepRequest
from tests.support import hashed_sessions, several_kernels
from tests.support.samples import SM90


def main() -> int:
    """Sweep what the words say; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kernels", nargs="+")
    parser.add_argument("--require", choices=["measured"], required=True)
    parser.add_argument("--gpus", type=lambda text: tuple(map(int, text.split(","))), required=True)
    for option in ("--limit", "--jobs"):
        parser.add_argument(option, type=int, required=True)
    for option in ("--out", "--journal", "--cubins"):
        parser.add_argument(option, type=Path, required=True)
    options = parser.parse_args()
    found = find_tunables([several_kernels.MODULE])
    request = SweepRequest(
        kernels=tuple(found[name] for name in options.kernels), arch=SM90, gpus=options.gpus,
        limit=options.limit, jobs=options.jobs, out=options.out, journal=options.journal,
        cubins=hashed_sessions.CUBINS,
    )  # fmt: skip
    with hashed_sessions.measuring(pytest.MonkeyPatch()):
        report = sweep.run(request, PlainProgress(io.StringIO()))
    return 0 if report.complete else 1


if __name__ == "__main__":
    sys.exit(main())
