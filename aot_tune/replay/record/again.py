"""Judge recorded winners by new searches of their problems. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aot_tune.replay.table import RecordedEntry
from aot_tune.replay.words import config_in_words, problem_in_words
from aot_tune.tuner.choose.times import FINALS_BAND, TIE, is_tie
from aot_tune.tuner.choose.verdict import Finding
from aot_tune.tuner.outcome import Measurement


@dataclass(frozen=True, kw_only=True)
class Again:
    """Recorded winner in a new search."""

    key: str
    """Hash of the search: processes of a program may make the same one."""

    path: str
    """File of the table."""

    kernel: str
    """Kernel's module and name."""

    problem: str
    """Problem, as a table shows it."""

    config: str
    """Recorded winner, as a table shows it."""

    table_us: float
    """Its time in the table, microseconds."""

    table_gain: float | None
    """First config's time over it in the table; None where that config failed."""

    mean_us: float | None
    """Its time here, microseconds; None where it failed."""

    gain: float | None
    """First config's time over it here; None where either failed."""

    findings: Mapping[Finding, str]
    """Each finding, in words; empty where the entry holds."""


def again(
    key: str,
    path: Path,
    entry: RecordedEntry,
    kernel: str,
    first_text: str,
    times: Mapping[str, Measurement],
    failed: str,
) -> Again:
    """Judge an entry by the times of a new search.

    Args:
        key: The hash of the search.
        path: The table's file.
        entry: The recorded winner.
        kernel: The kernel's module and name.
        first_text: Spelling of the library's first config.
        times: Times of all right configs, by spelling.
        failed: Why the recorded winner has no time, where it has none.
    """
    mine, first = times.get(entry.text), times.get(first_text)
    return Again(
        key=key,
        path=str(path),
        kernel=kernel,
        problem=problem_in_words(entry.problem),
        config=config_in_words(entry),
        table_us=entry.mean_us,
        table_gain=entry.gain,
        mean_us=None if mine is None else mine.mean_us,
        gain=None if mine is None or first is None else first.mean_us / mine.mean_us,
        findings={"fails": failed} if mine is None else _findings(entry, mine, first, times),
    )


def _findings(
    entry: RecordedEntry, mine: Measurement, first: Measurement | None, times: Mapping[str, Measurement]
) -> dict[Finding, str]:
    findings: dict[Finding, str] = {}
    if first is not None and mine.mean_us > first.mean_us and not is_tie(mine, first):
        findings["slower"] = f"{mine.mean_us / first.mean_us - 1:.1%} slower than the first config"
    if first is not None and entry.gain is not None:
        gain = first.mean_us / mine.mean_us
        noise = entry.error_margin_us / entry.mean_us + sum(
            time.error_margin_us / time.mean_us for time in (mine, first)
        )
        if entry.gain / gain - 1 > max(TIE, noise):
            findings["weaker"] = f"{gain:.2f}x here, {entry.gain:.2f}x in the table"
    text = min(times, key=lambda text: times[text].mean_us)
    behind = mine.mean_us / times[text].mean_us - 1
    if behind > FINALS_BAND and not is_tie(mine, times[text]):
        findings["beaten"] = f"{behind:.1%} slower than {text}"
    return findings
