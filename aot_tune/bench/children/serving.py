"""Run one scenario of the section `serving` in a fresh process: prints one line of JSON."""

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
from aot_tune.bench.children.client import Profile
from aot_tune.bench.host import launches_us, resident_mb
from aot_tune.cubins.archive import FILE_NAME, Archive
from aot_tune.declare.discovery import OWN_KERNELS, find_tunables
from aot_tune.kernels import matmul_tunable, rms_norm_tunable, rope_tunable
from aot_tune.nvidia import cutile
from aot_tune.serve import loader
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
MISSES = ((64, 384, 256), (256, 256, 320), (1024, 384, 384))
"""M, N, K far from all tuned problems; each product takes less than 1 ms."""

_CPU_CACHES = 1 << 27
"""Number of 4-byte values that evicts the CPU's caches: 512 MB, more than any CPU's caches hold."""

_PASSES = 4
"""Launches of each shape after `prime`: the first one, and three to compare it with."""


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
    problem = _PROBLEMS.get(tunable.name)
    return tunable.make_args(Problem(problem) if problem else tunable.typical_problems[6], "cuda:0", 1)


def _ms(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call, waited for."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return round((time.perf_counter() - started) * 1e3, 3)


# First launches ---------------------------------------------------------------------------------------------


def tune_first() -> dict[str, Any]:
    """Time a search of the whole space on the first call, as cuTile's users do it: milliseconds."""
    from cuda.tile.tune import exhaustive_search

    figures: dict[str, Any] = {}
    for tunable in (rms_norm_tunable, matmul_tunable):
        args = _args(tunable)
        problem, device = tunable.problem_of(*args), dispatcher_of(tunable).machine(0, _runtime()).device
        configs = tunable.candidates(device.arch, problem)

        search = partial(
            exhaustive_search, configs, torch.cuda.current_stream().cuda_stream,
            partial(_grid_of, tunable, device, problem), tunable.kernel, partial(_args_of, tunable, args),
            lambda config: dict(config.hints), quiet=True,
        )  # fmt: skip
        figures[f"{tunable.name}_ms"] = _ms(search)
        figures[f"{tunable.name}_configs"] = len(configs)
    return figures


def _grid_of(tunable: Tunable, device: Device, problem: Problem, config: Config) -> tuple[int, ...]:
    return tunable.grid_fn(config, device, problem)


def _args_of(tunable: Tunable, args: tuple[Any, ...], config: Config) -> tuple[Any, ...]:
    return tunable.args_fn(config, *args)


def bare_first() -> dict[str, Any]:
    """Time `ct.launch` of the tuned config in ms; cuTile compiles it or finds it in its disk cache."""
    figures: dict[str, Any] = {}
    for tunable in (rms_norm_tunable, matmul_tunable):
        call = _bare(tunable, tunable.kernel.replace_hints)
        figures[f"{tunable.name}_ms"] = _ms(call)
    return figures


def _bare(tunable: Tunable, kernel_of: Callable[..., Any]) -> Callable[[], None]:
    args = _args(tunable)
    dispatcher, problem = dispatcher_of(tunable), tunable.problem_of(*args)
    device = dispatcher.machine(0, _runtime()).device
    config = dispatcher.choice(device.arch, problem, device=device).config
    kernel, grid = kernel_of(**config.hints), tunable.grid_fn(config, device, problem)
    passed, stream = tunable.args_fn(config, *args), torch.cuda.current_stream().cuda_stream
    return lambda: ct.launch(stream, grid, kernel, passed)


def _runtime() -> Any:
    from aot_tune.serve.runtime import runtime

    return runtime()


def first_launches() -> dict[str, Any]:
    """Time `Tunable.launch` from cubins in ms, without a compiler; a process pays some costs only once."""
    _without_compiler()
    calls = [(tunable, _args(tunable)) for tunable in _LAUNCHED]
    profile, figures = Profile(), dict[str, Any]()
    profile.measure_serving()
    for tunable, args in calls:
        profile.taken()
        figures[f"{tunable.name}_ms"] = _ms(partial(tunable.launch, *args))
        figures |= {f"{tunable.name}: {part}_ms": ms for part, ms in profile.taken().items()}
    return figures


def after_prime() -> dict[str, Any]:
    """Compare the first launches of declared shapes after `prime` with later launches of the same shapes.

    New shapes alternate with shapes that were launched before, so that other work of the host affects both
    alike. Each launch has tensors that no launch has used, and the CPU's caches hold other data, as when a
    request arrives. For half of the new shapes the whole launch is timed, for the others only the host's part
    before it calls cuTile. The shapes launched before show how much faster or slower the first pass was for
    all shapes; the ratio of first to later launches is divided by that pace. Times are microseconds.
    """
    _without_compiler()
    done = aot_tune.prime(*_LAUNCHED)
    figures: dict[str, Any] = {
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
        figures[tunable.name] = {}
        for what, passes, column in (
            ("waited for", taken, 1),
            ("the host's part", taken, 0),
            ("before cuTile", own, 0),
        ):
            fresh, known = (
                [[t[column] for t in one_pass[half::2]] for one_pass in passes] for half in (0, 1)
            )
            first, later = _first_and_later(fresh)
            pace = truediv(*_first_and_later(known))
            figures[tunable.name] |= {
                f"{what}: first_us": round(first, 2), f"{what}: later_us": round(later, 2),
                f"{what}: of shapes met before": round(pace, 3),
                f"{what}: first / later": round(first / later / pace, 3),
            }  # fmt: skip
    return figures


def _first_and_later(passes: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the median over shapes of the first pass, and of each shape's median in the later passes."""
    later = [statistics.median(shape) for shape in zip(*passes[1:], strict=True)]
    return statistics.median(passes[0]), statistics.median(later)


def _in_turn(new: list[Problem], met: list[Problem]) -> list[Problem]:
    return [problem for pair in zip(new, met, strict=False) for problem in pair]


@contextmanager
def _without_cutile(tunable: Tunable) -> Iterator[None]:
    """Make launches return where they would call cuTile."""
    names = tunable.launch.__globals__
    launch, names["ct_launch"] = names["ct_launch"], lambda *_: None
    try:
        yield
    finally:
        names["ct_launch"] = launch


def _launch_us(tunable: Tunable, problems: list[Problem], seed: int) -> list[tuple[float, float]]:
    """Time one launch of each problem, microseconds: the host's part, and until the GPU is done."""
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
    """Measure host microseconds of a launch beyond a bare `ct.launch` of the same kernel.

    With grad off, as servers run, a launch does not look at whether tensors require a gradient.
    """
    x, weight, out, eps = _args(rms_norm_tunable)
    kernels = dispatcher_of(rms_norm_tunable).kernels
    bare = _bare(rms_norm_tunable, lambda **hints: kernels.of(Config(hints=hints)))
    launch = rms_norm_tunable.launch

    def tuned() -> None:
        launch(x, weight, out, eps)

    figures = launches_us({"bare_us": bare, "launch_us": tuned, "grad off: launch_us": tuned}, 31)
    above = {name.replace("launch", "above"): us for name, us in figures.items() if "launch" in name}
    return {**figures, **{name: round(us - figures["bare_us"], 3) for name, us in above.items()}}


# Misses and loading -----------------------------------------------------------------------------------------


def misses() -> dict[str, Any]:
    """Time a matmul that nothing was tuned for, from its search to the end of its launch: milliseconds."""
    _without_compiler()
    matmul_tunable.launch(*_args(matmul_tunable))
    figures: dict[str, Any] = {}
    for m, n, k in MISSES:
        problem = Problem({"dtype": "bfloat16", "M": m, "N": n, "K": k})
        args = matmul_tunable.make_args(problem, "cuda:0", 1)
        figures[f"{m} x {n} x {k} ms"] = _ms(partial(matmul_tunable.launch, *args))
        plans = dispatcher_of(matmul_tunable)._plans
        figures[f"{m} x {n} x {k}"] = next(p.choice.source for key, p in plans.items() if key[1] == problem)
    return figures


def loading() -> dict[str, Any]:
    """Measure milliseconds and MiB of loading all shipped tables, then the archive's index and sections.

    Loading tables includes the hinted kernels of their configs.
    """
    archs = loader.archs_to_load(rms_norm_tunable)
    shipped = [kernel.tunable for kernel in find_tunables([OWN_KERNELS]).values()]
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
    scenario.__name__: scenario
    for scenario in (tune_first, bare_first, first_launches, after_prime, launches, misses, loading)
}

if __name__ == "__main__":
    print(json.dumps(_SCENARIOS[sys.argv[1]]()))
