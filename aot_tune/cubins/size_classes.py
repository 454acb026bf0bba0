"""Choose a bucket's representative sizes, which have all JIT signatures of its sizes. Pure.

Compiling ahead and priming both use these sizes, so that they cover the same signatures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from aot_tune.declare.declaration import Declaration
from aot_tune.values.bucket import Pow2, edge
from aot_tune.values.parts import flat
from aot_tune.values.problem import Problem

MODULUS = 16
"""Divisor by which signatures distinguish sizes; strides by 16 bytes: 16, 8, 4 or 2 elements."""

ODD_SEED = 5
"""Seed for which `aot_tune.inputs.has_odd_sizes` is true."""

_BELOW_EDGE = (0, 8, 4, 2, 1)
"""Distances from an edge to sizes of every class. Size 1 is an edge itself."""


def representatives(
    tunable: Declaration, bucket: Problem, args_of: Callable[[Problem], Sequence[Any]] | None = None
) -> tuple[Problem, ...]:
    """Return problems of a bucket, one for every class of sizes on its Pow2 axes; the edge is first.

    An argument's size may be an axis divided by a number, like the pages of a sequence. Near the edge such a
    size does not change its class. So the sizes 16, 32, 64 and so on below the edge are tried too, and kept
    where their arguments have a new layout.

    Args:
        tunable: The declaration.
        bucket: The bucket.
        args_of: A function from a problem to its arguments; only shapes and strides are read. By default
            `make_args` on device "meta".
    """
    args_of = args_of or (lambda problem: tunable.make_args(problem, "meta", 0))
    pow2 = [name for name, axis in tunable.axes.items() if isinstance(axis, Pow2)]
    at_edge = bucket.replaced(**{name: edge(bucket.size(name)) for name in pow2})
    choices = [_sizes(at_edge, name, args_of) for name in pow2]
    return tuple(
        bucket.replaced(**dict(zip(pow2, sizes, strict=True))) for sizes in itertools.product(*choices)
    )


def smaller_of_class(size: int) -> Iterator[int]:
    """Yield smaller sizes of a size's class, ascending from the smallest in steps that double."""
    value = size % MODULUS or MODULUS
    if value == 1:  # the size 1 is a class of its own
        value += MODULUS
    step = MODULUS
    while value < size:
        yield value
        value += step
        step *= 2


def _sizes(at_edge: Problem, name: str, args_of: Callable[[Problem], Sequence[Any]]) -> tuple[int, ...]:
    """Return the representative sizes of one axis, with the other axes at their edges."""
    top = at_edge.size(name)
    near = [top - below for below in _BELOW_EDGE if edge(top - below) == top and top > below]
    far = [top - (1 << power) for power in range(_FARTHER, top.bit_length() - 2)]
    if not far:
        return tuple(near)
    laid_out = {_layout(args_of(at_edge.replaced(**{name: size}))) for size in near}
    for size in far:
        layout = _layout(args_of(at_edge.replaced(**{name: size})))
        if layout not in laid_out:
            laid_out.add(layout)
            near.append(size)
    return tuple(near)


_FARTHER = max(_BELOW_EDGE).bit_length()
"""Exponent of the next distance from an edge, which is a power of two."""


def _layout(args: Sequence[Any]) -> Hashable:
    """Return the properties of each dimension that a signature contains."""
    return tuple(
        (
            tuple((size == 1, size % MODULUS == 0) for size in arg.shape),
            tuple((step == 1, step * arg.element_size() % MODULUS == 0) for step in arg.stride()),
        )
        for arg in flat(args)
        if hasattr(arg, "element_size")
    )


def posed(args_of: Callable[[int], tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
    """Return a problem's arguments by seed: for seed 0, and for `ODD_SEED` where its shapes differ.

    Shapes differ where they have sizes that no axis names.

    Args:
        args_of: A function from a seed to the problem's arguments, by `make_args`.
    """
    given = {seed: args_of(seed) for seed in (0, ODD_SEED)}
    shapes = [[tuple(arg.shape) for arg in flat(args) if hasattr(arg, "shape")] for args in given.values()]
    return given if shapes[0] != shapes[1] else {0: given[0]}
