"""Choose the few configs that serve all problems of a kernel. Pure: times in, configs out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from aot_tune.choose.points import Tiles, waves
from aot_tune.tuner.choose.times import SweepTimes, Times, is_tie
from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.plan.sizes import sizes_inside
from aot_tune.values.bucket import Axes
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

MOST = 8
"""Most configs of a portfolio. A live search has time for them, and a wheel has room for their cubins."""

MOST_WHEN_WORSE = 16
"""Most configs of a portfolio where `MOST` configs leave a regret above `WORST` at a problem."""

WORST = 0.03
"""A regret, t / t_best - 1, above which a portfolio may grow beyond `MOST`."""


def estimates_inside(times_at_edges: Times, axes: Axes, tiles: Tiles | None, sm_count: int) -> Times:
    """Estimate times at points inside buckets from the times at their edges, by waves.

    A config that wins at no edge may win inside a bucket: on the recorded sweep a portfolio chosen only at
    the edges leaves a regret of 2.4 % there in the geometric mean and 14 % at worst, and with these estimates
    0.7 % and 7 %. The estimates serve to choose the configs to measure and are never published.

    Returns:
        Problem inside a bucket to config to estimate, with no samples; empty for a kernel that declares no
        `tiles`.
    """
    if tiles is None:
        return {}
    estimates: dict[Problem, dict[Config, Measurement]] = {}
    for bucket, times in times_at_edges.items():
        for problem in sizes_inside(axes, bucket):
            estimates[problem] = {}
            for config, time in times.items():
                inside, at_edge = (waves(tiles(config, p), config, sm_count) for p in (problem, bucket))
                estimates[problem][config] = Measurement(
                    config=config,
                    mean_us=time.mean_us * inside / at_edge,
                    error_margin_us=time.error_margin_us * inside / at_edge,
                    num_samples=0,
                )
    return estimates


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
    """Choose configs that serve all problems in addition to the defaults, the most useful first.

    1. Up to `most` times, take the config that shortens the times most, in the sum of their logarithms over
       all problems. Only configs that shorten a time by more than the tie band are taken, so that there are
       few cubins.
    2. If a measured problem's regret is still above `worst` and more than a tie, take up to `most_when_worse`
       configs: each time the one that shortens such problems most, or without such a one the one that
       shortens any problem most. With a `start` the latter is left out: problems that are not swept may need
       the room.

    Args:
        times_at_edges: Measured times. Problems where the default has no time do not count.
        defaults: Problem to the default there.
        most: Most configs after the first step.
        worst: A regret, as a fraction.
        most_when_worse: Most configs after the second step.
        estimates: Times inside the buckets (`estimates_inside`), which only the first step reads.
        start: Configs to take in any case.
        least_gain: The least gain over the default with which a config counts, as a fraction.
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
    """Return the regret of a portfolio and the default at each problem, against all configs that count."""
    portfolio = list(portfolio)
    return [row.regret(portfolio) for row in _rows(times, defaults, least_gain)]


def clear_regrets(
    times: Times, defaults: Mapping[Problem, Config], portfolio: Iterable[Config], *, least_gain: float = 0.0
) -> list[float]:
    """Return the `regrets`, with 0 where the portfolio's time ties with the best."""
    portfolio = list(portfolio)
    return [row.clear_regret(portfolio) for row in _rows(times, defaults, least_gain)]


def crowded_out(sweep: SweepTimes, portfolio: Sequence[Config], *, whole: bool) -> tuple[str, ...]:
    """List the swept edges at which a full portfolio leaves a regret above `WORST`, one line each.

    Args:
        sweep: The kernel's times, the first pass at least.
        portfolio: The portfolio to be published.
        whole: Whether the whole kernel was swept; otherwise unswept entries may need its places.
    """
    if len(portfolio) < MOST_WHEN_WORSE:
        return ()
    advice = "" if whole else "; tune the whole kernel, which chooses its configs anew"
    lines = []
    for problem, times in sweep.edge_times().items():
        defaults = {problem: sweep.default(problem)}
        left = clear_regrets({problem: times}, defaults, portfolio, least_gain=sweep.least_gain)
        best = min(times, key=lambda config: times[config].mean_us)
        lines += [
            f"{problem}: {regret:.0%} slower than with {best}, which is not among the portfolio's "
            f"{len(portfolio)} configs{advice}"
            for regret in left
            if regret > WORST
        ]
    return tuple(lines)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One problem's times."""

    default: Measurement
    """The default's time."""

    others: Mapping[Config, Measurement]
    """The times of the configs that count."""

    best: Measurement
    """The shortest of these times."""

    def served(self, chosen: Iterable[Config]) -> Measurement:
        """Return the shortest time of some configs and the default."""
        times = [self.others[config] for config in chosen if config in self.others]
        return min([self.default, *times], key=_mean_us)

    def regret(self, chosen: Iterable[Config]) -> float:
        """Return the regret of some configs and the default."""
        return self.served(chosen).mean_us / self.best.mean_us - 1

    def clear_regret(self, chosen: Iterable[Config]) -> float:
        """Return the `regret`, 0 for a tie."""
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
    """Return the config that saves most time in total, and on some problem more than the tie band."""
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
