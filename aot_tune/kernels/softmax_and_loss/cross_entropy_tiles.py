"""Tile code of cross_entropy: the loss of a row, and its gradient in place of the logits.

For its loss a row is read once, chunk by chunk. A gradient reads the same row again, unless several blocks
share it: together they hold the row in registers, exchange partial results, and each writes its part.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct

from aot_tune.kernels.rows.online_softmax import LOG2_E, LOWEST, exponential, maximum_and_sum
from aot_tune.kernels.rows.row_groups import exchange, fetch, highest_and_sum
from aot_tune.kernels.rows.rows import load_part, store_part

_NAN = math.nan

_LARGE = 2.0**20
"""Above this float16 has no finite number, and different bfloat16 numbers differ by 4096 or more."""


@ct.kernel
def cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits, target, loss, slots, ignore_index, grad_scale,
    chunk: ct.Constant[int], members: ct.Constant[int], parts: ct.Constant[int], inside: ct.Constant[int],
    ragged: ct.Constant[bool], lanes: ct.Constant[int], vector: ct.Constant[int], gradient: ct.Constant[bool],
):  # fmt: skip
    """Write the loss of each row and, if `gradient` is set, its gradient.

    With one block a row, `ragged` is whether its last chunk is partly empty. Several `members` of a row
    take its parts in turn: each holds `parts` of `chunk` columns, of which the first `inside` lie inside the
    row for every member.
    """
    if members > 1:
        row, member = ct.bid(0) // members, ct.bid(0) % members
        place, shape = (row, member, members), (chunk, parts, inside, lanes, gradient)
        _shared(logits, target, loss, slots, ignore_index, grad_scale, place, shape)
    else:
        shape = chunk, ragged, lanes, vector, gradient
        _alone(logits, ct.bid(0), target, loss, ignore_index, grad_scale, shape)


def _column(wanted: Any, cols: Any) -> Any:
    """Return the target's column, or -1 where it is not a column: that gives NaN and is never an address."""
    return ct.where((wanted >= 0) & (wanted < cols), wanted, -1).astype(ct.int32)


# A row that one block reads ---------------------------------------------------------------------


def _alone(logits: Any, row: Any, target: Any, loss: Any, ignored: Any, grad_scale: Any, shape: Any) -> None:
    chunk, ragged, lanes, vector, gradient = shape
    cols, chunks = logits.shape[1], logits.shape[1] // chunk
    wanted = ct.load(target, (row,), (1,), allow_tma=False)
    if wanted.item() == ignored:
        ct.store(loss, (row,), ct.zeros((1,), ct.float32), allow_tma=False)
        if gradient:
            nothing = ct.zeros((1, chunk), logits.dtype)
            for step in range(chunks):
                store_part(logits, (row, step), nothing, True)
            if ragged:
                store_part(logits, (row, chunks), nothing, False)
    else:
        top, total = maximum_and_sum(logits, row, chunk, ragged, lanes, vector)
        column = _column(wanted, cols)
        picked = ct.gather(logits, (row, column), padding_value=_NAN).astype(ct.float32)
        row_loss = ct.log(total).reshape((1,)) + (top.reshape((1,)) - picked)
        ct.store(loss, (row,), row_loss, allow_tma=False)
        if gradient:
            scale = ct.where(ct.isnan(row_loss), row_loss, grad_scale).reshape((1, 1))
            slope = top, scale / total, scale, column
            for step in range(chunks):
                _write_slopes(logits, row, step, chunk, slope, True)
            if ragged:
                _write_slopes(logits, row, chunks, chunk, slope, False)


def _write_slopes(logits: Any, row: Any, step: Any, chunk: Any, slope: Any, inside: Any) -> None:
    top, share, scale, column = slope
    part = load_part(logits, (row, step), (1, chunk), inside, ct.PaddingMode.NEG_INF).astype(ct.float32)
    part = exponential(part - top) * share
    here = (step * chunk + ct.arange(chunk, dtype=ct.int32) == column).reshape((1, chunk))
    store_part(logits, (row, step), ct.where(here, part - scale, part).astype(logits.dtype), inside)


# A row that several blocks hold -----------------------------------------------------------------


def _shared(
    logits: Any, target: Any, loss: Any, slots: Any, ignored: Any, grad_scale: Any, place: Any, shape: Any
) -> None:
    row, member, members = place
    width, parts, inside, lanes, gradient = shape
    # The slice begins at this block's first column, so that one address serves all its parts; an address of
    # its own would take each part two registers.
    own = logits.slice(1, member * width, logits.shape[1])
    wanted = ct.load(target, (row,), (1,), allow_tma=False)
    if wanted.item() == ignored:
        if member == 0:
            ct.store(loss, (row,), ct.zeros((1,), ct.float32), allow_tma=False)
        if gradient:
            for part in ct.static_iter(range(parts)):
                nothing = ct.zeros((1, width), logits.dtype)
                store_part(own, (row, part * members), nothing, part < inside)
    else:
        column = _column(wanted, logits.shape[1])
        picked = ct.gather(logits, (row, column), padding_value=_NAN)
        held = _loaded(own, row, members, shape)
        fetch(slots, row, member, members, lanes)
        top, total, exponentials = _top_and_sum(held, picked, width, parts)
        picked = picked.astype(ct.float32)
        # No block writes before all have answered, so that what each reads is still the logits.
        mine = ct.cat((top.reshape((1,)), total.reshape((1,))), 0)
        mine = ct.cat((mine, ct.cat((picked, picked), 0)), 0)
        found = exchange(slots, row, member, members, lanes, mine)
        highest, total = highest_and_sum(found, members)
        row_loss = ct.log(total) + (highest - found.extract((0, 2), (1, 1)))
        if member == 0:
            ct.store(loss, (row,), row_loss.reshape((1,)), allow_tma=False)
        if gradient:
            scale = ct.where(ct.isnan(row_loss), row_loss, grad_scale)
            share = scale / total
            # The gradient at the target. It is rounded here, as it stays in registers until all others are
            # written.
            slope = exponential(picked - highest.reshape((1,))) * share.reshape((1,)) - scale.reshape((1,))
            slope = slope.astype(logits.dtype)
            if logits.dtype == ct.float32:
                share = share * exponential(top - highest)
            else:
                factor, product, lost = _powers_of_two(highest)
                share = share * lost
            for part in ct.static_iter(range(parts)):
                if logits.dtype == ct.float32:
                    slopes = exponentials[part] * share
                else:
                    # No logit is above the highest. The compiler cannot know that, so it keeps the logits in
                    # 16 bits: with the same expression as before, it would keep their 32-bit conversions.
                    again = ct.minimum(held[part], highest.astype(logits.dtype))
                    slopes = ct.exp2(_less(again, factor, product), flush_to_zero=True) * share
                store_part(own, (row, part * members), slopes.astype(logits.dtype), part < inside)
            # Overwrites what the loop stored there: comparing each column would take longer. Whose column it
            # is, is found part by part: a division by `members` would take registers, and all hold logits.
            turn = column // width
            mine_too = turn == member
            for part in ct.static_iter(range(1, parts)):
                mine_too = mine_too | (turn == part * members + member)
            ct.scatter(logits, (row, column), slope, mask=mine_too & (column >= 0))


def _loaded(own: Any, row: Any, members: Any, shape: Any) -> Any:
    """Load the parts of a member, the checked one first: checked-load-branch (README)."""
    width, parts, inside, _, _ = shape
    held = ()
    for before in ct.static_iter(range(parts)):
        part = parts - 1 - before
        tile = load_part(own, (row, part * members), (1, width), part < inside, ct.PaddingMode.NEG_INF)
        held = (tile, *held)  # type: ignore[assignment]  # grows while compiling
    return held


def _top_and_sum(held: Any, picked: Any, width: Any, parts: Any) -> Any:
    """Return a member's maximum and sum of exponentials; for float32 also the exponentials.

    The picked logit, which is one of the row's, is part of the maximum too: so each warp has read it before
    any warp tells the other blocks that this one has read all. The maximum is never -inf, which would make
    NaN of a part that is all -inf or lies outside the row.
    """
    tops = held[parts - 1]  # begin with the checked part, or its load would be moved behind the others
    for before in ct.static_iter(range(1, parts)):
        tops = ct.maximum(tops, held[parts - 1 - before])
    tops = ct.maximum(tops, ct.broadcast_to(picked.reshape((1, 1)), (1, width)))
    top = ct.maximum(ct.max(tops, axis=1, keepdims=True).astype(ct.float32), LOWEST)
    total, exponentials = ct.zeros((1, width), ct.float32), ()
    if picked.dtype == ct.float32:
        for part in ct.static_iter(range(parts)):
            each = exponential(held[part] - top)
            total = total + each
            exponentials = (*exponentials, each)  # type: ignore[assignment]  # grows while compiling
        total = ct.sum(total, axis=1, keepdims=True)
    else:
        factor, product, lost = _powers_of_two(top)
        for part in ct.static_iter(range(parts)):
            total = total + ct.exp2(_less(held[part], factor, product), flush_to_zero=True)
        total = ct.sum(total, axis=1, keepdims=True) * lost
    return top, total, exponentials


# Exponentials of 16-bit logits ------------------------------------------------------------------


def _powers_of_two(top: Any) -> Any:
    """Return factor, product and correction: e^(x - top) is 2^`_less`(x, factor, product) * correction.

    This holds for each x up to `top`.
    `product` is rounded, but x * factor is not if the compiler fuses the multiplication with the subtraction:
    then all powers are wrong by the rounding of `product`, and the correction undoes that. Without fusion the
    correction is 1.

    The factor shrinks a large `top`, so that nothing is infinite: logits equal to `top` still give 1, and all
    others 0.
    """
    factor = LOG2_E * _LARGE / ct.maximum(ct.maximum(top, -top), _LARGE)
    product = top * factor
    # folded-difference (README): halves and doubles, or the compiler would see the same product twice and
    # take the difference to be 0.
    lost = _less(top * -0.5, factor * 2.0, -product)
    return factor, product, ct.exp2(lost, flush_to_zero=True)


def _less(x: Any, factor: Any, product: Any) -> Any:
    """Compute x * factor - product: one instruction a logit, where (x - top) * factor would take two."""
    return x.astype(ct.float32) * factor - product
