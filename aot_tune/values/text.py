"""Values as lines for people: aligned columns, counts, durations. Pure: prints nothing."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with columns padded to their widest cell, two spaces apart."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 problem``, ``2 problems``; `plural` where an s is not enough."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: ``40 s``, ``3 min``, ``1 h 5 min``."""
    whole = max(round(seconds), 1)
    if whole < 90:
        return f"{whole} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
