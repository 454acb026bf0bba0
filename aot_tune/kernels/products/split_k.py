"""A product whose sums over K several blocks share: each takes some steps, and others add up what they leave.

Where few rows and columns would leave most of a GPU idle. Blocks that add up start after all that multiply,
so that nobody waits for a block that has not begun. Nothing is released: cuTile would make each step of the
loop wait for its loads. So what a block leaves says of itself that it is there: the workspace is zero between
launches, and no number in it is stored as zero bits. Sums are taken in the order of K, whoever comes first.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import workspace
from aot_tune.declare.declaration import Close
from aot_tune.kernels.products.dense_space import left
from aot_tune.kernels.products.product import columns, multiply_add, rows_from, turned

_MINUS_ZERO = -(2**31)
"""The bits of float32's -0, which stands for 0."""

_NEVER_SO_MANY = 20
"""Elements that a block waits for are fewer than 2 to this power."""


def part_of_sum(
    a: Any, b: Any, m: Any, n: Any, part: Any, splits: Any, shape: Any, by_rows: Any, swapped: Any
) -> Any:
    """The float32 sums of a tile over the `part`-th of `splits` shares of K; transposed where `swapped`.

    The tile's first row is `m`, its columns are the `n`-th so many.
    Every part has two steps or more. Both stand before the loop: with one of them there, or none, in a branch
    of a kernel the compiler was seen to wait for each product before the next (tileiras 13.4, sm_90).
    """
    tile_m, tile_n, tile_k = shape
    steps = ct.cdiv(a.shape[1], tile_k)
    first, last = part * steps // splits, (part + 1) * steps // splits
    x = rows_from(a, m, first, tile_m, tile_k)
    y = columns(b, first, n, tile_k, tile_n, tile_n, by_rows, swapped)
    sums = multiply_add(x, y, turned(ct.zeros((tile_m, tile_n), ct.float32), swapped), swapped)
    x = rows_from(a, m, first + 1, tile_m, tile_k)
    y = columns(b, first + 1, n, tile_k, tile_n, tile_n, by_rows, swapped)
    sums = multiply_add(x, y, sums, swapped)
    for step in range(first + 2, last):
        x = rows_from(a, m, step, tile_m, tile_k)
        y = columns(b, step, n, tile_k, tile_n, tile_n, by_rows, swapped)
        sums = multiply_add(x, y, sums, swapped)
    return sums


def leave(scratch: Any, place: Any, sums: Any) -> None:
    """Store a part's float32 sums as the `place`-th of all, for those who add up.

    A weak store, through shared memory: a relaxed one takes registers from the products' loop, which then
    waits for each. It is the block's last.
    """
    bits = ct.bitcast(sums, ct.int32)
    bits = ct.where(bits == 0, _MINUS_ZERO, bits).reshape((sums.shape[0] * sums.shape[1],))
    ct.store(scratch, (place,), bits)


def slice_of_sum(scratch: Any, tile: Any, at: Any, splits: Any, slices: Any, shape: Any, swapped: Any) -> Any:
    """The `at`-th slice of a tile's whole sums, once all parts are there; what they left is zero again.

    Some rows of the sums, as they lie: of their transpose where `swapped`.
    """
    high, wide = shape[1] if swapped else shape[0], shape[0] if swapped else shape[1]
    size = high * wide // slices
    total, missing = ct.zeros((size,), ct.float32), 1
    while missing > 0:
        # Always 0, which the compiler cannot know: it would move a relaxed load of one place out of the loop
        # (tileiras 13.4).
        none = missing >> _NEVER_SO_MANY
        total, unseen = ct.zeros((size,), ct.float32), ct.zeros((size,), ct.int32)
        for part in ct.static_iter(range(splits)):
            bits = ct.load(
                scratch, ((tile * splits + part) * slices + at + none,), (size,), check_bounds=False,
                allow_tma=False, memory_order=ct.MemoryOrder.RELAXED, memory_scope=ct.MemoryScope.DEVICE,
            )  # fmt: skip
            unseen = unseen + ct.where(bits == 0, 1, 0)
            total = total + ct.bitcast(bits, ct.float32)
        missing = ct.sum(unseen)
    for part in ct.static_iter(range(splits)):
        place = (tile * splits + part) * slices + at
        ct.store(scratch, (place,), ct.zeros((size,), ct.int32), allow_tma=False)
    return total.reshape((high // slices, wide))


def index_of_slice(first: Any, n: Any, at: Any, slices: Any, tile: Any, swapped: Any) -> Any:
    """Where the `at`-th slice of a tile lies in the product, and the columns its index counts.

    The tile is of (rows, columns), its first row is `first`, its columns are the `n`-th so many.
    """
    tile_m, tile_n = tile
    if swapped:
        return first, n * slices + at, tile_n // slices
    return first + at * (tile_m // slices), n, tile_n


# The host's part --------------------------------------------------------------------------------


def scratch(a: torch.Tensor, columns: int) -> torch.Tensor:
    """What blocks leave their sums in: int32, zero between launches, large enough for every config.

    Args:
        a: (M, K), the left factor.
        columns: Of the right one.
    """
    rows, k = a.shape
    most = left(rows, k, columns)
    return workspace(a.device, 1, most).counters if most > 1 else _unused(a.device)


@cache
def _unused(device: torch.device) -> torch.Tensor:
    """What is passed where no config shares: neither read nor written, on whatever stream."""
    return workspace(device, 1, 1).counters


def nothing_left(scratch: torch.Tensor) -> Close:
    """The next launch finds it at zero."""
    return Close(value=torch.zeros_like(scratch), rtol=0.0, atol=0.0)
