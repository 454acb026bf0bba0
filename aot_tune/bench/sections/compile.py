"""Compare compiling in parallel with compiling one job after another: the same jobs, both from cold."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aot_tune.bench.gpu import shipped
from aot_tune.bench.sections.part import Part, Request
from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.tuner.compile.job import CompileJob
from aot_tune.tuner.compile.pool import CompilePool, usable_cores
from aot_tune.tuner.plan.candidates import plan
from aot_tune.tuner.plan.sizes import spread

_JOBS = 48
"""Compilations. They are enough for a ratio, and take at most half a minute."""


def run(request: Request) -> Iterator[Part]:
    """Measure seconds of matmul compilations by one process, and by one process for each core."""
    yield Part(name="compile", kernels=("matmul",), figures=_measured())


def _measured() -> dict[str, Any]:
    found = shipped()["matmul"]
    arch = next(gpu.arch for gpu in visible_gpus() or () if gpu.arch is not None)
    jobs = spread(plan(found, arch, spread(found.tunable.buckets, 6)).jobs, _JOBS)
    cores = usable_cores()
    seconds = {workers: _seconds(jobs, workers) for workers in (1, cores)}
    return {
        "compilations": len(jobs),
        "cores": cores,
        "one after another_s": round(seconds[1], 1),
        "in parallel_s": round(seconds[cores], 1),
        "ratio": round(seconds[1] / seconds[cores], 1),
    }


def _seconds(jobs: Sequence[CompileJob], workers: int) -> float:
    with tempfile.TemporaryDirectory() as folder, CompilePool(workers, folder=Path(folder)) as pool:
        # The start of the children is left out: a sweep starts them once, for thousands of compilations.
        started = 0.0
        for job in jobs:
            pool.submit(job)
        done = 0
        while pool.unfinished:
            done += len(pool.poll(1.0))
            if done and not started:
                started = time.perf_counter()
                first = done
        spent = time.perf_counter() - started
        return spent * len(jobs) / max(len(jobs) - first, 1)
