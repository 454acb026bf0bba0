"""A library in the style of cuTile's documentation: it searches at the first call of a shape, and forgets.

Its tensors may be stand-ins. `searches` counts how often cuTile's own search would be asked.
"""

from __future__ import annotations

import linecache
from types import SimpleNamespace
from typing import Any

import cuda.tile as ct
from cuda.tile.tune import exhaustive_search

SPACE = [
    SimpleNamespace(TILE=tile, occupancy=occupancy) for tile in (16, 32, 64) for occupancy in (None, 1, 2)
]


@ct.kernel
def scale_kernel(x, out, n, factor, TILE: ct.Constant[int]):
    """Multiply a vector by a number."""
    place = ct.bid(0)
    if place * TILE < n:
        tile = ct.load(x, index=(place,), shape=(TILE,)) * factor
        ct.store(out, index=(place,), tile=ct.astype(tile, out.dtype))


def hints_of(config: Any) -> dict[str, int]:
    return {} if config.occupancy is None else {"occupancy": config.occupancy}


def tuned(
    x: Any, out: Any, factor: float = 2.0, *, space: Any = None, kernel: Any = None, stream: Any = 0
) -> Any:
    """The result of the search that a first call makes."""
    n = x.shape[0]
    return exhaustive_search(
        SPACE if space is None else space,
        stream,
        lambda config: (-(-n // config.TILE), 1, 1),
        scale_kernel if kernel is None else kernel,
        lambda config: (x, out, n, factor, config.TILE),
        hints_of,
        quiet=True,
    )


def launch(x: Any, out: Any, factor: float = 2.0, *, stream: Any = 0) -> Any:
    """Search, then launch as the winner says."""
    best = tuned(x, out, factor, stream=stream).best.config
    kernel = scale_kernel.replace_hints(**hints_of(best))
    ct.launch(stream, (-(-x.shape[0] // best.TILE), 1, 1), kernel, (x, out, x.shape[0], factor, best.TILE))
    return best


GENERATED = """@ct.kernel
def generated_kernel(x):
    ct.store(x, index=(0,), tile=ct.zeros((16,), x.dtype))
"""


def generated() -> Any:
    """A kernel of generated code, whose function has no module."""
    linecache.cache["<generated>"] = (len(GENERATED), None, GENERATED.splitlines(True), "<generated>")
    names = {"ct": ct}
    exec(compile(GENERATED, "<generated>", "exec"), names)
    return names["generated_kernel"]
