"""One scenario of `bench.serving` in a fresh process: `python -m ... SCENARIO` prints one line of JSON."""

from __future__ import annotations

import importlib.abc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import truediv
from typing import Any

import cuda.tile as ct
import torch

import aot_tune
from aot_tune.bench.host import launch_us, resident_mb
from aot_tune.cubins.archive import FILE_NAME, Archive
from aot_tune.declare.discovery import OWN_KERNELS, find_tunables
from aot_tune.kernels import matmul_tunable, rms_norm_tunable, rope_tunable
from aot_tune.nvidia import cutile
from aot_tune.serve.choose import loader
from aot_tune.serve.launch.dispatch import Dispatcher, dispatcher_of
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

_LAUNCHED = (rms_norm_tunable, matmul_tunable, rope_tunable)
_PROBLEMS = {
    "rms_norm": {"dtype": "bfloat16", "rows": 64, "cols": 4096},
    "matmul": {"dtype": "bfloat16", "M": 64, "N": 6144, "K": 4096},
}
_MISSES = ((64, 512, 256), (256, 640, 512), (1024, 256, 1024))
"""M, N, K far from all that was tuned, each under 1 ms."""

_CPU_CACHES = 1 << 27
"""Numbers of 4 bytes, 512 MB: more than any CPU's caches hold."""

_PASSES = 4
"""Launches of each shape after `prime`: the first, and three to compare it with."""


class _NoCompiler(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "cuda.tile._compile":
            raise SystemExit("the compiler was imported")


def _without_compiler() -> None:
    sys.meta_path.insert(0, _NoCompiler())
    cutile.may_have_compiler = lambda: False


def _arch() -> Arch:
    return Arch(*torch.cuda.get_device_capability())


def _args(tunable: Tunable) -> tuple[Any, ...]:
    told = _PROBLEMS.get(tunable.name)
    return tunable.make_args(Problem(told) if told else tunable.typical_problems[6], "cuda:0", 1)


def _ms(call: Callable[[], object]) -> float:
    """Milliseconds of a call, waited for."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return round((time.perf_counter() - started) * 1e3, 3)


# First launches ---------------------------------------------------------------------------------------------


def tune_first() -> dict[str, Any]:
    """Search the whole space on the first call, as cuTile's users do."""
    from cuda.tile.tune import exhaustive_search

    told: dict[str, Any] = {}
    for tunable in (rms_norm_tunable, matmul_tunable):
        args = _args(tunable)
        problem, device = tunable.problem_of(*args), dispatcher_of(tunable).machine(0, _runtime()).device
        configs = tunable.candidates(device.arch, problem)

        search = partial(
            exhaustive_search, configs, torch.cuda.current_stream().cuda_stream,
            partial(_grid_of, tunable, device, problem), tunable.kernel, partial(_args_of, tunable, args),
            lambda config: dict(config.hints), quiet=True,
        )  # fmt: skip
        told[f"{tunable.name}_ms"] = _ms(search)
        told[f"{tunable.name}_configs"] = len(configs)
    return told


def _grid_of(tunable: Tunable, device: Device, problem: Problem, config: Config) -> tuple[int, ...]:
    return tunable.grid_fn(config, device, problem)


def _args_of(tunable: Tunable, args: tuple[Any, ...], config: Config) -> tuple[Any, ...]:
    return tunable.args_fn(config, *args)


def bare_first() -> dict[str, Any]:
    """`ct.launch` of the tuned config, which cuTile compiles or finds in its disk cache."""
    told: dict[str, Any] = {}
    for tunable in (rms_norm_tunable, matmul_tunable):
        call = _bare(tunable, tunable.kernel.replace_hints)
        told[f"{tunable.name}_ms"] = _ms(call)
    return told


def _bare(tunable: Tunable, kernel_of: Callable[..., Any]) -> Callable[[], None]:
    args = _args(tunable)
    dispatcher, problem = dispatcher_of(tunable), tunable.problem_of(*args)
    device = dispatcher.machine(0, _runtime()).device
    config = dispatcher.choice(device.arch, problem).config
    kernel, grid = kernel_of(**config.hints), tunable.grid_fn(config, device, problem)
    passed, stream = tunable.args_fn(config, *args), torch.cuda.current_stream().cuda_stream
    return lambda: ct.launch(stream, grid, kernel, passed)


def _runtime() -> Any:
    from aot_tune.serve.runtime import runtime

    return runtime()


def first_launches() -> dict[str, Any]:
    """`Tunable.launch` from cubins, with no compiler; the first kernel bears what a process does once."""
    _without_compiler()
    calls = [(tunable, _args(tunable)) for tunable in _LAUNCHED]
    return {f"{tunable.name}_ms": _ms(partial(tunable.launch, *args)) for tunable, args in calls}


def after_prime() -> dict[str, Any]:
    """Microseconds of the first launches of declared shapes, and of later launches of the same shapes.

    Between two of them one of a shape met before, so that whatever else the host does meets all alike; each
    with tensors that no launch has seen, and after the CPU's caches held other things, as when a request
    arrives. Of half of the shapes all is timed, of the others what the host does before it calls cuTile. The
    shapes met before tell how much faster or slower the first pass was for all, which is taken out: a first
    launch stands beside others of its pass, and what sets the shapes apart is not in it.
    """
    _without_compiler()
    done = aot_tune.prime(*_LAUNCHED)
    told: dict[str, Any] = {
        "signatures loaded": done.loaded, "compiled": done.compiled, "plans": done.plans,
        "prime_seconds": round(done.seconds, 3),
    }  # fmt: skip
    for tunable in _LAUNCHED:
        problems = [p for p in tunable.typical_problems if p.size(next(iter(tunable.axes))) <= 512]
        met, new = problems[::2], problems[1::2]
        for seed in range(5):
            _launch_us(tunable, met, seed)
        taken = [_launch_us(tunable, _in_turn(new[::2], met), 5 + again) for again in range(_PASSES)]
        with _without_cutile(tunable):
            own = [_launch_us(tunable, _in_turn(new[1::2], met), 5 + again) for again in range(_PASSES)]
        told[tunable.name] = {}
        for what, passes, column in (
            ("waited for", taken, 1),
            ("the host's part", taken, 0),
            ("before cuTile", own, 0),
        ):
            fresh, known = ([[t[column] for t in each[half::2]] for each in passes] for half in (0, 1))
            first, later = _first_and_later(fresh)
            pace = truediv(*_first_and_later(known))
            told[tunable.name] |= {
                f"{what}: first_us": round(first, 2), f"{what}: later_us": round(later, 2),
                f"{what}: of shapes met before": round(pace, 3),
                f"{what}: first / later": round(first / later / pace, 3),
            }  # fmt: skip
    return told


def _first_and_later(passes: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Medians over shapes, of the first pass and of each shape's median in the later ones."""
    later = [statistics.median(each) for each in zip(*passes[1:], strict=True)]
    return statistics.median(passes[0]), statistics.median(later)


def _in_turn(new: list[Problem], met: list[Problem]) -> list[Problem]:
    return [problem for pair in zip(new, met, strict=False) for problem in pair]


@contextmanager
def _without_cutile(tunable: Tunable) -> Iterator[None]:
    """Let launches end where they would call cuTile."""
    names = tunable.launch.__globals__
    launch, names["ct_launch"] = names["ct_launch"], lambda *_: None
    try:
        yield
    finally:
        names["ct_launch"] = launch


def _launch_us(tunable: Tunable, problems: list[Problem], seed: int) -> list[tuple[float, float]]:
    """Microseconds of one launch of each problem: the host's part, and until the GPU is done."""
    calls = [tunable.make_args(problem, "cuda:0", seed) for problem in problems]
    torch.cuda.synchronize()
    torch.zeros(_CPU_CACHES).add_(1)
    launch, clock, times = tunable.launch, time.perf_counter, []
    for args in calls:
        started = clock()
        launch(*args)
        launched = clock()
        torch.cuda.synchronize()
        times.append(((launched - started) * 1e6, (clock() - started) * 1e6))
    return times


def launches() -> dict[str, Any]:
    """Host microseconds of a launch above a bare `ct.launch` of the same kernel.

    With grad off, as servers run, no tensor is asked whether it requires a gradient.
    """
    x, weight, out, eps = _args(rms_norm_tunable)
    bare = _bare(rms_norm_tunable, lambda **hints: dispatcher_of(rms_norm_tunable).kernels.of(hints))
    launch = rms_norm_tunable.launch

    def tuned() -> None:
        launch(x, weight, out, eps)

    ways: dict[str, tuple[Callable[[], object], bool]] = {
        "bare_us": (bare, True), "launch_us": (tuned, True), "grad off: launch_us": (tuned, False),
    }  # fmt: skip
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(31):
        for name, (call, grad) in ways.items():
            with torch.set_grad_enabled(grad):
                rounds[name].append(launch_us(call))
    told = {name: round(statistics.median(times), 3) for name, times in rounds.items()}
    above = {name.replace("launch", "above"): us for name, us in told.items() if "launch" in name}
    return {**told, **{name: round(us - told["bare_us"], 3) for name, us in above.items()}}


# Misses and loading -----------------------------------------------------------------------------------------


def misses() -> dict[str, Any]:
    """Milliseconds of a matmul that nothing was tuned for: searched, launched, waited for."""
    _without_compiler()
    matmul_tunable.launch(*_args(matmul_tunable))
    told: dict[str, Any] = {}
    for m, n, k in _MISSES:
        problem = Problem({"dtype": "bfloat16", "M": m, "N": n, "K": k})
        args = matmul_tunable.make_args(problem, "cuda:0", 1)
        told[f"{m} x {n} x {k} ms"] = _ms(partial(matmul_tunable.launch, *args))
        plans = dispatcher_of(matmul_tunable)._plans
        told[f"{m} x {n} x {k}"] = next(p.choice.source for key, p in plans.items() if key[1] == problem)
    return told


def loading() -> dict[str, Any]:
    """Milliseconds and resident MB of all shipped tables, and then of the archive's index and sections.

    With the tables come the kernels of their configs, and whether the sections are of this source.
    """
    archs = loader.archs_to_load(rms_norm_tunable)
    shipped = [found.tunable for found in find_tunables([OWN_KERNELS]).values()]
    before, started = resident_mb(), time.perf_counter()
    dispatchers = [Dispatcher(tunable) for tunable in shipped]
    indexes = [dispatcher.load(arch) for dispatcher in dispatchers for arch in archs]
    tables, between = time.perf_counter() - started, resident_mb()
    kept: list[Any] = []
    started = time.perf_counter()
    for folder, _ in loader.folders(rms_norm_tunable):
        for arch in archs:
            if (path := folder / str(arch) / FILE_NAME).exists():
                archive = Archive(path)
                kept += [archive.section(name) for name in archive.kernels]
    return {
        "tables": sum(len(index.tables) for index in indexes),
        "sections": sum(section is not None for section in kept),
        "tables_ms": round(tables * 1e3, 2), "tables_mb": round(between - before, 2),
        "archive_ms": round((time.perf_counter() - started) * 1e3, 2),
        "archive_mb": round(resident_mb() - between, 2),
    }  # fmt: skip


_SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    one.__name__: one
    for one in (tune_first, bare_first, first_launches, after_prime, launches, misses, loading)
}

if __name__ == "__main__":
    print(json.dumps(_SCENARIOS[sys.argv[1]]()))
