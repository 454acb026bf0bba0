"""`aot-tune journal --seconds`: GPU seconds of sweeps, by use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from aot_tune.tuner.sweep.journal import JournalContent, Record
from aot_tune.tuner.sweep.results import ALSO, TIMINGS, Timing
from aot_tune.values.text import aligned

Seconds = Mapping[str, float]
"""Seconds by use: a `Timing`, ``verify_s``, or a name of `ALSO`. A use without a record is left out."""

COLUMNS: Mapping[str, Sequence[str]] = {
    **{timing: (timing,) for timing in get_args(Timing)},
    "verifying": ("verify_s",),
    "arguments": ("open_s",),
    "compilers, starts, idle": ("waited_s", "start_s", "idle_s"),
}
"""Columns of the table, each with the names of its seconds."""


def seconds_of(records: Iterable[Record]) -> Seconds:
    """Return the seconds in a journal's records, summed over GPUs."""
    return _added(_of_step(record) for record in records if record["kind"] == "spent")


def _of_step(record: Record) -> Seconds:
    timing = {TIMINGS[record["step"]]: record["measure_s"], "verify_s": record["verify_s"]}
    return {**timing, **{name: record[name] for name in ALSO if name in record}}


def _added(parts: Iterable[Seconds]) -> Seconds:
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, seconds in part.items():
            total[name] += seconds
    return dict(total)


def table_lines(journals: Iterable[tuple[Path, JournalContent]]) -> list[str]:
    """Return a row for each kernel, the longest first, and a row for their sum.

    Journals of one kernel and arch are added, and their row has their number. With several archs a kernel's
    name has its arch before it.

    Args:
        journals: Journals' paths and contents. Without a journal there is no line.
    """
    kernels: dict[tuple[str, str], list[Seconds]] = {}
    for path, content in journals:
        arch = content.identity.get("arch", path.parent.name)
        kernel = content.identity.get("kernel", path.name.partition(".")[0])
        kernels.setdefault((arch, kernel), []).append(seconds_of(content.records))
    if not kernels:
        return []
    several = len({arch for arch, _ in kernels}) > 1
    rows = [
        (
            (f"{arch}/{kernel}" if several else kernel)
            + (f" ({len(parts)} journals)" if len(parts) > 1 else ""),
            _added(parts),
        )
        for (arch, kernel), parts in kernels.items()
    ]
    rows.sort(key=lambda row: (-sum(row[1].values()), row[0]))
    rows.append(("all", _added(seconds for _, seconds in rows)))
    return aligned([("kernel", *COLUMNS, "sum"), *((name, *_cells(seconds)) for name, seconds in rows)])


def _cells(seconds: Seconds) -> list[str]:
    """Return a cell for each of `COLUMNS`, and their sum; ``-`` without a record."""
    cells = [[seconds[name] for name in names if name in seconds] for names in COLUMNS.values()]
    return [f"{sum(cell):.0f}" if cell else "-" for cell in (*cells, [*seconds.values()])]
