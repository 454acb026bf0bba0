"""Judge configs by their times in several states of the GPU: the worst one counts. Pure.

Without states everything here says what the times alone say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from aot_tune.tables.states import State, judged
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.config import Config

LONG_US = 200.0
"""Kernels of this time or more, in microseconds, count as long. The times of shorter ones stay within 1 %
from run to run (H200), and timing them in turn under load separates them less well: a table of small products
made that way was 2 % slower."""

NEAR = 1.25
"""Configs that take at most this many times as long as the fastest are timed in the other states. In every
state measured so far, one that was further behind lost (H200)."""

MOST_CONTENDERS = 8
"""Most candidates that are timed in the other states, beside the default and the incumbent."""

StateTimes = Mapping[State, Mapping[Config, Measurement]]
"""A state to each config's time there; configs that were not timed there are missing."""


def states_beside(times: Mapping[Config, Measurement]) -> tuple[State, ...]:
    """The states in which a problem is timed beside the one in which these times were taken.

    Long kernels were timed under load, so that ``read`` is another state; short ones were timed in it.
    """
    fastest = min((time.mean_us for time in times.values()), default=0.0)
    return ("read", "written", "tight") if fastest >= LONG_US else ("written", "tight")


def contenders(
    times: Mapping[Config, Measurement], keep: Sequence[Config], *, most: int | None = None
) -> list[Config]:
    """The configs to time in the other states, the fastest first; none where there is no choice to make.

    Args:
        times: The times of one problem.
        keep: Configs that are among them however slow they are, where they have a time.
        most: Most configs besides; any number when None.
    """
    ranked = sorted(times, key=lambda config: times[config].mean_us)
    if not ranked:
        return []
    limit = NEAR * times[ranked[0]].mean_us
    near = [config for config in ranked if times[config].mean_us <= limit][:most]
    found = list(dict.fromkeys([*near, *(config for config in keep if config in times)]))
    return found if len(found) > 1 else []


def in_worst_state(times: Mapping[Config, Measurement], states: StateTimes) -> dict[Config, Measurement]:
    """Each config's time, lengthened until it is as far behind the fastest as in the config's worst state.

    The margin of error is that of its worst state, lengthened likewise. `aot_tune.tables.states.judged` says
    which config is the fastest of a state; the rule between measured sizes judges alike.
    """
    if not states or not times:
        return dict(times)
    runs = [times, *states.values()]
    worst = judged([[run[one].mean_us if one in run else None for one in times] for run in runs])
    found = {}
    for config, one in zip(times, worst, strict=True):
        assert one is not None  # each has a time in the first run
        us, run = one
        governing = runs[run][config]
        margin = governing.error_margin_us * us / governing.mean_us
        found[config] = replace(governing, mean_us=us, error_margin_us=margin)
    return found


def mean_ratio(config: Config, other: Config, runs: Sequence[Mapping[Config, Measurement]]) -> float:
    """The geometric mean of a config's times over those of another, over the runs that have both."""
    ratios = [run[config].mean_us / run[other].mean_us for run in runs if config in run and other in run]
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0
