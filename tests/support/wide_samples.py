"""Declarations of what few kernels need: lists, absent outputs, several kernels, the device, ByTarget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cuda.tile as ct
import torch

from aot_tune.declare.declaration import Work
from aot_tune.declare.fingerprint import hashing
from aot_tune.inputs import empty, randn
from aot_tune.tables.table import Entry, Point, Table
from aot_tune.tunable import Tunable
from aot_tune.tuner.plan.sizes import sizes_inside
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support.samples import SM90, scale_table

MODULE = "tests.support.wide_samples"


# Lists, and the device --------------------------------------------------------------------------------------


@ct.kernel
def _scale_each_kernel(xs, outs, blocks: ct.Constant[int], tile: ct.Constant[int]):
    """Each block takes every `blocks`-th tile of every vector."""
    for g in range(len(xs)):
        x, out = xs[g], outs[g]
        for i in range(ct.bid(0), ct.num_tiles(x, 0, (tile,)), blocks):
            ct.store(out, (i,), ct.load(x, (i,), (tile,)) * 2)


def _vectors(problem: Any, device: Any, seed: int) -> tuple[Any, ...]:
    shapes = [(problem.size("n") + 16 * g,) for g in range(problem.size("groups"))]
    xs = [randn(shape, "float32", device, seed + g) for g, shape in enumerate(shapes)]
    return xs, [empty(shape, "float32", device) for shape in shapes]


scale_each = Tunable(
    name="scale_each",
    package="tests",
    kernel=_scale_each_kernel,
    axes={"groups": Exact(), "n": Pow2()},
    problem=lambda xs, outs: {"groups": len(xs), "n": xs[0].shape[0]},
    search_space=[Config(constants={"tile": tile}) for tile in (256, 512)],
    grid_fn=lambda config, device, problem: (device.sm_count,),
    args_fn=lambda config, xs, outs, *, device: (xs, outs, device.sm_count, config["tile"]),
    make_args=_vectors,
    reference=lambda xs, outs: [x.double() * 2 for x in xs],
    outputs=("outs",),
    typical=[{"groups": 2, "n": 1024}],
)


# Several kernels, and an output that may be absent ----------------------------------------------------------


@ct.kernel
def _sum_whole_kernel(x, out, largest, with_largest: ct.Constant[bool], tile: ct.Constant[int]):
    row = ct.bid(0)
    values = ct.load(x, (row, 0), (1, tile), padding_mode=ct.PaddingMode.ZERO)
    ct.store(out, (row,), ct.sum(values, axis=1))
    if with_largest:
        ct.store(largest, (row,), ct.max(values, axis=1))


@ct.kernel
def _sum_looped_kernel(x, out, largest, with_largest: ct.Constant[bool], step: ct.Constant[int]):
    row = ct.bid(0)
    total = ct.zeros((1,), ct.float32)
    most = ct.zeros((1,), ct.float32)
    for i in range(ct.num_tiles(x, 1, (1, step))):
        values = ct.load(x, (row, i), (1, step), padding_mode=ct.PaddingMode.ZERO)
        total = total + ct.sum(values, axis=1)
        most = ct.maximum(most, ct.max(values, axis=1))
    ct.store(out, (row,), total)
    if with_largest:
        ct.store(largest, (row,), most)


def _sum_space(arch: object, problem: Any) -> list[Config]:
    whole = [Config(kernel="whole", constants={"tile": problem.cols})] if problem.cols <= 4096 else []
    return [
        *(Config(kernel="looped", constants={"step": step}, hints={"occupancy": 2}) for step in (128, 256)),
        *whole,
    ]


def _sum_args(config: Config, x: torch.Tensor, out: torch.Tensor, largest: torch.Tensor | None) -> Any:
    width = config["tile"] if config.kernel == "whole" else config["step"]
    return x, out, out if largest is None else largest, largest is not None, width


def _sum_reference(x: torch.Tensor, out: torch.Tensor, largest: torch.Tensor | None) -> Any:
    most = None if largest is None else x.amax(1).clamp(min=0)
    return {"out": x.double().sum(1), "largest": most}


def _sum_made(problem: Any, device: Any, seed: int) -> tuple[Any, ...]:
    x = randn((problem.rows, problem.cols), "float32", device, seed)
    out = empty((problem.rows,), "float32", device)
    return x, out, empty((problem.rows,), "float32", device) if problem.largest else None


row_sum = Tunable(
    name="row_sum",
    package="tests",
    kernel={"whole": _sum_whole_kernel, "looped": _sum_looped_kernel},
    axes={"rows": Pow2(), "cols": Exact()},
    problem=lambda x, out, largest: {
        "rows": x.shape[0],
        "cols": x.shape[1],
        "largest": largest is not None,
    },
    search_space=_sum_space,
    legal=lambda config, arch, problem: config.kernel != "whole" or config["tile"] >= problem.cols,
    grid_fn=lambda config, device, problem: (problem.rows,),
    args_fn=_sum_args,
    make_args=_sum_made,
    reference=_sum_reference,
    outputs=("out", "largest"),
    typical=[{"rows": 64, "cols": [1024, 8192], "largest": [True, False]}],
    work=lambda config, problem: Work(
        steps=1 if config.kernel == "whole" else ct.cdiv(problem.cols, config["step"]),
        load_bytes=4 * problem.cols if config.kernel == "whole" else 4 * config["step"],
        store_bytes=4,
    ),
)


# Hints by target, and dependent launches --------------------------------------------------------------------


@ct.kernel
def _double_kernel(x, out, tile: ct.Constant[int]):
    ct.grid_dependency_control_wait()
    ct.store(out, (ct.bid(0),), ct.load(x, (ct.bid(0),), (tile,)) * 2)


@ct.kernel
def halve_kernel(x, out, tile: ct.Constant[int]):
    ct.store(out, (ct.bid(0),), ct.load(x, (ct.bid(0),), (tile,)) * 0.5)


double = Tunable(
    name="double",
    package="tests",
    kernel=_double_kernel,
    axes={"n": Pow2()},
    problem=lambda x, out: {"n": x.shape[0]},
    search_space=[
        Config(constants={"tile": 256}, hints={"num_ctas": num_ctas, "occupancy": 2})
        for num_ctas in (1, ct.ByTarget(sm_100=2, default=1))
    ],
    grid_fn=lambda config, device, problem: (ct.cdiv(problem.n, config["tile"]),),
    args_fn=lambda config, x, out: (x, out, config["tile"]),
    make_args=lambda problem, device, seed: (
        randn((problem.n,), "float32", device, seed),
        empty((problem.n,), "float32", device),
    ),
    reference=lambda x, out: x.double() * 2,
    outputs=("out",),
    typical=[{"n": 4096}],
    programmatic_dependent_launch=True,
)


def table_of(tunable: Tunable, winners: Mapping[Problem, Config], arch: Arch = SM90) -> Table:
    """A table of these winners, each twice as fast as the default at its bucket's edge."""
    portfolio = tuple(dict.fromkeys(winners.values()))
    pow2 = [name for name, axis in tunable.axes.items() if isinstance(axis, Pow2)]
    us = [10.0] * len(portfolio) + [20.0]
    entries = []
    for problem, config in winners.items():
        bucket = tunable.bucket_of(problem)
        sizes = [*sizes_inside(tunable.axes, bucket), bucket]
        entries.append(
            Entry(
                bucket=bucket,
                config=config,
                mean_us=10.0,
                error_margin_us=0.1,
                default_us=20.0,
                regret=0.0,
                evidence="measured",
                points=tuple(
                    Point(size={name: one.size(name) for name in pow2}, us=tuple(us)) for one in sizes
                ),
            )
        )
    return Table(
        kernel=tunable.name,
        arch=arch,
        source_hash=hashing.source_hash(tunable),
        check_hash=hashing.check_hash(tunable),
        built_with=scale_table(arch).built_with,
        axes=tunable.axes,
        portfolio=portfolio,
        portfolio_regret=0.0,
        entries=tuple(entries),
    )
