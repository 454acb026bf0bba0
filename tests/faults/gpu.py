"""The measuring worker's backend on a GPU that fails as planned: the real `GpuBackend` on stand-in hardware.

torch computes on the CPU, a launch multiplies there, and a time is a hash of problem and config, so that
every undisturbed sweep ends with the same bytes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tests.faults import injector, nvml

nvml.install()

import torch  # noqa: E402

from aot_tune.tables.states import State  # noqa: E402
from aot_tune.tuner.measure.worker import gpu  # noqa: E402
from aot_tune.tuner.measure.worker.backend import RECHECK_SEEDS, Trial  # noqa: E402
from aot_tune.tuner.measure.worker.verify import Case  # noqa: E402
from aot_tune.tuner.outcome import Measurement  # noqa: E402
from aot_tune.values.problem import Problem  # noqa: E402

PLAN = injector.plan()
LAUNCHES = 8
"""Launches of one search: three warm-ups and five samples."""

HANG_S = 600.0


class _Hardware:
    """What the process knows of its GPU."""

    dead = False
    phase = "check"
    problem = Problem({"M": 0, "N": 0})
    last_us = 0.0
    busy = False
    cases: Sequence[Case] = ()


# The hardware -----------------------------------------------------------------------------------------------


def _synchronize(*_: object) -> None:
    if _Hardware.dead:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


_PROPERTIES = SimpleNamespace(major=9, minor=0, name=PLAN.gpu, multi_processor_count=132)


class _Torch:
    """torch with its GPU on the CPU."""

    cuda = SimpleNamespace(
        set_device=lambda device: None,
        synchronize=_synchronize,
        current_stream=lambda device: SimpleNamespace(cuda_stream=0),
        get_device_properties=lambda device: _PROPERTIES,
        OutOfMemoryError=torch.OutOfMemoryError,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(*_: object) -> torch.device:
        return torch.device("cpu")


class _Round:
    """In the place of `EventRound`: the time of each call is that of what it launched."""

    def flush(self) -> None:
        pass

    def __call__(self, calls: Sequence[Callable[[], object]], *, written: bool = False) -> list[float]:
        samples = []
        for call in calls:
            call()
            samples.append(_Hardware.last_us)
        return samples

    def tight(self, calls: Sequence[tuple[Callable[[], object], Callable[[], object]]]) -> float:
        for prepare, launch in calls:
            prepare()
            launch()
        return _Hardware.last_us


def _launch(stream: int, grid: tuple[int, ...], kernel: Any, arguments: tuple[Any, ...]) -> None:
    source, target, tile_m, tile_n = arguments
    config, m = f"{tile_m}-{tile_n}", int(source.shape[0])
    injector.tally("launches")
    time.sleep(PLAN.launch_s)
    _synchronize()
    fault = injector.happens(PLAN.launches, config=config, phase=_Hardware.phase, only_on=m)
    _Hardware.last_us = injector.us_of(m, config) * PLAN.slow
    if fault is None:
        torch.mul(source, 2, out=target)
        return
    if fault.kind in _RESULTS:
        torch.mul(source, 2, out=target)
        _RESULTS[fault.kind](source, target)
    else:
        _go_wrong(fault.kind, fault.value)
        torch.mul(source, 2, out=target)


def _search(configs: Sequence[Any], stream: int, *, args_of: Callable[[Any], Any], **_: Any) -> Any:
    (config,) = configs
    for _number in range(LAUNCHES):
        _launch(stream, (), None, args_of(config))
    _synchronize()
    name = f"{config['tile_m']}-{config['tile_n']}"
    us = _Hardware.last_us
    if fault := injector.happens(PLAN.times, config=name, phase="time", only_on=_Hardware.problem.size("M")):
        us = us * fault.value if fault.kind == "factor" else fault.value
    return SimpleNamespace(best=SimpleNamespace(mean_us=us, error_margin_us=us * 0.001, num_samples=5))


_CUTILE = SimpleNamespace(
    limit_samples=lambda most: None,
    search=_search,
    with_hints=lambda kernel, hints, found: kernel,
    launcher=lambda **_: _launch,
    Cubin=gpu.cutile.Cubin,
)


# Faults -----------------------------------------------------------------------------------------------------


def _go_wrong(kind: str, value: float = 0.0) -> None:
    """Harm that a launch, a canary or a function of the declaration may do to the process."""
    if kind == "pause":
        time.sleep(value)
    elif kind == "hang":
        time.sleep(HANG_S)
    elif kind == "spin":
        until = time.monotonic() + HANG_S
        while time.monotonic() < until:
            pass
    elif kind in ("SEGV", "KILL", "STOP"):
        os.kill(os.getpid(), getattr(signal, f"SIG{kind}"))
    elif kind == "exit":
        os._exit(0)
    elif kind == "poison":
        _Hardware.dead = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    elif kind == "silent":
        _Hardware.dead = True
    elif kind == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory: tried to allocate 96 GiB")
    elif kind == "garbage":
        os.write(int(sys.argv[2]), b"\x10\0\0\0\0\0\0\0" + b"not a pickle at all"[:16])
    elif kind == "recursion":
        raise RecursionError("maximum recursion depth exceeded")
    else:
        raise RuntimeError(f"scripted: {kind}")


def _scribble(source: torch.Tensor, target: torch.Tensor) -> None:
    """Write outside of one's own arguments, into what the checker compares with."""
    for case in _Hardware.cases:
        for close in case.expected.values():
            close.value.mul_(1.5)


def _rows(target: torch.Tensor, value: float) -> None:
    target[target.shape[0] // 2 :] = value


_RESULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "wrong": lambda source, target: target.mul_(1.5),
    "half": lambda source, target: _rows(target, 7.0),
    "last": lambda source, target: target.view(-1)[-1:].fill_(1e4),
    "nan": lambda source, target: target.view(-1)[:1].fill_(float("nan")),
    "inf": lambda source, target: target.view(-1)[:1].fill_(float("inf")),
    "nothing": lambda source, target: target.fill_(float("nan")),
    "scribble": _scribble,
    "changes input": lambda source, target: source.view(-1)[:1].add_(1),
}
"""What a launch does beside, or in place of, computing the right result."""


def making_arguments(problem: Problem) -> None:
    """Called by the declaration's `make_args`: one of the user's functions may do harm too."""
    injector.tally("arguments made")
    if fault := injector.happens(PLAN.worker, phase="arguments", only_on=problem.size("M")):
        _go_wrong(fault.kind)


# The backend ------------------------------------------------------------------------------------------------

gpu.torch = _Torch()
gpu.cutile = _CUTILE
gpu.ct_launch = _launch
gpu.EventRound = _Round
gpu._BUSY_SIDE = 8


class FaultyGpu(gpu.GpuBackend):
    """The real backend, which logs what it is asked for."""

    def __init__(self, **arguments: Any) -> None:
        torch.set_num_threads(1)
        if PLAN.jump_s:
            began, looks = time.time(), [0]

            def jumping() -> float:
                looks[0] += 1
                injector.injected()
                return began + looks[0] * PLAN.jump_s

            time.time = jumping
        if fault := injector.happens(PLAN.worker, phase="start"):
            _go_wrong(fault.kind)
        super().__init__(**arguments)

    def canary(self) -> None:
        if fault := injector.happens(PLAN.worker, phase="canary"):
            _go_wrong(fault.kind)
        super().canary()

    def open(self, problem: Problem, seeds: Sequence[int]) -> None:
        _Hardware.problem = problem
        _Hardware.phase = "recheck" if tuple(seeds) == tuple(RECHECK_SEEDS) else "check"
        super().open(problem, seeds)
        _Hardware.cases = self._cases

    def verify(self, trial: Trial) -> str | None:
        _Hardware.cases = self._cases
        seeds = tuple(case.seed for case in self._cases)
        _Hardware.phase = "recheck" if seeds == tuple(RECHECK_SEEDS) else "check"
        return super().verify(trial)

    def time(self, trial: Trial) -> Measurement:
        _Hardware.phase, name = "time", f"{trial.config['tile_m']}-{trial.config['tile_n']}"
        injector.log(f"time {_Hardware.problem.size('M')} {name}")
        return super().time(trial)

    def busy(self, seconds: float) -> None:
        _Hardware.busy = True
        super().busy(seconds)

    def sample(self, trial: Trial, state: State) -> float:
        _Hardware.phase = f"time {'load' if _Hardware.busy else state}"
        _Hardware.busy, name = False, f"{trial.config['tile_m']}-{trial.config['tile_n']}"
        injector.log(f"sample {_Hardware.problem.size('M')} {name}")
        return super().sample(trial, state)
