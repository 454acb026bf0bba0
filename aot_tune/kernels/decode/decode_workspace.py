"""Sizes of the memory for the exchange between blocks of attention_decode. Pure: imports no kernel."""

from __future__ import annotations

from aot_tune.values.bucket import edge
from aot_tune.values.problem import Problem

MOST_LEFT = 1 << 22
"""Words that the blocks of a launch store for each other, at most: 32 MiB."""

FEWEST_ROWS = 8
"""Queries of a tile, at least: the narrowest side of the matrix units."""

MOST_APART = 16
"""Parts of a sequence, at most, that are combined with each thread holding the same numbers of all parts."""

_AT_A_TIME = 2048
"""Words that a block reads at a time, of up to `MOST_APART` parts together. With half of them, few parts
would combine many slices one after another; with twice as many, registers spill."""

MOST_WARPS = 4
"""Warps of a block that combine partial results, at most."""

_THREADS = 32 * MOST_WARPS
"""Words of a slice, at least. With fewer words than threads, each warp may hold a copy from its own read, and
warps that disagree about the end of a wait never meet again."""

_WIDTH_OF_MANY = 32
"""Numbers of a slice where parts are more than `MOST_APART`: a block then reads all parts together."""


def rows(group: int) -> int:
    """Return the columns of a tile that holds a group of queries."""
    return max(edge(group), FEWEST_ROWS)


def left(columns: int, head_dim: int) -> int:
    """Count the words that a block stores for others: one for each number of a result."""
    return columns * head_dim


def places(problem: Problem) -> int:
    """Count the blocks whose results the workspace holds."""
    columns = rows(problem.size("heads") // problem.size("kv_heads"))
    return MOST_LEFT // left(columns, problem.size("head_dim"))


def width_of_slice(splits: int, queries: int, head_dim: int) -> int:
    """Return the numbers of a result that a block combines at a time, from up to `splits` parts."""
    if splits > MOST_APART:
        return max(_WIDTH_OF_MANY, queries)
    return min(max(_AT_A_TIME // splits, _THREADS), head_dim * queries)
