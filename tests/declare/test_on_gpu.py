"""Declarations of what few kernels need, and TileGym's: every candidate computes right on a GPU."""

from __future__ import annotations

import importlib

import pytest

from aot_tune.declare.discovery import load
from aot_tune.tuner.measure.worker.backend import SEEDS, Trial
from tests.support import tilegym_sites, wide_samples

pytestmark = pytest.mark.gpu

OPERATIONS = ("bmm", "gated_delta_rule", "group_gemm", "mla_decoding", "rms_norm", "silu_and_mul")


def verify_all(module: str, name: str) -> None:
    """Launch each candidate of each typical problem on poisoned outputs and compare, for every seed."""
    from aot_tune.tuner.measure.worker.gpu import GpuBackend

    backend = GpuBackend(module=module, name=name, gpu_index=0)
    tunable, device = load(module, name), backend.device()
    for problem in tunable.typical_problems:
        backend.open(problem, SEEDS)
        for config in tunable.candidates(device.arch, problem):
            if device.refusal(config.hints.get("occupancy", 1)) is None:
                assert backend.verify(Trial(config=config)) is None, f"{name} {problem} {config}"
        assert backend.damage() is None


@pytest.mark.parametrize("name", ["scale_each", "row_sum", "double"])
def test_every_candidate_of_the_wide_samples_is_right(name: str) -> None:
    verify_all(wide_samples.MODULE, name)


@pytest.mark.skipif(not (tilegym_sites.FOLDER / "tilegym").is_dir(), reason=tilegym_sites.MISSING)
@pytest.mark.filterwarnings("ignore:TileCpp backend is not available")  # TileGym's, once, as it is imported
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_candidate_of_tilegyms_operations_is_right(name: str) -> None:
    module = f"tests.support.tilegym_declared.{name}"
    verify_all(module, getattr(importlib.import_module(module), name).name)


@pytest.mark.filterwarnings("ignore::aot_tune.errors.MissWarning")  # nothing is tuned
@pytest.mark.parametrize("name", ["scale_each", "row_sum", "double"])
def test_launches_of_lists_and_absent_outputs_are_right(name: str) -> None:
    tunable = load(wide_samples.MODULE, name)
    for problem in tunable.typical_problems:
        args = tunable.make_args(problem, "cuda:0", 0)
        for _ in range(3):  # the slow path, then the plan
            tunable.launch(*args)
