"""What the blocks of a sequence tell each other in attention_decode, and the sum over their parts.

Nothing releases or acquires: a release would make each step of a block's loop wait for its loads. So what a
block leaves says of itself that it is there. The workspace is zero between launches, and no word that is left
is zero; who combines reads until none is, and sets back to zero what nobody else reads.

A word has a number of a result in its lower half, and in its upper half the log-sum that the number goes
with: they arrive together, and one load finds both. Loaded apart, one would wait for the other.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct

from aot_tune.kernels.decode.decode_workspace import MOST_APART

NOTHING = -1e30
"""The largest score of no keys: a number, so that its difference to itself is 0."""

_NEVER_SO_MANY = 20
"""Words that a block waits for are fewer than 2 to this power."""

_MINUS_ZERO = -(2**31)
"""The bits of -0.0, as int32."""

_LOWER = 2**32 - 1
"""The lower half of a word."""


_MOST_ASKED = 2048
"""Words of a row that a block holds through its loop: more drive others out of the registers. All 4096 of 32
query heads over a KV head of 128 would spill 224 bytes a thread on sm120."""


def asked_for(scratch: Any, words: Any) -> Any:
    """What this block's row of the workspace holds before anything is left there: zeros.

    Nobody needs them; but asked for first, the row is in the L2 cache. Else who looks for what is not there
    yet fetches it from memory, and sees only the next time what has come meanwhile. In sm90's table one
    sequence of 2048 keys, 32 heads over 8 of 128, went from 11.4 to 9.8 us with it, in the same config.

    Args:
        scratch: As `leave` has it.
        words: In a row; of a long one nothing is asked for.
    """
    if words > _MOST_ASKED:
        return 0
    return ct.load(
        scratch, (ct.bid(0), 0), (1, words), check_bounds=False, allow_tma=False,
        memory_order=ct.MemoryOrder.RELAXED, memory_scope=ct.MemoryScope.DEVICE,
    )  # fmt: skip


def leave(scratch: Any, result: Any, log2_sum: Any, zeros: Any) -> None:
    """Store what this block found, in its row of the workspace.

    Args:
        scratch: (blocks, dims * queries), int64.
        result: (dims, queries), float32.
        log2_sum: (1, queries), float32.
        zeros: What was `asked_for`; without a use of it the compiler would leave that out.
    """
    bits = ct.bitcast(result, ct.int32)
    lower = ct.where(bits == 0, _MINUS_ZERO, bits).astype(ct.int64) & _LOWER
    upper = ct.bitcast(ct.broadcast_to(log2_sum, result.shape), ct.int32).astype(ct.int64) << 32
    words = (upper | lower).reshape((1, result.shape[0] * result.shape[1])) | zeros
    order, scope = ct.MemoryOrder.RELAXED, ct.MemoryScope.DEVICE
    ct.store(scratch, (ct.bid(0), 0), words, allow_tma=False, memory_order=order, memory_scope=scope)


def combined(scratch: Any, first: Any, parts: Any, at: Any, splits: Any, width: Any) -> Any:
    """A slice of the result and of the log-sums of all keys, from what every part left of it.

    What is read is set back to zero: nobody else reads it.

    Args:
        scratch: As `leave` has it.
        first: The row of the first part; the others follow.
        parts: How many they are, up to `splits`.
        at: Which slice.
        splits: The most parts that there may be.
        width: Numbers of a slice.

    Returns:
        The result and the log2-sums, each (1, width), float32.
    """
    all_rows, missing = scratch.slice(0, first, first + splits), 1
    result, logs = ct.zeros((1, width), ct.float32), ct.zeros((1, width), ct.float32)
    while missing > 0:
        # Always 0, which the compiler cannot know: it would move a relaxed load of one place out of the loop
        # (tileiras 13.4), and acquiring ones would wait for each other.
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
    """How many words are missing, and of each number the largest log-sum, the weights' sum, and the sum.

    Each part is loaded for itself, so that a thread has the same numbers of all of them.
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
    """As `_apart`, of parts too many for the registers of a thread: threads share a number's.

    Summed at each turn of the loop: tiles that leave it lie so among the threads that their sums take four
    times as long.
    """
    there = ct.arange(splits, dtype=ct.int32).reshape((splits, 1)) < parts
    log2_sums, values, absent = _read(_words(rows, (0, at), (splits, width)), there)
    most = ct.maximum(ct.max(log2_sums, axis=0, keepdims=True), NOTHING)
    weights = ct.exp2(log2_sums - most)
    total, result = ct.sum(weights, axis=0, keepdims=True), ct.sum(values * weights, axis=0, keepdims=True)
    return ct.sum(absent), most, total, result


def _words(rows: Any, index: Any, shape: Any) -> Any:
    """What other blocks left; zeros where they have not yet."""
    return ct.load(
        rows, index, shape, check_bounds=False, allow_tma=False,
        memory_order=ct.MemoryOrder.RELAXED, memory_scope=ct.MemoryScope.DEVICE,
    )  # fmt: skip


def _read(words: Any, there: Any) -> Any:
    """The log-sums and numbers of words, of none where nobody is `there`; and 1 for each that is absent."""
    log2_sums = ct.bitcast((words >> 32).astype(ct.int32), ct.float32)
    values = ct.bitcast(words.astype(ct.int32), ct.float32)
    absent = ct.where(there & (words == 0), 1, 0)
    return ct.where(there, log2_sums, -math.inf), ct.where(there, values, 0.0), absent
