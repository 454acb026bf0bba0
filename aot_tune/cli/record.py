"""`aot-tune record`: lines about the recordings, and remarks for the library's author."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from aot_tune.replay.record.program import Recording
from aot_tune.replay.record.recorder import Site
from aot_tune.values.text import aligned, counted


def recording_lines(recording: Recording) -> Iterator[str]:
    """Yield a row for each place that searched, then the remarks and the tables."""
    if not recording.pythons:
        yield (
            "nothing was recorded: the program started no Python that heeds PYTHONPATH; start Python without "
            "-I, -E and -S"
        )
        return
    if recording.interrupted:
        yield f"interrupted by {recording.interrupted}: no config is passed over for it"
    if not recording.sites and not recording.tables:
        until = " until then" if recording.interrupted else ""
        yield f"nothing was recorded: no kernel of cuTile was searched or launched{until}"
        return
    rows = [_row(site) for site in recording.sites if site.searches]
    yield from aligned([("where", "kernel", "problems", "gain", "failed", "wrong"), *rows] if rows else [])
    for site in recording.sites:
        for remark in site.remarks:
            yield f"{_short(site.place)}: {remark}"
    written = counted(len(recording.tables), "table")
    yield f"{written} written" + (":" if recording.tables else "")
    yield from (f"  {path}" for path in recording.tables)


def _row(site: Site) -> Sequence[str]:
    return (
        _short(site.place),
        site.kernel,
        str(len(site.problems)),
        f"{_mean(site.gains):.2f}x the first config" if site.gains else "-",
        str(site.failures),
        str(site.wrong),
    )


def _mean(gains: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, gains)) / len(gains))


def _short(place: str) -> str:
    """Return a file and line, the file relative to the current folder if below it, else by its name."""
    path, _, line = place.rpartition(":")
    relative = os.path.relpath(path)
    return f"{relative if not relative.startswith('..') else Path(path).name}:{line}"
