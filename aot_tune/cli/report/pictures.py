"""Draw tables as SVG: grids of buckets, and a curve. Pure: knows nothing of files and kernels.

Colours run from orange over white to blue, which red-green blindness tells apart. Each cell has its value as
text, and each picture a label that states what it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from aot_tune.tables.table import Entry, Table
from aot_tune.values.bucket import Pow2
from aot_tune.values.problem import Value

BLUE, ORANGE, WHITE = (0, 68, 136), (204, 85, 0), (255, 255, 255)
"""Ends and middle of the scale of colours."""

TINTS = ("#bbd4f1", "#fbd9a5", "#c9c9c9", "#e3c3e8", "#a8dcd9", "#f4c0b0", "#d9e08f", "#9fb3d9")
"""Colours of a portfolio's configs, in turn; the numbers in the cells tell them apart."""

STYLE = (
    "svg text{font:11px system-ui,sans-serif;fill:#1b1f24}svg .e{text-anchor:end}svg .m,svg .w{"
    "text-anchor:middle;font-size:10px;pointer-events:none}svg .w{fill:#fff}"
)
"""Style of the pictures' text."""

_WIDE, _HIGH, _LEFT = 36, 18, 64
"""Width and height of a cell, and the space to the left of the rows, pixels."""


class Cell(NamedTuple):
    """One bucket in a grid."""

    text: str
    """Value in the cell."""

    fill: str
    """Colour."""

    title: str
    """Text that the browser shows over the cell, after the bucket's values."""


def shade(part: float) -> str:
    """Return a colour: orange at -1, white at 0, blue at 1."""
    part = min(max(part, -1.0), 1.0)
    end = BLUE if part > 0 else ORANGE
    mixed = (round(low + (high - low) * abs(part)) for low, high in zip(WHITE, end, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def grid(table: Table, cell_of: Callable[[Entry], Cell], label: str) -> str:
    """Draw each entry as a cell: the sizes of one Pow2 axis are the rows, all other values the columns.

    Args:
        table: The table.
        cell_of: Returns an entry's cell.
        label: What the picture shows, for readers who do not see it.
    """
    down, across = _axes(table)
    rows = sorted({entry.bucket.size(down) for entry in table.entries}, reverse=True) if down else [0]
    columns = sorted({_values(entry, across) for entry in table.entries}, key=_sort_key)
    longest = max(len(_words(column)) for column in columns)
    top = 16 + 5 * longest
    parts = []
    for place, column in enumerate(columns):
        x = _LEFT + _WIDE * place + _WIDE // 2
        parts.append(
            f'<text x="{x}" y="{top - 5}" transform="rotate(-50 {x} {top - 5})">{_words(column)}</text>'
        )
    for place, size in enumerate(rows if down else []):
        parts.append(f'<text x="{_LEFT - 5}" y="{top + _HIGH * place + 13}" class="e">{_short(size)}</text>')
    for entry in table.entries:
        column = _values(entry, across)
        x = _LEFT + _WIDE * columns.index(column)
        y = top + _HIGH * (rows.index(entry.bucket.size(down)) if down else 0)
        parts.append(
            _cell(x, y, cell_of(entry), (_short(entry.bucket[down]) if down else "", _words(column)))
        )
    bottom = top + _HIGH * len(rows) + 14
    names = f"{down} by {' '.join(across)}" if down and across else down or " ".join(across)
    parts.append(f'<text x="{_LEFT}" y="{bottom}">{escape(names)}</text>')
    return svg(_LEFT + _WIDE * len(columns) + 4 * longest, bottom + 6, label, parts)


def _cell(x: int, y: int, cell: Cell, bucket: tuple[str, str]) -> str:
    title = escape(" ".join([*filter(None, bucket)]) + f": {cell.title}")
    ink = ' class="w"' if _is_dark(cell.fill) else ' class="m"'
    return (
        f'<rect x="{x}" y="{y}" width="{_WIDE - 1}" height="{_HIGH - 1}" fill="{cell.fill}">'
        f"<title>{title}</title></rect>"
        f'<text x="{x + _WIDE // 2}" y="{y + 13}"{ink}>{escape(cell.text)}</text>'
    )


def _is_dark(fill: str) -> bool:
    red, green, blue = (int(fill[place : place + 2], 16) for place in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue < 140


def _axes(table: Table) -> tuple[str, list[str]]:
    """Return the Pow2 axis with the most sizes, or "", and all other names whose values differ."""
    buckets = [entry.bucket for entry in table.entries]
    counts = {name: len({bucket[name] for bucket in buckets}) for name in buckets[0]}
    pow2 = [name for name, axis in table.axes.items() if isinstance(axis, Pow2)]
    down = max(pow2, key=lambda name: counts[name], default="")
    return down, [name for name, count in counts.items() if name != down and count > 1]


def _values(entry: Entry, names: Sequence[str]) -> tuple[Value, ...]:
    return tuple(entry.bucket[name] for name in names)


def _sort_key(values: tuple[Value, ...]) -> list[tuple[int, float, str]]:
    return [(0, value, "") if isinstance(value, int) else (1, 0.0, str(value)) for value in values]


def _words(values: Sequence[Value]) -> str:
    return escape(" ".join(map(_short, values)))


def _short(value: Value) -> str:
    """Return a value in few characters: ``4k`` for 4096, ``bf16`` for bfloat16."""
    if type(value) is int:
        return f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else str(value)
    return str(value).replace("bfloat", "bf").replace("float", "f")


def curves(lines: Sequence[tuple[str, Sequence[float]]], label: str) -> str:
    """Draw at most three lines of fractions over 0, 1, 2... configs, on a scale of square roots.

    Args:
        lines: Name and values of each line, all equally many.
        label: As of `grid`.
    """
    width, height, left, base = 360, 230, 44, 150
    highest = max(0.01, *(value for _, values in lines for value in values))
    step = (width - left - 10) / max(len(lines[0][1]) - 1, 1)

    def at(place: int, value: float) -> tuple[float, float]:
        return round(left + step * place, 1), round(base - 140 * (value / highest) ** 0.5, 1)

    parts = []
    for tick in (0.0, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0):
        if tick <= highest:
            _, y = at(0, tick)
            parts.append(f'<path d="M{left} {y}H{width - 10}" stroke="#d8dee4"/>')
            parts.append(f'<text x="{left - 4}" y="{y + 4}" class="e">{tick:.0%}</text>')
    for number, ((name, values), dash) in enumerate(zip(lines, ("", "6 3", "2 3"), strict=False)):
        points = [at(place, value) for place, value in enumerate(values)]
        drawn = " ".join(f"{x},{y}" for x, y in points)
        color = (shade(1), "#6b6b6b", shade(-1))[number]
        parts.append(
            f'<polyline points="{drawn}" fill="none" stroke="{color}" stroke-width="2" '
            f'stroke-dasharray="{dash}"/>'
        )
        for place, ((x, y), value) in enumerate(zip(points, values, strict=True)):
            title = f"{place} configs: {name} {value:.1%}"
            parts.append(
                f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"><title>{escape(title)}</title></circle>'
            )
        y = base + 30 + 14 * number
        parts.append(
            f'<path d="M{left} {y}h30" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        parts.append(f'<text x="{left + 36}" y="{y + 4}">{escape(name)}</text>')
    for place in range(0, len(lines[0][1]), 2):
        parts.append(f'<text x="{at(place, 0)[0]}" y="{base + 14}" class="m">{place}</text>')
    parts.append(f'<text x="{width - 10}" y="{base + 34}" class="e">configs</text>')
    return svg(width, height, label, parts)


def svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    """Return a picture of parts, with a label in place of it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )
