"""What the blocks of attention_decode leave for each other, in which slices. Pure; knows no kernel."""

from __future__ import annotations

from aot_tune.bucket import edge
from aot_tune.problem import Problem

MOST_LEFT = 1 << 23
"""Numbers that the blocks of a launch leave for each other at most: 32 MiB."""

FEWEST_ROWS = 8
"""Queries of a tile, the matrix units' narrowest side."""

_PIECE = 1024
"""Numbers of a result that a block combines at a time, the parts' together: so many it reads.

Of fewer than its threads each warp may have a copy of its own, as old as its own read. Warps that disagree
about the end of a wait never meet again.
"""


def rows(group: int) -> int:
    """Columns of a tile that holds a group of queries."""
    return max(edge(group), FEWEST_ROWS)


def left(columns: int, head_dim: int) -> int:
    """Numbers that a block leaves for others: a result, and a log-sum beside each number."""
    return 2 * columns * head_dim


def places(problem: Problem) -> int:
    """Blocks that can leave what they found."""
    columns = rows(problem.size("heads") // problem.size("kv_heads"))
    return MOST_LEFT // left(columns, problem.size("head_dim"))


def width_of_slice(splits: int, queries: int, head_dim: int, balanced: bool) -> int:
    """Numbers of a result that a block combines at a time, of `splits` parts at most; also in a kernel.

    Of equal parts there may be as few as two, which have few slices to combine one after another.
    """
    if balanced:
        return min(max(4 * _PIECE // splits, queries), head_dim * queries)
    return max(min(_PIECE, head_dim * queries) // splits, queries)
