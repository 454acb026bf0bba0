"""A sweep that was recorded on an H200: the time of every config at 27 sizes, as values for tests."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from aot_tune.tables.table import BuiltWith
from aot_tune.tuner.choose.times import ProblemTimes, SweepTimes
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Axes, Exact, Pow2, edge
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

FILE = Path(__file__).parents[1] / "data" / "h200_matmul_bf16_n6144_k4096.json"

AXES: Axes = {"M": Pow2(), "N": Exact(), "K": Exact()}

SM_COUNT = 132

BUILT_WITH = BuiltWith(
    device_name="NVIDIA H200",
    sm_count=SM_COUNT,
    cuda_tile="1.7.0",
    tileiras="13.4.92",
    driver="580.159.04",
)

Times = dict[Problem, dict[Config, Measurement]]


def config(tile_m: int, tile_n: int, tile_k: int, num_ctas: int = 1, occupancy: int = 1) -> Config:
    return Config(
        constants={"tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k},
        hints={"num_ctas": num_ctas, "occupancy": occupancy},
    )


DEFAULT = config(128, 128, 64)


def problem(m: int) -> Problem:
    return Problem({"dtype": "bfloat16", "M": m, "N": 6144, "K": 4096})


def tiles(config: Config, problem: Problem) -> int:
    return -(-problem.size("M") // int(config["tile_m"])) * -(-problem.size("N") // int(config["tile_n"]))


@functools.cache
def _all() -> Times:
    data = json.loads(FILE.read_text())
    configs = [config(*values) for values in data["configs"]]
    return {
        problem(row["M"]): {
            one: Measurement(config=one, mean_us=us, error_margin_us=error, num_samples=20)
            for one, us, error in zip(configs, row["mean_us"], row["error_us"], strict=True)
        }
        for row in data["problems"]
    }


def times(sizes: Iterable[int] | None = None) -> Times:
    """Every config's time at these sizes, or at all that were recorded."""
    everything = _all()
    return {
        one: dict(measured)
        for one, measured in everything.items()
        if sizes is None or one.size("M") in set(sizes)
    }


def sizes() -> list[int]:
    return [one.size("M") for one in _all()]


def edges() -> list[int]:
    return [size for size in sizes() if edge(size) == size]


_PASSES = tuple(each.name for each in dataclasses.fields(ProblemTimes))


def with_times(sweep: SweepTimes, **passes: Mapping[Problem, object]) -> SweepTimes:
    """A sweep with more times: a field of `ProblemTimes` to its value by problem."""
    problems = dict(sweep.problems)
    for name, by_problem in passes.items():
        for one, value in by_problem.items():
            known = problems.get(one, ProblemTimes())
            problems[one] = dataclasses.replace(known, **{name: value})  # type: ignore[arg-type]
    return dataclasses.replace(sweep, problems=problems)


def sweep(**values: object) -> SweepTimes:
    """The first pass at the edges, as a sweep.

    Args:
        values: Fields of `SweepTimes` in place of its own, and times by problem as `with_times` takes them.
    """
    fields: dict[str, object] = {
        "kernel": "matmul",
        "arch": Arch.parse("sm90"),
        "source_hash": "0123456789abcdef",
        "check_hash": "0123456789abcdef",
        "built_with": BUILT_WITH,
        "axes": AXES,
        "tiles": tiles,
        "defaults": {problem(size): DEFAULT for size in sizes()},
        "problems": {},
    }
    passes: dict[str, Any] = {"candidates": times(edges())}
    passes |= {name: values.pop(name) for name in _PASSES if name in values}
    return with_times(SweepTimes(**{**fields, **values}), **passes)  # type: ignore[arg-type]


def us(size: int, config: Config) -> float:
    return _all()[problem(size)][config].mean_us


def regret(size: int, config: Config) -> float:
    """What a config leaves at a size against the best of all 96."""
    return us(size, config) / min(time.mean_us for time in _all()[problem(size)].values()) - 1


def geometric_mean(regrets: Iterable[float]) -> float:
    logs = [math.log1p(one) for one in regrets]
    return math.exp(sum(logs) / len(logs)) - 1


def percentile_95(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[math.ceil(0.95 * len(ordered)) - 1]
