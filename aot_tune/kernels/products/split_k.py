"""Split the sums of a product over K (split-K): blocks sum over shares of K, others add up the shares.

It is for products whose few rows and columns would leave most of a GPU idle, and for a last wave that would.
Blocks that add up start after all blocks that multiply, so that no block waits for one that has not begun: a
GPU starts blocks by ascending index, the first axis of the grid fastest. Stores are relaxed, none is a
release: release-joins-loads (README). A number shows by itself that it has arrived: the workspace is zero
between launches, and no number is stored as zero bits. Shares are added in the order of K, whichever arrives
first.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import workspace
from aot_tune.declare.declaration import Close
from aot_tune.kernels.host.unused import unused_counters
from aot_tune.kernels.products.dense_space import WIDTH, left
from aot_tune.kernels.products.product import columns, multiply_add, rows_from, turned

_MINUS_ZERO = -(2**31)
"""Bits of float32's -0, stored in place of 0."""

_NEVER_SO_MANY = 20
"""Binary logarithm of a bound on the elements that a block waits for."""


def part_of_sum(
    a: Any, b: Any, m: Any, n: Any, part: Any, splits: Any, shape: Any, by_rows: Any, swapped: Any
) -> Any:
    """Sum a tile over the `part`-th of `splits` shares of K in float32; transposed if `swapped`.

    The tile's first row is `m`, its first column `n` * tile_n. Every part has two steps or more, and the
    first two are before the loop: spurious-wait (README).
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
    """Store the float32 sums of a part as the `place`-th of all, for the blocks that add up.

    The store is a weak one, through shared memory: a relaxed one takes registers from the loop of products,
    which then waits for each product. So would a vector of the sums do: flattened-store (README).
    It is the last store of the block.
    """
    bits = ct.bitcast(sums, ct.int32)
    bits = ct.where(bits == 0, _MINUS_ZERO, bits)
    across = scratch.shape[1] // sums.shape[1]
    ct.store(scratch, (place // across, place % across), bits)


def slice_of_sum(
    scratch: Any, tile: Any, at: Any, shares: Any, splits: Any, slices: Any, shape: Any, swapped: Any
) -> Any:
    """Wait for all parts of a tile and add up the `at`-th slice of its sums; then set what it read to zero.

    A slice is some rows of the sums, which are transposed if `swapped`. There are `shares` parts, of at most
    `splits`; in the place of one that is not there the last is read again, and not counted.
    """
    high, wide = shape[1] if swapped else shape[0], shape[0] if swapped else shape[1]
    slice_shape, across = (high // slices, wide), scratch.shape[1] // wide
    total, missing = ct.zeros(slice_shape, ct.float32), 1
    while missing > 0:
        # hoisted-load (README): always 0, which the compiler cannot know. A relaxed load of one fixed place
        # would leave the loop, which then never ends.
        none = missing >> _NEVER_SO_MANY
        total, unseen = ct.zeros(slice_shape, ct.float32), ct.zeros(slice_shape, ct.int32)
        for part in ct.static_iter(range(splits)):
            place = tile * shares + min(part, shares - 1)
            index = place // across * slices + at + none, place % across
            bits = ct.load(
                scratch, index, slice_shape, check_bounds=False, allow_tma=False,
                memory_order=ct.MemoryOrder.RELAXED, memory_scope=ct.MemoryScope.DEVICE,
            )  # fmt: skip
            unseen = unseen + ct.where(bits == 0, 1, 0)
            total = total + ct.where(part < shares, ct.bitcast(bits, ct.float32), 0.0)
        missing = ct.sum(unseen)
    for part in ct.static_iter(range(splits)):
        place = tile * shares + min(part, shares - 1)
        index = place // across * slices + at, place % across
        ct.store(scratch, index, ct.zeros(slice_shape, ct.int32), allow_tma=False)
    return total


def index_of_slice(first: Any, n: Any, at: Any, slices: Any, tile: Any, swapped: Any) -> Any:
    """Return the first row of a tile's `at`-th slice, its index along columns, and the columns of a unit.

    `tile` is (rows, columns); the tile's first row is `first`, its first column `n` * columns.
    """
    tile_m, tile_n = tile
    if swapped:
        return first, n * slices + at, tile_n // slices
    return first + at * (tile_m // slices), n, tile_n


# The host's part --------------------------------------------------------------------------------


def scratch(a: torch.Tensor, columns: int) -> torch.Tensor:
    """Return memory for the sums of blocks: int32, zero between launches, large enough for every config.

    Args:
        a: (M, K), the left factor.
        columns: Columns of the right factor.

    Returns:
        (n, `WIDTH`), int32.
    """
    rows, k = a.shape
    most = left(rows, k, columns)
    return _in_rows(workspace(a.device, 1, most).counters if most > 1 else unused_counters(a.device))


def _in_rows(counters: torch.Tensor) -> torch.Tensor:
    """View the counters of a workspace as (n, `WIDTH`); their number is a multiple of it."""
    # Of meta tensors each is made anew.
    return counters.view(-1, WIDTH) if counters.is_meta else _kept_in_rows(counters)


@cache
def _kept_in_rows(counters: torch.Tensor) -> torch.Tensor:
    """Keep the views: making one takes nearly as long as a launch; workspaces are few and never freed."""
    return counters.view(-1, WIDTH)


def nothing_left(scratch: torch.Tensor) -> Close:
    """Return the reference of `scratch` after a launch: the next launch must find zeros."""
    return Close(value=torch.zeros_like(scratch), rtol=0.0, atol=0.0)
