"""Draw a library's first calls, unchanged and replayed from cubins, as an SVG of recorded figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from aot_tune.bench import records
from aot_tune.bench.sections import replay

FILE = ".github/first-call.svg"
"""Path of the picture in a checkout."""

_INK, _SLOW, _FAST = "#727b85", "#8c959f", "#2da44e"
"""Colours of text and of the two bars: each is readable on white and on black."""

_WIDTH, _LEFT, _RIGHT, _TOP = 760, 200, 70, 84
"""Width of the picture, and space to the left, to the right and above the bars, in pixels."""

_ROW, _BAR = 36, 12
"""Height of an operation and of a bar, in pixels."""


@dataclass(frozen=True, kw_only=True)
class FirstCalls:
    """First calls of a device's record."""

    device: str
    """Product name of the GPU."""

    ms: Mapping[str, tuple[float, float]]
    """Milliseconds unchanged and from cubins by operation that searches, the longest first."""

    def __str__(self) -> str:
        ranges = [
            f"{_time(min(column))} to {_time(max(column))}" for column in zip(*self.ms.values(), strict=True)
        ]
        return (
            f"First calls of {len(self.ms)} operations of TileGym: {ranges[0]} as the library comes, "
            f"{ranges[1]} replayed from cubins"
        )


def first_calls(folder: Path) -> FirstCalls | None:
    """Return each operation's first call, of the device with most operations; None without any."""
    by_device = [
        FirstCalls(device=device, ms=_ms({name: record.figures for name, record in recorded.items()}))
        for device, recorded in records.read(folder, "replay").items()
    ]
    most = max(by_device, key=lambda calls: len(calls.ms), default=None)
    return most if most is not None and most.ms else None


def _ms(recorded: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return milliseconds of the first shape, whose call also pays for a process's one-time work."""
    ms: dict[str, tuple[float, float]] = {}
    for name in replay.SHAPES:
        for shape in [*recorded.get(name, {}).get("shapes", {}).values()][:1]:
            if shape["searches"] and "cubins" in shape["first_ms"] and replay.COMPILED not in shape:
                ms[name] = shape["first_ms"]["bare"], shape["first_ms"]["cubins"]
    return dict(sorted(ms.items(), key=lambda item: -item[1][0]))


def svg(calls: FirstCalls) -> str:
    """Draw horizontal bars on a logarithmic scale that begins at 1 ms."""
    decades = max(1, math.ceil(math.log10(max(slow for slow, _ in calls.ms.values()))))
    bottom = _TOP + _ROW * len(calls.ms)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom + 50}" '
            f'viewBox="0 0 {_WIDTH} {bottom + 50}" role="img" font-size="12" fill="{_INK}" '
            'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
            f"<title>{escape(str(calls))}</title>",
            *_legend(),
            *_scale(decades, bottom),
            *(line for row, name in enumerate(calls.ms) for line in _bars(row, name, calls, decades)),
            _text(
                _LEFT,
                bottom + 40,
                f"{calls.device}, each at its first recorded shape; logarithmic scale",
                extra=' font-size="11"',
            ),
            "</svg>\n",
        ]
    )


def _legend() -> Iterator[str]:
    yield _text(
        16, 26, "The first call of TileGym's operations in a new process",
        extra=' font-size="16" font-weight="600"',
    )  # fmt: skip
    for x, colour, text in (
        (16, _SLOW, "as the library comes: it searches"),
        (260, _FAST, "replayed from cubins by aot_tune: no search, no compiler"),
    ):
        yield f'<rect x="{x}" y="42" width="12" height="12" rx="2" fill="{colour}"/>'
        yield _text(x + 18, 52, text)


def _scale(decades: int, bottom: int) -> Iterator[str]:
    for power in range(decades + 1):
        x = _x(10.0**power, decades)
        line = f'stroke="{_INK}" stroke-opacity="0.3"'
        yield f'<line x1="{x}" y1="{_TOP - 8}" x2="{x}" y2="{bottom}" {line}/>'
        tick = _time(10.0**power).replace(".0", "")
        yield _text(x, bottom + 18, tick, extra=' text-anchor="middle"')


def _bars(row: int, name: str, calls: FirstCalls, decades: int) -> Iterator[str]:
    top = _TOP + _ROW * row
    yield _text(_LEFT - 10, top + _BAR + 5, name, extra=' text-anchor="end"')
    for place, (ms, colour) in enumerate(zip(calls.ms[name], (_SLOW, _FAST), strict=True)):
        y, width = top + (_BAR + 2) * place, round(_x(ms, decades) - _LEFT, 1)
        yield f'<rect x="{_LEFT}" y="{y}" width="{width}" height="{_BAR}" rx="2" fill="{colour}"/>'
        yield _text(round(_LEFT + width + 6, 1), y + _BAR - 2, _time(ms))


def _x(ms: float, decades: int) -> float:
    return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * max(0.0, math.log10(ms)) / decades, 1)


def _text(x: float, y: float, text: str, *, extra: str = "") -> str:
    return f'<text x="{x}" y="{y}"{extra}>{escape(text)}</text>'


def _time(ms: float) -> str:
    """Format milliseconds with two digits, as seconds from one second on."""
    value, unit = (ms / 1000, "s") if ms >= 1000 else (ms, "ms")
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
