"""Host microseconds of a launch: a bare `ct.launch`, `Tunable.launch`, and the pattern written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cuda.tile as ct
import torch

from aot_tune.bench.gpu import BenchGpu, this_gpu
from aot_tune.bench.host import launches_us
from aot_tune.bench.sections.part import Part, Request
from aot_tune.kernels.norms.rms_norm import rms_norm_tunable as tunable

_ROUNDS = 41


def run(request: Request) -> Iterator[Part]:
    """Measure each way to launch one tuned rms_norm in interleaved rounds: median host microseconds."""
    with this_gpu() as gpu:
        yield Part(name="launch", kernels=(tunable.name,), figures=_measured(gpu))


def _measured(gpu: BenchGpu) -> dict[str, float]:
    x = torch.randn(64, 4096, device=gpu.torch_device, dtype=torch.bfloat16)
    weight, out = torch.ones(4096, device=gpu.torch_device, dtype=torch.bfloat16), torch.empty_like(x)
    problem = tunable.problem_of(x, weight, out, 1e-6)
    config = tunable.default_config(gpu.arch, problem)
    kernel = tunable.kernel.replace_hints(**config.hints)
    grid, stream = tunable.grid_fn(config, gpu.device, problem), torch.cuda.current_stream().cuda_stream
    arguments = tunable.args_fn(config, x, weight, out, 1e-6)
    launch, tuned = ct.launch, tunable.launch
    tuned_once: dict[Any, Any] = {}

    def by_hand() -> None:
        # cuTile's users write this: tune on the first call of a shape, then reuse the kernel of the shape.
        key = (x.shape, weight.shape, x.dtype, str(x.device))
        if key not in tuned_once:
            tuned_once[key] = (config, kernel)
        chosen, ready = tuned_once[key]
        # The grid of a persistent kernel needs the number of multiprocessors.
        torch.cuda.get_device_properties(x.device)
        ct.launch(torch.cuda.current_stream(), grid, ready, tunable.args_fn(chosen, x, weight, out, 1e-6))

    ways: dict[str, Callable[[], object]] = {
        "bare ct.launch": lambda: launch(stream, grid, kernel, arguments),
        "Tunable.launch": lambda: tuned(x, weight, out, 1e-6),
        "Tunable.launch, grad off": lambda: tuned(x, weight, out, 1e-6),
        "Tunable.launch, config given": lambda: tuned(x, weight, out, 1e-6, config=config),
        "tune-once pattern by hand": by_hand,
        "a Python call": lambda: None,
    }
    us = launches_us(ways, _ROUNDS)
    us["above bare"] = round(us["Tunable.launch"] - us["bare ct.launch"], 3)
    us["by hand / Tunable.launch"] = round(us["tune-once pattern by hand"] / us["Tunable.launch"], 2)
    return us
