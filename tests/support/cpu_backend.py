"""A measuring backend without a GPU: it runs a module's own Python function `on_cpu` in the kernel's place.

Arguments, poison and comparison are the real ones, on CPU tensors; only launching and timing are made up.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from aot_tune.declare.discovery import load
from aot_tune.errors import CutileError
from aot_tune.tuner.measure.worker.backend import Trial
from aot_tune.tuner.measure.worker.verify import Case
from aot_tune.tuner.outcome import Measurement, Stage
from aot_tune.values.arch import Arch
from aot_tune.values.problem import Problem
from tests.support.gpu_locks import shared_folder
from tests.support.idle_gpu import IdleGpu


class CpuBackend(IdleGpu):
    """A `Backend` that plays an H200."""

    def __init__(self, *, module: str, name: str, gpu_index: int) -> None:
        self._tunable = load(module, name)
        self._on_cpu: Callable[..., None] = import_module(module).on_cpu
        self._cases: list[Case] = []

    def open(self, problem: Problem, seeds: Sequence[int]) -> None:
        cpu = torch.device("cpu")
        self._cases = [Case.make(self._tunable, problem, cpu, seed) for seed in seeds]

    def verify(self, trial: Trial) -> str | None:
        if trial.cubin is None:  # the real one compiles it once more, and fails as the compiling child did
            raise CutileError("it does not compile")
        for case in self._cases:
            case.prepare()
            self._on_cpu(*case.args)
            if wrong := case.check():
                return wrong
        return None

    def again(self, trial: Trial, number: int) -> str | None:
        return self.verify(trial)

    def check(self) -> str | None:
        return None

    def damage(self) -> str | None:
        return next(filter(None, (case.damage() for case in self._cases)), None)

    def time(self, trial: Trial) -> Measurement:
        us = 10.0 - int(trial.config["tile"]) / 1024  # larger tiles are clearly faster
        return Measurement(config=trial.config, mean_us=us, error_margin_us=0.01, num_samples=5)

    def healthy(self) -> bool:
        return True

    def stage(self, error: Exception) -> Stage:
        return "compile" if isinstance(error, CutileError) else "launch"


def play_an_h200() -> Any:
    """Let this process's command line find one sm90 GPU, on which a worker measures with this backend."""
    from aot_tune.declare import selection
    from aot_tune.nvidia.nvml import Gpu
    from aot_tune.tuner.measure import gpu_lock
    from aot_tune.tuner.measure.session import MeasureSession

    selection.visible_gpus = lambda: (Gpu(index=0, name="NVIDIA H200", arch=Arch(9, 0), uuid="GPU-0"),)
    gpu_lock.FOLDERS = (shared_folder(Path(tempfile.mkdtemp())),)  # that GPU is this process's own
    defaults = MeasureSession.__init__.__kwdefaults__
    assert "backend" in defaults
    defaults["backend"] = f"{__name__}:CpuBackend"
