"""Kernels that are broken on purpose, one way for each value of a constant, for the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs
from aot_tune.declare.declaration import Close
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Pow2
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

RIGHT, FAULTS, HANGS, PARTIAL, NOTHING, NAN, BESIDE = range(7)
"""What a value of ``mode`` does."""

TILE = 256
FAR = 3 << 28
"""Elements past the start of an array: 3 GiB, beyond what these tests map, in 32 bits as well."""


@ct.kernel
def add_one_kernel(x, out, mode: ct.Constant[int]):  # type: ignore[no-untyped-def]
    """``out = x + 1`` when `mode` is RIGHT."""
    block = ct.bid(0)
    tile = ct.load(x, (block,), (TILE,)) + 1.0
    if mode == FAULTS:
        places = ct.arange(TILE, dtype=ct.int32) + FAR
        ct.scatter(out, places, tile, check_bounds=False)
    if mode == BESIDE:  # as much as the output has, right behind it: in torch's heap, where nothing faults
        beside = ct.arange(TILE, dtype=ct.int32) + (ct.num_blocks(0) + block) * TILE
        ct.scatter(out, beside, tile, check_bounds=False)
    if mode == HANGS:
        while ct.load(x, (block,), (1,)).item() < 1e30:
            ct.store(out, (block,), tile)
    if mode == NAN:
        tile = tile * float("nan")
    if mode != NOTHING:
        if mode == PARTIAL:
            if block != 0:
                ct.store(out, (block,), tile)
        else:
            ct.store(out, (block,), tile)


@ct.kernel
def undeclared_kernel(x, out, mode: ct.Constant[int]):  # type: ignore[no-untyped-def]
    """``out = x + 1``, and `x` is changed as well."""
    block = ct.bid(0)
    tile = ct.load(x, (block,), (TILE,)) + 1.0
    ct.store(out, (block,), tile)
    ct.store(x, (block,), tile)


@ct.kernel
def in_place_kernel(x, mode: ct.Constant[int]):  # type: ignore[no-untyped-def]
    """``x = x + 1``."""
    block = ct.bid(0)
    ct.store(x, (block,), ct.load(x, (block,), (TILE,)) + 1.0)


def config(mode: int, occupancy: int = 1) -> Config:
    return Config(constants={"mode": mode}, hints={"occupancy": occupancy})


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    n = problem.size("n")
    return inputs.randn((n,), "float32", device, seed), inputs.empty((n,), "float32", device)


def _reference(x: torch.Tensor, out: torch.Tensor) -> Close:
    return Close(value=x.double() + 1, rtol=1e-6, atol=1e-6)


def _problem(x: torch.Tensor, out: torch.Tensor) -> Mapping[str, object]:
    return {"n": x.shape[0]}


def _space(arch: Arch, problem: Problem) -> list[Config]:
    return [config(mode) for mode in range(7)] + [config(RIGHT, 2)]


def _declared(name: str, kernel: Any) -> Tunable:
    return Tunable(
        name=name,
        package=__package__ or "tests",
        kernel=kernel,
        axes={"n": Pow2()},
        problem=_problem,
        search_space=_space,
        default=lambda arch, problem: config(RIGHT),
        grid_fn=lambda config, device, problem: (problem.size("n") // TILE, 1, 1),
        args_fn=lambda config, x, out: (x, out, config["mode"]),
        make_args=_make_args,
        reference=_reference,
        outputs=("out",),
        typical=[{"n": [65536, 1048576]}],
    )


add_one = _declared("add_one", add_one_kernel)
undeclared = _declared("undeclared", undeclared_kernel)
in_place = Tunable(
    name="in_place",
    package=__package__ or "tests",
    kernel=in_place_kernel,
    axes={"n": Pow2()},
    problem=lambda x: {"n": x.shape[0]},
    search_space=_space,
    default=lambda arch, problem: config(RIGHT),
    grid_fn=lambda config, device, problem: (problem.size("n") // TILE, 1, 1),
    args_fn=lambda config, x: (x, config["mode"]),
    make_args=lambda problem, device, seed: _make_args(problem, device, seed)[:1],
    reference=lambda x: Close(value=x.double() + 1, rtol=1e-6, atol=1e-6),
    inplace=("x",),
    typical=[{"n": 65536}],
)
