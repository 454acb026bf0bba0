"""Report GPUs of one model whose times of the same defaults differ. Pure."""

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
    """List the pairs of GPUs whose times of the same defaults differ by more than the noise.

    The noise is the larger of the clocks' range and the error margins. The median counts, over all problems
    with one GPU in the first pass and the other in the second.
    """
    ratios: dict[tuple[str, str], list[float]] = {}
    noise: dict[tuple[str, str], list[float]] = {}
    for default in defaults:
        (first, second), (a, b) = default.gpus, default.times
        if first == second:
            continue
        pair = (first, second) if first < second else (second, first)
        ratio = a.mean_us / b.mean_us
        ratios.setdefault(pair, []).append(ratio if pair[0] == first else 1 / ratio)
        margins = a.error_margin_us / a.mean_us + b.error_margin_us / b.mean_us
        noise.setdefault(pair, []).append(max(CLOCKS, margins))
    lines = []
    for pair, of_pair in sorted(ratios.items()):
        ratio = statistics.median(of_pair)
        slower, faster = pair if ratio > 1 else pair[::-1]
        slowdown = max(ratio, 1 / ratio)
        if slowdown - 1 > statistics.median(noise[pair]):
            lines.append(
                f"{slower} takes {slowdown:.2f} times as long as {faster} for the same defaults, by the "
                f"median of {len(of_pair)}: check its clocks and its cooling (nvidia-smi -q), or leave it "
                "out (--gpus)"
            )
    return lines
