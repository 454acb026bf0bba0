"""The shipped kernels through the real compiler, for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aot_tune.kernels import matmul_tunable, rms_norm_tunable, rope_tunable
from aot_tune.nvidia import cutile
from aot_tune.nvidia.cubin import Resources, resources
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support.agree import problem

pytestmark = pytest.mark.process

ARCHS = ("sm80", "sm90", "sm100", "sm120")
SAMPLED = 5
"""Configs of the matmul's space compiled beside its defaults; each takes about half a second."""


def compiled(tunable: Tunable, arch: Arch, one: Problem, config: Config) -> Resources:
    args = tunable.make_args(one, torch.device("meta"), 0)
    signature = cutile.signature_of(tunable.kernel, tunable.args_fn(config, *args))
    return resources(cutile.compile_cubin(tunable.kernel, config.hints, signature, arch, timeout_s=120))


def matmul_configs(arch: Arch) -> Iterator[tuple[Problem, Config]]:
    for m in (1, 4096):
        one = problem(dtype="bfloat16", M=m, N=6144, K=4096)
        yield one, matmul_tunable.default_config(arch, one)
        candidates = matmul_tunable.candidates(arch, one)
        yield from ((one, config) for config in candidates[:: -(-len(candidates) // SAMPLED)])


@pytest.mark.parametrize("name", ARCHS)
def test_matmul_compiles_in_its_defaults_and_across_its_space(name: str) -> None:
    arch = Arch.parse(name)
    for one, config in dict.fromkeys(matmul_configs(arch)):
        found = compiled(matmul_tunable, arch, one, config)
        is_default = config == matmul_tunable.default_config(arch, one)
        # sm80 spills before the loop in much of its space, which the sweep prunes; sm90 and sm100 nowhere.
        if is_default or name in ("sm90", "sm100"):
            assert found.stack_bytes == 0, (one, config)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (200, 100, 72), (33, 97, 65)])
def test_matmul_compiles_for_sizes_that_are_not_aligned(m: int, n: int, k: int) -> None:
    arch, one = Arch.parse("sm90"), problem(dtype="float16", M=m, N=n, K=k)
    compiled(matmul_tunable, arch, one, matmul_tunable.default_config(arch, one))


@pytest.mark.parametrize("name", ARCHS)
def test_rms_norm_compiles_and_its_default_spills_at_no_declared_width(name: str) -> None:
    arch = Arch.parse(name)
    for cols in sorted({p.size("cols") for p in rms_norm_tunable.typical_problems}):
        one = problem(dtype="bfloat16", rows=4096, cols=cols)
        assert (
            compiled(rms_norm_tunable, arch, one, rms_norm_tunable.default_config(arch, one)).stack_bytes == 0
        )


def test_rms_norm_compiles_across_its_space() -> None:
    arch = Arch.parse("sm90")
    for cols in (1, 100, 128, 8192, 32768):
        one = problem(dtype="float32", rows=7, cols=cols)
        compiled(rms_norm_tunable, arch, one, rms_norm_tunable.default_config(arch, one))
    one = problem(dtype="bfloat16", rows=4096, cols=4096)
    for config in rms_norm_tunable.candidates(arch, one):
        assert compiled(rms_norm_tunable, arch, one, config).stack_bytes == 0, config


@pytest.mark.parametrize("name", ARCHS)
def test_rope_compiles_and_its_default_spills_for_no_declared_model(name: str) -> None:
    arch = Arch.parse(name)
    for one in rope_tunable.typical_problems:
        if one["tokens"] == 1024:
            assert (
                compiled(rope_tunable, arch, one, rope_tunable.default_config(arch, one)).stack_bytes == 0
            ), one


def test_rope_compiles_across_its_space() -> None:
    arch, one = Arch.parse("sm90"), rope_tunable.typical_problems[0].replaced(dtype="float16", tokens=64)
    for config in rope_tunable.space(arch, one):
        assert compiled(rope_tunable, arch, one, config).stack_bytes == 0, config
