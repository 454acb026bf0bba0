"""What the blocks of attention_decode leave for each other, in which slices. Pure; knows no kernel."""

from __future__ import annotations

from aot_tune.values.bucket import edge
from aot_tune.values.problem import Problem

MOST_LEFT = 1 << 22
"""Words that the blocks of a launch leave for each other at most: 32 MiB."""

FEWEST_ROWS = 8
"""Queries of a tile, the matrix units' narrowest side."""

MOST_APART = 16
"""Parts of a sequence that are combined by threads which have the same numbers of all of them."""

_AT_A_TIME = 2048
"""Words that a block reads of so many parts together: with half as many, few parts have many slices to
combine one after another; with twice as many, registers spill."""

MOST_WARPS = 4
"""Of a block, that combine."""

_THREADS = 32 * MOST_WARPS
"""Of fewer words than threads each warp may have a copy of its own, as old as its own read. Warps that
disagree about the end of a wait never meet again."""

_WIDTH_OF_MANY = 32
"""Numbers of a slice of more parts than `MOST_APART`, all of which a block reads together."""


def rows(group: int) -> int:
    """Columns of a tile that holds a group of queries."""
    return max(edge(group), FEWEST_ROWS)


def left(columns: int, head_dim: int) -> int:
    """Words that a block leaves for others: one for each number of a result."""
    return columns * head_dim


def places(problem: Problem) -> int:
    """Blocks that can leave what they found."""
    columns = rows(problem.size("heads") // problem.size("kv_heads"))
    return MOST_LEFT // left(columns, problem.size("head_dim"))


def width_of_slice(splits: int, queries: int, head_dim: int) -> int:
    """Numbers of a result that a block combines at a time, of `splits` parts at most; also in a kernel."""
    if splits > MOST_APART:
        return max(_WIDTH_OF_MANY, queries)
    return min(max(_AT_A_TIME // splits, _THREADS), head_dim * queries)
