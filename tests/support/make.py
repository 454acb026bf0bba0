"""`make` as a person would call it, also where the tests were started by `make` themselves."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def planned_commands(*words: str) -> list[str]:
    """The commands that `make <words>` would run with the interpreter as it is; none of them is run.

    What an outer `make` leaves in the environment (its flags, its level, the variables of its command line)
    is left out: it would print its folders and override `words`.
    """
    left_by_make = ("MAKE", "MFLAGS", "ARGS")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(left_by_make)}
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "VENV=", *words],
        cwd=ROOT,
        env=clean,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
