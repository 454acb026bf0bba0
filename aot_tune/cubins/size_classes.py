"""The sizes that stand for all of a bucket where a JIT signature is concerned. Pure.

What is compiled ahead and what is primed are told from here, so that they are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from aot_tune.declare.declaration import Declaration
from aot_tune.values.bucket import Pow2, edge
from aot_tune.values.problem import Problem

MODULUS = 16
"""A size counts modulo this, and as a stride modulo 16 bytes, which is 16, 8, 4 or 2 elements."""

ODD_SEED = 5
"""A seed of which `aot_tune.inputs.has_odd_sizes` is true."""

_BELOW_EDGE = (0, 8, 4, 2, 1)
"""Distances from an edge to sizes of every class. A size of 1 is its own edge."""


def representatives(
    tunable: Declaration, bucket: Problem, args_of: Callable[[Problem], Sequence[Any]] | None = None
) -> tuple[Problem, ...]:
    """Problems of one bucket, one for every class of sizes on its Pow2 axes; the edge first.

    A size of an argument may be a quotient of an axis, as the pages of a sequence are. It keeps its class on
    all sizes next to the edge, so that sizes farther below are there too: ever twice as far, of which those
    are kept whose arguments are laid out as at no size before.

    Args:
        tunable: The declaration.
        bucket: The bucket.
        args_of: A problem's arguments, shapes and strides alone; what `make_args` gives on device "meta".
    """
    args_of = args_of or (lambda problem: tunable.make_args(problem, "meta", 0))
    pow2 = [name for name, axis in tunable.axes.items() if isinstance(axis, Pow2)]
    at_edge = bucket.replaced(**{name: edge(bucket.size(name)) for name in pow2})
    choices = [_sizes(at_edge, name, args_of) for name in pow2]
    return tuple(
        bucket.replaced(**dict(zip(pow2, sizes, strict=True))) for sizes in itertools.product(*choices)
    )


def smaller_of_class(size: int) -> Iterator[int]:
    """Sizes below one that are of its class, ascending: the smallest first, then ever further apart."""
    value = size % MODULUS or MODULUS
    if value == 1:  # a size of 1 is a class of its own
        value += MODULUS
    step = MODULUS
    while value < size:
        yield value
        value += step
        step *= 2


def _sizes(at_edge: Problem, name: str, args_of: Callable[[Problem], Sequence[Any]]) -> tuple[int, ...]:
    """Sizes of one axis, the others at their edges."""
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
"""The power of two that the next distance from an edge is."""


def _layout(args: Sequence[Any]) -> Hashable:
    """Of each dimension what a signature tells of it."""
    return tuple(
        (
            tuple((size == 1, size % MODULUS == 0) for size in arg.shape),
            tuple((step == 1, step * arg.element_size() % MODULUS == 0) for step in arg.stride()),
        )
        for arg in args
        if hasattr(arg, "element_size")
    )


def posed(args_of: Callable[[int], tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
    """The arguments of seed 0, and of `ODD_SEED` where shapes differ: sizes that no axis names may.

    Args:
        args_of: `make_args` of one problem, by the seed.
    """
    given = {seed: args_of(seed) for seed in (0, ODD_SEED)}
    shapes = [[tuple(arg.shape) for arg in args if hasattr(arg, "shape")] for args in given.values()]
    return given if shapes[0] != shapes[1] else {0: given[0]}
