"""Products with a stage left out: the whole one is a product, and each variant compiles as matmul does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune.bench.gpu import shipped
from aot_tune.bench.states.__main__ import worth_timing
from aot_tune.bench.states.stages import VARIANTS, constants, staged_kernel, takes
from aot_tune.kernels.products.linear import linear_tunable
from aot_tune.kernels.products.matmul import matmul_tunable
from aot_tune.nvidia import cutile
from aot_tune.nvidia.cubin import resources
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.tuner.plan.candidates import DeviceKernel
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support import emulator

SM90 = Arch.parse("sm90")
PROBLEM = Problem({"dtype": "bfloat16", "M": 885, "N": 5120, "K": 25600})
SMALL = Config(
    constants={
        "tile_m": 16, "tile_n": 16, "more": 0, "tile_k": 16, "swapped": 0, "group": 2, "splits": 1,
    }
)  # fmt: skip


def fragile() -> Config:
    """The config that wins under load and is slow in every other state."""
    wanted = {"tile_m": 64, "tile_n": 128, "more": 0, "splits": 1, "swapped": 0}
    return next(
        config
        for config in matmul_tunable.search_space(SM90, PROBLEM)
        if wanted.items() <= dict(config.constants).items() and takes(config)
    )


def compiled(kernel: Any, config: Config, args: tuple[Any, ...]) -> bytes:
    return cutile.compile_cubin(kernel, config.hints, cutile.signature_of(kernel, args), SM90)


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("name", "peeled"),
    # With blocks apart a peeled first step is done twice, and another one never: it is no product.
    [("whole", 0), ("whole", 1), ("blocks apart", 0)],
)
def test_what_leaves_nothing_out_is_the_product(
    monkeypatch: pytest.MonkeyPatch, name: str, peeled: int
) -> None:
    a, b = torch.randn(40, 64).bfloat16(), torch.randn(64, 48).bfloat16()
    c = torch.zeros(40, 48)
    config = Config(constants={**SMALL.constants, "peeled": peeled})
    declared: Any = SimpleNamespace(
        kernel=staged_kernel,
        problem_of=lambda *args: None,
        grid_fn=lambda config, device, problem: (2,),
        args_fn=lambda config, *args: (*args, *constants(config, VARIANTS[name], by_rows=False)),
        parameters=("a", "b", "c"),
        output_names=("c",),
        inplace=(),
    )
    emulator.run(declared, (a, b, c), config, monkeypatch, twice=8 * 48)  # the last rows of tiles overlap
    assert torch.allclose(c, a.float() @ b.float(), atol=1e-3)


@pytest.mark.process
def test_the_whole_product_is_compiled_as_the_kernel_matmul_is() -> None:
    config = fragile()
    args = matmul_tunable.make_args(PROBLEM, torch.device("meta"), 0)
    real = compiled(matmul_tunable.kernel, config, tuple(matmul_tunable.args_fn(config, *args)))
    whole = (*args[:3], *constants(config, VARIANTS["whole"], by_rows=False))
    assert resources(compiled(staged_kernel, config, whole)) == resources(real)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("kernel", [matmul_tunable, linear_tunable], ids=["matmul", "linear"])
@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_compiles(kernel: Any, name: str) -> None:
    config, by_rows = fragile(), kernel is linear_tunable
    problem = kernel.typical_problems[0].replaced(M=885)
    args = kernel.make_args(problem, torch.device("meta"), 0)
    assert compiled(staged_kernel, config, (*args[:3], *constants(config, VARIANTS[name], by_rows=by_rows)))


def test_configs_with_further_columns_or_shared_sums_are_left_alone() -> None:
    space = matmul_tunable.search_space(SM90, PROBLEM)
    assert {takes(config) for config in space} == {True, False}
    assert all(takes(config) == (config["more"] == 0 and config["splits"] == 1) for config in space)


def test_the_choice_comes_first_then_the_default_then_the_portfolio() -> None:
    kernel = DeviceKernel(shipped()["matmul"], SM90)
    problem = kernel.tunable.typical_problems[0]
    first, *others = worth_timing(kernel, problem)
    assert first == dispatcher_of(kernel.tunable).choice(SM90, problem, device=kernel.device).config
    assert kernel.tunable.default_config(SM90, problem) in (first, *others[:1])
    assert len(others) == len(set(others))
    assert set(others) <= set(kernel.tunable.candidates(SM90, problem))
