"""A library with patterns of serving code: a flattened tensor, the longest of a batch, several base hints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cuda.tile as ct
from cuda.tile.tune import exhaustive_search

SPACE = [SimpleNamespace(TILE=tile) for tile in (16, 32)]


@ct.kernel
def rows_kernel(x, out, rows, longest, LIMIT: ct.Constant[int], TILE: ct.Constant[int]):
    """Copy each batch's first `longest` rows, at most LIMIT."""
    place = ct.bid(0)
    if place * TILE < min(min(rows, longest), LIMIT):
        ct.store(out, index=(place,), tile=ct.load(x, index=(place,), shape=(TILE,)))


hinted_kernel = rows_kernel.replace_hints(opt_level=2)


def tuned(x: Any, out: Any, *, batch: int, longest: int, limit: int = 4096, kernel: Any = rows_kernel) -> Any:
    """Search as a first call does. `x` is flattened: its batches have `len(x) / batch` rows."""
    rows = x.shape[0] // batch
    return exhaustive_search(
        SPACE,
        0,
        lambda config: (-(-rows // config.TILE), 1, 1),
        kernel,
        lambda config: (x, out, rows, longest, limit, config.TILE),
        quiet=True,
    )
