"""Time imports: the fastest of several fresh interpreters, so that the file cache is warm."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from aot_tune.bench.sections.part import Part, Request

_RUNS = 4
_STEPS = {
    "interpreter": "pass",
    "aot_tune": "import aot_tune",
    "torch and cuda.tile": "import torch, cuda.tile",
    "torch, cuda.tile and the shipped kernels": "import torch, cuda.tile, aot_tune.kernels",
}
_NO_CONTEXT = """
import os, torch, cuda.tile, aot_tune.kernels
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    torch.zeros(1, device="cuda").add_(1).cpu()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def _milliseconds(statement: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return (time.perf_counter() - started) * 1e3


def run(request: Request) -> Iterator[Part]:
    """Measure milliseconds of each import, and try whether a child forked after them can use the GPU."""
    yield Part(name="imports", figures=_measured())


def _measured() -> dict[str, float | bool]:
    fastest = {name: min(_milliseconds(code) for _ in range(_RUNS)) for name, code in _STEPS.items()}
    rows: dict[str, float | bool] = {f"{name}_ms": round(ms, 1) for name, ms in fastest.items()}
    rows["import aot_tune adds_ms"] = round(fastest["aot_tune"] - fastest["interpreter"], 1)
    rows["the shipped kernels add_ms"] = round(
        fastest["torch, cuda.tile and the shipped kernels"] - fastest["torch and cuda.tile"], 1
    )
    try:
        rows["a forked child uses the GPU"] = (
            subprocess.run([sys.executable, "-c", _NO_CONTEXT], check=False).returncode == 0
        )
    except OSError:
        rows["a forked child uses the GPU"] = False
    return rows
