"""The real compiler on a kernel, for GPUs that are not here: the resources that its cubin takes."""

from __future__ import annotations

import pytest
import torch

from aot_tune.nvidia import cutile
from aot_tune.nvidia.cubin import Resources, resources
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

ARCHS = ("sm80", "sm90", "sm100", "sm120")
"""An arch of each kind that shipped kernels tell apart."""

SM90_AND_SLOW_ARCHS = tuple(
    name if name == "sm90" else pytest.param(name, marks=pytest.mark.slow) for name in ARCHS
)
"""The same for a long proof: `make test` has it for sm90, `make test-slow` for the others."""


def compiled(tunable: Tunable, arch: Arch, one: Problem, config: Config) -> Resources:
    """The resources of the cubin that a launch with this config would compile on this arch."""
    args = tunable.make_args(one, torch.device("meta"), 0)
    signature = cutile.signature_of(tunable.kernel, tunable.args_fn(config, *args))
    return resources(cutile.compile_cubin(tunable.kernel, config.hints, signature, arch, timeout_s=120))
