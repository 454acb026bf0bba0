"""Whether two arrays share memory. Pure: knows addresses, sizes and strides, and no tensor."""

from __future__ import annotations

from functools import lru_cache

_Runs = tuple[tuple[int, int], ...]
"""Stride in bytes and count, the largest stride first; the last run is of bytes that follow each other."""

_MOST_PARTS = 16
"""Parts of an array that are looked at where two have other strides; arrays as entangled are let pass."""


@lru_cache(maxsize=1024)  # of views of one projection the distance is the same at each call
def share(
    distance: int,
    shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int,
    other_shape: tuple[int, ...], other_strides: tuple[int, ...], other_item_bytes: int,
) -> bool:  # fmt: skip
    """Whether two arrays, neither of them empty, have a byte in common.

    Elements that lie between the other's are told from shared ones, as those of queries and keys of one
    projection.

    Args:
        distance: Bytes from the start of the one to the start of the other.
        shape: Of the one.
        strides: In elements.
        item_bytes: Of an element.
        other_shape: Of the other.
        other_strides: Likewise.
        other_item_bytes: Likewise.
    """
    one, other = _runs(shape, strides, item_bytes), _runs(other_shape, other_strides, other_item_bytes)
    return _meet(distance, one, other)


def _runs(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> _Runs:
    """An array's runs, those that follow each other without a gap joined to one."""
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
    """From the first byte to the last."""
    return 1 + sum(stride * (count - 1) for stride, count in runs)


def _meet(distance: int, one: _Runs, other: _Runs) -> bool:
    """Whether `other`, `distance` bytes behind `one`, shares a byte with it."""
    if distance < 0:
        return _meet(-distance, other, one)
    if distance >= _bytes(one):
        return False
    if distance == 0 or len(one) == 1:  # the other's first byte is one of this one's
        return True
    (stride, count), part = one[0], one[1:]
    if other[0][0] == stride and len(other) > 1:
        # Parts as far apart in both: two neighbours of the one are all that a part of the other can meet.
        before, within = divmod(distance, stride)
        behind = before + 1 < count and _meet(within - stride, part, other[1:])
        return behind or _meet(within, part, other[1:])
    if other[0][0] > stride:
        places = range(distance, _bytes(one), other[0][0])[: min(other[0][1], _MOST_PARTS)]
        return any(_meet(place, one, other[1:]) for place in places)
    first = max(0, -(-(distance - _bytes(part) + 1) // stride))
    last = min(count - 1, (distance + _bytes(other) - 1) // stride)
    return any(_meet(distance - i * stride, part, other) for i in range(first, last + 1)[:_MOST_PARTS])
