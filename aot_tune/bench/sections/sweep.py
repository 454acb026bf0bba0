"""Compare a whole sweep with serial `exhaustive_search` over the same candidates, both from cold."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aot_tune.bench.gpu import shipped
from aot_tune.bench.sections.part import Part, Request
from aot_tune.declare.discovery import FoundKernel
from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.tables import store
from aot_tune.tuner.choose.times import TIE
from aot_tune.tuner.sweep import run as sweep
from aot_tune.tuner.sweep.progress import PlainProgress
from aot_tune.tuner.sweep.report import SweepReport, SweepRequest
from aot_tune.values.arch import Arch
from aot_tune.values.problem import Problem

_PROBLEMS = (("bfloat16", 64, 6144, 4096), ("bfloat16", 1024, 4096, 4096), ("bfloat16", 4096, 5120, 2880))
"""Matmul problems swept both ways: (dtype, M, N, K)."""


def run(request: Request) -> Iterator[Part]:
    """Measure seconds of both ways. The serial way is a user's: it compiles during the search."""
    yield Part(name="sweep", kernels=("matmul",), figures=_both_ways())


def _both_ways() -> dict[str, Any]:
    """Sweep first, while this process has no context on the GPU, then search serially."""
    found = shipped()["matmul"]
    arch = next(gpu.arch for gpu in visible_gpus() or () if gpu.arch is not None)
    names = list(found.tunable.buckets[0])
    problems = tuple(Problem(dict(zip(names, values, strict=True))) for values in _PROBLEMS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        report, seconds = _sweep(arch, found, problems, folder)
        table = store.read_table(store.table_path(folder, arch, found.tunable.name))
    serial = {problem: _serial_search(arch, found, problem) for problem in problems}
    agreed = 0
    for problem, (_, times) in serial.items():
        entry = table.entry(problem)
        best = min(times.values())
        agreed += entry is not None and times.get(entry.config, best * 9) <= best * (1 + 2 * TIE)
    serial_s, row = sum(spent for spent, _ in serial.values()), report.rows[0]
    return {
        "problems": len(problems),
        "candidates": sum(len(found.tunable.candidates(arch, problem)) for problem in problems),
        "serial exhaustive_search_s": round(serial_s, 1),
        "aot_tune_s": round(seconds, 1),
        "of it until the last compilation_s": round(row.compile_s, 1),
        "of it measuring_s": round(row.measure_s, 1),
        "of it verifying_s": round(row.verify_s, 1),
        "what it does beside": "two seeds verified, finals, points inside, a recheck",
        "ratio": round(serial_s / seconds, 1),
        "same winners up to ties": f"{agreed} of {len(problems)}",
    }


def _serial_search(arch: Arch, found: FoundKernel, problem: Problem) -> tuple[float, dict[Any, float]]:
    import torch
    from cuda.tile.tune import exhaustive_search

    from aot_tune.values.device import Device

    tunable = found.tunable
    device = Device.of(torch.cuda.get_device_properties(0))
    args = tunable.make_args(problem, torch.device("cuda", 0), 0)
    started = time.perf_counter()
    searched = exhaustive_search(
        tunable.candidates(arch, problem),
        torch.cuda.current_stream().cuda_stream,
        lambda config: tunable.grid_fn(config, device, problem),
        tunable.kernel,
        lambda config: tunable.args_fn(config, *args),
        lambda config: dict(config.hints),
        quiet=True,
    )
    spent = time.perf_counter() - started
    return spent, {one.config: one.mean_us for one in searched.successes}


def _sweep(
    arch: Arch, found: FoundKernel, problems: Sequence[Problem], folder: Path
) -> tuple[SweepReport, float]:
    request = SweepRequest(
        kernels=(found,), arch=arch, gpus=(0,), problems={found.tunable.name: tuple(problems)},
        exhaustive=True, out=folder, journal=folder / "journal", cubins=folder / "cubins",
    )  # fmt: skip
    started = time.perf_counter()
    report = sweep.run(request, PlainProgress())
    return report, time.perf_counter() - started
