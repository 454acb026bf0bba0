"""A dense product with stages that can be left out, to find the stage that a slow state slows down.

The tile code is that of `aot_tune.kernels.products.product`, for configs without further columns or
rows whose sums are not shared. Only the variant ``whole`` computes the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import cuda.tile as ct

from aot_tune.kernels.products import product
from aot_tune.values.config import Config

EVERY, NEAR, ONCE = 0, 1, 2
"""Way to load an operand: each of its steps; the same four steps again and again; one step before the loop.
"""

_NEAR_STEPS = 4
"""Steps of an operand that is loaded near: few enough to stay in the L2 cache."""


class Variant(NamedTuple):
    """Stages of the product that are left out."""

    a: int = EVERY
    """Way to load A."""

    b: int = EVERY
    """Way to load B."""

    multiplies: int = 1
    """Whether the matrix units multiply; without it each step adds up its operands."""

    stores: int = 1
    """Whether tiles are stored."""

    apart: int = 0
    """Whether each block begins at another step of K, so that no two blocks read the same part of B at once.
    """


VARIANTS: Mapping[str, Variant] = {
    "whole": Variant(),
    "A near": Variant(a=NEAR),
    "B near": Variant(b=NEAR),
    "A and B near": Variant(a=NEAR, b=NEAR),
    "A once": Variant(a=ONCE),
    "B once": Variant(b=ONCE),
    "no loads": Variant(a=ONCE, b=ONCE),
    "no products": Variant(multiplies=0),
    "no stores": Variant(stores=0),
    "blocks apart": Variant(apart=1),
}
"""Variants by name. What is near comes from the L2 cache, and memory does not matter for it. Blocks that
are apart along K share nothing in the L2 cache: where that costs as much as a slow state does, the blocks
drift apart there."""


@ct.kernel
def staged_kernel(  # type: ignore[no-untyped-def]
    a, b, c,
    tile_m: ct.Constant[int], tile_n: ct.Constant[int], tile_k: ct.Constant[int], swapped: ct.Constant[int],
    group: ct.Constant[int], peeled: ct.Constant[int], by_rows: ct.Constant[int],
    from_a: ct.Constant[int], from_b: ct.Constant[int], multiplies: ct.Constant[int],
    stores: ct.Constant[int], apart: ct.Constant[int],
):  # fmt: skip
    """Compute every `num_blocks`-th tile of C as matmul and linear do, without the stages left out."""
    tiles_m, tiles_n = ct.cdiv(a.shape[0], tile_m), ct.cdiv(c.shape[1], tile_n)
    steps = ct.cdiv(a.shape[1], tile_k)
    for tile in range(ct.bid(0), tiles_m * tiles_n, ct.num_blocks(0)):
        m, n = product.place(tile, a.shape[0], tile_m, tiles_n, group)
        if peeled or from_a == ONCE:
            first_a = product.rows_from(a, m, 0, tile_m, tile_k)
        if peeled or from_b == ONCE:
            first_b = product.columns(b, 0, n, tile_k, tile_n, tile_n, by_rows, swapped)
        if peeled:
            zeros = product.turned(ct.zeros((tile_m, tile_n), ct.float32), swapped)
            sums = product.multiply_add(first_a, first_b, zeros, swapped)
        else:
            sums = product.turned(product.unknown_zeros((tile_m, tile_n), n), swapped)
        for step in range(peeled, steps):
            at = step
            if apart:
                at = (step + ct.bid(0)) % steps
            if from_a != ONCE:  # noqa: SIM108 - only this form is decided while compiling
                x = product.rows_from(a, m, _of(at, from_a), tile_m, tile_k)
            else:
                x = first_a
            if from_b != ONCE:
                y = product.columns(b, _of(at, from_b), n, tile_k, tile_n, tile_n, by_rows, swapped)
            else:
                y = first_b
            if multiplies:
                sums = product.multiply_add(x, y, sums, swapped)
            else:
                sums = sums + (ct.sum(x.astype(ct.float32)) + ct.sum(y.astype(ct.float32)))
        done = product.turned(sums.astype(c.dtype), swapped)
        if stores or n >= tiles_n:  # the latter never, which the compiler does not know
            product.store(c, m, n, done, tile_n)


def _of(step: Any, how: Any) -> Any:
    """Return the step to load in place of this one."""
    if how == NEAR:
        return step % _NEAR_STEPS
    return step


def takes(config: Config) -> bool:
    """Whether a config of the kernels matmul or linear has stages that can be left out here."""
    return config["more"] == 0 and config["splits"] == 1


def constants(config: Config, variant: Variant, *, by_rows: bool) -> tuple[int, ...]:
    """Return the constants that `staged_kernel` is launched with, in the order of its parameters.

    Args:
        config: A config that `takes` accepts.
        variant: What is left out.
        by_rows: Whether B is (N, K), as for linear; else (K, N), as for matmul.
    """
    names = ("tile_m", "tile_n", "tile_k", "swapped", "group", "peeled")
    return *(int(config[name]) for name in names), int(by_rows), *variant
