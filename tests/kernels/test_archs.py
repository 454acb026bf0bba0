"""Every shipped kernel through the real compiler for the archs that its own tests leave out: a fixed sample.

`make check-archs` takes all defaults and portfolios on all archs.
"""

from __future__ import annotations

import random
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

from aot_tune import kernels
from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.mistakes import space_mistakes
from aot_tune.errors import LaunchError
from aot_tune.tunable import Tunable
from aot_tune.values.arch import KNOWN_ARCHS, Arch
from aot_tune.values.bucket import Pow2
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.check_archs import ARCHS, check

SM80, SM90, SM120 = map(Arch.parse, ("sm80", "sm90", "sm120"))

LEFT_OUT = tuple(map(Arch.parse, ("sm89", "sm103")))

MODULES = [
    import_module(one.name) for one in walk_packages(kernels.__path__, "aot_tune.kernels.") if not one.ispkg
]
FOUND = {
    one.name: FoundKernel(module=module.__name__, tunable=one)
    for module in MODULES
    for one in vars(module).values()
    if isinstance(one, Tunable)
}


@pytest.mark.slow
@pytest.mark.process
def test_the_default_of_every_kernel_compiles(tmp_path: Path) -> None:
    assert set(LEFT_OUT) < set(ARCHS)
    checks = check(list(FOUND.values()), LEFT_OUT, print, most=1, folder=tmp_path)
    assert [one.wrong for one in checks if one.wrong] == []
    assert [one.compiled for one in checks] == [0 if one.refused else 1 for one in checks]
    assert {one.kernel for one in checks if one.refused} <= {"matmul_fp8", "matmul_fp8_block"}


@pytest.mark.parametrize("name", FOUND)
def test_no_archs_space_is_one_that_a_sweep_would_refuse(name: str) -> None:
    tunable = FOUND[name].tunable
    for arch in KNOWN_ARCHS:
        assert list(space_mistakes(tunable, arch, tunable.typical_problems)) == [], arch


WITHOUT_FP8 = [arch for arch in KNOWN_ARCHS if arch < SM90]


def runs(name: str) -> list[Arch]:
    """The archs that a kernel runs on."""
    return [arch for arch in KNOWN_ARCHS if not name.startswith("matmul_fp8") or arch not in WITHOUT_FP8]


@pytest.mark.parametrize("name", FOUND)
def test_the_default_is_a_candidate_of_every_declared_problem(name: str) -> None:
    tunable = FOUND[name].tunable
    for arch in runs(name):
        for one in tunable.typical_problems:
            assert tunable.default_config(arch, one) in tunable.candidates(arch, one), (arch, one)


@pytest.mark.parametrize("name", FOUND)
def test_all_sizes_of_a_bucket_have_its_default_and_its_candidates(name: str) -> None:
    tunable, chance = FOUND[name].tunable, random.Random(name)
    pow2 = [axis for axis, kind in tunable.axes.items() if isinstance(kind, Pow2)]
    for arch in runs(name):
        for bucket in chance.sample(tunable.buckets, 10):
            sizes = {axis: chance.randint(bucket.size(axis) // 2 + 1, bucket.size(axis)) for axis in pow2}
            one = bucket.replaced(**sizes)
            for ask in (tunable.default_config, tunable.candidates):
                assert ask(arch, one) == ask(arch, bucket), (arch, one)


@pytest.mark.parametrize("name", FOUND)
def test_any_size_has_a_default_and_grids_or_an_error_that_says_what_to_pass(name: str) -> None:
    tunable, chance = FOUND[name].tunable, random.Random(name)
    refused = []
    for _ in range(60):
        sizes = dict(chance.choice(tunable.typical_problems))
        for axis in chance.sample(list(tunable.axes), chance.randint(1, len(tunable.axes))):
            sizes[axis] = int(2 ** chance.uniform(0, 19))
        problem = Problem(sizes)
        for arch in (SM80, SM90, SM120):
            try:
                chosen = [tunable.default_config(arch, problem), *tunable.candidates(arch, problem)[:2]]
                assert all(tunable.grid_fn(config, Device.reference(arch), problem) for config in chosen)
            except LaunchError as error:
                refused.append(str(error))
    assert [words for words in refused if "pass" not in words and "tune" not in words] == []
