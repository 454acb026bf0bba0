"""Choose one config for every size of a batch, from the times of a table. Pure: uses no file or GPU.

Serving asks for it where a row's bits must not depend on the batch; what is compiled ahead holds it too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aot_tune.tables.states import in_worst_state
from aot_tune.tables.table import Entry, Table
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Axes, edge
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration

Refusal = Callable[[Config, Problem], "str | None"]
"""A function that says why a config may not run for a problem, or that a row's bits depend on the batch with
it; None where neither is so."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A config with what it costs over all measured sizes of a batch."""

    config: Config
    """The config."""

    regret: float
    """The worst t / t_best - 1 over the sizes at which it has a time; 0 where it has none."""

    worst_at: Mapping[str, int]
    """The size of that regret, by axis; empty where there is none."""

    sizes: int
    """The number of sizes that were measured."""

    untimed: int
    """The number of these at which it has no time, because it counted as unsuitable there."""


def without_batch(tunable: Declaration, problem: Problem) -> Problem:
    """A problem without its sizes on the batch axes: what the choice depends on."""
    return Problem({name: value for name, value in problem.items() if name not in tunable.batch_axes})


def other_axes(tunable: Declaration) -> Axes:
    """The axes that are not batch axes."""
    return {name: axis for name, axis in tunable.axes.items() if name not in tunable.batch_axes}


def every_batch(tunable: Declaration, problem: Problem) -> Iterator[Problem]:
    """The problem at every bucket of the batch axes, from the largest declared one down to 1."""
    largest = [max(edge(one.size(name)) for one in tunable.typical_problems) for name in tunable.batch_axes]
    sizes = ([1 << power for power in range(size.bit_length() - 1, -1, -1)] for size in largest)
    for values in itertools.product(*sizes):
        yield problem.replaced(**dict(zip(tunable.batch_axes, values, strict=True)))


def refused_somewhere(tunable: Declaration, problem: Problem, config: Config, refusal: Refusal) -> str | None:
    """Why a config cannot serve a problem at every size of its batch; None where it can.

    Args:
        tunable: The declaration.
        problem: The problem; the sizes of its batch do not count.
        config: The config.
        refusal: Why a config may not run for a problem, or is not the same for every batch.
    """
    for one in every_batch(tunable, problem):
        if reason := refusal(config, one):
            return f"{one}: {reason}"
    return None


def ranked(tunable: Declaration, arch: Arch, entries: Iterable[tuple[Entry, Table]]) -> tuple[Ranked, ...]:
    """The configs of some buckets' tables, those with the least worst regret first.

    A config that has no time at some sizes comes after those that have one at more of them. Ties keep the
    portfolio's order.

    Args:
        tunable: The declaration.
        arch: The tables' arch.
        entries: The buckets that differ in the batch alone, each with its table.
    """
    configs: dict[Config, None] = {}
    sizes: list[tuple[Problem, dict[Config, float]]] = []
    for entry, table in entries:
        configs.update(dict.fromkeys(table.portfolio))
        for point in map(in_worst_state, entry.points):
            problem = entry.bucket.replaced(**point.size)
            columns = (*table.portfolio, tunable.default_config(arch, problem))
            # Of a default that is in the portfolio too, the portfolio's time counts.
            times = {
                config: us
                for config, us in reversed([*zip(columns, point.us, strict=True)])
                if us is not None
            }
            sizes.append((problem, times))
    every = [_ranked(tunable.batch_axes, config, sizes) for config in configs]
    return tuple(sorted(every, key=lambda one: (one.untimed, round(one.regret, 9))))


def _ranked(
    axes: Sequence[str], config: Config, sizes: Sequence[tuple[Problem, Mapping[Config, float]]]
) -> Ranked:
    regrets = [
        (times[config] / min(times.values()) - 1, problem) for problem, times in sizes if config in times
    ]
    regret, worst = max(regrets, key=lambda one: one[0], default=(0.0, None))
    return Ranked(
        config=config,
        regret=regret,
        worst_at={} if worst is None else {name: worst.size(name) for name in axes},
        sizes=len(sizes),
        untimed=len(sizes) - len(regrets),
    )


def default_for_every_batch(
    tunable: Declaration, arch: Arch, problem: Problem, refusal: Refusal
) -> Config | None:
    """The default of the largest batch whose default may run at every size of it; None where none may."""
    defaults = (tunable.default_config(arch, one) for one in every_batch(tunable, problem))
    for config in dict.fromkeys(defaults):
        if refused_somewhere(tunable, problem, config, refusal) is None:
            return config
    return None
