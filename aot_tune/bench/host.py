"""Measure the host: time of a launch, and memory of this process. Imports no kernel."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping

import torch

_LAUNCHES = 500
"""Launches in one measurement: fewer than the driver queues, so that the host never waits for the GPU."""


def launch_us(call: Callable[[], object], *, launches: int = _LAUNCHES) -> float:
    """Return the mean host time of a call that launches a kernel, microseconds, over consecutive calls."""
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(launches):
        call()
    spent = time.perf_counter() - started
    torch.cuda.synchronize()
    return spent / launches * 1e6


def launches_us(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median over interleaved rounds of `launch_us` of each way to launch.

    Args:
        ways: Calls by name. A call with "grad off" in its name runs without grad, as in servers.
        rounds: Rounds in which each call takes its turn.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            with torch.set_grad_enabled("grad off" not in name):
                taken[name].append(launch_us(call))
    return {name: round(statistics.median(times), 3) for name, times in taken.items()}


def resident_mb() -> float:
    """Return the resident memory of this process, MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
