"""Find an entry of the loaded tables fast: of a problem's own bucket or the nearest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from aot_tune.choose.nearest import Buckets
from aot_tune.choose.points import RULE, DefaultAt, Estimator, Tiles
from aot_tune.tables.table import Entry, Table
from aot_tune.values.bucket import Axes, Pow2, edge
from aot_tune.values.lazy import lazy
from aot_tune.values.problem import Problem


class Match(NamedTuple):
    """Entry with the table that holds it."""

    entry: Entry
    """Entry of a bucket."""

    table: Table
    """Table without the entries that may not be used."""

    path: Path
    """File of the table."""


class Index:
    """Entries of all tables of a kernel on an arch, in reading order.

    Args:
        axes: The kernel's axes.
        tiles: The declaration's `tiles`, or None.
        tables: The files and their tables in reading order; of several with a bucket, the first counts.
    """

    def __init__(self, axes: Axes, tiles: Tiles | None, tables: Mapping[Path, Table]) -> None:
        self._axes, self._tiles = axes, tiles
        self._read = dict(tables)
        self._sound = _Sound(axes, self._read)
        self._pow2 = tuple(name for name, axis in axes.items() if isinstance(axis, Pow2))
        self._estimators: dict[Path, Estimator] = {}
        self._last: tuple[Problem | None, Problem] = (None, Problem({}))

    @property
    def tables(self) -> Mapping[Path, Table]:
        """Tables by file, without the entries that were found malformed."""
        return self._sound.tables

    def own(self, problem: Problem) -> Match | None:
        """Return the entry of the problem's own bucket."""
        match = self._sound.own.get(self.bucket_of(problem))
        if match is None or match.entry.is_sound():
            return match
        self.leave_malformed_out()
        return self.own(problem)

    def matches(self) -> Iterable[Match]:
        """Return all entries, one per bucket, in reading order."""
        return self._sound.own.values()

    def leave_malformed_out(self) -> None:
        """Read all entries and leave out the malformed ones, of which one was asked for.

        All at once, so that a file of them takes bounded time, and by one assignment, since other threads
        look up. Estimators have the tables as they were read: whether a malformed entry was asked for before
        may not influence a choice.
        """
        self._sound = _Sound(
            self._axes,
            {
                path: replace(table, entries=tuple(entry for entry in table.entries if entry.is_sound()))
                for path, table in self.tables.items()
            },
        )

    def bucket_of(self, problem: Problem) -> Problem:
        """Return the problem's bucket; the last answer is kept, since a choice needs it several times."""
        last, bucket = self._last
        if last is not problem:
            bucket = problem.replaced(**{name: edge(problem.size(name)) for name in self._pow2})
            self._last = (problem, bucket)
        return bucket

    def nearest(self, problem: Problem, within: float) -> Match | None:
        """Return the entry of the same classes with the nearest bucket (`aot_tune.choose.nearest`)."""
        match = self._sound.nearest(self.bucket_of(problem), within)
        if match is None or match.entry.is_sound():
            return match
        self.leave_malformed_out()
        return self.nearest(problem, within)

    def estimator(self, match: Match, default_at: DefaultAt) -> Estimator:
        """Return the estimator of an entry's table; made once.

        Args:
            match: The entry.
            default_at: The declaration's default for a problem, which is the same at each call.
        """
        estimator = self._estimators.get(match.path)
        if estimator is None:
            table, sound = self._read[match.path], self._sound
            buckets = sound.buckets(match.path) if sound.tables[match.path] is table else None
            estimator = self._estimators[match.path] = Estimator(
                table, self._tiles, default_at, buckets=buckets
            )
        return estimator


class _Sound:
    """Tables whose malformed entries, where one was asked for, are left out; never changed."""

    def __init__(self, axes: Axes, tables: Mapping[Path, Table]) -> None:
        self.tables, self._axes = tables, axes
        self._buckets: dict[Path, Buckets] = {}

    @lazy
    def own(self) -> dict[Problem, Match]:
        """Entry of each bucket."""
        own: dict[Problem, Match] = {}
        for path, table in self.tables.items():
            for entry in table.entries:
                own.setdefault(entry.bucket, Match(entry, table, path))
        return own

    def buckets(self, path: Path) -> Buckets:
        """Return the buckets of a table; made once."""
        buckets = self._buckets.get(path)
        if buckets is None:
            entries = self.tables[path].entries
            buckets = Buckets(self._axes, [entry.bucket for entry in entries], RULE.other_class)
            self._buckets[path] = buckets
        return buckets

    def nearest(self, bucket: Problem, within: float) -> Match | None:
        """Return the entry of the same classes with the nearest bucket."""
        best, match = None, None
        for path, table in self.tables.items():
            near = self.buckets(path).nearest(bucket, within)
            if near is not None and (best is None or near[:2] > best):
                best, match = near[:2], self.own[table.entries[near[2]].bucket]
        return match
