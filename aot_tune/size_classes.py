"""The sizes that stand for all of a bucket where a JIT signature is concerned. Pure.

What is compiled ahead and what is primed are told from here, so that they are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from aot_tune.bucket import Pow2, edge
from aot_tune.problem import Problem
from aot_tune.tunable import Tunable

MODULUS = 16
"""A size counts modulo this, and as a stride modulo 16 bytes, which is 16, 8, 4 or 2 elements."""

_BELOW_EDGE = (0, 8, 4, 2, 1)
"""Distances from an edge to sizes of every class. A size of 1 is its own edge."""


def representatives(tunable: Tunable, bucket: Problem) -> tuple[Problem, ...]:
    """Problems of one bucket, one for every class of sizes on its Pow2 axes; the edge first."""
    pow2 = [name for name, axis in tunable.axes.items() if isinstance(axis, Pow2)]
    choices = [_sizes(bucket.size(name)) for name in pow2]
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


def _sizes(size: int) -> tuple[int, ...]:
    top = edge(size)
    return tuple(top - below for below in _BELOW_EDGE if edge(top - below) == top and top > below)


def posed(args_of: Callable[[int], tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
    """The arguments of seed 0, and those of seed 1 where shapes differ: sizes that no axis names may.

    Args:
        args_of: `make_args` of one problem, by the seed.
    """
    given = {seed: args_of(seed) for seed in (0, 1)}
    shapes = [[tuple(arg.shape) for arg in args if hasattr(arg, "shape")] for args in given.values()]
    return given if shapes[0] != shapes[1] else {0: given[0]}
