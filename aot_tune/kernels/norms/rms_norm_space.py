"""Cut rows into blocks of the root-mean-square norms: search space, default, legality. Imports no kernel."""

from __future__ import annotations

from functools import cache

from aot_tune.errors import LaunchError
from aot_tune.kernels.rows.rows import parts, refusal, threads, too_wide
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import edge
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

_MOST_ROWS = 16
"""Rows of a block, at most, where they are short: the signature already says whether 16 divides all rows."""

_OCCUPANCIES = {(4, 8): (2, 4, 6, 8), (8, 8): (1, 2, 3, 4), (4, 16): (2, 4), (8, 16): (1, 2)}
"""Occupancies to search, by num_worker_warps and the elements of a part for each thread. 8 elements are one
load of 16 bytes, or two for float32. vLLM too uses fewer threads for many rows than for few
(csrc/layernorm_kernels.cu)."""


@cache  # every unseen shape asks for its default
def _config(warps: int, occupancy: int, each: int = 8) -> Config:
    constants = {"width": 32 * warps * each}
    return Config(constants=constants, hints={"occupancy": occupancy, "num_worker_warps": warps})


SPACE = tuple(
    _config(warps, occupancy, each)
    for (warps, each), occupancies in _OCCUPANCIES.items()
    for occupancy in occupancies
)


def cut(config: Config, rows: int, cols: int) -> tuple[int, int, int, int]:
    """Return rows of a block, columns of a part, parts of a row, and parts that need no check of bounds.

    Several rows shorter than the config's `width` share a block of `width` elements, `_MOST_ROWS` at most.
    """
    widest = int(config["width"])
    width = min(edge(cols), widest)
    height = min(widest // width, _MOST_ROWS)
    return height, width, *parts(height, width, rows, cols)


_FREE_PARTS = 6
"""Parts of a row that need registers for their elements alone; each further part needs one more. With 12
parts of 1024 at an occupancy of 4, sm_90 spilled 200 bytes, and a block took 1.43 times as long on an H200;
with 6 of 2048 nothing spilled."""


def legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    """Whether the registers of a block hold its rows, or why not."""
    height, width, count, _ = cut(config, problem.size("rows"), problem.size("cols"))
    beside = max(count - _FREE_PARTS, 0)
    return refusal(config, arch, height * width * count, beside) or True


def legal_in_place(config: Config, arch: Arch, problem: Problem) -> bool | str:
    """Whether a config may run a kernel that works in place, or why not.

    Beside what `legal` asks, a tile must have an element for each thread: reloaded-tile (README).
    """
    height, width, _, _ = cut(config, problem.size("rows"), problem.size("cols"))
    if height * width < threads(config):
        return (
            f"{height * width} elements are fewer than {threads(config)} threads, which may read them again "
            "after they were overwritten"
        )
    return legal(config, arch, problem)


LEAST_COLUMNS_IN_PLACE = 5
"""Fewest columns of a kernel in place: `_MOST_ROWS` rows of them, the columns rounded up to a power of
two, have an element for each thread of 4 warps."""


def default(arch: Arch, problem: Problem) -> Config:
    """Choose 8 warps, which speed up few rows and do not slow down many; the most occupancy without spills.

    Raises:
        LaunchError: No config holds a row of so many columns.
    """
    found = next((one for n in (3, 2, 1) if legal(one := _config(8, n), arch, problem) is True), None)
    if found is None:
        raise too_wide(problem.size("cols"))
    return found


def default_in_place(arch: Arch, problem: Problem) -> Config:
    """Like `default`, but 4 warps for rows so short that 8 are refused.

    Raises:
        LaunchError: There are fewer than `LEAST_COLUMNS_IN_PLACE` columns, too few for any config.
    """
    chosen = default(arch, problem), SPACE[0]
    found = next((one for one in chosen if legal_in_place(one, arch, problem) is True), None)
    if found is None:
        raise LaunchError(
            f"no config changes rows of {problem.size('cols')} columns in place; pass "
            f"{LEAST_COLUMNS_IN_PLACE} or more"
        )
    return found
