"""Starts child processes that serve on a GPU from an archive of cubins, and reads what they answer.

What they do is in `tests.support.children.serving_scenarios`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aot_tune import environment
from aot_tune.nvidia.nvml import visible_gpus

ROOT = Path(__file__).parents[2]


def built(folder: Path) -> Path:
    """An archive of the kernels that scenarios launch, for this machine's arch."""
    arch = next((gpu.arch for gpu in visible_gpus() or () if gpu.arch is not None), None)
    if arch is None or not (ROOT / "tuned_configs" / str(arch)).is_dir():
        pytest.fail(f"these tests need a GPU that kernels were tuned for; this machine has {arch}")
    kernels = [word for name in ("matmul", "rms_norm", "rope") for word in ("--kernel", name)]
    command = [sys.executable, "-m", "aot_tune", "compile", "--arch", str(arch), "--out", str(folder)]
    subprocess.run([*command, *kernels], cwd=ROOT, check=True, timeout=580, stdout=sys.stderr)
    return folder


def start(
    archives: Path,
    cache: Path,
    scenario: str,
    *arguments: str,
    module: str = "tests.support.children.serving_scenarios",
    **variables: str,
) -> subprocess.Popen[str]:
    """A scenario in a process without anybody's variables, its cubins in `archives`."""
    told = {name: value for name, value in os.environ.items() if name not in environment.DESCRIPTIONS}
    for name in environment.LAUNCHERS:
        told.pop(name, None)
    told |= {environment.TABLES: str(archives), environment.CACHE_DIR: str(cache), **variables}
    return subprocess.Popen(
        [sys.executable, "-m", module, scenario, *arguments],
        cwd=ROOT, env=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def answer(process: subprocess.Popen[str], timeout_s: float = 240.0) -> dict[str, Any]:
    """What a scenario printed; its exit must be clean, which a capture gone wrong spoils."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    print(told)
    return told
