"""What the first request costs in fresh processes, against tuning, compiling and Triton's autotuner.

Choosing a config is timed apart, by `bench.lookups`: beside other processes it would be timed with them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aot_tune import environment
from aot_tune.nvidia.nvml import visible_gpus

_REPEATS = 5
"""Fresh processes of each quick scenario. On a host that others use too, some are a third slower than the
rest: the median and the least are told."""

_PRIMED = 3
"""Processes that prime first, each of half a minute."""

_LIMIT_S = 400.0


def run() -> dict[str, Any]:
    """Milliseconds of first launches, of misses and of loading; microseconds of launches."""
    with tempfile.TemporaryDirectory() as temporary:
        return _Bench(Path(temporary)).all()


class _Bench:
    """One run; everything it makes lies in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._archives = folder / "archives"
        self._caches = 0
        arch = next(str(gpu.arch) for gpu in visible_gpus() or () if gpu.arch is not None)
        command = [sys.executable, "-m", "aot_tune", "compile", "--arch", arch, "--out", str(self._archives)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_LIMIT_S)
        self._size_kb = (self._archives / arch / "cubins.aot").stat().st_size / 1024

    def all(self) -> dict[str, Any]:
        """Every scenario's figures."""
        disk = self._folder / "cutile"
        first = {
            "tuned on the first call": self._child("tune_first", cutile_cache=None),
            "config known, compiled on the spot": self._several("bare_first", cutile_cache=None),
            # The first of these fills it.
            "config known, cuTile's disk cache warm": [
                self._child("bare_first", cutile_cache=disk) for _ in range(2)
            ][-1],
            "aot_tune with cubins, no compiler": self._several("first_launches", prebuilt=True),
        }
        return {
            "archive_kb": round(self._size_kb, 1),
            "first launch, waited for": {**first, **self._triton()},
            "after prime": [self._child("after_prime", prebuilt=True) for _ in range(_PRIMED)],
            "launch, with cubins": self._several("launches", prebuilt=True),
            "launch, without cubins": self._several("launches"),
            "a miss, searched live over cubins": self._several("misses", prebuilt=True),
            "loading all tables, and the archive's index and sections": self._several(
                "loading", prebuilt=True
            ),
        }

    def _several(self, scenario: str, *, prebuilt: bool = False, cutile_cache: Path | None = None) -> Any:
        """By figure, the middle and the least of several processes'; what is no figure is the last one's."""
        told = [self._child(scenario, prebuilt=prebuilt, cutile_cache=cutile_cache) for _ in range(_REPEATS)]
        failed = next((one for one in told if "failed" in one), None)
        return failed or _middle_and_least(told)

    def _child(
        self,
        scenario: str,
        *,
        module: str = "aot_tune.bench.sections.serving_child",
        prebuilt: bool = False,
        cutile_cache: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Any:
        """What a fresh process prints, with a user's cache of its own."""
        self._caches += 1
        named = {name: value for name, value in os.environ.items() if name not in environment.DESCRIPTIONS}
        named |= {
            environment.CACHE_DIR: str(self._folder / f"cache{self._caches}"),
            "CUDA_TILE_CACHE_DIR": str(cutile_cache or "off"),
            **({environment.TABLES: str(self._archives)} if prebuilt else {}),
            **(variables or {}),
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", module, scenario],
            capture_output=True, text=True, timeout=_LIMIT_S, env=named, check=False,
        )  # fmt: skip
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            told = {"failed": last[0]}
        else:
            told = json.loads(done.stdout.splitlines()[-1])
        # Told at once, so that a run that is cut off has told all it measured.
        print(f"   {scenario}{' with cubins' if prebuilt else ''}: {json.dumps(told)}", flush=True)
        return told

    def _triton(self) -> dict[str, Any]:
        if importlib.util.find_spec("triton") is None:
            return {"Triton": "not installed"}

        def launch(folder: str, **variables: str) -> Any:
            told = {"TRITON_CACHE_DIR": str(self._folder / folder), **variables}
            return self._child("rms_norm", module="aot_tune.bench.sections.triton_child", variables=told)

        caching = {"TRITON_CACHE_AUTOTUNING": "1"}
        return {
            "Triton, 12 configs, nothing cached": launch("triton"),
            "Triton, compile cache warm": launch("triton"),
            "Triton, TRITON_CACHE_AUTOTUNING=1, warm": [launch("tuned", **caching) for _ in range(2)][-1],
        }


def _middle_and_least(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each figure that several processes told, the median and the least; of all else the last one's."""
    found: dict[str, Any] = {}
    for name, value in told[-1].items():
        if isinstance(value, float):
            values = sorted(one[name] for one in told)
            found |= {name: values[len(values) // 2], f"{name}, the least": values[0]}
        else:
            found[name] = value
    return found
