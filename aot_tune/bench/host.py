"""Measure the host: time of a launch, and memory of this process. Knows no kernel."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

_LAUNCHES = 500
"""Launches in one measurement: fewer than the driver queues, so that the host never waits for the GPU."""


def launch_us(call: Callable[[], object], *, launches: int = _LAUNCHES) -> float:
    """Mean host time in microseconds of a call that launches a kernel, over calls one after another."""
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(launches):
        call()
    spent = time.perf_counter() - started
    torch.cuda.synchronize()
    return spent / launches * 1e6


def resident_mb() -> float:
    """Resident memory of this process in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
