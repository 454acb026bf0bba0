"""Find an entry of the loaded tables fast: of a problem's own bucket or the nearest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import NamedTuple

from aot_tune.choose.nearest import Places, Sizes, nearest
from aot_tune.choose.points import DefaultAt, Estimator, Tiles
from aot_tune.tables.table import Entry, Table
from aot_tune.values.bucket import Axes, Classes, Pow2, classes_of, edge
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
        self.tables = dict(tables)
        self._axes = axes
        self._tiles = tiles
        self._pow2 = tuple(name for name, axis in axes.items() if isinstance(axis, Pow2))
        self._is_exact = [name not in self._pow2 for name in axes]
        self._groups_of: dict[Classes, list[Places[Match]]] = {}
        self._candidates: dict[tuple[Classes, Sizes, float], Places[Match]] = {}
        self._estimators: dict[Path, Estimator] = {}
        self._last: tuple[Problem | None, Problem] = (None, Problem({}))
        self._last_key: tuple[Problem | None, Classes, Sizes, Sizes] = (None, frozenset(), (), ())

    @lazy
    def _own(self) -> dict[Problem, Match]:
        own: dict[Problem, Match] = {}
        for path, table in self.tables.items():
            for entry in table.entries:
                own.setdefault(entry.bucket, Match(entry, table, path))
        return own

    @lazy
    def _groups(self) -> dict[Classes, dict[Sizes, list[Match]]]:
        groups: dict[Classes, dict[Sizes, list[Match]]] = {}
        for bucket, match in self._own.items():
            classes, sizes = classes_of(self._axes, bucket), self._sizes_of(bucket)
            exact = tuple(compress(sizes, self._is_exact))
            groups.setdefault(classes, {}).setdefault(exact, []).append(match)
        return groups

    def own(self, problem: Problem) -> Match | None:
        """Return the entry of the problem's own bucket."""
        match = self._own.get(self.bucket_of(problem))
        if match is None or match.entry.is_sound():
            return match
        self._leave_malformed_out()
        return self.own(problem)

    def matches(self) -> Iterable[Match]:
        """Return all entries, one per bucket, in reading order."""
        return self._own.values()

    def _leave_malformed_out(self) -> None:
        """Read all entries and leave out the malformed ones, of which one was asked for.

        All at once, so that a file of them takes bounded time. Estimators keep their tables: whether a
        malformed entry was asked for before may not influence a choice.
        """
        for path, table in self.tables.items():
            self.tables[path] = replace(table, entries=tuple(e for e in table.entries if e.is_sound()))
        self._groups_of.clear()
        self._candidates.clear()
        for name in ("_own", "_groups"):
            vars(self).pop(name, None)

    def bucket_of(self, problem: Problem) -> Problem:
        """Return the problem's bucket; the last answer is kept, since a choice needs it several times."""
        last, bucket = self._last
        if last is not problem:
            bucket = problem.replaced(**{name: edge(problem.size(name)) for name in self._pow2})
            self._last = (problem, bucket)
        return bucket

    def nearest(self, problem: Problem, within: float) -> Match | None:
        """Return the entry of the same classes with the nearest bucket (`aot_tune.choose.nearest`)."""
        match = self._nearest(problem, within)
        if match is None or match.entry.is_sound():
            return match
        self._leave_malformed_out()
        return self.nearest(problem, within)

    def _nearest(self, problem: Problem, within: float) -> Match | None:
        classes, sizes, edges = self._key_of(self.bucket_of(problem))
        candidates = self._candidates.get((classes, edges, within))
        if candidates is None:
            candidates = self._new_candidates(classes, sizes, within)
            if len(self._candidates) >= _MOST_CLOSEST:
                self._candidates.clear()
            self._candidates[classes, edges, within] = candidates
        return nearest(sizes, candidates, within)

    def _new_candidates(self, classes: Classes, sizes: Sizes, within: float) -> Places[Match]:
        """Return the nearest bucket of each group of buckets with equal sizes on the Exact axes.

        Buckets of a group are equally far on the Exact axes, so the edges alone decide between them. There
        are few edges, so the answers are kept: a scan of a hundred buckets takes several times as long.
        """
        groups = self._groups_of.get(classes)
        if groups is None:
            matches = self._groups.get(classes, {}).values()
            groups = [
                Places((self._sizes_of(match.entry.bucket), match) for match in group) for group in matches
            ]
            if groups:
                self._groups_of[classes] = groups
        candidates = []
        for group in groups:
            at_edges = zip(sizes, group.sizes[0], self._is_exact, strict=True)
            wanted = [own if exact else size for size, own, exact in at_edges]
            if (closest := nearest(wanted, group, within)) is not None:
                candidates.append((self._sizes_of(closest.entry.bucket), closest))
        return Places(candidates)

    def estimator(self, match: Match, default_at: DefaultAt) -> Estimator:
        """Return the estimator of an entry's table; made once.

        Args:
            match: The entry.
            default_at: The declaration's default for a problem, which is the same at each call.
        """
        estimator = self._estimators.get(match.path)
        if estimator is None:
            estimator = self._estimators[match.path] = Estimator(match.table, self._tiles, default_at)
        return estimator

    def _sizes_of(self, bucket: Problem) -> Sizes:
        return tuple([bucket.size(name) for name in self._axes])

    def _key_of(self, bucket: Problem) -> tuple[Classes, Sizes, Sizes]:
        """Return a bucket's classes, sizes and edges; the last answer is kept: a miss needs it twice."""
        last, classes, sizes, edges = self._last_key
        if last is not bucket:
            classes, sizes = classes_of(self._axes, bucket), self._sizes_of(bucket)
            edges = tuple([bucket.size(name) for name in self._pow2])
            self._last_key = (bucket, classes, sizes, edges)
        return classes, sizes, edges


_MOST_CLOSEST = 1024
"""Most answers that are kept, enough for the edges of two axes; beyond it all are dropped."""
