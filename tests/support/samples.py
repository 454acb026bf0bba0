"""The sample kernel `scale`: a small declaration, and tables made up for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import cuda.tile as ct
import torch

from aot_tune import inputs
from aot_tune.declare.declaration import Close, Work
from aot_tune.declare.discovery import FoundKernel
from aot_tune.declare.fingerprint import hashing
from aot_tune.tables import writer
from aot_tune.tables.table import BuiltWith, Entry, Point, Table
from aot_tune.tunable import Tunable
from aot_tune.tuner.plan.sizes import sizes_inside
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

SM90 = Arch.parse("sm90")

MODULE = "tests.support.samples"


@ct.kernel
def _scale_kernel(source, target, tile_m: ct.Constant[int], tile_n: ct.Constant[int]):
    row, column = ct.bid(0), ct.bid(1)
    tile = ct.load(source, (row, column), (tile_m, tile_n))
    ct.store(target, (row, column), tile * 2)


def _config(tile_m: int, tile_n: int = 64, *, occupancy: int = 1, num_ctas: int = 1) -> Config:
    hints = {"occupancy": occupancy, "num_ctas": num_ctas}
    return Config(constants={"tile_m": tile_m, "tile_n": tile_n}, hints=hints)


SPACE = [
    _config(m, n, occupancy=o, num_ctas=c)
    for m in (16, 32, 64)
    for n in (64, 128)
    for o in (1, 2)
    for c in (1, 2)
]
DEFAULT = _config(16)


def _legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    if config["tile_m"] == 64 and config["tile_n"] == 128:
        return "64 x 128 does not fit"
    return True


def _tiles(config: Config, problem: Problem) -> int:
    return -(-problem.size("M") // int(config["tile_m"])) * -(-problem.size("N") // int(config["tile_n"]))


def _make_args(problem: Problem, device: object, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape, dtype = (problem.size("M"), problem.size("N")), str(problem["dtype"])
    return inputs.randn(shape, dtype, str(device), seed), inputs.empty(shape, dtype, str(device))


def _problem(source: torch.Tensor, target: torch.Tensor) -> Mapping[str, object]:
    return {"dtype": source.dtype, "M": source.shape[0], "N": source.shape[1]}


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    tile_m, tile_n = int(config["tile_m"]), int(config["tile_n"])
    return -(-problem.size("M") // tile_m), -(-problem.size("N") // tile_n)


scale = Tunable(
    name="scale",
    package="tests",
    kernel=_scale_kernel,
    axes={"M": Pow2(), "N": Exact()},
    problem=_problem,
    search_space=lambda arch, problem: SPACE,
    legal=_legal,
    default=lambda arch, problem: DEFAULT,
    grid_fn=_grid,
    args_fn=lambda config, source, target: (source, target, config["tile_m"], config["tile_n"]),
    tiles=_tiles,
    make_args=_make_args,
    reference=lambda source, target: Close(value=source.double() * 2, rtol=0.01, atol=0.01),
    outputs=("target",),
    typical=[{"dtype": "bfloat16", "M": [1, 64, 256], "N": 1024}],
    tables=Path("/nonexistent/tuned_configs"),
)


def scale_in(folder: Path) -> dict[str, FoundKernel]:
    """The declaration with its tables in `folder`, as `find_tunables` returns it."""
    return {"scale": FoundKernel(module=MODULE, tunable=dataclasses.replace(scale, tables=folder))}


def entry(bucket: Problem, config: Config, portfolio: tuple[Config, ...], *, us: float = 10.0) -> Entry:
    """An entry whose winner takes `us` at the edge, and all others 1.5 times as long."""
    columns = (*portfolio, DEFAULT)
    times = [us if column == config else us * 1.5 for column in columns]
    sizes = [problem.size("M") for problem in sizes_inside(scale.axes, bucket)] + [bucket.size("M")]
    return Entry(
        bucket=bucket,
        config=config,
        mean_us=us,
        error_margin_us=0.1,
        default_us=times[-1],
        regret=0.01,
        evidence="measured",
        points=tuple(
            Point(size={"M": size}, us=tuple(time * size / bucket.size("M") for time in times))
            for size in sizes
        ),
    )


def scale_table(arch: Arch = SM90) -> Table:
    """A table that `check` has nothing to say about."""
    portfolio = (_config(32), _config(64, occupancy=2))
    winners = (DEFAULT, *portfolio)
    entries = tuple(
        entry(bucket, config, portfolio, us=us)
        for bucket, config, us in zip(scale.buckets, winners, (2.0, 10.0, 40.0), strict=True)
    )
    return Table(
        kernel="scale",
        arch=arch,
        source_hash=hashing.source_hash(scale),
        check_hash=hashing.check_hash(scale),
        built_with=BuiltWith(
            device_name="NVIDIA H200",
            sm_count=132,
            cuda_tile="1.7.0",
            tileiras="13.4.92",
            driver="580.159.04",
        ),
        axes=scale.axes,
        portfolio=portfolio,
        portfolio_regret=0.01,
        entries=entries,
    )


def write(folder: Path, table: Table) -> Path:
    """Write a table where a folder of tables keeps it."""
    path = folder / str(table.arch) / f"{table.kernel}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(writer.dump(table))
    return path


def with_entry(table: Table, place: int, **values: object) -> Table:
    """The same table with other values in one entry."""
    entries = list(table.entries)
    entries[place] = dataclasses.replace(entries[place], **values)  # type: ignore[arg-type]
    return dataclasses.replace(table, entries=tuple(entries))


def loading_more(config: Config) -> Tunable:
    """The kernel, of which each block loads twice as much with this config as with any other."""
    return dataclasses.replace(
        scale,
        tiles=lambda config, problem: 1,
        work=lambda one, problem: Work(load_bytes=2.0 if one == config else 1.0),
    )


def equally_fast(bucket: Problem, winner: Config) -> Table:
    """The table, where all configs take the same time in a bucket, and this one is the winner."""
    table = scale_table()
    place = [entry.bucket for entry in table.entries].index(bucket)
    points = tuple(
        dataclasses.replace(point, us=(5.0,) * len(point.us), states={})
        for point in table.entries[place].points
    )
    return with_entry(table, place, config=winner, points=points, states={})
