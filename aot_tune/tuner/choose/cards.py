"""Name cards of one model that disagree: one takes longer than another for the same default. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from aot_tune.tuner.outcome import Measurement

CLOCKS = 0.05
"""Clocks within their normal range change the time of a kernel by up to this fraction from minute to
minute."""


@dataclass(frozen=True, kw_only=True)
class DefaultTwice:
    """A problem's default, timed in two passes."""

    gpus: tuple[str, str]
    """The uuid of the GPU of each pass."""

    times: tuple[Measurement, Measurement]
    """The time in each pass."""


def disagreements(defaults: Iterable[DefaultTwice]) -> list[str]:
    """A line for each two cards whose times of the same defaults differ by more than the noise.

    The noise is what clocks and the error margins explain. The median over all problems counts that one
    measured in its first pass and the other in its second.
    """
    ratios: dict[tuple[str, str], list[float]] = {}
    noise: dict[tuple[str, str], list[float]] = {}
    for one in defaults:
        (first, second), (a, b) = one.gpus, one.times
        if first == second:
            continue
        pair = (first, second) if first < second else (second, first)
        ratio = a.mean_us / b.mean_us
        ratios.setdefault(pair, []).append(ratio if pair[0] == first else 1 / ratio)
        margins = a.error_margin_us / a.mean_us + b.error_margin_us / b.mean_us
        noise.setdefault(pair, []).append(max(CLOCKS, margins))
    lines = []
    for pair, found in sorted(ratios.items()):
        ratio = statistics.median(found)
        slower, faster = pair if ratio > 1 else pair[::-1]
        by = max(ratio, 1 / ratio)
        if by - 1 > statistics.median(noise[pair]):
            lines.append(
                f"{slower} takes {by:.2f} times as long as {faster} for the same defaults, by the median of "
                f"{len(found)}: look at its clocks and its cooling (nvidia-smi -q), or leave it out (--gpus)"
            )
    return lines
