"""Time several ways to do the same thing against each other. Imports no kernel.

Every round times each of them once, in an order that changes from round to round, so that changes of the
clocks affect all of them alike (`aot_tune.tuner.measure.rounds.in_turn`). The median of the rounds counts.
`aot_tune.tuner.measure.worker.clock` describes how a round is timed on a GPU.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from aot_tune.inputs import named_dtype
from aot_tune.tuner.measure.rounds import in_turn

Call = Callable[[], object]

Round = Callable[[Sequence[Call]], Sequence[float]]
"""Function that runs each call once, in order, and returns the times in microseconds."""

WARM_UPS = 3
"""Runs of each call before any is timed."""

ROUNDS = 31
"""Most rounds of a contest."""

LEAST_ROUNDS = 5
"""Fewest rounds of a contest, however long its calls take."""

BUDGET_US = 400_000.0
"""Microseconds that the calls of one contest may take together: long calls need fewer rounds."""


def contest(calls: Mapping[str, Call], timed: Round, *, rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median microseconds of each call, timed in alternating rounds.

    Args:
        calls: Name to the call; each has run before.
        timed: Times one round.
        rounds: Most rounds; there are fewer where they would take longer than `BUDGET_US`.
    """
    names = list(calls)
    taken: dict[str, list[float]] = {name: [] for name in names}

    def once(order: Sequence[str]) -> None:
        for name, us in zip(order, timed([calls[name] for name in order]), strict=True):
            taken[name].append(us)

    once(names)
    affordable = math.floor(BUDGET_US / sum(us for [us] in taken.values()))
    for number in range(1, max(LEAST_ROUNDS, min(rounds, affordable))):
        once(in_turn(names, number))
    return {name: statistics.median(us) for name, us in taken.items()}


def ceilings(timed: Round, dtypes: Iterable[str]) -> dict[str, float]:
    """Measure what this GPU reaches now: the bandwidth of a copy, and the rate of dense products.

    Args:
        timed: Times one round.
        dtypes: Dtypes of the products' operands.

    Returns:
        Under ``copy`` the bytes read and written per second while copying 1 GiB. Under each dtype the
        operations per second of an 8192 x 8192 x 8192 product by cuBLAS.
    """
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    work = {"copy": 2.0 * source.nbytes, **dict.fromkeys(dtypes, 2.0 * _SIDE**3)}
    calls = {name: _product(named_dtype(name)) for name in work if name != "copy"}
    calls["copy"] = lambda: target.copy_(source)
    for call in calls.values():
        for _ in range(WARM_UPS):
            call()
    return {name: work[name] / us * 1e6 for name, us in contest(calls, timed).items()}


_SIDE = 8192
"""Rows and columns of the matrices of `ceilings`."""


def _product(dtype: torch.dtype) -> Call:
    """Make a square product by cuBLAS; float32 in torch's set precision, fp8 with one scale."""
    a, b = (torch.randn((_SIDE, _SIDE), device="cuda").mul_(0.02).to(dtype) for _ in range(2))
    if dtype.itemsize == 1:
        one = torch.ones((), device="cuda")
        return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return lambda: a @ b
