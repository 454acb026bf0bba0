"""What a launch costs on the host: a bare `ct.launch`, through `Tunable.launch`, and the hand-written pattern."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import cuda.tile as ct
import torch

from aot_tune.arch import Arch
from aot_tune.device import Device
from aot_tune.kernels import rms_norm as module

_LAUNCHES = 500  # few enough that the driver's queue of 1024 launches never fills and blocks the host
_ROUNDS = 41


def _host_us(call: Callable[[], object]) -> list[float]:
    for _ in range(50):
        call()
    torch.cuda.synchronize()
    rounds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        for _ in range(_LAUNCHES):
            call()
        rounds.append((time.perf_counter() - started) / _LAUNCHES * 1e6)
        torch.cuda.synchronize()
    return rounds
