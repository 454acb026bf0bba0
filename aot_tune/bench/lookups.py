"""What choosing a config costs for shapes not seen before, and what it leaves in memory. Needs no GPU."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from typing import Any

from aot_tune.arch import KNOWN_ARCHS, visible_gpus
from aot_tune.kernels import matmul_tunable, rms_norm_tunable
from aot_tune.problem import Problem
from aot_tune.serve.dispatch import dispatcher_of
from aot_tune.serve.resolve import Legality, resolve

_LOOK_UPS = 500_000
"""Of each kernel."""


def run() -> dict[str, Any]:
    """Microseconds of choosing a config for random problems, and how memory grows meanwhile, on one core."""
    here = [gpu.arch for gpu in visible_gpus() or () if gpu.arch is not None]
    arch = next((a for a in (*here, *KNOWN_ARCHS) if dispatcher_of(matmul_tunable).load(a).tables), None)
    if arch is None:
        return {"failed": "no table of matmul is there; tune it first"}
    random_ = random.Random(0)

    def size(most: int) -> int:
        return int(2 ** random_.uniform(0, math.log2(most)))

    draws: dict[str, Callable[[], dict[str, Any]]] = {
        "matmul": lambda: {"dtype": "bfloat16", "M": size(16384), "N": size(32768), "K": size(32768)},
        "rms_norm": lambda: {"dtype": "bfloat16", "rows": size(16384), "cols": size(32768)},
    }
    told: dict[str, Any] = {"arch": str(arch)}
    for tunable in (matmul_tunable, rms_norm_tunable):
        index, legality = dispatcher_of(tunable).load(arch), Legality(tunable, arch)
        draw, clock = draws[tunable.name], time.perf_counter_ns
        for _ in range(5000):
            resolve(tunable, arch, Problem(draw()), index, legality)
        before = resident_mb()
        histogram = [0] * 20001  # tenths of a microsecond; the last for all above 2 ms
        for _ in range(_LOOK_UPS):
            problem = Problem(draw())
            started = clock()
            resolve(tunable, arch, problem, index, legality)
            histogram[min((clock() - started) // 100, 20000)] += 1
        told[tunable.name] = {
            "look-ups": _LOOK_UPS,
            "median_us": _quantile(histogram, 0.5),
            "99.9 %_us": _quantile(histogram, 0.999),
            "under 200 us": round(sum(histogram[:2000]) / _LOOK_UPS, 6),
            "grown_mb": round(resident_mb() - before, 2),
        }  # fmt: skip
    return told


def resident_mb() -> float:
    """Memory of this process that lies in RAM, MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _quantile(histogram: list[int], part: float) -> float:
    left = part * sum(histogram)
    for place, count in enumerate(histogram):
        left -= count
        if left <= 0:
            return (place + 1) / 10
    return math.inf
