"""Let several blocks share a row: each holds a part and exchanges partial results with the others.

Stores are relaxed, none is a release: release-joins-loads (README). A number that a block has stored shows by
itself that it has arrived: it is never all zero bits, and the memory is zero between launches.

The blocks of a row have consecutive indices and wait only for each other. A GPU starts blocks in the order of
their indices, on which CUB's look-back relies too (cub/device/dispatch/dispatch_scan.cuh). So all blocks of
the first unfinished row are running, if the GPU holds that many blocks at once. Imports no kernel.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from aot_tune.errors import LaunchError
from aot_tune.kernels.rows.online_softmax import LOWEST, exponential
from aot_tune.kernels.rows.rows import at_once, threads
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import edge
from aot_tune.values.config import Config
from aot_tune.values.device import Device

_MINUS_ZERO = -(2**31)
"""Bits of float32's -0, stored in place of 0."""

_NEVER_SO_MANY = 20
"""Binary logarithm of a bound on the threads of a block."""

_FEWEST_ROWS = 1024
"""Rows that a workspace holds at least. After any call that shares rows of the same width, that of
`aot_tune.prime` included, which launches few rows, a CUDA graph of up to this many rows can be captured."""

MOST_LANES = 4096
"""Threads that share a row, at most. Each stores a number of 4 bytes."""


def ints(rows: int, lanes: int) -> int:
    """Return the size of `slots`, in int32 elements, for this many rows of at most `lanes` threads each.

    That is up to 16 KB a row, for at least 1024 rows. A workspace that has become too small is kept, since a
    graph may use it. Sizes double, so all smaller workspaces together are smaller than the largest one.
    """
    return max(edge(rows), _FEWEST_ROWS) * lanes


def fit(rows: int, lanes: int) -> bool:
    """Whether one workspace holds what the blocks of this many rows store for each other."""
    return ints(rows, lanes) < _TOO_MANY_INTS


def refusal(config: Config, arch: Arch, lanes: int) -> str | None:
    """Return why a config's blocks should not share rows, with `slots` for `lanes` threads a row; or None."""
    members = int(config["members"])
    if members * threads(config) > lanes:
        return (
            f"{members} members of {threads(config)} threads share a row; its slots are for {lanes} threads"
        )
    if config.hints.get("num_ctas", 1) > 1:
        return f"{members} members share a row; each must be a single block, with num_ctas 1"
    if edge(members) * _MOST_VALUES > threads(config):
        return f"{threads(config)} threads of a block are too few to store numbers for {members} members"
    if 2 * members > Device.reference(arch).sm_count:
        return f"{members} blocks that wait for each other are more than half a GPU"
    return None


_MOST_VALUES = 4
"""Most numbers that a block sends to each other block."""

_TOO_MANY_INTS = 1 << 30
"""A workspace has fewer elements than this: it may become twice as large as the request, and cuTile counts
elements in 32 bits."""


def parts(width: int, members: int, cols: int) -> tuple[int, int]:
    """Count a member's parts of `width` columns, and how many, from the first, lie inside for all."""
    count = -(-cols // (width * members))
    return count, min(max(cols // width - (members - 1) * count, 0), count)


def check_all_run(kernel: str, config: Config, device: Device, members: int) -> None:
    """Refuse a launch whose blocks wait for more blocks than half of the GPU runs at once.

    If the GPU could not run all of them, they would wait for ever; half of it leaves room for a second launch
    of this kind on another stream.

    Raises:
        LaunchError: The message names the config and advises to tune the kernel on this GPU.
    """
    most = at_once(config, device) // 2
    if 1 < members > most:
        raise LaunchError(
            f"{kernel}: in {config} {members} blocks wait for each other, and half of this GPU of "
            f"{device.sm_count} multiprocessors runs {most} at once; tune {kernel} on it "
            f"(aot-tune tune {kernel}), which leaves such configs out"
        )


def fetch(slots: Any, row: Any, member: Any, members: Any, lanes: Any) -> None:
    """Prefetch the input of `exchange` to the L2 cache while the block does other work. For kernels.

    It adds zeros, which changes nothing at whatever time it happens.
    """
    relaxed, scope = ct.MemoryOrder.RELAXED, ct.MemoryScope.DEVICE
    place = (row * members + member) * lanes + ct.arange(lanes, dtype=ct.int32)
    nothing = ct.zeros((lanes,), ct.int32)
    ct.atomic_add(slots, place, nothing, check_bounds=False, memory_order=relaxed, memory_scope=scope)


def exchange(slots: Any, row: Any, member: Any, members: Any, lanes: Any, mine: Any) -> Any:
    """Exchange the partial results of a row's blocks. For kernels; each block calls it once.

    What a block loaded to compute `mine` has been read before any other block goes on. What it writes
    afterwards must depend on the answer, or it might be written before the other blocks have read. Each block
    stores as many numbers as it has threads, an equal share for each reader, and a reader sets to zero what
    it alone has read. So no block has to be the last one, for which others would wait.

    Args:
        slots: (n,), int32, n being at least `ints` of the rows; zero between launches.
        row: Row of this block.
        member: Index of this block among the blocks of its row.
        members: Blocks of the row, up to 32.
        lanes: Threads of a block, at least p times the numbers of `mine`, p being `members` rounded up to a
            power of two. With fewer, each warp might read a copy of its own, and warps that see different
            numbers would leave the waiting loop at different times.
        mine: (n,), float32, n a power of two: the partial results of this block. A 0 may arrive as -0.

    Returns:
        (p, n), float32: the results of all members, then zeros.
    """
    relaxed, scope = ct.MemoryOrder.RELAXED, ct.MemoryScope.DEVICE
    places = 2
    if members > 2:
        places = 4
    if members > 4:
        places = 8
    if members > 8:
        places = 16
    if members > 16:
        places = 32
    values, each = mine.shape[0], lanes // places
    bits = ct.bitcast(mine, ct.int32)
    bits = ct.where(bits == 0, _MINUS_ZERO, bits)
    lane = ct.arange(lanes, dtype=ct.int32)
    left = ct.zeros((lanes,), ct.int32)
    for value in ct.static_iter(range(values)):
        left = ct.where((lane & (values - 1)) == value, bits.extract((value,), (1,)), left)
    other = lane // each  # the member that reads what this lane stores, and that stored what it reads
    if members < places:
        left = ct.where(other < members, left, 0)
    # Added to zeros, since cuTile has no relaxed store to scattered places.
    place = (row * members + ct.minimum(other, members - 1)) * lanes + member * each + lane % each
    ct.atomic_add(slots, place, left, check_bounds=False, memory_order=relaxed, memory_scope=scope)
    found, missing = ct.zeros((lanes,), ct.int32), 1
    while missing > 0:
        # hoisted-load (README): always 0, which the compiler cannot know. A relaxed load of one fixed place
        # would leave the loop, which then never ends; acquiring loads would wait for each other.
        none = missing >> _NEVER_SO_MANY
        found = ct.load(
            slots, (row * members + member + none,), (lanes,),
            check_bounds=False, allow_tma=False, memory_order=relaxed, memory_scope=scope,
        )  # fmt: skip
        missing = ct.sum(ct.where((found == 0) & (other < members), 1, 0))
    nothing = ct.zeros((lanes,), ct.int32)
    ct.store(slots, (row * members + member,), nothing, check_bounds=False, allow_tma=False)
    all_of_them = found.reshape((places, each // values, values)).extract((0, 0, 0), (places, 1, values))
    return ct.bitcast(all_of_them.reshape((places, values)), ct.float32)


def highest_and_sum(found: Any, members: Any) -> Any:
    """Combine the row's maximum and sum of exponentials, each (1, 1), from its blocks' columns of `found`."""
    places = found.shape[0]
    tops, totals = found.extract((0, 0), (places, 1)), found.extract((0, 1), (places, 1))
    if members < places:
        there = ct.arange(places, dtype=ct.int32).reshape((places, 1)) < members
        tops = ct.where(there, tops, LOWEST)
    highest = ct.max(tops, axis=0, keepdims=True)
    return highest, ct.sum(totals * exponential(tops - highest), axis=0, keepdims=True)
