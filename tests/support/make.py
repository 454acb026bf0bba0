"""`make` as a person would call it, also where the tests were started by `make` themselves."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def planned_commands(*words: str) -> list[str]:
    """The commands that `make <words>` would run with the interpreter as it is; none of them is run."""
    done = made("--dry-run", *words)
    done.check_returncode()
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def made(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What came of `make <words>` with this interpreter as it is.

    What an outer `make` leaves in the environment (its flags, its level, the variables of its command line)
    is left out: it would print its folders and override `words`.
    """
    left_by_make = ("MAKE", "MFLAGS", "ARGS")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(left_by_make)}
    return subprocess.run(
        ["make", "--no-print-directory", "VENV=", f"PYTHON={sys.executable}", *words],
        cwd=ROOT,
        env=clean | variables,
        capture_output=True,
        text=True,
    )
