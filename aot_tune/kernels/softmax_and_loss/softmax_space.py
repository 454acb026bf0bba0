"""Cut rows of softmax for its blocks: search space, default, legality. Pure: imports no kernel."""

from __future__ import annotations

import itertools
from functools import cache

from aot_tune.kernels.rows import row_groups
from aot_tune.kernels.rows.rows import MOST_ELEMENTS, part_refusal, parts, refusal
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import edge
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

_BLOCKS = ((4, 2), (4, 4), (4, 8), (8, 1), (8, 2), (8, 4))
"""(num_worker_warps, occupancy) of blocks that hold whole rows."""

_MEMBERS = (2, 4, 8, 16, 32)
"""Numbers of blocks that share a row; at most 32, so that a small GPU runs them at once."""

_SHARING = ((1024, 4, 3), (1024, 4, 4), (1024, 4, 5), (2048, 8, 1), (2048, 8, 2))
"""(columns of a part, num_worker_warps, occupancy) of blocks that hold a share of a row."""

_SHARED_FROM = 8193
"""Columns of a row that blocks may share, at least: for fewer, waiting costs more than sharing gains."""

_FEWEST_PARTS = 2
"""Parts of a member, at least: 16 columns a thread. With fewer it waits longer than it works."""


@cache
def _config(
    height: int, width: int, warps: int, occupancy: int, *, members: int = 1, chunked: bool = False
) -> Config:
    return Config(
        constants={"height": height, "width": width, "members": members, "chunked": chunked},
        hints={"occupancy": occupancy, "num_worker_warps": warps},
    )


_CHUNKS = (
    # NVIDIA's TileGym (src/tilegym/ops/cutile/softmax.py) reads 8192 columns at a time, at an occupancy of 4.
    *(_config(1, *values, chunked=True) for values in ((4096, 4, 8), (8192, 8, 2), (8192, 8, 4))),
)
"""For rows too wide for registers, which are read twice, 32 columns a thread at a time."""


def shared(cols: int) -> bool:
    """Whether blocks may share rows of this many columns."""
    return cols >= _SHARED_FROM


def slots(rows: int, cols: int) -> int:
    """Return the size of `slots`, in int32 elements, for the members of any config; 1 without shared rows."""
    return row_groups.ints(rows, _lanes(cols)) if _may_share(rows, cols) else 1


def _may_share(rows: int, cols: int) -> bool:
    return shared(cols) and row_groups.fit(rows, _lanes(cols))


def _lanes(cols: int) -> int:
    """Return the most threads that share a row: each member holds two or more parts of 8 columns a thread."""
    return min(edge(cols) // (8 * _FEWEST_PARTS), row_groups.MOST_LANES)


def space(arch: Arch, problem: Problem) -> tuple[Config, ...]:
    """Return all candidates for a number of columns."""
    return _space(edge(problem.size("cols")))


@cache
def _space(width: int) -> tuple[Config, ...]:
    if width <= 1024:  # one part, of several rows
        tiles = itertools.product((1024, 4096), _BLOCKS)
        return tuple(_config(tile // width, width, *block) for tile, block in tiles)
    held = tuple(
        _config(1, max(256 * warps, width // 16), warps, occupancy)
        for warps, occupancy in _BLOCKS
        if width <= MOST_ELEMENTS
    )
    sharing = tuple(
        _config(1, *block, members=members)
        for members, block in itertools.product(_MEMBERS, _SHARING)
        if shared(width)
    )
    return *held, *sharing, *(_CHUNKS if width > MOST_ELEMENTS else ())


def default(arch: Arch, problem: Problem) -> Config:
    """Choose as many blocks a multiprocessor as spill on no arch."""
    cols = problem.size("cols")
    width = edge(cols)
    if width <= 4096:
        return _config(max(1, 1024 // width), min(width, 1024), 4, 4)
    if width <= 8192:
        return _config(1, 2048, 8, 4)
    # Longer shares only where no block holds a whole row.
    for most, block in _DEFAULT_SHARING if width > MOST_ELEMENTS else _DEFAULT_SHARING[:1]:
        for members in _MEMBERS:
            sharing = _config(1, *block, members=members)
            count, _ = row_groups.parts(block[0], members, cols)
            if count <= most and legal(sharing, arch, problem) is True:
                return sharing
    if width <= MOST_ELEMENTS:
        return _config(1, 2048, 8, 2 if width <= MOST_ELEMENTS // 2 else 1)
    return _CHUNKS[1]


_DEFAULT_PARTS = 8
"""Parts of a member of the default, at most, if it can be: 64 columns a thread."""

_MOST_PARTS = 16
"""Parts of a member, at most: the code and the time to compile it grow with them."""

_DEFAULT_SHARING = ((_DEFAULT_PARTS, (2048, 8, 2)), (_MOST_PARTS, (2048, 8, 2)), (_MOST_PARTS, (1024, 4, 3)))
"""Most parts of a member, and its block, in the order in which defaults try them. For some numbers of
columns, such as 100352 and 151936, no power of two of members has both so few parts and work for the last of
them. Longer shares are read once; rows in chunks are read twice."""


def legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    """Whether the registers of a block hold its part of a problem, or why not."""
    cols, height, width = problem.size("cols"), int(config["height"]), int(config["width"])
    members = int(config["members"])
    if config["chunked"]:
        return refusal(config, arch, width) or True
    if members == 1:
        return part_refusal(width, cols) or refusal(config, arch, height * width * -(-cols // width)) or True
    if refused := row_groups.refusal(config, arch, _lanes(cols)):
        return refused
    if height > 1 or not _may_share(problem.size("rows"), cols):
        return (
            f"{height} rows of {cols} columns are not shared; blocks share single rows of {_SHARED_FROM} "
            "columns or more"
        )
    count, _ = row_groups.parts(width, members, cols)
    if not _FEWEST_PARTS <= count <= _MOST_PARTS:
        return (
            f"{cols} columns are {count} parts of {width} for each of {members} blocks; it may be "
            f"{_FEWEST_PARTS} to {_MOST_PARTS}"
        )
    if (members - 1) * count * width >= cols:
        return f"{cols} columns leave nothing to the last of {members} blocks"
    return refusal(config, arch, count * width) or True


def cut(config: Config, rows: int, cols: int) -> tuple[int, int, int, int]:
    """Return rows of a block, columns of a part, parts of a block, and parts that lie inside for all."""
    height, width, members = (int(config[name]) for name in ("height", "width", "members"))
    found = parts(height, width, rows, cols) if members == 1 else row_groups.parts(width, members, cols)
    return height, width, *found
