"""Journals of sweeps and of recordings, for `aot-tune journal`. Imports no kernel."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, get_args

from aot_tune.cli.seconds import Seconds, seconds_of
from aot_tune.errors import JournalMismatchError
from aot_tune.replay.record import journal as searches
from aot_tune.tuner.outcome import Failure
from aot_tune.tuner.sweep import journal as journals
from aot_tune.tuner.sweep import results
from aot_tune.tuner.sweep.journal import JournalContent, Record
from aot_tune.tuner.sweep.results import ALSO, Timing, outcome_of
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import aligned, counted, duration


@dataclass(kw_only=True)
class Summary:
    """Results of one step of a sweep, or of one search."""

    measured: set[Hashable] = field(default_factory=set)
    """Configs with a final result."""

    failed: set[Hashable] = field(default_factory=set)
    """Configs that failed."""

    pending: set[Hashable] = field(default_factory=set)
    """Configs that were begun, or whose time was to be measured again."""

    rounds: int = 0
    """Number of times measured in rounds."""

    fastest: dict[Hashable, float] = field(default_factory=dict)
    """Final times, microseconds."""

    def row(self) -> tuple[str, ...]:
        """Return the cells of a row."""
        times = {config: us for config, us in self.fastest.items() if config in self.measured}
        best = min(times, key=times.__getitem__, default=None)
        return (
            str(len(self.measured)),
            str(len(self.failed)),
            str(self.rounds or "-"),
            str(len(self.pending - self.measured - self.failed) or "-"),
            "-" if best is None else f"{times[best]:.2f}",
            "-" if best is None else str(best),
        )


class JournalDocument(ABC):
    """Journal and its contents.

    Args:
        path: The file.
        content: The file's contents.

    Attributes:
        noun: The activity that writes such a journal.
        foreign: The treatment of a journal with records of other conditions.
        heads: The heads of the rows.
    """

    noun: ClassVar[str]
    foreign: ClassVar[str]
    heads: ClassVar[tuple[str, ...]]

    def __init__(self, path: Path, content: JournalContent) -> None:
        self.path, self.content = path, content

    @property
    def records(self) -> Sequence[Record]:
        """Return the records, in their order."""
        return self.content.records

    @abstractmethod
    def total(self) -> str:
        """Return the totals, in one line."""

    @abstractmethod
    def summaries(self) -> Mapping[tuple[str, ...], Summary]:
        """Return the steps or searches by the first cells of their rows, in the journal's order."""

    def rows(self) -> list[str]:
        """Return a line for each step or search."""
        rows = [(*cells, *summary.row()) for cells, summary in self.summaries().items()]
        return aligned([self.heads, *rows]) if rows else ["no results yet"]


class SweepJournal(JournalDocument):
    """Journal of a kernel's sweep."""

    noun, foreign = "sweep", "no sweep resumes it; move it away, or start over with --fresh"
    heads = ("problem", "step", "measured", "failed", "rounds", "provisional", "fastest us", "config")

    def summaries(self) -> Mapping[tuple[str, ...], Summary]:
        """See the base class. A step that measures the GPU's states counts once for each state."""
        steps: dict[tuple[str, ...], Summary] = {}
        for record in self.records:
            if record["kind"] != "result":
                continue
            name = record["step"] if record["state"] is None else f"{record['step']}: {record['state']}"
            step = steps.setdefault((str(Problem(record["problem"])), name), Summary())
            outcome, config = outcome_of(record), Config(**record["config"])
            if isinstance(outcome, Failure):
                step.failed.add(config)
            elif outcome is not None and record["round"] is not None:
                step.rounds += 1
            elif outcome is not None and outcome.provisional:
                step.pending.add(config)
            else:  # a recheck that passed has no time
                step.measured.add(config)
                if outcome is not None:
                    step.fastest[config] = min(outcome.mean_us, step.fastest.get(config, math.inf))
        return steps

    def total(self) -> str:
        """See the base class."""
        outcomes = [outcome_of(record) for record in self.records if record["kind"] == "result"]
        failures = sum(isinstance(outcome, Failure) for outcome in outcomes)
        compiled = [record for record in self.records if record["kind"] == "compile"]
        refused = sum("message" in record for record in compiled)
        gpus = sorted({record["gpu"] for record in self.records})
        return (
            f"{counted(len(outcomes) - failures, 'result')}, {counted(failures, 'failure')}, "
            f"{counted(len(compiled), 'compilation')} ({refused} failed) in "
            f"{_seconds(sum(record.get('seconds', 0.0) for record in compiled))} of cores; "
            + _spent(seconds_of(self.records))
            + (f"; on {' '.join(gpus)}" if gpus else "")
        )


class SearchJournal(JournalDocument):
    """Journal of `aot-tune record`: a library's searches, by key.

    A record has the place of a config in its library's search space. The config and the problem are in the
    table that is written at the search's end.
    """

    noun, foreign = "recording", "the next recording sets the file aside"
    heads = ("search", "timed", "failed", "rounds", "unfinished", "fastest us", "place")

    def summaries(self) -> Mapping[tuple[str, ...], Summary]:
        """See the base class."""
        searches: dict[tuple[str, ...], Summary] = {}
        for record in self.records:
            search, place = searches.setdefault((record["search"],), Summary()), record["config"]
            if record["what"] == "begun":
                search.pending.add(place)
            elif record["what"] == "abandoned":
                search.pending.discard(place)
            elif record["what"] == "failed":
                search.failed.add(place)
            elif record["round"] is not None:
                search.rounds += 1
            else:
                search.fastest[place] = record["mean_us"]
        for search in searches.values():
            search.measured = search.fastest.keys() - search.failed
        return searches

    def total(self) -> str:
        """See the base class."""
        searches = self.summaries().values()
        return (
            f"a journal of aot-tune record: {counted(len(searches), 'search', 'searches')}, "
            f"{counted(sum(len(search.measured) for search in searches), 'config')} timed, "
            f"{sum(len(search.failed) for search in searches)} failed"
        )


def read_journal(path: Path) -> JournalDocument:
    """Read a journal of a sweep or of a recording.

    Raises:
        JournalMismatchError: Another release wrote the file, or it is not a journal.
        JournalWriteError: The file cannot be read.
    """
    content = journals.read(path, results.accepts)
    if not content.records and (searched := journals.read(path, searches.accepts)).records:
        return SearchJournal(path, searched)
    if content.damaged_bytes and not (content.identity or content.records or content.foreign):
        raise JournalMismatchError(f"{path} is no journal: it has no intact line; give a journal's path")
    return SweepJournal(path, content)


def _spent(seconds: Seconds) -> str:
    """Return the use of the GPUs' time, in words."""
    if not seconds:
        return "the GPUs' time is not recorded"
    timings = {name: seconds[name] for name in get_args(Timing) if seconds.get(name)}
    parts = ", ".join(f"{_in_seconds(timing)} {name}" for name, timing in timings.items())
    return (
        f"{_seconds(sum(timings.values()))} timing"
        + (f" ({parts})" if parts else "")
        + f", {_seconds(seconds['verify_s'])} verifying"
        + "".join(f", {_seconds(seconds[name])} {what}" for name, what in ALSO.items() if seconds.get(name))
    )


def _in_seconds(seconds: float) -> str:
    """Return a time in seconds, also above a minute, so that times can be compared."""
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"


def _seconds(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else f"{seconds:.1f} s"
