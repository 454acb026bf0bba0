"""The kernel that faulty sweeps tune: twelve configs, no two of the same machine code, and three buckets.

The scenario's plan says which configs it refuses and which of its functions are written in another way.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import torch

from aot_tune import inputs
from aot_tune.declare.declaration import Close
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.faults import injector
from tests.support import samples

MODULE = "tests.faults.small_kernel"
PLAN = injector.plan() if injector.PLAN in os.environ else injector.Plan()

SPACE = [Config(constants={"tile_m": m, "tile_n": n}) for m in (16, 32, 64) for n in (32, 64, 128, 256)]
DEFAULT = SPACE[0]


def name_of(config: Config) -> str:
    """The config as plans and logs name it."""
    return f"{config['tile_m']}-{config['tile_n']}"


def _legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    return "the plan is without it" if name_of(config) in PLAN.without else True


def _make_args(problem: Problem, device: object, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    if worker := sys.modules.get("tests.faults.gpu"):
        worker.making_arguments(problem)
    shape = problem.size("M"), problem.size("N")
    return inputs.randn(shape, "bfloat16", str(device), seed), inputs.empty(shape, "bfloat16", str(device))


def _made_otherwise(problem: Problem, device: object, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    source, target = _make_args(problem, device, seed + 1000)
    return source.abs(), target


def _reference(source: torch.Tensor, target: torch.Tensor) -> Close:
    return Close(value=source.double() * 2, rtol=0.01, atol=0.01)


def _stricter(source: torch.Tensor, target: torch.Tensor) -> Close:
    return Close(value=source.double() + source.double(), rtol=0.008, atol=0.008)


scale: Tunable = dataclasses.replace(
    samples.scale,
    search_space=lambda arch, problem: SPACE,
    legal=_legal,
    default=lambda arch, problem: DEFAULT,
    make_args=_made_otherwise if "make_args" in PLAN.changed else _make_args,
    reference=_stricter if "reference" in PLAN.changed else _reference,
    typical=[{"dtype": "bfloat16", "M": list(PLAN.problems), "N": 1024}],
    tables=Path("/nonexistent/tuned_configs"),
)
