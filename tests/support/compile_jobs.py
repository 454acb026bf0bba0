"""Jobs for the compile pool: the sample kernel, in configs that a test names."""

from __future__ import annotations

from aot_tune.declare.discovery import FoundKernel
from aot_tune.tuner.compile.job import CompileJob
from aot_tune.tuner.plan.candidates import DeviceKernel
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support.samples import MODULE, SM90, scale

PROBLEM = Problem({"dtype": "bfloat16", "M": 64, "N": 1024})


def job(tile_m: int, occupancy: int = 1) -> CompileJob:
    """A job that compiles the sample kernel for sm90 with tiles of `tile_m` rows."""
    kernel = DeviceKernel(FoundKernel(module=MODULE, tunable=scale), SM90)
    config = Config(constants={"tile_m": tile_m, "tile_n": 64}, hints={"occupancy": occupancy, "num_ctas": 1})
    return kernel.job(PROBLEM, config)
