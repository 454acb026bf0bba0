"""Time the choice of a config for unseen shapes, and measure the memory that it keeps. Needs no GPU.

The process has a user's cache that holds winners of live searches, as a serving process has. No look-up
starts a search: a search takes milliseconds, happens once for each bucket, and is timed by `serving`.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from aot_tune import environment
from aot_tune.bench.host import resident_mb
from aot_tune.bench.sections.part import Part, Request
from aot_tune.choose.index import Index
from aot_tune.choose.legality import Legality
from aot_tune.choose.resolve import Live, resolve
from aot_tune.declare.declaration import Declaration
from aot_tune.errors import UsageError
from aot_tune.kernels import matmul_tunable, rms_norm_tunable
from aot_tune.nvidia.nvml import visible_gpus
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.serve.search.cache import UserCache, Winners
from aot_tune.values.arch import KNOWN_ARCHS, Arch
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

_FOUND = 200
"""Buckets of each kernel whose winner the cache holds."""

_OFTEN = 50
"""Interval of look-ups of buckets whose winners the cache holds; the others are of random problems."""


def run(request: Request) -> Iterator[Part]:
    """Measure microseconds of a choice for random problems on one core, and the growth of memory meanwhile.

    Raises:
        UsageError: No table of matmul exists.
    """
    here = [gpu.arch for gpu in visible_gpus() or () if gpu.arch is not None]
    arch = next((a for a in (*here, *KNOWN_ARCHS) if dispatcher_of(matmul_tunable).load(a).tables), None)
    if arch is None:
        raise UsageError(
            "there is no table of matmul, so there is nothing to look up; run aot-tune tune first"
        )
    random_ = random.Random(0)

    def size(most: int) -> int:
        return int(2 ** random_.uniform(0, math.log2(most)))

    draws: dict[str, Callable[[], dict[str, Any]]] = {
        "matmul": lambda: {"dtype": "bfloat16", "M": size(16384), "N": size(32768), "K": size(32768)},
        "rms_norm": lambda: {"dtype": "bfloat16", "rows": size(16384), "cols": size(32768)},
    }
    with _cache_folder():
        for tunable in (matmul_tunable, rms_norm_tunable):
            figures = _timed(tunable, arch, draws[tunable.name], random_, request.look_ups)
            yield Part(name=tunable.name, kernels=(tunable.name,), figures={"arch": str(arch), **figures})


def _timed(
    tunable: Declaration,
    arch: Arch,
    draw: Callable[[], dict[str, Any]],
    random_: random.Random,
    look_ups: int,
) -> dict[str, Any]:
    dispatcher, clock = dispatcher_of(tunable), time.perf_counter_ns
    index, legality = dispatcher.load(arch), Legality(tunable, arch)
    winners, name = Winners(tunable, dispatcher.kernels), Device.reference(arch).name
    remembered = _remembered(tunable, arch, winners, name, index, draw)
    chosen = partial(
        resolve,
        index=index,
        legality=legality,
        live=Live(remembered=partial(winners.of, arch, name)),
    )
    for _ in range(5000):
        chosen(problem=Problem(draw()))
    before = resident_mb()
    histogram = [0] * 20001  # each bin is 0.1 us wide; the last one counts all above 2 ms
    cached = 0
    for number in range(look_ups):
        problem = random_.choice(remembered) if number % _OFTEN == 0 else Problem(draw())
        started = clock()
        choice = chosen(problem=problem)
        histogram[min((clock() - started) // 100, 20000)] += 1
        cached += choice.source == "cached"
    return {
        "look-ups": look_ups,
        "from the cache": cached,
        "median_us": _quantile(histogram, 0.5),
        "99.9 %_us": _quantile(histogram, 0.999),
        "99.99 %_us": _quantile(histogram, 0.9999),
        "under 200 us": round(sum(histogram[:2000]) / look_ups, 6),
        "grown_mb": round(resident_mb() - before, 2),
    }  # fmt: skip


@contextmanager
def _cache_folder() -> Iterator[None]:
    """Use a temporary cache in place of the user's."""
    before = os.environ.get(environment.CACHE_DIR)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[environment.CACHE_DIR] = str(Path(folder).resolve())
        try:
            yield
        finally:
            if before is None:
                del os.environ[environment.CACHE_DIR]
            else:
                os.environ[environment.CACHE_DIR] = before


def _remembered(
    tunable: Declaration,
    arch: Arch,
    winners: Winners,
    name: str,
    index: Index,
    draw: Callable[[], dict[str, Any]],
) -> list[Problem]:
    """Draw problems whose buckets no table has, and put a winner of each bucket into the cache."""
    cache = UserCache(Path(os.environ[environment.CACHE_DIR]))
    remembered: dict[Problem, Problem] = {}
    while len(remembered) < _FOUND:
        problem = Problem(draw())
        if index.own(problem) is None:
            remembered[tunable.bucket_of(problem)] = problem
    for bucket, problem in remembered.items():
        cache.write(winners.key(arch, name, bucket), tunable.default_config(arch, problem), 1.0)
    return list(remembered.values())


def _quantile(histogram: list[int], part: float) -> float:
    left = part * sum(histogram)
    for place, count in enumerate(histogram):
        left -= count
        if left <= 0:
            return (place + 1) / 10
    return math.inf
