"""The few configs that serve all problems of a kernel. Pure: times in, configs out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from aot_tune.tables.rule import Tiles, waves
from aot_tune.tuner.choose.times import Sweep, Times, is_tie
from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.plan.sizes import sizes_inside
from aot_tune.values.bucket import Axes
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

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
            found[problem] = {}
            for config, time in times.items():
                here, there = (waves(tiles(config, p), config, sm_count) for p in (problem, bucket))
                found[problem][config] = Measurement(
                    config=config,
                    mean_us=time.mean_us * here / there,
                    error_margin_us=time.error_margin_us * here / there,
                    num_samples=0,
                )
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
    2. Where that leaves a measured problem further than `worst` from its best, beyond a tie, up to
       `most_when_worse`: the config that shortens such problems most; when none does any more, the one that
       shortens any most. The latter not beside a `start`: problems that are not here may need the room.

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
    if all(row.clear_regret(chosen) <= worst for row in measured):
        return tuple(chosen)
    while len(chosen) < most_when_worse:
        behind = [row for row in measured if row.clear_regret(chosen) > worst]
        config = _most_useful(behind, chosen) or (None if start else _most_useful(measured, chosen))
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


def clear_regrets(
    times: Times, defaults: Mapping[Problem, Config], portfolio: Iterable[Config], *, least_gain: float = 0.0
) -> list[float]:
    """As `regrets`, with 0 where the portfolio's time ties with the best: what is left beyond the noise."""
    portfolio = list(portfolio)
    return [row.clear_regret(portfolio) for row in _rows(times, defaults, least_gain)]


def crowded_out(sweep: Sweep, portfolio: Sequence[Config], *, whole: bool) -> tuple[str, ...]:
    """The swept edges that a full portfolio leaves further than `WORST` behind their best, a line each.

    Args:
        sweep: With its first pass.
        portfolio: What is to be published.
        whole: Whether all of the kernel was swept; else entries that were not may hold its places.
    """
    if len(portfolio) < MOST_WHEN_WORSE:
        return ()
    advice = "" if whole else "; tune the whole kernel, which chooses its configs anew"
    told = []
    for problem, times in sweep.edge_times().items():
        defaults = {problem: sweep.default(problem)}
        lags = clear_regrets({problem: times}, defaults, portfolio, least_gain=sweep.least_gain)
        best = min(times, key=lambda config: times[config].mean_us)
        told += [
            f"{problem}: {lag:.0%} slower than with {best}, which found no place among the portfolio's "
            f"{len(portfolio)}{advice}"
            for lag in lags
            if lag > WORST
        ]
    return tuple(told)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One problem's times."""

    default: Measurement
    """The default's."""

    others: Mapping[Config, Measurement]
    """Those of the configs that count."""

    best: Measurement
    """The shortest of all."""

    def served(self, chosen: Iterable[Config]) -> Measurement:
        """The time it takes with these configs and the default."""
        times = [self.others[config] for config in chosen if config in self.others]
        return min([self.default, *times], key=_mean_us)

    def regret(self, chosen: Iterable[Config]) -> float:
        """What these configs and the default leave."""
        return self.served(chosen).mean_us / self.best.mean_us - 1

    def clear_regret(self, chosen: Iterable[Config]) -> float:
        """As `regret`, with 0 for a tie."""
        return 0.0 if is_tie(self.served(chosen), self.best) else self.regret(chosen)


def _rows(times: Times, defaults: Mapping[Problem, Config], least_gain: float) -> list[_Row]:
    rows = []
    for problem, measured in times.items():
        default = measured.get(defaults[problem])
        if default is None:
            continue
        limit = default.mean_us / (1 + least_gain)
        others = {config: time for config, time in measured.items() if time.mean_us <= limit}
        best = min([default, *others.values()], key=_mean_us)
        rows.append(_Row(default=default, others=others, best=best))
    return rows


def _mean_us(time: Measurement) -> float:
    return time.mean_us


def _most_useful(rows: Sequence[_Row], chosen: Sequence[Config]) -> Config | None:
    """The config that shortens these problems most in all and one of them by more than the tie band."""
    saved: dict[Config, float] = {}
    helps: set[Config] = set()
    for row in rows:
        now = row.served(chosen)
        for config, time in row.others.items():
            if time.mean_us < now.mean_us:
                saved[config] = saved.get(config, 0.0) + math.log(now.mean_us / time.mean_us)
                if not is_tie(now, time):
                    helps.add(config)
    # Equal savings: by name, so that the same times give the same portfolio.
    return min(helps, key=lambda config: (-round(saved[config], 9), str(config)), default=None)
