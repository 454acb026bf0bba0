"""Releases of cuda-tile beside the installed one, each in a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

OTHERS = ("1.6.0",)
"""Releases beside the installed one, the oldest of each tested minor version."""


@cache
def other_release(version: str) -> Path:
    """A folder that holds nothing but this release of cuda-tile; kept between runs."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    folder = ROOT / "build" / "contract" / f"cuda_tile-{version}-{tag}"
    if not (folder / "cuda" / "tile" / "VERSION").is_file():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            "--no-compile",
        ]
        wanted = [f"cuda-tile=={version}", "--upgrade", "--target", str(folder)]
        done = subprocess.run([*command, *wanted], capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines()
            pytest.skip(
                f"cuda-tile {version} cannot be fetched here: {said[-1] if said else 'pip says nothing'}"
            )
    return folder
