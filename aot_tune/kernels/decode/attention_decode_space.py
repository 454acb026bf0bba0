"""Splits and tiles of attention_decode: search space, default, legality. Pure: imports no kernel."""

from __future__ import annotations

import itertools
from functools import cache

from aot_tune.errors import LaunchError
from aot_tune.kernels.decode.decode_workspace import MOST_WARPS, places, rows
from aot_tune.kernels.rows.rows import at_once
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import edge
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

_MOST_BLOCKS = 4096
"""Blocks of a launch that splits sequences, at most. More would be waves of ever smaller blocks."""

MOST_SPLITS = 64
"""Parts of a sequence, at most; their blocks wait for each other."""

MOST_SEQUENCES = 512
"""Sequences that can be cut into equal parts, at most: each block looks at all lengths in one tile, since a
loop over them is not possible: length-loop-crash (README)."""

_MOST_JOINED = 4
"""Pages, at most, that are loaded one by one and joined to a tile."""

_TILES = (64, 128)
"""Keys of a step. Seeded from NVIDIA's TileGym (suites/flashinfer/cutile/fmha_decode_bsr.py: 32 to 128, with
an occupancy of 1 or 2). The matrix units of sm90 and sm100 take at least 64 rows."""

_NARROW = 64
"""Smaller of the two head_dims."""

_MOST_LOOPING = 3
"""Blocks of a multiprocessor, at most, whose loads run ahead; windows loaded at once allow one more."""

_MANY_QUERIES = 32
"""Columns of a tile of queries with which three blocks a multiprocessor spill registers."""

_FEW_SEQUENCES, _TILE_OF_FEW = 16, 32
"""Sequences, at most, whose lengths each warp looks at by itself, and the size of the tile that holds them. A
config tuned for 8 sequences serves up to 16, one tuned for 64 serves more: an archive has both tile sizes."""

_MOST_ORDERED, _BLOCKS_ORDERED = 64, 8
"""Sort sequences by length only up to this batch, and only with at least this many blocks per sequence: fewer
blocks mostly run all at once anyway. 64 sequences of up to 2048 keys, 32 heads over 8 of 128, take 88.9 us
sorted and 93.5 us in any order (H200)."""

_SLOW_PAGES = 64
"""Keys of a page from which on pairs of blocks do not gather pages: slow-pairs (README)."""

_GATHERING = (9, 10, 11)
"""Major numbers of the archs where one load gathers the pages of a tile."""


@cache
def _space(arch: Arch) -> tuple[Config, ...]:
    return tuple(
        config
        for values in itertools.product(
            (1, 2, 4, 8, 16, 32, MOST_SPLITS), (False, True), _TILES, (False, True), (1, 2), (1, 2, 3, 4)
        )
        if _does_not_fit(config := _config(*values), arch) is None
    )


@cache
def _config(splits: int, balanced: bool, tile_n: int, gather: bool, num_ctas: int, occupancy: int) -> Config:
    return Config(
        constants={"splits": splits, "balanced": balanced, "tile_n": tile_n, "gather": gather},
        hints={"num_ctas": num_ctas, "occupancy": occupancy},
    )


def space(arch: Arch, problem: Problem) -> tuple[Config, ...]:
    """Return all candidates of an arch."""
    return _space(arch)


def default(arch: Arch, problem: Problem) -> Config:
    """Choose equal parts or, where not legal, two blocks a multiprocessor. Gathers pages if it can."""
    tile, gather = _TILES[0], _gathers(arch, problem)
    equal = min(_wanted(arch, problem), _most_splits(arch, problem, tile))
    balanced = _config(equal, True, tile, gather, 1, 2)
    if equal > 1 and _balanced_misfit(balanced, arch, problem) is None:
        return balanced
    fewest, most = _splits_between(arch, problem, tile)
    wanted = 1 << max(2 * Device.reference(arch).sm_count // _pairs(problem), 1).bit_length() - 1
    return _config(min(max(wanted, fewest), most), False, tile, gather, 1, 2)


def _wanted(arch: Arch, problem: Problem) -> int:
    """Return the splits for equal parts, 2 or more: each sequence's share in two blocks a multiprocessor."""
    return max(edge(-(-2 * Device.reference(arch).sm_count // _pairs(problem))), 2)


def _gathers(arch: Arch, problem: Problem) -> bool:
    """Whether the default gathers pages."""
    return arch.major in _GATHERING and problem.size("page_size") < _TILES[0]


def legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    """Whether a config may run, or why not."""
    return _does_not_fit(config, arch) or _does_not_suit(config, arch, problem) or True


def fits(config: Config, device: Device, problem: Problem) -> bool | str:
    """Whether a GPU runs enough blocks for equal parts, or why not.

    A block finds its part by raising the share of a block until the blocks suffice. With at least two blocks
    for each sequence and head, this ends before the share is as long as the longest sequence; with fewer
    blocks it may not end.
    """
    pairs = problem.size("batch") * problem.size("kv_heads")
    if config["balanced"] and (found := blocks_on(config, device, problem)) < 2 * pairs:
        return f"equal parts of {pairs} sequences and heads take {2 * pairs} blocks, and {found} are launched"
    return True


def invariant(config: Config, problem: Problem) -> bool | str:
    """Whether a sequence's sums are taken in the same order in every batch, or why not."""
    if config["splits"] == 1:
        return True
    return "how many parts a sequence may have depends on the number of sequences"


def loads_at_once(config: Config, page_size: int, context: int, windowed: bool) -> bool:
    """Whether a block loads all its keys before it computes, which it does for windows of at most two tiles.

    256 windows of 128 keys and 8 heads of 64 take 31.2 us so and 32.8 us in a loop; 8 windows 8.7 and 10.8
    us.

    Args:
        config: The config, for its splits, its tile and whether it gathers pages.
        page_size: Keys of a page.
        context: Keys of a sequence or window.
        windowed: Whether `context` is a window.
    """
    splits, tile_n, gather = _constants(config)
    one_block = gather and splits == 1 and tile_n == _TILES[0]
    return windowed and one_block and page_size < tile_n and edge(context) <= 2 * tile_n


def tile_of_sequences(config: Config, sequences: int, kv_heads: int, windowed: bool) -> int:
    """Return the tile size for sequences that are cut into equal parts or sorted by length; 0 for neither."""
    if config["balanced"]:
        return _TILE_OF_FEW if sequences <= _FEW_SEQUENCES else MOST_SEQUENCES
    ordered = _FEW_SEQUENCES < sequences <= _MOST_ORDERED and not windowed
    return _MOST_ORDERED if ordered and kv_heads * int(config["splits"]) >= _BLOCKS_ORDERED else 0


def _constants(config: Config) -> tuple[int, int, bool]:
    """Return splits, tile_n and gather of a config."""
    return int(config["splits"]), int(config["tile_n"]), bool(config["gather"])


def _evened_out(arch: Arch, problem: Problem) -> bool:
    """Whether a bucket's sequences may be cut into equal parts: their lengths differ, and they are few."""
    few = 1 < edge(problem.size("batch")) <= MOST_SEQUENCES
    return few and not problem["windowed"] and _pairs(problem) <= 2 * Device.reference(arch).sm_count


def _balanced_misfit(config: Config, arch: Arch, problem: Problem) -> str | None:
    """Return why a bucket's sequences should not be cut into equal parts in this way, or None."""
    if not _evened_out(arch, problem):
        return (
            f"{_pairs(problem)} sequences and heads; equal parts are for 2 to {MOST_SEQUENCES} sequences of "
            "lengths that differ, with their heads no more than two a multiprocessor"
        )
    splits, tile_n, _ = _constants(config)
    most = _most_splits(arch, problem, tile_n)
    fewest, most = min(_wanted(arch, problem), most), min(2 * _wanted(arch, problem), most)
    if not fewest <= splits <= most:
        return f"{splits} splits; from {fewest} to {most} suit sequences in equal parts"
    edges, device = problem.replaced(batch=edge(problem.size("batch"))), Device.reference(arch)
    if (refusal := fits(config, device, edges)) is not True:
        return str(refusal)
    if blocks_on(config, device, edges) + splits > places(problem):
        return f"{splits} splits of this many queries store more than the workspace holds"
    return None


def _does_not_fit(config: Config, arch: Arch) -> str | None:
    """Return why a config is not for an arch, or None."""
    splits, tile_n, gather = _constants(config)
    num_ctas, occupancy = config.hints.get("num_ctas", 1), config.hints.get("occupancy", 1)
    if num_ctas > 1 and (arch < Arch(10, 0) or occupancy > 1):
        return "a narrow tile is worth sharing, if at all, from sm100 on, with a multiprocessor to itself"
    if tile_n > _TILES[0] and occupancy > 2:
        return f"registers for {occupancy} blocks of {tile_n} keys would spill"
    if splits > 1 and (num_ctas > 1 or config.hints.get("num_worker_warps", 4) > MOST_WARPS):
        return "the parts are waited for by the four warps of one block, which must see the same"
    if gather and arch.major not in _GATHERING:
        return f"{arch} has no loads that gather pages"
    if occupancy > _MOST_LOOPING and not (gather and splits == 1):
        return f"{occupancy} blocks are for windows that one block asks for at once"
    if config["balanced"] and (splits == 1 or occupancy == 1):
        # balanced-crash (README)
        return "equal parts need 2 splits and an occupancy of 2 at least: the compiler crashes on others"
    return None


def _does_not_suit(config: Config, arch: Arch, problem: Problem) -> str | None:
    """Return why a config does not suit a problem's bucket, or None; the default always suits."""
    (splits, tile_n, gather), page_size = _constants(config), problem.size("page_size")
    wide = problem.size("head_dim") > _NARROW
    if gather and tile_n <= page_size:
        return f"a tile of {tile_n} lies in a page of {page_size}"
    if not gather and tile_n > _MOST_JOINED * page_size:
        return f"a tile of {tile_n} would be joined from more than {_MOST_JOINED} pages"
    occupancy = config.hints.get("occupancy", 1)
    if gather and tile_n == _TILES[1] and wide:
        if arch.major == 9 and (occupancy == 1 or config["balanced"]):  # gathered-spill (README)
            return f"{tile_n} gathered keys with an occupancy of 1, or in equal parts, spill registers"
        if splits > 1 and arch.major > 9 and occupancy == 1:  # gathered-crash (README)
            return f"the compiler crashes on splits of {tile_n} gathered keys with an occupancy of 1"
    if gather and config.hints.get("num_ctas", 1) > 1 and page_size >= _SLOW_PAGES:
        return f"pairs of blocks that gather pages of {page_size} compile for minutes"
    if gather and occupancy > 2 and (wide or splits > 1):
        return f"{occupancy} blocks that gather load no more at once than two"
    short = _is_short_window(arch, problem)
    if short and occupancy > 2 and rows(problem.size("heads") // problem.size("kv_heads")) >= _MANY_QUERIES:
        return f"{occupancy} blocks that load a window at once for so many queries spill registers"
    if short and config.hints.get("num_ctas", 1) > 1:
        return "pairs of blocks that load a window at once spill registers"  # window-pairs-spill (README)
    if short and (splits, tile_n, gather) != (1, _TILES[0], True):
        return f"a window of {problem.size('context')} keys is one block's, in gathered tiles of {_TILES[0]}"
    if occupancy > _MOST_LOOPING and (wide or not short):
        return f"{occupancy} blocks a multiprocessor are for short windows, of a head_dim of {_NARROW}"
    if not gather and tile_n > page_size and arch.major in _GATHERING:
        return "pages are gathered where an arch can"
    if tile_n > max(_TILES[0], edge(problem.size("context"))):
        return f"a tile of {tile_n} is more than half empty"
    if config["balanced"]:
        return _balanced_misfit(config, arch, problem)
    fewest, most = _splits_between(arch, problem, tile_n)
    plain = (tile_n, gather, occupancy) == (_TILES[0], _gathers(arch, problem), 2)
    always = plain and (splits == 1 or splits >= _SMALL_GPU)
    if not (fewest <= splits or always) or splits > most:
        return f"{splits} splits; from {fewest} to {most} suit these numbers of sequences, heads and keys"
    return None


def _is_short_window(arch: Arch, problem: Problem) -> bool:
    """Whether the default loads a bucket's windows at once."""
    one = _config(1, False, _TILES[0], _gathers(arch, problem), 1, 2)
    return loads_at_once(one, problem.size("page_size"), problem.size("context"), bool(problem["windowed"]))


_SMALL_GPU = 8
"""Splits that the smallest GPU runs at once. Configs with this many or more splits stay legal in the
default's tiles, for GPUs with fewer multiprocessors than others of their arch: a MIG slice, an H20, an L4. So
does one without splits, which alone is the same for every batch."""


def _splits_between(arch: Arch, problem: Problem, tile_n: int) -> tuple[int, int]:
    """Return the range of splits worth a trial: half the multiprocessors busy, to 4 or 8 times as many."""
    most, sms, pairs = (
        _most_splits(arch, problem, tile_n), Device.reference(arch).sm_count, _pairs(problem)
    )  # fmt: skip
    fewest = min(edge(-(-sms // (2 * pairs))), most)
    return fewest, min((4 if _evened_out(arch, problem) else 8) * fewest, most)


def _most_splits(arch: Arch, problem: Problem, tile_n: int) -> int:
    """Limit the splits by a sequence's tiles, the workspace and what half a GPU runs at once."""
    if _is_short_window(arch, problem):
        return 1
    blocks, sms = min(_MOST_BLOCKS, places(problem)), Device.reference(arch).sm_count
    context = edge(problem.size("context"))
    most = max(min(MOST_SPLITS, context // tile_n, blocks // _pairs(problem), sms // 2), 1)
    return 1 << (most.bit_length() - 1)


def _pairs(problem: Problem) -> int:
    """Return sequences times KV heads, for all sizes of a bucket."""
    return edge(problem.size("batch")) * problem.size("kv_heads")


def blocks(config: Config, problem: Problem) -> int:
    """Return the most parts of all sequences and heads."""
    return problem.size("batch") * problem.size("kv_heads") * int(config["splits"])


def blocks_on(config: Config, device: Device, problem: Problem) -> int:
    """Count the blocks of a launch on a GPU; for equal parts a multiple of what the GPU runs at once."""
    if not config["balanced"]:
        return blocks(config, problem)
    pairs, slots = problem.size("batch") * problem.size("kv_heads"), at_once(config, device)
    return slots * -(-3 * pairs // (2 * slots))


def checked_blocks(config: Config, device: Device, problem: Problem) -> int:
    """Count the blocks of a launch on a GPU.

    Raises:
        LaunchError: There are too many sequences for equal parts, or their blocks on this GPU exceed the
            workspace.
    """
    count, sequences = blocks_on(config, device, problem), problem.size("batch")
    if config["balanced"] and (sequences > MOST_SEQUENCES or count + int(config["splits"]) > places(problem)):
        raise LaunchError(
            f"attention_decode: {config} is for up to {MOST_SEQUENCES} sequences, and {places(problem)} "
            f"blocks that leave parts; here are {sequences} and {count}: pass a config with balanced=False"
        )
    return count
