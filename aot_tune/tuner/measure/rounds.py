"""Several rounds of timing one config made into one figure, and whether finalists are told apart. Pure.

``exhaustive_search`` gives a plain mean of its samples, which one interrupted launch can move. So a finalist
is timed in rounds, each a search of its own, interleaved with the other finalists', and counts with the
median of its rounds' means. A round whose mean lies further than `OUTLIER` from that median is left out and
another one is run in its place.
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
"""Clean rounds each finalist has before an order is believed; a median of fewer is a mean."""

MOST_ROUNDS = 9
"""Rounds after which finalists that are still inside the noise are left as tied."""

OUTLIER = 0.10
"""A round further than this fraction from the median of the rounds is an outlier. Clocks that move within
their normal range change a time by 2-5 %; an interrupted launch among five samples changes the mean by far
more."""

RESOLUTION_US = 0.5
"""What GPU timing events resolve: a smaller difference from the median is never an outlier."""

TIED = 0.01
"""Once the noise is below this fraction, half of the tie band, more rounds cannot make two tied configs
differ."""

_DEVIATIONS, _OF_MEDIAN = 1.4826, 1.2533
"""Of a normal distribution: deviation over median distance; a median's deviation over a mean's."""

_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31)
"""Student's t, 97.5 %, for 2, 3, ... 9 rounds."""


_T = TypeVar("_T")


def in_turn(contenders: Sequence[_T], number: int) -> list[_T]:
    """The order of the `number`-th round, from 0: another one every two rounds, the second of them backwards.

    Backwards, so that what drifts meets all alike. Others, so that none always follows the same one, which
    leaves it the clocks that its power allowed: on an H200 that moved products by 5 %. The same each time.
    """
    order = list(contenders)
    if number > 1:
        random.Random(number // 2).shuffle(order)
    return order[::-1] if number % 2 else order


def usable(measurement: Measurement) -> bool:
    """Whether a time can be one: finite and above zero. An event timer that never ran gives others."""
    return (
        math.isfinite(measurement.mean_us)
        and measurement.mean_us > 0
        and math.isfinite(measurement.error_margin_us)
        and measurement.error_margin_us >= 0
        and measurement.num_samples > 0
    )


def from_samples(config: Config, us: Sequence[float]) -> Measurement:
    """Samples taken in turn with others': their median, and half of its 95 % interval.

    Told from the median of their distances to it: a launch that was interrupted moves neither.
    """
    middle = statistics.median(us)
    deviation = _DEVIATIONS * statistics.median(abs(one - middle) for one in us)
    margin = _student(len(us)) * _OF_MEDIAN * deviation / math.sqrt(len(us)) if len(us) > 1 else 0.0
    return Measurement(config=config, mean_us=middle, error_margin_us=margin, num_samples=len(us))


def clean(rounds: Sequence[Measurement]) -> list[Measurement]:
    """The rounds that are no outliers."""
    middle = statistics.median(one.mean_us for one in rounds)
    reach = max(OUTLIER * middle, RESOLUTION_US)
    return [one for one in rounds if abs(one.mean_us - middle) <= reach]


def combined(config: Config, rounds: Sequence[Measurement]) -> Measurement:
    """The median of the clean rounds' means, with the wider of two 95 % intervals.

    One interval is that of the rounds' means among each other, the other what each round tells of itself.
    """
    kept = clean(rounds) or list(rounds)
    means = [one.mean_us for one in kept]
    inside = math.sqrt(sum(one.error_margin_us**2 for one in kept)) / len(kept)
    between = 0.0
    if len(kept) > 1:
        between = _student(len(kept)) * statistics.stdev(means) / math.sqrt(len(kept))
    return Measurement(
        config=config,
        mean_us=statistics.median(means),
        error_margin_us=max(inside, between),
        num_samples=sum(one.num_samples for one in kept),
    )


def _student(count: int) -> float:
    return _STUDENT[min(count, len(_STUDENT) + 1) - 2]


def settled(rounds: Sequence[Sequence[Measurement]]) -> bool:
    """Whether each finalist has enough clean rounds, and is told apart from the fastest or tied with it.

    Args:
        rounds: Each finalist's rounds so far.
    """
    if any(len(clean(one)) < LEAST_ROUNDS for one in rounds):
        return False
    figures = sorted((combined(one[0].config, one) for one in rounds), key=lambda figure: figure.mean_us)
    fastest = figures[0]
    for other in figures[1:]:
        noise = fastest.error_margin_us + other.error_margin_us
        outside = other.mean_us - fastest.mean_us > noise
        if not outside and noise > TIED * fastest.mean_us:
            return False
    return True
