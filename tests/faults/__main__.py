"""Print what faults do: ``python -m tests.faults [--row A8] [--full] [--seconds N]``, or `make faults`.

One line for each row of the two tables of faults: times injected, lost, wrong, hung. The exit code is 1 where
any of the last three is not 0.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults import rows
from tests.faults.world import Tally, World


def main(words: Sequence[str]) -> int:
    """Run the rows that are asked for and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--row", action="append", help="a row such as A8; may be repeated; all by default")
    parser.add_argument("--full", action="store_true", help="many repetitions, and the scenarios of minutes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after that time")
    parser.add_argument("--seed", type=int, default=0, help="draws the random instants")
    parser.add_argument("--jobs", type=int, default=2, help="rows that run at the same time")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the sweeps")
    asked = parser.parse_args(words)
    folder = Path(tempfile.mkdtemp(prefix="aot-tune-faults-"))
    world, began = World(folder, asked.seed), time.monotonic()
    asked_for = asked.row or [*rows.ROWS, *(rows.LONG if asked.full else ())]
    asked_for = list(dict.fromkeys(asked_for))

    def run(row: str) -> Tally | None:
        if time.monotonic() - began > asked.seconds:
            return None
        tally = Tally()
        rows.run_row(row, world, tally, full=asked.full)
        return tally

    failed = False
    print(f"{'fault':<12}{'injected':>9}{'lost':>6}{'wrong':>7}{'hung':>6}", flush=True)
    with ThreadPoolExecutor(asked.jobs) as pool:
        for row, tally in zip(asked_for, pool.map(run, asked_for), strict=True):
            if tally is None:
                print(f"{row:<12}{'no time left':>15}", flush=True)
                continue
            print(f"{row:<12}{tally.injected:>9}{tally.lost:>6}{tally.wrong:>7}{tally.hung:>6}", flush=True)
            for line in tally.why:
                print(f"    {line}", file=sys.stderr, flush=True)
            failed = failed or not tally.clean
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if asked.keep:
        print(folder, file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
