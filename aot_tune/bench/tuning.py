"""What a sweep costs: compiling in parallel, all of it against a serial search, and a second sweep's diff."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cuda.tile.tune import exhaustive_search

from aot_tune import store
from aot_tune.bench.gpu import Gpu
from aot_tune.discovery import Found
from aot_tune.problem import Problem
from aot_tune.table import Table
from aot_tune.tuner import sweep
from aot_tune.tuner.compile import CompilePool
from aot_tune.tuner.compiled import CompileJob
from aot_tune.tuner.feed import CompileFeed
from aot_tune.tuner.plan import plan
from aot_tune.tuner.progress import PlainProgress
from aot_tune.tuner.report import SweepRequest, spread
from aot_tune.tuner.times import TIE

_SERIAL_JOBS = 48
"""Compilations done one after another too: enough for a ratio, and no more than half a minute of waiting."""

_PROBLEMS = (("bfloat16", 64, 6144, 4096), ("bfloat16", 1024, 4096, 4096), ("bfloat16", 4096, 5120, 2880))
"""Matmul problems swept both ways: (dtype, M, N, K)."""


def compile_speed(gpu: Gpu, found: Found) -> dict[str, Any]:
    """Seconds for the same compilations by one process after another and by one a core, both from cold."""
    planned = plan(found, gpu.arch, spread(found.tunable.buckets, 6), device=gpu.device)
    jobs = spread(planned.jobs, _SERIAL_JOBS)
    cores = os.cpu_count() or 1
    seconds = {workers: _compile_seconds(jobs, workers) for workers in (1, cores)}
    return {
        "compilations": len(jobs),
        "cores": cores,
        "one after another_s": round(seconds[1], 1),
        "in parallel_s": round(seconds[cores], 1),
        "ratio": round(seconds[1] / seconds[cores], 1),
    }


def _compile_seconds(jobs: Sequence[CompileJob], workers: int) -> float:
    with tempfile.TemporaryDirectory() as folder, CompilePool(workers, folder=Path(folder)) as pool:
        # The children's start is part of neither: a sweep starts them once, for thousands of compilations.
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


def against_serial_search(gpu: Gpu, found: Found, folder: Path) -> dict[str, Any]:
    """A whole sweep of a few problems beside `exhaustive_search` over the same candidates, both from cold.

    The serial search is what a user writes: one call a problem, hints by `hints_fn`, compiled on the way.
    """
    names = list(found.tunable.buckets[0])
    problems = tuple(Problem(dict(zip(names, values, strict=True))) for values in _PROBLEMS)
    serial, candidates = _serial_search(gpu, found, problems)
    report, seconds = _sweep(gpu, found, problems, folder)
    table = store.read_table(store.table_path(folder, gpu.arch, found.tunable.name))
    rows = report.rows[0]
    agreed = []
    for problem in problems:
        entry = table.entry(problem)
        times = serial[problem][1]
        best = min(times.values())
        agreed.append(entry is not None and times.get(entry.config, best * 9) <= best * (1 + 2 * TIE))
    serial_s = sum(spent for spent, _ in serial.values())
    return {
        "problems": len(problems),
        "candidates": candidates,
        "serial exhaustive_search_s": round(serial_s, 1),
        "aot_tune_s": round(seconds, 1),
        "of it compiling_s": round(rows.compile_s, 1),
        "of it measuring_s": round(rows.measure_s, 1),
        "of it verifying_s": round(rows.verify_s, 1),
        "ratio": round(serial_s / seconds, 1),
        "same winners up to ties": f"{sum(agreed)} of {len(agreed)}",
    }


def _serial_search(gpu: Gpu, found: Found, problems: Sequence[Problem]) -> tuple[dict[Problem, Any], int]:
    tunable, results, candidates = found.tunable, {}, 0
    for problem in problems:
        space = tunable.candidates(gpu.arch, problem)
        candidates += len(space)
        args = tunable.make_args(problem, gpu.torch_device, 0)
        started = time.perf_counter()
        searched = exhaustive_search(
            space,
            torch.cuda.current_stream().cuda_stream,
            lambda config, problem=problem: tunable.grid_fn(config, gpu.device, problem),
            tunable.kernel,
            lambda config, args=args: tunable.args_fn(config, *args),
            lambda config: dict(config.hints),
            quiet=True,
        )
        spent = time.perf_counter() - started
        results[problem] = (spent, {one.config: one.mean_us for one in searched.successes})
    return results, candidates


def _sweep(gpu: Gpu, found: Found, problems: tuple[Problem, ...], folder: Path) -> tuple[Any, float]:
    request = SweepRequest(
        kernels=(found,), arch=gpu.arch, gpu=0, problems={found.tunable.name: problems},
        exhaustive=True, out=folder, journal=folder / "journal", cubins=folder / "cubins",
    )  # fmt: skip
    started = time.perf_counter()
    report = sweep.run(request, PlainProgress())
    return report, time.perf_counter() - started


def tune_again(gpu: Gpu, found: Found, folder: Path, problems: int) -> dict[str, Any]:
    """Sweep some problems of an unchanged kernel again over a copy of its table, and count what changed."""
    tunable = found.tunable
    name = (str(gpu.arch), f"{tunable.name}.json")
    old_path = store.package_folder(tunable).joinpath(*name)
    target = folder.joinpath(*name)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(old_path, target)
    chosen = spread(tunable.buckets, problems)
    request = SweepRequest(
        kernels=(found,),
        arch=gpu.arch,
        gpu=0,
        problems={tunable.name: chosen},
        out=folder,
        journal=folder / "journal",
    )
    sweep.run(request, PlainProgress())
    old, new = store.read_table(old_path), store.read_table(target)
    changed = [_change(old, entry.bucket, entry) for entry in new.entries if old.entry(entry.bucket) != entry]
    return {
        "problems": len(chosen),
        "changed entries": len(changed),
        "empty diff": old_path.read_bytes() == target.read_bytes(),
        "changes": changed,
    }


def _change(old: Table, bucket: Problem, entry: Any) -> dict[str, Any]:
    before = old.entry(bucket)
    assert before is not None
    return {
        "bucket": str(bucket),
        "from": f"{before.config}: {before.mean_us} us",
        "to": f"{entry.config}: {entry.mean_us} us",
        "config changed": before.config != entry.config,
    }


def feed() -> CompileFeed:
    """A feed over the folder of cubins that sweeps share."""
    return CompileFeed(partial(CompilePool, os.cpu_count() or 1, folder=sweep.CUBINS))
