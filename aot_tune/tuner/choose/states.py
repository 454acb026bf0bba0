"""Judge configs by their times in several states of the GPU: the worst state counts. Pure.

Without other states the results are the times themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from aot_tune.tables.states import State, judged
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.config import Config

LONG_US = 200.0
"""Least time of a long kernel, microseconds. The times of shorter kernels stay within 1 % from run to run
(H200), and timing them in turn under load separates them less well: a table of small products made that way
was 2 % slower."""

NEAR = 1.25
"""Configs up to this multiple of the fastest time are timed in the other states. In every state measured so
far, a config that was further behind lost (H200)."""

MOST_CONTENDERS = 8
"""Most candidates timed in the other states, in addition to the default and the incumbent."""

StateTimes = Mapping[State, Mapping[Config, Measurement]]
"""State to the times of the configs that were timed in it."""


def other_states(times: Mapping[Config, Measurement]) -> tuple[State, ...]:
    """Return the states in which a problem is timed in addition to the state of these times.

    Long kernels were timed under load, so that ``read`` is another state; short kernels were timed in it.
    """
    fastest = min((time.mean_us for time in times.values()), default=0.0)
    return ("read", "written", "tight") if fastest >= LONG_US else ("written", "tight")


def contenders(
    times: Mapping[Config, Measurement], keep: Sequence[Config], *, most: int | None = None
) -> list[Config]:
    """Return the configs to time in the other states, fastest first; none where fewer than two would be.

    Args:
        times: The times of one problem.
        keep: Configs to include however slow they are, where they have a time.
        most: Most other configs; any number when None.
    """
    ranked = sorted(times, key=lambda config: times[config].mean_us)
    if not ranked:
        return []
    limit = NEAR * times[ranked[0]].mean_us
    near = [config for config in ranked if times[config].mean_us <= limit][:most]
    chosen = list(dict.fromkeys([*near, *(config for config in keep if config in times)]))
    return chosen if len(chosen) > 1 else []


def in_worst_state(times: Mapping[Config, Measurement], states: StateTimes) -> dict[Config, Measurement]:
    """Return each config's time, scaled to its slowdown in its worst state.

    The slowdown is relative to the fastest config of the state, which `aot_tune.tables.states.judged`
    defines; the rule between measured sizes uses the same. The margin of error is the margin in the worst
    state, scaled likewise.
    """
    if not states or not times:
        return dict(times)
    runs = [times, *states.values()]
    worst = judged([[run[config].mean_us if config in run else None for config in times] for run in runs])
    scaled = {}
    for config, judgement in zip(times, worst, strict=True):
        assert judgement is not None  # each has a time in the first run
        us, run = judgement
        governing = runs[run][config]
        margin = governing.error_margin_us * us / governing.mean_us
        scaled[config] = replace(governing, mean_us=us, error_margin_us=margin)
    return scaled


def mean_ratio(config: Config, other: Config, runs: Sequence[Mapping[Config, Measurement]]) -> float:
    """Return the geometric mean of two configs' time ratios, over the runs with both."""
    ratios = [run[config].mean_us / run[other].mean_us for run in runs if config in run and other in run]
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0
