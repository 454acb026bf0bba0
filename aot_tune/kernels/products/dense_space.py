"""Search space of the dense products, matmul and linear: tiles, the operand of the rows, hints.

Tiles of 64 rows and more are those of Triton's tutorial (03-matrix-multiplication.py), of CUTLASS's kernels
for sm90 (128 x 256 by eight warps; two blocks that share a tile), and sizes between them that measured best
on the H200: 80, 160 and 192 columns. Tiles of 80 to 192 rows are for batches that are no powers of two, those
of 16 and 32 rows for the few tokens of a decoding step. Where K is long and tiles are few, blocks may share
the sums of all tiles (split-K), and with more tiles those of the last wave alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache

from aot_tune.declare.declaration import Work
from aot_tune.inputs import named_dtype
from aot_tune.kernels.products.product_space import (
    MatrixUnit,
    Rows,
    extent,
    matrix_unit,
    overflow,
    persistent_grid,
    waste,
    work_of,
    wrongly_peeled,
)
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import edge
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

# Values of tile_m, tile_n, more, tile_k, swapped, group, num_ctas, occupancy and num_worker_warps. A wave
# of blocks reads least where its tiles make a square: 16 rows of wide tiles may do it, 4 of tall ones.
_SPACE: Mapping[MatrixUnit, Rows] = {
    MatrixUnit.WARPGROUP: (
        # A few tokens: only the weight's bytes count. Narrow tiles give every multiprocessor one.
        ((16,), (64,), (0,), (128,), (0,), (8,), (1,), (1,), (4,)),
        ((16,), (64,), (0,), (128,), (1,), (8,), (1,), (1, 2), (4,)),
        ((16,), (64,), (0,), (256,), (1,), (8,), (1,), (1,), (4,)),
        ((16,), (128,), (0,), (64,), (1,), (8,), (1,), (2,), (4,)),
        ((32,), (64,), (0,), (128, 256), (1,), (8,), (1,), (1,), (4,)),
        ((64,), (64,), (0,), (128,), (0,), (8,), (1,), (1,), (4,)),
        # Tens of tokens to hundreds. 256 tokens by 10240 features are 80 tiles of 128 x 256, 160 of 128 x 128
        # and 128 of 128 x 160, for 132 multiprocessors; 256 by 5120 are 80 of 128 x 128, 128 of 128 x 80.
        ((64,), (128,), (0, 32, 64), (64,), (0,), (8,), (1,), (1,), (4,)),
        ((128,), (64,), (0, 16), (64,), (0,), (8,), (1,), (1,), (4,)),
        ((256,), (64,), (0,), (64,), (0,), (8,), (1,), (1,), (8,)),
        # Prompts: the most sums that stay in registers.
        ((128,), (128,), (0,), (64,), (0,), (8,), (1,), (1,), (4, 8)),
        ((128,), (128,), (32, 64), (64,), (0,), (8, 16), (1,), (1,), (8,)),
        ((256,), (128,), (0,), (64,), (0,), (8,), (2,), (1,), (4,)),
        ((256,), (128,), (64,), (64,), (0,), (8,), (2,), (1,), (8,)),
        # Batches of no power of two. 300 tokens fill 2 tiles of 160 rows, of 128 rows 2.3.
        ((64,), (128,), (16, 32), (128,), (1,), (8,), (1,), (1,), (8,)),
        ((128,), (128,), (16, 32, 64), (64,), (1,), (8,), (1,), (1,), (8,)),
        ((128,), (64,), (16, 32, 64), (64,), (1,), (8,), (1,), (1,), (4,)),
    ),
    MatrixUnit.TENSOR_MEMORY: (
        ((16,), (64,), (0,), (128, 256), (1,), (8,), (1,), (1,), (4,)),
        ((16, 32), (64, 128), (0,), (128,), (0, 1), (8,), (1,), (1,), (4,)),
        ((64,), (64,), (0,), (128,), (0,), (8,), (1,), (1,), (4,)),
        ((64,), (128,), (0, 64), (64, 128), (0,), (8,), (1,), (1,), (4,)),
        ((64,), (128, 256), (0,), (128,), (0,), (8,), (2,), (1,), (4,)),
        ((128,), (64,), (0,), (128,), (0,), (8,), (1,), (1,), (4,)),
        ((128,), (128, 256), (0, 64), (64,), (0,), (8, 16), (1,), (1,), (4,)),
        ((128,), (128, 256), (0,), (64,), (0,), (8,), (2,), (1,), (4,)),
        ((256,), (128, 256), (0,), (64,), (0,), (8,), (1, 2), (1,), (4,)),
        ((256,), (256,), (0,), (64,), (0,), (8,), (4,), (1,), (4,)),
        ((512,), (256,), (0,), (64,), (0,), (4, 8), (8,), (1,), (4,)),
    ),
    MatrixUnit.WARP: (
        ((16,), (32, 64), (0,), (64, 128), (0,), (8,), (1,), (1,), (4,)),
        ((32,), (64, 128), (0,), (64,), (0,), (8,), (1,), (1,), (4,)),
        ((64,), (64,), (0,), (32, 64), (0,), (8,), (1,), (2,), (4,)),
        ((64,), (128,), (0,), (32, 64), (0,), (8,), (1,), (1, 2), (4,)),
        ((128,), (64,), (0,), (32, 64), (0,), (8,), (1,), (1, 2), (4,)),
        ((128,), (128,), (0,), (32,), (0,), (8, 16), (1,), (1, 2), (4, 8)),
        ((128,), (128,), (0,), (64,), (0,), (8,), (1,), (1,), (4, 8)),
        ((128,), (256,), (0,), (32,), (0,), (8, 16), (1,), (1,), (8,)),
        ((128,), (256,), (0,), (32,), (0,), (8, 16), (2,), (1,), (4,)),
        ((256,), (128,), (0,), (32,), (0,), (8,), (1,), (1,), (8,)),
    ),
}

# Values of tile_m, tile_n, tile_k, group, num_ctas and num_worker_warps, not peeled (`product.one_sum`).
# Steps of 32 are 4 % faster on an H200 than steps of 64, since more of them are in flight. Two blocks that
# share a tile of 256 x 256 are slower than one block alone.
_UNPEELED: Mapping[MatrixUnit, Sequence[tuple[int, int, int, int, int, int]]] = {
    MatrixUnit.WARPGROUP: ((128, 256, 32, 8, 1, 8), (128, 256, 32, 16, 1, 8)),
    MatrixUnit.TENSOR_MEMORY: (),
    MatrixUnit.WARP: (),
}

# Values of tile_m, tile_n, tile_k, num_worker_warps and splits where blocks share the last wave alone. On
# sm90 steps of 32 pipeline; with steps of 64 each waits once for its products.
_LAST_WAVE: Mapping[MatrixUnit, Sequence[tuple[int, int, int, int, int]]] = {
    MatrixUnit.WARPGROUP: (
        (128, 256, 32, 8, 4),
        (128, 256, 32, 8, 8),
        (128, 128, 32, 8, 4),
        (128, 128, 64, 8, 4),
    ),
    MatrixUnit.TENSOR_MEMORY: ((128, 256, 64, 4, 4),),
    MatrixUnit.WARP: (),
}

# Values of tile_m, tile_n, tile_k, swapped, occupancy and num_worker_warps of tiles whose sums blocks share.
_SHARED: Mapping[MatrixUnit, Sequence[tuple[int, int, int, int, int, int]]] = {
    MatrixUnit.WARPGROUP: (
        (16, 64, 128, 1, 2, 4),
        (16, 64, 256, 1, 1, 4),
        (64, 64, 128, 0, 1, 4),
        (64, 128, 64, 0, 1, 4),
        (128, 128, 64, 0, 1, 8),
    ),
    MatrixUnit.TENSOR_MEMORY: ((16, 64, 128, 1, 1, 4), (64, 128, 64, 0, 1, 4), (128, 128, 64, 0, 1, 4)),
    MatrixUnit.WARP: ((16, 64, 64, 0, 1, 4), (64, 64, 32, 0, 2, 4), (128, 64, 32, 0, 2, 4)),
}

_SPLITS = (2, 3, 4)
"""Numbers of blocks that may share the sums of every tile."""

_MOST_SPLITS = 8
"""Blocks that may share the sums of a tile of the last wave, at most."""

_BETWEEN = (128, 2048)
"""Bucket's rows above and up to which tiles have further rows, and blocks share the last wave. With fewer
rows there is one row of tiles; with more there are many waves, and the last one counts little."""

_LEAST_K_LAST = 2048
"""K where blocks share the last wave, at least."""

_GROUP = 8
"""Rows of tiles that are taken together where tiles are not wider than tall, or sums are shared."""

_FEWEST_ROWS = 16
"""Rows of a tile, at least."""

_LONG_PROMPT = 1024
"""Rows above which a product counts as a long prompt."""

_MOST_ROWS = 256
"""Largest M for which blocks split K; above it there are enough tiles to fill the GPU."""

_LEAST_K = 4096
"""Length of a share of K, at least: with less, adding up takes longer than sharing saves."""

WIDTH = 256
"""Columns of the scratch in which blocks leave shares of sums, which lie side by side and then below."""

_MOST_LEFT = 1 << 23
"""Numbers that the blocks of a launch store for each other, at most: 32 MiB."""

_MOST_WAVES = 1.5
"""Tiles for each multiprocessor, at most, of a product whose sums are shared."""

_LEAST_SLICE = 2048
"""Numbers of a tile that one block adds up, at least: 8 for each thread of 8 warps. With fewer numbers than
threads, each warp might hold a copy from its own read, and warps that disagree about the end of a wait never
meet again."""

_LEAST_TILE, _WIDEST = 1024, 128
"""Numbers of a tile whose sums are shared, at least (4 for each thread of 8 warps); and its columns, at most,
where every tile is shared."""


@cache  # every unseen shape asks for its default
def config_of(
    tile_m: int,
    tile_n: int,
    more: int,
    tile_k: int,
    swapped: int,
    group: int,
    num_ctas: int,
    occupancy: int,
    warps: int,
    splits: int = 1,
    peeled: int = 1,
) -> Config:
    """Make the config of these constants and hints; `product` and `dense` explain the constants."""
    tile = {"tile_m": tile_m, "tile_n": tile_n, "more": more, "tile_k": tile_k, "swapped": swapped}
    return Config(
        constants={**tile, "group": group, "peeled": peeled, "splits": splits},
        hints={"num_ctas": num_ctas, "occupancy": occupancy, "num_worker_warps": warps},
    )


def constants_of(config: Config) -> tuple[int, ...]:
    """Return the constants that a kernel is launched with, in the order of its parameters."""
    return *_tile_of(config), *(int(config[name]) for name in ("group", "peeled", "splits")), _slices(config)


def _tile_of(config: Config) -> tuple[int, int, int, int, int]:
    return (
        int(config["tile_m"]), int(config["tile_n"]), int(config["more"]),
        int(config["tile_k"]), int(config["swapped"]),
    )  # fmt: skip


def _slices(config: Config) -> int:
    """Count the blocks that add up the parts of a tile's sums; 1 where sums are not shared."""
    tile_m, tile_n, _, _, swapped = _tile_of(config)
    if config["splits"] == 1:
        return 1
    return min(max(tile_m * tile_n // _LEAST_SLICE, 1), tile_n if swapped else tile_m)


def tiles(config: Config, rows: int, columns: int) -> int:
    """Count the tiles of a product of this many rows and columns; each share of a tile counts as one.

    Where the last wave alone is shared, all tiles count so: it then costs the part of a wave that it is.
    """
    high, wide = extent(config)
    return -(-rows // high) * -(-columns // wide) * int(config["splits"])


def grid(config: Config, device: Device, rows: int, columns: int) -> tuple[int, ...]:
    """Return the grid: as many blocks as the GPU runs at once, and as many that add up the last wave.

    Where the sums of all tiles are shared, a block for each part and each slice.
    """
    parts, splits = tiles(config, rows, columns), int(config["splits"])
    if splits == 1:
        return persistent_grid(config, device, parts)
    if not config["peeled"]:
        return *persistent_grid(config, device, parts), 2
    return (parts + parts // splits * _slices(config),)


def work(config: Config, problem: Problem) -> Work:
    """Return the work of a block for one tile or, where sums are shared, for its part of a tile."""
    k = -(-problem.size("K") // int(config["splits"]))
    return work_of(config, k, item_bytes=item_bytes(problem))


def space(arch: Arch, problem: Problem) -> Sequence[Config]:
    """Return all configs whose tiles fit an arch at the problem's dtype."""
    return _fitting(arch, item_bytes(problem))


@cache
def _fitting(arch: Arch, size: int) -> tuple[Config, ...]:
    rows = [values for row in _SPACE[matrix_unit(arch)] for values in itertools.product(*row)]
    # Steps have as many bytes as those of two-byte elements.
    every = dict.fromkeys(config_of(*v[:3], v[3] * 2 // size, *v[4:]) for v in rows)
    for splits, (tile_m, tile_n, tile_k, *rest) in itertools.product(_SPLITS, _SHARED[matrix_unit(arch)]):
        swapped, *hints = rest
        every[config_of(tile_m, tile_n, 0, tile_k * 2 // size, swapped, _GROUP, 1, *hints, splits)] = None
    for tile_m, tile_n, tile_k, group, num_ctas, warps in _UNPEELED[matrix_unit(arch)]:
        every[config_of(tile_m, tile_n, 0, tile_k * 2 // size, 0, group, num_ctas, 1, warps, peeled=0)] = None
    for tile_m, tile_n, tile_k, warps, splits in _LAST_WAVE[matrix_unit(arch)]:
        tile = tile_m, tile_n, 0, tile_k * 2 // size, 0
        every[config_of(*tile, _GROUP, 1, 1, warps, splits, peeled=0)] = None
    return tuple(config for config in every if overflow(config, arch, item_bytes=size) is None)


def default(arch: Arch, problem: Problem) -> Config:
    """Choose the config of an untuned problem."""
    rows, wide = problem.size("M"), item_bytes(problem) > 2
    if matrix_unit(arch) is MatrixUnit.WARP:
        # Two blocks hide each other's waits; with an occupancy of 1 it spills: sm80-spill (README).
        tile = (64, 64, 32) if wide else (64, 128, 64) if rows <= 64 else (128, 128, 32)
        return _plain(*tile, occupancy=2)
    if rows <= 16:
        return _plain(16, 64, 64 if wide else 128, swapped=1)
    if rows <= 64:
        return _plain(64, 64, 64 if wide else 128)
    # On an H200 eight warps are 1 % faster on long prompts, four on short ones.
    warps = 8 if rows > _LONG_PROMPT and matrix_unit(arch) is MatrixUnit.WARPGROUP else 4
    return _plain(128, 128, 32 if wide else 64, warps=warps)


def _plain(
    tile_m: int, tile_n: int, tile_k: int, *, swapped: int = 0, occupancy: int = 1, warps: int = 4
) -> Config:
    return config_of(tile_m, tile_n, 0, tile_k, swapped, _GROUP, 1, occupancy, warps)


def legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    """Whether a config may run a problem, or why not; the same for all sizes of a bucket."""
    rows = edge(problem.size("M"))
    wrong = wrongly_peeled(config) or _wrongly_grouped(config, rows) or _wrongly_more(config, rows)
    if wrong:
        return wrong
    if not config["peeled"] and config["more"]:
        return "a tile with further columns or rows needs peeled to be 1"
    refusal = overflow(config, arch, item_bytes=item_bytes(problem))
    return refusal or waste(config, rows) or _not_shared(config, arch, problem) or True


def invariant(config: Config, problem: Problem) -> bool | str:
    """Whether a config sums each row in an order that no batch changes, or why not."""
    return config["splits"] == 1 or "blocks share sums, by the number of tiles"


def _wrongly_more(config: Config, rows: int) -> str | None:
    """Return why further columns or rows of a config are wrong, or empty for `rows` rows; or None."""
    tile_m, tile_n, more, _, swapped = _tile_of(config)
    along = ("tile_n", tile_n) if not swapped else ("tile_m", tile_m)
    if more and along[1] % more:
        return f"more is {more}; with swapped {swapped} it must divide {along[0]}, {along[1]}"
    least, most = _BETWEEN
    if more and swapped and not least < rows <= most:
        return f"tiles of {tile_m} and {more} rows are for {least + 1} to {most} rows, not for {rows}"
    return None


def _wrongly_grouped(config: Config, rows: int) -> str | None:
    """Return why the `group` of a config (`product.place`) is wrong or useless for `rows` rows, or None."""
    group = int(config["group"])
    if group < 1:
        return f"group is {group}; it must be the number of rows of tiles taken together, 1 or more"
    if group != _GROUP and -(-rows // int(config["tile_m"])) <= min(group, _GROUP):
        return f"group {group} orders the tiles of up to {rows} rows as group {_GROUP} does"
    return None


def left(rows: int, k: int, columns: int) -> int:
    """Return the most numbers that blocks of any config store for each other, for all sizes of a bucket."""
    if k >= _LEAST_K_LAST and _BETWEEN[0] < edge(rows) <= _BETWEEN[1]:
        return min(_MOST_SPLITS * edge(rows) * (columns + WIDTH), _MOST_LEFT)
    if rows > _MOST_ROWS or k < 2 * _LEAST_K:
        return 1
    # At most half of a tile's rows are empty.
    return min(_SPLITS[-1] * 2 * max(edge(rows), _FEWEST_ROWS) * (columns + _WIDEST), _MOST_LEFT)


def _not_shared(config: Config, arch: Arch, problem: Problem) -> str | None:
    """Return why blocks should not share the sums of tiles in a problem's bucket, or None."""
    (tile_m, tile_n, more, tile_k, _), splits = _tile_of(config), int(config["splits"])
    if splits == 1:
        return None
    rows, k, sms = edge(problem.size("M")), problem.size("K"), Device.reference(arch).sm_count
    if more or config.hints.get("num_ctas", 1) > 1:
        return "the sums of a tile with further columns or rows, or of two blocks, are not shared"
    if not config["peeled"]:
        return _last_wave_not_shared(config, rows, k)
    if splits not in _SPLITS or tile_m * tile_n < _LEAST_TILE or tile_n > _WIDEST:
        return (
            f"a tile of {tile_m} x {tile_n} over {splits}; {_SPLITS} share one of {_LEAST_TILE} numbers or "
            f"more, of up to {_WIDEST} columns"
        )
    if not tile_m // 2 < max(rows, _FEWEST_ROWS) <= _MOST_ROWS or k < splits * max(_LEAST_K, 2 * tile_k):
        return (
            f"{rows} rows and a K of {k} over {splits} splits; tiles that are shared are no more than half "
            f"empty, of {_MOST_ROWS} rows at most, and a share is {_LEAST_K} or more"
        )
    parts = tiles(config, rows, problem.size("N"))
    if parts // splits > _MOST_WAVES * sms or parts * tile_m * tile_n > _MOST_LEFT:
        return f"{parts // splits} tiles are enough for {sms} multiprocessors, or leave too much"
    return None


def _last_wave_not_shared(config: Config, rows: int, k: int) -> str | None:
    """Return why blocks should not share the last wave of a product of up to `rows` rows, or None."""
    (tile_m, tile_n, _, _, _), splits = _tile_of(config), int(config["splits"])
    if not 1 < splits <= _MOST_SPLITS or tile_m * tile_n < _LEAST_TILE or max(tile_m, tile_n) > WIDTH:
        return (
            f"a tile of {tile_m} x {tile_n} over {splits}; up to {_MOST_SPLITS} share one of {_LEAST_TILE} "
            f"numbers or more, of up to {WIDTH} rows and columns"
        )
    least, most = _BETWEEN
    if not least < rows <= most or k < _LEAST_K_LAST:
        return (
            f"{rows} rows and a K of {k}; the last wave is shared for {least + 1} to {most} rows and a K of "
            f"{_LEAST_K_LAST} or more"
        )
    return None


def item_bytes(problem: Problem) -> int:
    """Return the bytes of an element of a problem's dtype."""
    return named_dtype(str(problem["dtype"])).itemsize
