"""Decide whether two strided arrays share a byte. Pure: takes addresses, sizes and strides, not tensors."""

from __future__ import annotations

from functools import lru_cache

_Runs = tuple[tuple[int, int], ...]
"""An array as (stride in bytes, count) pairs, the largest stride first; the last pair is of single bytes."""

_MOST_PARTS = 16
"""Most parts of an array that are examined where the strides of both differ; if these are free, the rest is
taken to be free too."""


@lru_cache(maxsize=1024)  # views of one projection have the same distance at each call
def share(
    distance: int,
    shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int,
    other_shape: tuple[int, ...], other_strides: tuple[int, ...], other_item_bytes: int,
) -> bool:  # fmt: skip
    """Whether two arrays that are not empty share a byte.

    Arrays whose elements alternate in memory, as queries and keys of one projection do, have none.

    Args:
        distance: Bytes from the start of the first array to the start of the other.
        shape: Sizes of the first array.
        strides: Strides of the first array, in elements.
        item_bytes: Bytes of an element of the first array.
        other_shape: Sizes of the other array.
        other_strides: Strides of the other array, in elements.
        other_item_bytes: Bytes of an element of the other array.
    """
    one, other = _runs(shape, strides, item_bytes), _runs(other_shape, other_strides, other_item_bytes)
    return _meet(distance, one, other)


def _runs(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> _Runs:
    """Return the runs of an array; dimensions that follow each other without a gap are joined to one run."""
    dense = item_bytes
    runs: list[tuple[int, int]] = []
    for stride, count in sorted(
        (stride * item_bytes, size) for stride, size in zip(strides, shape, strict=True)
    ):
        if count == 1 or stride == 0:
            continue
        if stride <= dense and not runs:
            dense += (count - 1) * stride
        elif runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] * count)
        else:
            runs.append((stride, count))
    return (*reversed(runs), (1, dense))


def _bytes(runs: _Runs) -> int:
    """Count the bytes from the first to the last, both included."""
    return 1 + sum(stride * (count - 1) for stride, count in runs)


def _meet(distance: int, one: _Runs, other: _Runs) -> bool:
    """Whether `other`, `distance` bytes behind `one`, shares a byte with it."""
    if distance < 0:
        return _meet(-distance, other, one)
    if distance >= _bytes(one):
        return False
    if distance == 0 or len(one) == 1:  # the other array's first byte belongs to this one
        return True
    (stride, count), part = one[0], one[1:]
    if other[0][0] == stride and len(other) > 1:
        # Both strides are equal, so a part of the other can meet only two neighbouring parts of this one.
        before, within = divmod(distance, stride)
        behind = before + 1 < count and _meet(within - stride, part, other[1:])
        return behind or _meet(within, part, other[1:])
    if other[0][0] > stride:
        places = range(distance, _bytes(one), other[0][0])[: min(other[0][1], _MOST_PARTS)]
        return any(_meet(place, one, other[1:]) for place in places)
    first = max(0, -(-(distance - _bytes(part) + 1) // stride))
    last = min(count - 1, (distance + _bytes(other) - 1) // stride)
    return any(_meet(distance - i * stride, part, other) for i in range(first, last + 1)[:_MOST_PARTS])
