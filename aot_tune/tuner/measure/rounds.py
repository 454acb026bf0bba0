"""Combine rounds of timing into one time, and decide when rounds suffice. Pure.

``exhaustive_search`` returns the plain mean of its samples, which one interrupted launch can move. So a
finalist is timed in rounds. Each round is a search of its own, interleaved with those of the other finalists,
and the median of the rounds' means counts. A round whose mean is further than `OUTLIER` from that median is
left out, and another round is run in its place.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import TypeVar

from aot_tune.tuner.outcome import Measurement
from aot_tune.values.config import Config

LEAST_ROUNDS = 3
"""Least clean rounds of each finalist. The median of fewer would be a mean."""

MOST_ROUNDS = 9
"""Most rounds. Finalists that are still inside the noise then are left as tied."""

OUTLIER = 0.10
"""Largest distance of a round's mean from the rounds' median, as a fraction; beyond it lies an outlier.

Clocks within their normal range change a time by 2 to 5 %; an interrupted launch among five samples changes
the mean by far more.
"""

RESOLUTION_US = 0.5
"""Resolution of GPU timing events, microseconds. A smaller difference from the median is never an outlier."""

SHORTEST_US = 0.1
"""Shortest time that a launch can take, microseconds: an empty grid takes ten times as long."""

TIED = 0.01
"""Noise below this fraction of the fastest time ends the finals.

It is half of the tie band, and further rounds cannot separate two tied configs.
"""

_DEVIATION_PER_MEDIAN_DISTANCE = 1.4826
"""The standard deviation of a normal distribution divided by the median distance from its median."""

_MEDIAN_ERROR_PER_MEAN_ERROR = 1.2533
"""The standard error of a median divided by that of a mean, for normally distributed samples."""

_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31)
"""The 97.5 % quantile of Student's t distribution for 2, 3, ... 9 samples."""


_T = TypeVar("_T")


def in_turn(contenders: Sequence[_T], number: int) -> list[_T]:
    """Return the order of round `number`, from 0.

    The order is new every two rounds, and every second round runs backwards, so that a drift affects all
    contenders alike. New orders, so that no contender always follows the same other: the power of a
    contender determines the clocks of the next, which changed products by 5 % on an H200. The orders are the
    same in each run.
    """
    order = list(contenders)
    if number > 1:
        random.Random(number // 2).shuffle(order)
    return order[::-1] if number % 2 else order


def usable(measurement: Measurement) -> bool:
    """Return whether a time is finite and as long as a launch. Lost events give other values."""
    return (
        math.isfinite(measurement.mean_us)
        and measurement.mean_us >= SHORTEST_US
        and math.isfinite(measurement.error_margin_us)
        and measurement.error_margin_us >= 0
        and measurement.num_samples > 0
    )


def from_samples(config: Config, us: Sequence[float]) -> Measurement:
    """Combine samples that were taken in turn: their median, and half of its 95 % interval.

    The interval is derived from the median of the samples' distances to their median, so that an interrupted
    launch changes neither.
    """
    middle = statistics.median(us)
    deviation = _DEVIATION_PER_MEDIAN_DISTANCE * statistics.median(abs(sample - middle) for sample in us)
    margin = 0.0
    if len(us) > 1:
        margin = _student(len(us)) * _MEDIAN_ERROR_PER_MEAN_ERROR * deviation / math.sqrt(len(us))
    return Measurement(config=config, mean_us=middle, error_margin_us=margin, num_samples=len(us))


def clean(rounds: Sequence[Measurement]) -> list[Measurement]:
    """Return the rounds that are not outliers."""
    middle = statistics.median(timing.mean_us for timing in rounds)
    reach = max(OUTLIER * middle, RESOLUTION_US)
    return [timing for timing in rounds if abs(timing.mean_us - middle) <= reach]


def combined(config: Config, rounds: Sequence[Measurement]) -> Measurement:
    """Return the median of the clean rounds' means, with the wider of two 95 % intervals.

    One interval follows from the spread of the rounds' means, the other from the intervals of the rounds.
    """
    kept = clean(rounds) or list(rounds)
    means = [timing.mean_us for timing in kept]
    inside = math.sqrt(sum(timing.error_margin_us**2 for timing in kept)) / len(kept)
    between = 0.0
    if len(kept) > 1:
        between = _student(len(kept)) * statistics.stdev(means) / math.sqrt(len(kept))
    return Measurement(
        config=config,
        mean_us=statistics.median(means),
        error_margin_us=max(inside, between),
        num_samples=sum(timing.num_samples for timing in kept),
        disturbed=next((timing.disturbed for timing in kept if timing.disturbed), None),
    )


def _student(count: int) -> float:
    return _STUDENT[min(count, len(_STUDENT) + 1) - 2]


def settled(rounds: Sequence[Sequence[Measurement]]) -> bool:
    """Return whether no finalist needs a further round.

    Each must have enough clean rounds, and be clearly slower than the fastest or tied with it.

    Args:
        rounds: Each finalist's rounds so far.
    """
    if any(len(clean(timings)) < LEAST_ROUNDS for timings in rounds):
        return False
    times = sorted(
        (combined(timings[0].config, timings) for timings in rounds), key=lambda time: time.mean_us
    )
    fastest = times[0]
    for slower in times[1:]:
        noise = fastest.error_margin_us + slower.error_margin_us
        outside = slower.mean_us - fastest.mean_us > noise
        if not outside and noise > TIED * fastest.mean_us:
            return False
    return True
