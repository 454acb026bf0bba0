"""aot_tune.declare.remarks: what may be meant is a remark, and the shipped kernels have none."""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.tile as ct
import numpy as np
import pytest
import torch

from aot_tune import inputs
from aot_tune.declare.checks import declaration_problems, declaration_remarks
from aot_tune.declare.declaration import Close, Work
from aot_tune.kernels.products.matmul import matmul_tunable
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support.samples import SM90
from tests.support.shipped import SHIPPED

SM100 = Arch.parse("sm100")
SPACE = [Config(constants={"tile": tile}, hints={"num_ctas": c}) for tile in (16, 64) for c in (1, 2)]


@ct.kernel
def _scale(x, out, factor, rows: ct.Constant[int], flag: ct.Constant[bool], tile: ct.Constant[int]):
    scaled = ct.load(x, (ct.bid(0), 0), (tile, 16)) * factor
    ct.store(out, (ct.bid(0), 0), scaled.astype(out.dtype))


@ct.kernel
def _twin(x, out, factor, rows: ct.Constant[int], flag: ct.Constant[bool], tile: ct.Constant[int]):
    scaled = ct.load(x, (ct.bid(0), 0), (tile, 16)) * factor
    ct.store(out, (ct.bid(0), 0), scaled.astype(out.dtype))


@ct.kernel
def _grow(x, out, factor, rows: ct.Constant[int], flag: ct.Constant[bool], tile: ct.Constant[int]):
    ct.store(out, (ct.bid(0), 0), ct.load(out, (ct.bid(0), 0), (tile, 16)) * factor)


@ct.kernel
def _twice(x, out, factor, rows: ct.Constant[int], flag: ct.Constant[bool], tile: ct.Constant[int]):
    ct.store(out, (ct.bid(0), 0), ct.load(x, (ct.bid(0), 0), (tile, 16)))
    ct.store(out, (ct.bid(0), 0), ct.load(out, (ct.bid(0), 0), (tile, 16)) * factor)


@ct.kernel
def _add(x, out, factor, rows: ct.Constant[int], flag: ct.Constant[bool], tile: ct.Constant[int]):
    rows_of, columns = ct.arange(tile, dtype=ct.int32), ct.arange(16, dtype=ct.int32)
    index = (rows_of[:, None] + ct.bid(0) * tile, columns[None, :])
    ct.atomic_add(out, index, factor)


@ct.kernel
def _normalise(x, out, factor, rows: ct.Constant[int], flag: ct.Constant[bool], tile: ct.Constant[int]):
    scaled = ct.load(x, (ct.bid(0), 0), (tile, 16)) * factor
    ct.store(x, (ct.bid(0), 0), scaled)
    ct.store(out, (ct.bid(0), 0), scaled)


def declared(**changes: object) -> Tunable:
    """A right declaration, but for the changes."""
    fields = {
        "name": "scale",
        "package": "tests",
        "kernel": _scale,
        "axes": {"M": Pow2(), "N": Exact()},
        "problem": lambda x, out, factor: {"dtype": x.dtype, "M": x.shape[0], "N": x.shape[1]},
        "search_space": lambda arch, problem: SPACE,
        "default": lambda arch, problem: SPACE[0],
        "grid_fn": lambda config, device, problem: (ct.cdiv(problem["M"], config["tile"]),),
        "args_fn": lambda config, x, out, factor: (x, out, factor, 1, True, config["tile"]),
        "make_args": lambda problem, device, seed: (
            inputs.randn((problem["M"], problem["N"]), problem["dtype"], device, seed),
            inputs.empty((problem["M"], problem["N"]), problem["dtype"], device),
            0.5,
        ),
        "reference": lambda x, out, factor: Close(value=x.double() * factor, rtol=0.01, atol=0.01),
        "outputs": ("out",),
        "typical": [{"dtype": ["bfloat16", "float16"], "M": [1, 64], "N": 16}],
        "tiles": lambda config, problem: ct.cdiv(problem["M"], config["tile"]),
        "work": lambda config, problem: Work(load_bytes=32 * config["tile"], store_bytes=32 * config["tile"]),
    }
    return Tunable(**{**fields, **changes})


REMARKS = {
    # name: (changes, what the remark must say)
    "the device compiled in": (
        {
            "args_fn": lambda config, x, out, factor, *, device: (
                *(x, out, factor),
                *(device.sm_count, True, config["tile"]),
            )
        },
        "rows, a ct.Constant, follows the device: args_fn hands on 132 on NVIDIA H200 and 67 with 67 "
        "multiprocessors. So an archive serves devices with as many as NVIDIA H200 alone",
    ),
    "a kernel that is lent to a problem whose space lacks it": (
        {
            "kernel": {"one": _scale, "two": _twin},
            "search_space": lambda arch, problem: [
                Config(kernel=name, constants={"tile": 16}) for name in ("one", "two")[: problem["M"]]
            ],
            "default": None,
        },
        "kernel two is in the search space of dtype=float16 M=64 N=16 and not of dtype=bfloat16 M=1 N=16, "
        "yet legal takes its config kernel=two tile=16 for that too",
    ),
    "an output that another of several kernels reads": (
        {
            "kernel": {"one": _scale, "two": _grow},
            "search_space": [Config(kernel=name, constants={"tile": 16}) for name in ("one", "two")],
            "default": None,
        },
        "the kernel loads out, where out of outputs arrives, before it stores to it",
    ),
    "a size that is compiled in": (
        {"args_fn": lambda config, x, out, factor: (x, out, factor, len(x), True, config["tile"])},
        "rows, a ct.Constant, follows the Pow2 axis M: args_fn hands on 64 for M=64 and 56 for M=56. "
        "So each size compiles at its first launch, and an archive serves the declared sizes alone; "
        "take ct.Constant away from rows, so that it is passed at launch, or declare 'M': Exact()",
    ),
    "a scalar that is compiled in": (
        {"args_fn": lambda config, x, out, factor: (x, out, 1.0, int(factor * 64), True, config["tile"])},
        "rows, a ct.Constant, follows the launch argument factor, which problem() does not return: args_fn "
        "hands on 32 for factor=0.5 and 128 for factor=2.0.",
    ),
    "a copy of a strided output": (
        {"args_fn": lambda config, x, out, factor: (x, out.contiguous(), factor, 1, True, config["tile"])},
        "args_fn hands on a copy of out where it is not contiguous",
    ),
    "an output that is read": (
        {"kernel": _grow},
        "the kernel loads out, where out of outputs arrives, before it stores to it; a sweep poisons outputs",
    ),
    "an output that arrives where the kernel loads": (
        {"args_fn": lambda config, x, out, factor: (out, x, factor, 1, True, config["tile"])},
        "args_fn hands on out of outputs for x, which the kernel only loads, and x for out, to which it "
        "stores; return them in the order of the kernel's parameters",
    ),
    "an output that is added to": (
        {"kernel": _add},
        "the kernel adds to out, where out of outputs arrives; a sweep poisons outputs before a check: name "
        "it in reset",
    ),
    "an input that is written": (
        {"kernel": _normalise},
        "the kernel stores to x, where the argument x arrives, which neither outputs, inplace nor reset",
    ),
    "arguments without a seed": (
        {
            "make_args": lambda problem, device, seed: (
                torch.randn(problem["M"], problem["N"], device=device).to(
                    inputs.named_dtype(problem["dtype"])
                ),
                inputs.empty((problem["M"], problem["N"]), problem["dtype"], device),
                0.5,
            )
        },
        "make_args gave x other values when it was called again with the same seed",
    ),
    "a space for some archs": (
        {"search_space": lambda arch, problem: SPACE if arch >= Arch(9, 0) else []},
        "search_space is empty or raises on sm80 sm86 sm87 sm88 sm89, so nothing can be launched there",
    ),
    "loads of the whole problem for one step": (
        {
            "work": lambda config, problem: Work(steps=8, load_bytes=2 * 16 * problem["M"]),
            "typical": [{"dtype": "bfloat16", "M": 64, "N": 16}],
        },
        "says that one block loads 16,384 bytes, 8 steps of load_bytes=2,048; all arguments together hold "
        "4,096. load_bytes and flops are those of one step, not of the whole block",
    ),
    "stores of the whole problem for one block": (
        {"work": lambda config, problem: Work(load_bytes=32, store_bytes=32 * 16 * problem["M"])},
        "the arguments that the kernel writes hold 2,048. store_bytes is what one block stores in all its",
    ),
    "the same where the grid's blocks are counted": (
        {
            "work": lambda config, problem: Work(load_bytes=32, store_bytes=32 * 16 * problem["M"]),
            "tiles": None,
        },
        "is what one block stores in all its steps together; where it loops over tiles, declare tiles",
    ),
}


@pytest.mark.parametrize("name", REMARKS)
def test_what_may_be_meant_is_remarked_once_with_the_ways_out(name: str) -> None:
    changes, told = REMARKS[name]
    [remark] = declaration_remarks(declared(**changes), SM90)
    assert remark.startswith("scale: ")
    assert told in remark


def _matmul(**changes: Any) -> Tunable:
    return dataclasses.replace(
        matmul_tunable, typical=[dict(one) for one in matmul_tunable.typical_problems[:3]], **changes
    )


@pytest.mark.parametrize("name", ["flops", "load_bytes"])
def test_figures_of_a_whole_block_in_place_of_one_step_are_remarked(name: str) -> None:
    """Of a block with few steps its arguments' bytes do not tell them; its code does."""
    right, problem = matmul_tunable.work, matmul_tunable.typical_problems[0]
    assert right is not None

    def of_a_block(config: Config, problem: Problem) -> Work:
        work = right(config, problem)
        return dataclasses.replace(work, **{name: getattr(work, name) * work.steps})

    [remark] = [
        one for one in declaration_remarks(_matmul(work=of_a_block), SM90) if "the kernel's code" in one
    ]
    work = right(matmul_tunable.default_config(SM90, problem), problem)
    block = getattr(work, name) * work.steps
    assert f"{work.steps} steps of {name}={block:,.0f}; the kernel's code does {block:,.0f}" in remark
    assert f"{name} is that of one step; without work it is counted for products" in remark


def test_an_axis_of_the_grid_that_no_block_asks_for_is_remarked() -> None:
    grid = lambda config, device, problem: (ct.cdiv(problem["M"], config["tile"]), 2)  # noqa: E731
    typical = [{"dtype": "bfloat16", "M": 256, "N": 16}]
    [remark] = declaration_remarks(declared(grid_fn=grid, typical=typical), SM90)
    assert "has 2 blocks along axis 1, and the kernel never asks for ct.bid(1) there" in remark


def test_a_grid_that_leaves_out_blocks_is_remarked() -> None:
    def half(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
        return (ct.cdiv(problem["M"], 2 * config["tile"]),)

    [remark] = declaration_remarks(
        declared(grid_fn=half, typical=[{"dtype": "bfloat16", "M": 256, "N": 16}]), SM90
    )
    assert "the 8 blocks of grid_fn(" in remark
    assert "store 4,096 bytes in all, and the outputs hold 8,192: grid_fn leaves out blocks" in remark


QUIET = {
    "the declaration as it is": {},
    "a result that is read again": {"kernel": _twice},
    "an output in place": {
        "kernel": _grow,
        "outputs": (),
        "inplace": ("out",),
        "make_args": lambda problem, device, seed: (
            inputs.randn((problem["M"], problem["N"]), problem["dtype"], device, seed),
            inputs.randn((problem["M"], problem["N"]), problem["dtype"], device, seed + 1),
            0.5,
        ),
    },
    "a sum that is zeroed": {"kernel": _add, "outputs": (), "reset": ("out",)},
    "a size that is an Exact axis": {
        "axes": {"M": Exact(), "N": Exact()},
        "args_fn": lambda config, x, out, factor: (x, out, factor, len(x), True, config["tile"]),
    },
    "a flag of whether tiles are whole": {
        "args_fn": lambda config, x, out, factor: (
            x, out, factor, 1, len(x) % config["tile"] == 0, config["tile"]
        )
    },
    "a scalar that problem returns": {
        "axes": {"M": Pow2(), "N": Exact(), "width": Exact()},
        "problem": lambda x, out, factor: {
            "dtype": x.dtype, "M": x.shape[0], "N": x.shape[1], "width": int(factor * 64)
        },
        "args_fn": lambda config, x, out, factor: (x, out, factor, int(factor * 64), True, config["tile"]),
        "typical": [{"dtype": "bfloat16", "M": [1, 64], "N": 16, "width": 32}],
    },
    "a view": {
        "args_fn": lambda config, x, out, factor: (x, out.view(-1, 16), factor, 1, True, config["tile"])
    },
    "arguments for one size alone": {
        "make_args": lambda problem, device, seed: (
            inputs.randn((problem["M"], 16), problem["dtype"], device, seed),
            inputs.empty((problem["M"], {1: 16, 64: 16}[problem["M"]]), problem["dtype"], device),
            0.5,
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", QUIET)
def test_what_is_right_has_no_remark(name: str) -> None:
    assert declaration_remarks(declared(**QUIET[name]), SM90) == []


UNTAKEN = {
    "an array of numpy": ("ndarray", lambda: np.ones(2)),
    "a dict of tensors": ("dict", lambda: {"scale": torch.ones(2)}),
    "a tuple with an array": ("tuple", lambda: (np.ones(2),)),
}


@pytest.mark.parametrize("name", UNTAKEN)
def test_an_argument_that_does_not_compare_is_a_mistake_and_no_traceback(name: str) -> None:
    kind, made = UNTAKEN[name]
    right = declared()
    untaken = declared(
        make_args=lambda problem, device, seed: (*right.make_args(problem, device, seed)[:2], made()),
        reference=lambda x, out, factor: Close(value=x.double(), rtol=0.01, atol=0.01),
    )
    [mistake, *_] = declaration_problems(untaken, SM90)
    assert f"kernel argument factor is a {kind}; pass a tensor, a list of tensors, an int" in str(mistake)
    assert declaration_remarks(untaken, SM90) == []


@pytest.mark.parametrize("tunable", SHIPPED, ids=lambda tunable: tunable.name)
def test_no_shipped_kernel_has_a_remark(tunable: Tunable) -> None:
    assert [remark for arch in (SM90, SM100) for remark in declaration_remarks(tunable, arch)] == []


def test_a_kernel_whose_source_cannot_be_read_has_no_remark_of_it() -> None:
    unread = {"ct": ct}
    code = "@ct.kernel\ndef made(x, out, factor, rows: ct.Constant[int], flag: ct.Constant[bool], "
    exec(
        code + "tile: ct.Constant[int]):\n    ct.store(out, (ct.bid(0), 0), ct.zeros((16, 16), out.dtype))",
        unread,
    )
    assert declaration_remarks(dataclasses.replace(declared(), kernel=unread["made"]), SM90) == []
