"""Measure at sizes that no sweep measured how much slower the chosen config is than the fastest candidate."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from aot_tune.bench import words
from aot_tune.bench.gpu import BenchGpu, Timed, shipped, this_gpu
from aot_tune.bench.sections.part import Part, Request
from aot_tune.declare.declaration import Declaration
from aot_tune.declare.discovery import FoundKernel
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.tables.table import geometric_mean
from aot_tune.tuner.plan.candidates import DeviceKernel, ProblemPlan
from aot_tune.tuner.plan.sizes import sizes_inside
from aot_tune.values.bucket import Pow2
from aot_tune.values.problem import Problem

_SEED = 20
"""Seed of the draw of problems."""

_FACTOR = 16
"""Divisor by which signatures distinguish sizes: every second problem has sizes that are its multiples."""


def run(request: Request) -> Iterator[Part]:
    """Measure the regret of the resolver's choice, of the default and of the model, kernel by kernel.

    All compilations are submitted first, so that those of later kernels run while earlier kernels are timed.

    Raises:
        UsageError: No shipped kernel has one of the asked names.
    """
    kernels = shipped()
    names = request.kernels or tuple(kernels)
    words.check_known(names, kernels, "no kernel is called")
    until = time.monotonic() + request.limit_s
    with this_gpu() as gpu:
        planned = {name: gpu.plans(kernels[name], problems(kernels[name], request.sizes)) for name in names}
        for name, (kernel, plans) in planned.items():
            if time.monotonic() > until:
                return
            try:
                figures = _measured(gpu, kernel, plans)
            except Exception as error:  # another kernel may still succeed
                figures = {"failed": f"{type(error).__name__}: {error}"}
            yield Part(name=name, kernels=(name,), figures=figures)
            torch.cuda.empty_cache()


def _measured(gpu: BenchGpu, kernel: DeviceKernel, plans: Sequence[ProblemPlan]) -> dict[str, Any]:
    timed = [gpu.exhaustive(kernel, plan) for plan in plans]
    figures = of_resolver(gpu, kernel, plans, timed)
    if all(times.listed.predicted_us for times in timed):
        figures["model"] = of_model(timed)
    return figures


def problems(found: FoundKernel, sizes: int) -> list[Problem]:
    """Draw problems inside the declared buckets, at sizes that no sweep measures.

    Equal numbers give equal problems. In every second problem all sizes are divisible by 16 where their
    buckets have such sizes; in the others no size is.
    """
    tunable, random_ = found.tunable, random.Random(_SEED)
    swept = {size for bucket in tunable.buckets for size in (bucket, *sizes_inside(tunable.axes, bucket))}
    chosen: list[Problem] = []
    while len(chosen) < sizes:
        bucket, whole = random_.choice(tunable.buckets), len(chosen) % 2 == 1
        drawn = {name: _size_inside(bucket.size(name), random_, whole=whole) for name in _pow2_axes(tunable)}
        problem = bucket.replaced(**drawn)
        if problem not in swept and problem not in chosen:
            chosen.append(problem)
    return chosen


def _size_inside(edge: int, random_: random.Random, *, whole: bool) -> int:
    """Draw a size of the bucket that ends at `edge`, a multiple of 16 or not, where it has such sizes."""
    least = edge // 2 + 1
    if whole and edge >= _FACTOR:
        return _FACTOR * random_.randint(-(-least // _FACTOR), edge // _FACTOR)
    size = random_.randint(least, edge)
    return size - 1 if size % _FACTOR == 0 else size


def _pow2_axes(tunable: Declaration) -> list[str]:
    return [name for name, axis in tunable.axes.items() if isinstance(axis, Pow2)]


def of_resolver(
    gpu: BenchGpu, kernel: DeviceKernel, plans: Sequence[ProblemPlan], timed: Sequence[Timed]
) -> dict[str, Any]:
    """Summarise the regrets of the resolver's choice and of the default against the fastest candidate."""
    tunable = kernel.tunable
    taken, default = [], []
    for plan, times in zip(plans, timed, strict=True):
        choice = dispatcher_of(tunable).choice(gpu.arch, plan.problem, device=gpu.device)
        config = times.listed.twins.get(choice.config, choice.config)
        if config not in times.us:
            own = plan if config in plan.jobs else gpu.plan_configs(kernel, plan.problem, [config])
            times.us.update(gpu.times(kernel, own, [config]))
        best = min(times.us.values())
        taken.append(times.us[config] / best - 1)
        default.append(times.us[times.listed.twins.get(plan.default, plan.default)] / best - 1)
    worst = max(range(len(taken)), key=taken.__getitem__)
    return {
        "problems": len(taken),
        "not divisible by 16": sum(1 for plan in plans if _ragged(kernel, plan.problem)),
        "resolver": summary(taken),
        "default": summary(default),
        "worst at": str(plans[worst].problem),
    }


def of_model(timed: Sequence[Timed]) -> dict[str, Any]:
    """Summarise the regret of the fastest of the model's first 1, 3 and 5 configs, where all were timed."""
    result: dict[str, Any] = {}
    for top in (1, 3, 5):
        result[f"best of top {top}"] = summary(_of_first(times, top) for times in timed)
    return result


def _of_first(timed: Timed, top: int) -> float:
    """Return the regret of the fastest of the model's first few configs that ran."""
    ran = [config for config in timed.listed.predicted_us if config in timed.us]
    return min(timed.us[config] for config in ran[:top]) / min(timed.us.values()) - 1


def summary(regrets: Iterable[float]) -> dict[str, float]:
    """Return geometric mean, 95th percentile and worst of some regrets, in percent."""
    values = sorted(regrets)
    values = values if len(values) > 1 else values * 2  # a quantile needs two
    return {
        "geometric mean %": round(100 * (geometric_mean(1 + value for value in values) - 1), 2),
        "95th percentile %": round(100 * statistics.quantiles(values, n=20, method="inclusive")[-1], 2),
        "worst %": round(100 * values[-1], 2),
    }


def _ragged(kernel: DeviceKernel, problem: Problem) -> bool:
    """Whether the largest drawn size is not divisible by 16."""
    return max(problem.size(name) for name in _pow2_axes(kernel.tunable)) % _FACTOR != 0
