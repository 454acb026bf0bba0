"""Programs of the library `tuned_once`, and the command line, as processes on the stand-in driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from aot_tune import environment

ROOT = Path(__file__).parents[2]

ONCE = """
import json, sys, torch
from tests.support.played_cuda import counted, noted, on_the_stand_in

with on_the_stand_in():
    from tests.support import tuned_once
    launches, searched = noted("tests.support"), counted()
    for rows in map(int, sys.argv[1:]):
        x = torch.empty(rows, dtype=torch.float16, device="cuda")
        tuned_once.launch(x, torch.empty_like(x))
print(json.dumps({"launches": launches, "searched": searched}))
"""
"""A program that searches at each of its arguments."""


def kept(folder: Path) -> dict[str, str]:
    """This process's environment without variables of aot_tune, where modules of `folder` are found too."""
    others = {name: value for name, value in os.environ.items() if name not in environment.DESCRIPTIONS}
    return {**others, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**kept(folder), **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def aot_tune(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "aot_tune", *words, **variables)
