"""The few configs that serve all problems of a kernel. Pure: times in, configs out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from aot_tune.bucket import Axes
from aot_tune.config import Config
from aot_tune.problem import Problem
from aot_tune.rule import Tiles, sizes_inside, waves
from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.times import TIE, Times

MOST = 8
"""A portfolio's size: what a live search can afford, and what few cubins a wheel can carry."""

MOST_WHEN_WORSE = 16
"""Its size where `MOST` configs leave a problem further than `WORST` from its best."""

WORST = 0.03
"""A regret, t / t_best - 1, above which a portfolio may grow beyond `MOST`."""


def estimates_inside(times_at_edges: Times, axes: Axes, tiles: Tiles | None, sm_count: int) -> Times:
    """What the configs would take at the points inside the buckets, told from the edges by their waves.

    A config that wins nowhere at an edge may win inside: on the recorded sweep a portfolio chosen at the
    edges alone leaves 2.4 % there in the geometric mean and 14 % at worst, with these estimates 0.7 % and
    7 %. They choose what to measure, and are never published.

    Returns:
        Problem inside a bucket -> config -> estimate, of no samples; empty for a kernel that declares no
        tiles.
    """
    if tiles is None:
        return {}
    found: dict[Problem, dict[Config, Measurement]] = {}
    for bucket, times in times_at_edges.items():
        for problem in sizes_inside(axes, bucket):
            found[problem] = {
                config: Measurement(
                    config=config,
                    mean_us=time.mean_us
                    * waves(tiles(config, problem), config, sm_count)
                    / waves(tiles(config, bucket), config, sm_count),
                    error_margin_us=0.0,
                    num_samples=0,
                )
                for config, time in times.items()
            }
    return found


def choose_portfolio(
    times_at_edges: Times,
    defaults: Mapping[Problem, Config],
    *,
    most: int = MOST,
    worst: float = WORST,
    most_when_worse: int = MOST_WHEN_WORSE,
    estimates: Times | None = None,
    start: Sequence[Config] = (),
    least_gain: float = 0.0,
) -> tuple[Config, ...]:
    """Choose configs that serve all problems beside the defaults, the most useful first.

    1. Up to `most` times the config that shortens most, in the sum of the logarithms over all problems, of
       those that shorten one by more than the tie band; none is taken for less, so that cubins are few.
    2. While a measured problem stays further than `worst` from its best, up to `most_when_worse`, the config
       that shortens those problems most.

    Args:
        times_at_edges: Measured times. Problems where the default has none do not count.
        defaults: Problem to the default there.
        most: Size of the first step.
        worst: A regret as a fraction.
        most_when_worse: Size of the second step.
        estimates: Times inside the buckets (`estimates_inside`), which only the first step reads.
        start: Configs that are in it whatever they are worth.
        least_gain: How much faster than the default a config must be to count, as a fraction.
    """
    measured = _rows(times_at_edges, defaults, least_gain)
    every = [*measured, *_rows(estimates or {}, defaults, least_gain)]
    chosen = list(dict.fromkeys(start))
    while len(chosen) < most and (config := _most_useful(every, chosen)):
        chosen.append(config)
    while len(chosen) < most_when_worse:
        behind = [row for row in measured if row.regret(chosen) > worst]
        config = _most_useful(behind, chosen)
        if config is None:
            break
        chosen.append(config)
    return tuple(chosen)


def regrets(
    times: Times, defaults: Mapping[Problem, Config], portfolio: Iterable[Config], *, least_gain: float = 0.0
) -> list[float]:
    """What a portfolio and the default leave at each problem, t / t_best - 1 of all configs that count."""
    portfolio = list(portfolio)
    return [row.regret(portfolio) for row in _rows(times, defaults, least_gain)]


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One problem's times, microseconds."""

    default: float
    """The default's."""

    others: Mapping[Config, float]
    """Those of the configs that count."""

    best: float
    """The shortest of all."""

    def served(self, chosen: Iterable[Config]) -> float:
        """The time it takes with these configs and the default."""
        return min([self.default, *(self.others.get(config, math.inf) for config in chosen)])

    def regret(self, chosen: Iterable[Config]) -> float:
        """What these configs and the default leave."""
        return self.served(chosen) / self.best - 1


def _rows(times: Times, defaults: Mapping[Problem, Config], least_gain: float) -> list[_Row]:
    rows = []
    for problem, measured in times.items():
        default = measured.get(defaults[problem])
        if default is None:
            continue
        limit = default.mean_us / (1 + least_gain)
        others = {config: time.mean_us for config, time in measured.items() if time.mean_us <= limit}
        rows.append(
            _Row(default=default.mean_us, others=others, best=min([default.mean_us, *others.values()]))
        )
    return rows


def _most_useful(rows: Sequence[_Row], chosen: Sequence[Config]) -> Config | None:
    """The config that shortens these problems most in all and one of them by more than the tie band."""
    saved: dict[Config, float] = {}
    helps: set[Config] = set()
    for row in rows:
        now = row.served(chosen)
        for config, us in row.others.items():
            if us < now:
                saved[config] = saved.get(config, 0.0) + math.log(now / us)
                if now / us > 1 + TIE:
                    helps.add(config)
    # Equal savings: by name, so that the same times give the same portfolio.
    return min(helps, key=lambda config: (-round(saved[config], 9), str(config)), default=None)
