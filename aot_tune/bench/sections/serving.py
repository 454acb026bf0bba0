"""Time the first request of fresh processes, against tuning, compiling and Triton's autotuner.

The section `lookups` times the choice of a config: here other processes would disturb it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aot_tune import environment
from aot_tune.bench.children import client
from aot_tune.bench.sections.part import Part, Request
from aot_tune.declare.selection import chosen_arch

KERNELS = ("rms_norm", "matmul", "rope")
"""Kernels that the scenarios launch."""

_PRIMED = 3
"""Most processes that prime first. Each takes half a minute."""

_LIMIT_S = 400.0
"""Seconds after which a process counts as hanging."""

_IMPORTS = {
    "aot_tune": ("sys", "import aot_tune"),
    "rms_norm": ("torch, cuda.tile", "from aot_tune.kernels import rms_norm"),
    "kernels": ("torch, cuda.tile", "from aot_tune.kernels import TUNABLES"),
}
"""Modules that a fresh interpreter imports, and the statement that is timed then, by name."""

_TIMED_IMPORT = """
import time, {modules}
wall_s, cpu_s = time.perf_counter(), time.process_time()
{statement}
print(time.perf_counter() - wall_s, time.process_time() - cpu_s)
"""

_NO_CONTEXT = """
import os, torch, cuda.tile
from aot_tune.kernels import TUNABLES
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    torch.zeros(1, device="cuda").add_(1).cpu()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
"""Program that fails where importing the kernels creates a CUDA context: no fork could use the GPU then."""


def run(request: Request) -> Iterator[Part]:
    """Measure milliseconds of first launches, of misses and of loading, and microseconds of launches.

    On a host that others use too, some processes are a third slower than the rest. So a scenario runs in
    several processes, and the median and the minimum are reported.
    """
    with tempfile.TemporaryDirectory() as temporary:
        for name, figures in _Bench(Path(temporary), request.repeats).all():
            kernels = client.KERNELS if name.startswith("client: ") else KERNELS
            yield Part(name=name, kernels=kernels, figures=figures)


class _Bench:
    """A run of all scenarios.

    Args:
        folder: The folder of all files of the run.
        repeats: Fresh processes of each quick scenario.
    """

    def __init__(self, folder: Path, repeats: int) -> None:
        self._folder = folder
        self._archives = folder / "archives"
        self._caches = 0
        self._repeats = repeats
        arch = str(chosen_arch(None))
        self._has_client = importlib.util.find_spec("transformers") is not None
        self._kernels = tuple(dict.fromkeys((*KERNELS, *client.KERNELS))) if self._has_client else KERNELS
        command = [
            *(sys.executable, "-m", "aot_tune", "compile", "--arch", arch, "--out", str(self._archives)),
            *(word for kernel in self._kernels for word in ("--kernel", kernel)),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_LIMIT_S)
        self._size_kb = (self._archives / arch / "cubins.aot").stat().st_size / 1024

    def all(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every scenario's name and figures, each as soon as it is measured."""
        disk = self._folder / "cutile"
        yield "imports", _imports(self._repeats)
        yield "archive", {"kb": round(self._size_kb, 1), "kernels": len(self._kernels)}
        if self._has_client:
            module = "aot_tune.bench.children.client"
            yield "client: aot_tune", self._several("aot_tune", prebuilt=True, module=module)
            yield "client: torch as it comes", self._several("torch", module=module)
        yield (
            "first launch: aot_tune with cubins, no compiler",
            self._several("first_launches", prebuilt=True),
        )
        yield "first launch: config known, compiled on the spot", self._several("bare_first")
        self._child("bare_first", cutile_cache=disk)  # fills cuTile's disk cache
        warm = self._child("bare_first", cutile_cache=disk)
        yield "first launch: config known, cuTile's disk cache warm", warm
        yield "first launch: tuned on the first call", self._child("tune_first")
        for name, figures in self._triton().items():
            yield f"first launch: {name}", figures
        yield "launch, with cubins", self._several("launches", prebuilt=True)
        yield "launch, without cubins", self._several("launches")
        yield "a miss, searched live over cubins", self._several("misses", prebuilt=True)
        yield "loading", self._several("loading", prebuilt=True)
        primed = [self._child("after_prime", prebuilt=True) for _ in range(min(_PRIMED, self._repeats))]
        failed = next((answer for answer in primed if "failed" in answer), None)
        yield "after prime", failed or {"processes": primed}

    def _several(self, scenario: str, **how: Any) -> Any:
        """Return median and minimum over processes for each number; other values from the last process.

        The first process is not counted: Python compiles the files and caches them.
        """
        self._child(scenario, **how)
        answers = [self._child(scenario, **how) for _ in range(self._repeats)]
        failed = next((answer for answer in answers if "failed" in answer), None)
        return failed or {**_median_and_minimum(answers), "processes": len(answers)}

    def _child(
        self,
        scenario: str,
        *,
        module: str = "aot_tune.bench.children.serving",
        prebuilt: bool = False,
        cutile_cache: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Any:
        """Run a scenario in a fresh process with a user's cache of its own, and return what it prints."""
        self._caches += 1
        named = _variables() | {
            environment.CACHE_DIR: str(self._folder / f"cache{self._caches}"),
            "CUDA_TILE_CACHE_DIR": str(cutile_cache or "off"),
            client.SPAWNED: str(time.time_ns()),
            **({environment.TABLES: str(self._archives)} if prebuilt else {}),
            **(variables or {}),
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", module, scenario],
            capture_output=True, text=True, timeout=_LIMIT_S, env=named, check=False,
        )  # fmt: skip
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            answer = {"failed": last[0]}
        else:
            answer = json.loads(done.stdout.splitlines()[-1])
        # Printed at once, so that a run that is cut off has printed all it measured.
        print(f"   {scenario}{' with cubins' if prebuilt else ''}: {json.dumps(answer)}", flush=True)
        return answer

    def _triton(self) -> dict[str, Any]:
        if importlib.util.find_spec("triton") is None:
            return {}

        def launch(folder: str, **variables: str) -> Any:
            variables = {"TRITON_CACHE_DIR": str(self._folder / folder), **variables}
            return self._child("rms_norm", module="aot_tune.bench.children.triton", variables=variables)

        caching = {"TRITON_CACHE_AUTOTUNING": "1"}
        return {
            "Triton, 12 configs, nothing cached": launch("triton"),
            "Triton, compile cache warm": launch("triton"),
            "Triton, TRITON_CACHE_AUTOTUNING=1, warm": [launch("tuned", **caching) for _ in range(2)][-1],
        }


def _median_and_minimum(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return median and minimum of each number of several processes; other values from the last one."""
    figures: dict[str, Any] = {}
    for name, value in answers[-1].items():
        if isinstance(value, float):
            values = sorted(answer[name] for answer in answers)
            figures |= {name: values[len(values) // 2], f"{name}, the least": values[0]}
        else:
            figures[name] = value
    return figures


def _imports(repeats: int) -> dict[str, Any]:
    """Return the milliseconds of imports, with cached files: the least of several interpreters."""
    figures: dict[str, Any] = {}
    for name, (modules, statement) in _IMPORTS.items():
        code = _TIMED_IMPORT.format(modules=modules, statement=statement)
        _printed(code)  # not counted: Python compiles the files and caches them
        wall, cpu = zip(*(map(float, _printed(code).split()) for _ in range(repeats)), strict=True)
        figures |= {f"{name}_ms": round(min(wall) * 1e3, 1), f"{name}_cpu_ms": round(min(cpu) * 1e3, 1)}
    no_context = subprocess.run([sys.executable, "-c", _NO_CONTEXT], env=_variables(), check=False)
    return figures | {"no CUDA context": not no_context.returncode}


def _printed(code: str) -> str:
    """Return what a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=_LIMIT_S, env=_variables()
    )
    return done.stdout


def _variables() -> dict[str, str]:
    """Return the environment of fresh processes: no variable of ours, and Python caches what it compiles."""
    left_out = {*environment.DESCRIPTIONS, "PYTHONDONTWRITEBYTECODE"}
    return {name: value for name, value in os.environ.items() if name not in left_out}
