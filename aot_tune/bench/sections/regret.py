"""Sizes that were not swept: what the resolver's choice loses against all candidates, and the model's."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from aot_tune.bench.gpu import Gpu, Timed, shipped, this_gpu
from aot_tune.declare.discovery import Found
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.tables.table import geometric_mean
from aot_tune.tuner.plan.sizes import sizes_inside
from aot_tune.values.bucket import Pow2
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

SIZES = 44
"""Problems a kernel, every second of them of a size not divisible by 16."""

_LARGEST = 8192
_SEED = 20


def run() -> dict[str, Any]:
    """The regret of each kernel, and the model's on matmul's exhaustive times."""
    result = {}
    with this_gpu() as gpu:
        for name, one in shipped().items():
            result[name], timed = of_resolver(gpu, one)
            if name == "matmul":
                defaults = [one.tunable.default_config(gpu.arch, each.problem) for each in timed]
                result["model on matmul"] = of_model(timed, defaults)
    return result


def problems(found: Found) -> list[Problem]:
    """Declared shapes at sizes of the Pow2 axes that no sweep measures, log-uniform up to `_LARGEST`."""
    tunable, choose = found.tunable, random.Random(_SEED)
    swept = {size for bucket in tunable.buckets for size in (bucket, *sizes_inside(tunable.axes, bucket))}
    axes = [name for name, axis in tunable.axes.items() if isinstance(axis, Pow2)]
    chosen: list[Problem] = []
    while len(chosen) < SIZES:
        size = round(2 ** choose.uniform(4, math.log2(_LARGEST)))
        size = size // 16 * 16 if len(chosen) % 2 else size + (size % 16 == 0)
        problem = choose.choice(tunable.buckets).replaced(**dict.fromkeys(axes, size))
        if problem not in swept and problem not in chosen:
            chosen.append(problem)
    return chosen


def of_resolver(gpu: Gpu, found: Found) -> tuple[dict[str, Any], list[Timed]]:
    """Time every candidate at the unswept sizes, and compare what the resolver takes.

    Returns:
        The regrets' geometric mean, 95th percentile and worst, beside the default's; and all times.
    """
    tunable = found.tunable
    kernel, plans = gpu.plans(found, problems(found))
    timed = [gpu.exhaustive(kernel, each) for each in plans]
    taken, default = [], []
    for each, one in zip(plans, timed, strict=True):
        choice = dispatcher_of(tunable).choice(gpu.arch, each.problem)
        config = one.listed.twins.get(choice.config, choice.config)
        if config not in one.us:
            one.us.update(gpu.times(kernel, each, [config]))
        best = min(one.us.values())
        taken.append(one.us[config] / best - 1)
        default.append(one.us[one.listed.twins.get(each.default, each.default)] / best - 1)
    worst = max(range(len(taken)), key=taken.__getitem__)
    return {
        "problems": len(taken),
        "not divisible by 16": sum(1 for each in plans if _ragged(found, each.problem)),
        "resolver": summary(taken),
        "default": summary(default),
        "worst at": str(plans[worst].problem),
    }, timed


def of_model(timed: Sequence[Timed], defaults: Sequence[Config]) -> dict[str, Any]:
    """Regret of the best of the model's top 1, 3 and 5, and of the default, where every config was timed."""
    result: dict[str, Any] = {"problems": len(timed)}
    for top in (1, 3, 5):
        result[f"best of top {top}"] = summary(
            min(one.us[config] for config in list(one.listed.predicted_us)[:top] if config in one.us)
            / min(one.us.values())
            - 1
            for one in timed
        )
    result["default"] = summary(
        one.us[one.listed.twins.get(default, default)] / min(one.us.values()) - 1
        for one, default in zip(timed, defaults, strict=True)
    )
    return result


def summary(regrets: Iterable[float]) -> dict[str, float]:
    """Geometric mean, 95th percentile and worst of some regrets, in percent."""
    values = sorted(regrets)
    return {
        "geometric mean %": round(100 * (geometric_mean(1 + value for value in values) - 1), 2),
        "95th percentile %": round(100 * statistics.quantiles(values, n=20, method="inclusive")[-1], 2),
        "worst %": round(100 * values[-1], 2),
    }


def _ragged(found: Found, problem: Problem) -> bool:
    return any(problem.size(name) % 16 for name, axis in found.tunable.axes.items() if isinstance(axis, Pow2))
