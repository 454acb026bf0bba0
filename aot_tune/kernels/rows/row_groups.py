"""Rows that several blocks share: each holds a part of one, and learns what the others found in theirs.

Nothing is released: cuTile would join all that the block loaded before to it. What a block leaves says of
itself that it is there, since it is never all zero bits, in memory that is zero between launches.

The blocks of a row follow each other, and wait for each other alone. A GPU starts blocks in their order, as
CUB's look-back relies on too (cub/device/dispatch/dispatch_scan.cuh), so that the first row which is not done
has all its blocks running as long as the GPU holds as many. Knows no kernel.
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
"""The bits of float32's -0, which stands for 0."""

_NEVER_SO_MANY = 20
"""A block's threads are fewer than 2 to this power."""

_FEWEST_ROWS = 1024
"""Rows that `ints` suffice for: a graph of no more may be captured after any other call that shares rows of
as many columns, that of `aot_tune.prime` too, which launches few."""

MOST_LANES = 4096
"""Threads that share a row at most. Each leaves a number, of 4 bytes."""


def ints(rows: int, lanes: int) -> int:
    """Elements of `slots`, int32, for as many rows, each of which `lanes` threads share at most.

    Up to 16 KB a row, for 1024 rows or more. What was too small is kept for graphs that may use it: memory
    grows by doubling, so that all of it is less than the largest.
    """
    return max(edge(rows), _FEWEST_ROWS) * lanes


def fit(rows: int, lanes: int) -> bool:
    """Whether one workspace holds what the blocks of as many rows leave."""
    return ints(rows, lanes) < _TOO_MANY_INTS


def refusal(config: Config, arch: Arch, lanes: int) -> str | None:
    """Why blocks of a config should not share rows, whose `slots` are for as many threads a row; or None."""
    members = int(config["members"])
    if members * threads(config) > lanes:
        return f"{members} members of {threads(config)} threads have no slots; {lanes} threads of a row have"
    if config.hints.get("num_ctas", 1) > 1:
        return f"{members} members; each is a lone block"
    if edge(members) * _MOST_VALUES > threads(config):
        return f"{members} members of {threads(config)} threads, who have no number for each"
    if 2 * members > Device.reference(arch).sm_count:
        return f"{members} blocks that wait for each other are more than half a GPU"
    return None


_MOST_VALUES = 4
"""Numbers that a block tells the others."""

_TOO_MANY_INTS = 1 << 30
"""A workspace may be larger than what was asked for, and cuTile counts its elements in 32 bits."""


def parts(width: int, members: int, cols: int) -> tuple[int, int]:
    """Parts of `width` columns that a member holds, and how many, from the first, lie inside for all."""
    count = -(-cols // (width * members))
    return count, min(max(cols // width - (members - 1) * count, 0), count)


def check_all_run(kernel: str, config: Config, device: Device, members: int) -> None:
    """Refuse to let more blocks wait for each other than half of a GPU runs at once.

    More than all would wait for ever; so might as many of two launches, each with a part of the GPU.

    Raises:
        LaunchError: It says how to go on.
    """
    most = at_once(config, device) // 2
    if 1 < members > most:
        raise LaunchError(
            f"{kernel}: in {config} {members} blocks wait for each other, and half of this GPU of "
            f"{device.sm_count} multiprocessors runs {most} at once; tune {kernel} on it "
            f"(aot-tune tune {kernel}), which leaves such configs out"
        )


def fetch(slots: Any, row: Any, member: Any, members: Any, lanes: Any) -> None:
    """Bring what this block will read in `exchange` to the L2 cache, in a kernel, while it does other work.

    Zeros are added, which changes nothing whenever it is done.
    """
    relaxed, scope = ct.MemoryOrder.RELAXED, ct.MemoryScope.DEVICE
    place = (row * members + member) * lanes + ct.arange(lanes, dtype=ct.int32)
    nothing = ct.zeros((lanes,), ct.int32)
    ct.atomic_add(slots, place, nothing, check_bounds=False, memory_order=relaxed, memory_scope=scope)


def exchange(slots: Any, row: Any, member: Any, members: Any, lanes: Any, mine: Any) -> Any:
    """What all blocks of a row found, in a kernel; each calls it once.

    What a block loaded to make `mine` of it is read before any other block goes on; what it writes afterwards
    must depend on the answer, or it might be written before the others have read. Each block leaves as many
    numbers as it has threads, an equal share for each reader, who sets back to zero what it alone has read:
    nobody is the last, for whom others would wait.

    Args:
        slots: (`ints` of the rows or more,), int32, zero between launches.
        row: The block's.
        member: Which of its row's blocks it is.
        members: How many the row has, up to 32.
        lanes: Threads of a block, p times the numbers of `mine` or more; p is the power of two from `members`
            on. Of a smaller tile every warp might read its own copy, and warps that see different ones would
            leave the waiting loop apart.
        mine: (n,), float32, n a power of two: what this block found. A 0 may arrive as -0.

    Returns:
        (p, n), float32; zeros behind the members'.
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
    other = lane // each  # who reads what is left, and who left what is found
    if members < places:
        left = ct.where(other < members, left, 0)
    # Added to zeros, since cuTile has no relaxed store to places that do not follow each other.
    place = (row * members + ct.minimum(other, members - 1)) * lanes + member * each + lane % each
    ct.atomic_add(slots, place, left, check_bounds=False, memory_order=relaxed, memory_scope=scope)
    found, missing = ct.zeros((lanes,), ct.int32), 1
    while missing > 0:
        # Always 0, which the compiler cannot know: it would move a relaxed load of one place out of the loop
        # (tileiras 13.4), which then never ends, and acquiring ones would wait for each other.
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
    """Of maxima and sums of exponentials, the first two columns of `exchange`: the row's, each (1, 1)."""
    places = found.shape[0]
    tops, totals = found.extract((0, 0), (places, 1)), found.extract((0, 1), (places, 1))
    if members < places:
        there = ct.arange(places, dtype=ct.int32).reshape((places, 1)) < members
        tops = ct.where(there, tops, LOWEST)
    highest = ct.max(tops, axis=0, keepdims=True)
    return highest, ct.sum(totals * exponential(tops - highest), axis=0, keepdims=True)
