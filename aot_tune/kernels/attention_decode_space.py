"""Splits and tiles of attention_decode: search space, default, what is legal. Pure; knows no kernel."""

from __future__ import annotations

import itertools
from functools import cache

from aot_tune.arch import Arch
from aot_tune.bucket import edge
from aot_tune.config import Config
from aot_tune.device import Device
from aot_tune.problem import Problem

MOST_LEFT = 1 << 23
"""Numbers that the blocks of a launch leave for each other at most: 32 MiB."""

_MOST_BLOCKS = 4096
"""Blocks of a launch that splits. More would be waves of ever smaller blocks."""

MOST_SPLITS = 64
"""Parts of a sequence, which wait for each other."""

FEWEST_ROWS = 8
"""Queries of a tile, the matrix units' narrowest side."""

_MOST_JOINED = 4
"""Pages that are loaded one by one and put together to a tile."""

_TILES = (64, 128)
"""Keys a step. Seeded from NVIDIA's TileGym (suites/flashinfer/cutile/fmha_decode_bsr.py: 32 to 128, with an
occupancy of 1 or 2). The matrix units of sm90 and sm100 take no fewer than 64 rows."""


_NARROW = 64
"""The smaller head_dim."""

_MOST_WARPS = 4
"""Warps that combine parts: each thread of theirs has elements of its own, even of a piece of 512."""

_GATHERING = (9, 10, 11)
"""Major numbers of the archs that load the pages of a tile at once."""


@cache
def _space(arch: Arch) -> tuple[Config, ...]:
    return tuple(
        _config(splits, tile_n, gather, num_ctas, occupancy)
        for splits, tile_n, gather, num_ctas, occupancy in itertools.product(
            (1, 2, 4, 8, 16, 32, MOST_SPLITS), _TILES, (False, True), (1, 2), (1, 2, 3)
        )
        if _does_not_fit(_config(splits, tile_n, gather, num_ctas, occupancy), arch) is None
    )


@cache
def _config(splits: int, tile_n: int, gather: bool, num_ctas: int, occupancy: int) -> Config:
    return Config(
        constants={"splits": splits, "tile_n": tile_n, "gather": gather},
        hints={"num_ctas": num_ctas, "occupancy": occupancy},
    )


def space(arch: Arch, problem: Problem) -> tuple[Config, ...]:
    """All candidates of an arch."""
    return _space(arch)


def default(arch: Arch, problem: Problem) -> Config:
    """Some four blocks a multiprocessor, so that long and short sequences even out; pages gathered."""
    fewest, most = _splits_between(arch, problem, _TILES[0])
    wanted = edge(-(-4 * Device.reference(arch).sm_count // _pairs(problem)))
    return _config(min(max(wanted, fewest), most), _TILES[0], _gathers(arch, problem), 1, 2)


def _gathers(arch: Arch, problem: Problem) -> bool:
    """Whether the default gathers pages."""
    return arch.major in _GATHERING and problem.size("page_size") < _TILES[0]


def legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    """Whether a config may run."""
    return _does_not_fit(config, arch) or _does_not_suit(config, arch, problem) or True


def _constants(config: Config) -> tuple[int, int, bool]:
    """splits, tile_n and gather of a config."""
    return int(config["splits"]), int(config["tile_n"]), bool(config["gather"])


def _does_not_fit(config: Config, arch: Arch) -> str | None:
    """Why a config is not for an arch, or None."""
    splits, tile_n, gather = _constants(config)
    num_ctas, occupancy = config.hints.get("num_ctas", 1), config.hints.get("occupancy", 1)
    if num_ctas > 1 and (arch < Arch(10, 0) or occupancy > 1):
        return "a narrow tile is worth sharing, if at all, from sm100 on, with a multiprocessor to itself"
    if tile_n > _TILES[0] and occupancy > 2:
        return f"registers for {occupancy} blocks of {tile_n} keys would spill"
    if splits > 1 and (num_ctas > 1 or config.hints.get("num_worker_warps", 4) > _MOST_WARPS):
        return "the parts are waited for by the four warps of one block, which must see the same"
    if gather and arch.major not in _GATHERING:
        return f"{arch} has no loads that gather pages"
    return None


def _does_not_suit(config: Config, arch: Arch, problem: Problem) -> str | None:
    """Why a config is a waste on a problem's bucket, or None; the default never is."""
    (splits, tile_n, gather), page_size = _constants(config), problem.size("page_size")
    wide = problem.size("head_dim") > _NARROW
    if gather and tile_n <= page_size:
        return f"a tile of {tile_n} lies in a page of {page_size}"
    if not gather and tile_n > _MOST_JOINED * page_size:
        return f"a tile of {tile_n} would be put together of more than {_MOST_JOINED} pages"
    occupancy = config.hints.get("occupancy", 1)
    if gather and splits > 1 and arch.major > 9 and (tile_n, occupancy) == (_TILES[1], 1) and wide:
        return f"the compiler crashes on parts of {tile_n} gathered keys at an occupancy of 1 (tileiras 13.4)"
    if gather and occupancy > 2:
        return f"{occupancy} blocks that gather load no more at once than two"
    if not gather and tile_n > page_size and arch.major in _GATHERING:
        return "pages are gathered where an arch can"
    if tile_n > max(_TILES[0], edge(problem.size("context"))):
        return f"a tile of {tile_n} is more than half empty"
    fewest, most = _splits_between(arch, problem, tile_n)
    small = splits >= _SMALL_GPU and (tile_n, gather, occupancy) == (_TILES[0], _gathers(arch, problem), 2)
    if not (fewest <= splits or small) or splits > most:
        return f"{splits} splits; from {fewest} to {most} may suit so many sequences, heads and keys"
    return None


_SMALL_GPU = 8
"""Splits that the smallest GPU runs at once. So few may run, in the default's tiles, for a GPU with fewer
multiprocessors than others of its arch: a MIG slice, an H20, an L4."""


def _splits_between(arch: Arch, problem: Problem, tile_n: int) -> tuple[int, int]:
    """Fewest and most splits worth a trial: half the multiprocessors busy, and eight times as many blocks."""
    pairs = _pairs(problem)
    sms, columns = Device.reference(arch).sm_count, rows(problem.size("heads") // problem.size("kv_heads"))
    blocks = min(_MOST_BLOCKS, MOST_LEFT // left(columns, problem.size("head_dim")))
    # No more than half a GPU waits for each other.
    most = max(min(MOST_SPLITS, edge(problem.size("context")) // tile_n, blocks // pairs, sms // 2), 1)
    most = 1 << (most.bit_length() - 1)
    fewest = min(edge(-(-sms // (2 * pairs))), most)
    return fewest, min(8 * fewest, most)


def _pairs(problem: Problem) -> int:
    """Sequences times KV heads, for all sizes of a bucket."""
    return edge(problem.size("batch")) * problem.size("kv_heads")


def blocks(config: Config, problem: Problem) -> int:
    """Blocks of a launch."""
    return problem.size("batch") * problem.size("kv_heads") * int(config["splits"])


def left(columns: int, head_dim: int) -> int:
    """Numbers that a block leaves for others: a result, and a log-sum beside each number."""
    return 2 * columns * head_dim


PIECE = 1024
"""Numbers of a result that a sequence's blocks combine at a time: each of them reads as many.

Of fewer than its threads each warp may have a copy of its own, as old as its own read. Warps that disagree
about the end of a wait never meet again.
"""


def rows(group: int) -> int:
    """Columns of a tile that holds a group of queries."""
    return max(edge(group), FEWEST_ROWS)
