"""Tile code: exchange the results of a sequence's parts between blocks, and combine them. Imports no kernel.

Nothing releases or acquires: release-joins-loads (README). A word that a block has stored shows by itself
that it has arrived: the workspace is zero between launches, and no stored word is zero. A block that combines
reads until no word is zero, and sets to zero what no other block reads.

The lower half of a word is a number of a result, its upper half the log-sum of that result: both arrive
together, and one load reads both. Loaded apart, one load would wait for the other.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct

from aot_tune.kernels.decode.decode_workspace import MOST_APART

NOTHING = -1e30
"""Largest score where there are no keys. It is finite, so that its difference to itself is 0."""

_NEVER_SO_MANY = 20
"""Binary logarithm of a bound on the words that a block waits for."""

_MINUS_ZERO = -(2**31)
"""Bits of -0.0, as int32."""

_LOWER = 2**32 - 1
"""Lower half of a word."""


_MOST_ASKED = 2048
"""Words of a row that a block holds through its loop, at most: more would make it spill. All 4096 words of 32
query heads over a KV head of 128 would spill 224 bytes a thread on sm120."""


def asked_for(scratch: Any, words: Any) -> Any:
    """Load this block's row of the workspace before anything is stored there; it holds zeros.

    Nobody needs the zeros, but the load brings the row to the L2 cache. Otherwise the blocks that look for
    the words fetch them from memory, and see only at their next look what has arrived meanwhile. In sm90's
    table one sequence of 2048 keys, 32 heads over 8 of 128, went from 11.4 to 9.8 us with it, in the same
    config.

    Args:
        scratch: As for `leave`.
        words: Words of a row; a row of more than `_MOST_ASKED` is not loaded.

    Returns:
        The zeros, for `leave`.
    """
    if words > _MOST_ASKED:
        return 0
    return ct.load(
        scratch, (ct.bid(0), 0), (1, words), check_bounds=False, allow_tma=False,
        memory_order=ct.MemoryOrder.RELAXED, memory_scope=ct.MemoryScope.DEVICE,
    )  # fmt: skip


def leave(scratch: Any, result: Any, log2_sum: Any, zeros: Any) -> None:
    """Store the result of this block in its row of the workspace.

    Args:
        scratch: (blocks, dims * queries), int64.
        result: (dims, queries), float32.
        log2_sum: (1, queries), float32.
        zeros: The result of `asked_for`: dead-load (README).
    """
    bits = ct.bitcast(result, ct.int32)
    lower = ct.where(bits == 0, _MINUS_ZERO, bits).astype(ct.int64) & _LOWER
    upper = ct.bitcast(ct.broadcast_to(log2_sum, result.shape), ct.int32).astype(ct.int64) << 32
    words = (upper | lower).reshape((1, result.shape[0] * result.shape[1])) | zeros
    order, scope = ct.MemoryOrder.RELAXED, ct.MemoryScope.DEVICE
    ct.store(scratch, (ct.bid(0), 0), words, allow_tma=False, memory_order=order, memory_scope=scope)


def combined(scratch: Any, first: Any, parts: Any, at: Any, splits: Any, width: Any) -> Any:
    """Combine a slice of the result and of the log-sums over all keys from the results of all parts.

    Sets to zero what it has read, which no other block reads.

    Args:
        scratch: As for `leave`.
        first: The row of the first part; the others follow.
        parts: Number of parts, up to `splits`.
        at: Index of the slice.
        splits: Number of parts, at most.
        width: Numbers of a slice.

    Returns:
        The result and the log2-sums, each (1, width), float32.
    """
    all_rows, missing = scratch.slice(0, first, first + splits), 1
    result, logs = ct.zeros((1, width), ct.float32), ct.zeros((1, width), ct.float32)
    while missing > 0:
        # hoisted-load (README): always 0, which the compiler cannot know. A relaxed load of one fixed place
        # would leave the loop, which then never ends; acquiring loads would wait for each other.
        none = missing >> _NEVER_SO_MANY
        if splits > MOST_APART:
            missing, most, total, result = _together(all_rows, at + none, parts, splits, width)
        else:
            missing, most, total, result = _apart(all_rows, at + none, parts, splits, width)
        result, logs = result / ct.where(total > 0, total, 1.0), most + ct.log2(total)
    nothing = ct.zeros((splits, width), ct.int64)
    ct.store(scratch.slice(0, first, first + parts), (0, at), nothing, allow_tma=False)
    return result, logs


def _apart(rows: Any, at: Any, parts: Any, splits: Any, width: Any) -> Any:
    """Count the missing words; for each number find the largest log-sum, the sum of weights and the sum.

    Each part is loaded by itself, so that a thread has the same numbers of all parts.
    """
    words, missing = (), ct.zeros((1, width), ct.int32)
    for part in ct.static_iter(range(splits)):
        words = (*words, _words(rows, (part, at), (1, width)))  # type: ignore[assignment]  # grows while compiling
    found, most = (), ct.full((1, width), NOTHING, ct.float32)
    for part in ct.static_iter(range(splits)):
        log2_sums, values, absent = _read(words[part], part < parts)
        found = (*found, (log2_sums, values))  # type: ignore[assignment]
        most, missing = ct.maximum(most, log2_sums), missing + absent
    total, result = ct.zeros((1, width), ct.float32), ct.zeros((1, width), ct.float32)
    for part in ct.static_iter(range(splits)):
        log2_sums, values = found[part]
        weights = ct.exp2(log2_sums - most)
        total, result = total + weights, result + values * weights
    return ct.sum(missing), most, total, result


def _together(rows: Any, at: Any, parts: Any, splits: Any, width: Any) -> Any:
    """Like `_apart`, for more parts than fit the registers of a thread: threads share the parts of a number.

    The sums are taken in each turn of the loop: tiles that leave it are distributed over the threads such
    that their sums take four times as long.
    """
    there = ct.arange(splits, dtype=ct.int32).reshape((splits, 1)) < parts
    log2_sums, values, absent = _read(_words(rows, (0, at), (splits, width)), there)
    most = ct.maximum(ct.max(log2_sums, axis=0, keepdims=True), NOTHING)
    weights = ct.exp2(log2_sums - most)
    total, result = ct.sum(weights, axis=0, keepdims=True), ct.sum(values * weights, axis=0, keepdims=True)
    return ct.sum(absent), most, total, result


def _words(rows: Any, index: Any, shape: Any) -> Any:
    """Load words that other blocks store; those that have not arrived are zero."""
    return ct.load(
        rows, index, shape, check_bounds=False, allow_tma=False,
        memory_order=ct.MemoryOrder.RELAXED, memory_scope=ct.MemoryScope.DEVICE,
    )  # fmt: skip


def _read(words: Any, there: Any) -> Any:
    """Take words apart: log-sums, numbers, and 1 for each word that is missing, of parts that are `there`."""
    log2_sums = ct.bitcast((words >> 32).astype(ct.int32), ct.float32)
    values = ct.bitcast(words.astype(ct.int32), ct.float32)
    absent = ct.where(there & (words == 0), 1, 0)
    return ct.where(there, log2_sums, -math.inf), ct.where(there, values, 0.0), absent
