"""One config for every size of a batch, so that a row's bits do not depend on it. Effects are passed in.

Nothing is searched and no cache is read: the choice is the tables' and the declaration's alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from aot_tune import environment
from aot_tune.declare.declaration import Declaration
from aot_tune.environment import OnMiss
from aot_tune.errors import LaunchError
from aot_tune.serve.choose.resolve import Choice, Legality, Source, Unfit, miss_error
from aot_tune.tables.index import Index, Match
from aot_tune.tables.invariant import (
    Ranked,
    default_for_every_batch,
    every_batch,
    other_axes,
    ranked,
    refused_somewhere,
    without_batch,
)
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import NEAR_DOUBLINGS, bucket_of, nearest
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem, problem_option

_MOST_KEPT = 4096
"""The most choices that are kept: as many as plans of launches."""


class BatchInvariant:
    """The choices of one declaration on one arch that hold for every size of a batch."""

    def __init__(self, tunable: Declaration, arch: Arch, index: Index, legality: Legality) -> None:
        self._tunable = tunable
        self._arch = arch
        self._index = index
        self._legality = legality
        self._groups: dict[Problem, tuple[Match, ...]] | None = None
        self._kept: dict[tuple[Problem, bool, OnMiss], Choice] = {}
        self._axes = " and ".join(tunable.batch_axes)

    def choice(self, problem: Problem, asked_default: bool, on_miss: OnMiss, unfit: Unfit | None) -> Choice:
        """Choose the config that serves a problem and all that differ from it in the batch alone.

        1. the tables' buckets of the same other sizes, whatever their batch: the config whose worst regret
           over them is least, of those that may run at every size and that the declaration's `invariant`
           does not refuse
        2. the same of the buckets whose other sizes are nearest, at most one doubling away on each axis
        3. a miss, where there are no such buckets: the same of the nearest ones at any distance, unless
           `on_miss` is ``default``
        4. the default of the largest batch whose default may run at every size

        Args:
            problem: What is launched.
            asked_default: Whether AOT_TUNE_CONFIG asks for the default.
            on_miss: What AOT_TUNE_ON_MISS says; nothing is searched.
            unfit: Why a legal config cannot run on this very GPU; None where that is not asked yet.

        Raises:
            LaunchError: No config may run at every size.
            MissError: Nothing was tuned for the problem or near it, and `on_miss` is ``error``.
        """
        bucket = bucket_of(self._tunable.axes, problem)
        key = (without_batch(self._tunable, bucket), asked_default, on_miss)
        choice = self._kept.get(key) if unfit is None else None
        if choice is None:
            choice = self._new_choice(problem, bucket, asked_default, on_miss, unfit)
            if unfit is None and len(self._kept) < _MOST_KEPT:
                self._kept[key] = choice
        if reason := self._may_not_run(choice.config, problem):
            raise LaunchError(
                f"{self._tunable.name}: {choice.config} serves every batch up to the largest declared one, "
                f"and may not run {problem}: {reason}; launch fewer {self._axes} at a time"
            )
        return choice

    def ranking(self, problem: Problem) -> tuple[Ranked, ...]:
        """What each config of the nearest buckets' tables costs over all sizes of the batch, best first."""
        group = self._group(without_batch(self._tunable, bucket_of(self._tunable.axes, problem)), math.inf)
        return self._ranked(self._matches(group))

    def refusal(self, config: Config, problem: Problem) -> str | None:
        """Why a config cannot serve a problem at every size of its batch; None where it can."""
        bucket = bucket_of(self._tunable.axes, problem)
        return refused_somewhere(self._tunable, bucket, config, self._refused)

    def _new_choice(
        self, problem: Problem, bucket: Problem, asked_default: bool, on_miss: OnMiss, unfit: Unfit | None
    ) -> Choice:
        """Choose for all problems of these other sizes: nothing here depends on the batch of `problem`."""

        def refusal(config: Config, at: Problem) -> str | None:
            return self._refused(config, at) or (unfit(config) if unfit is not None else None)

        tuned = self._group(without_batch(self._tunable, bucket), NEAR_DOUBLINGS) is not None
        if not asked_default:
            if choice := self._of_tables(bucket, NEAR_DOUBLINGS, "invariant", refusal):
                return choice
            if not tuned and on_miss == "error":
                # It raises for a size that no config can run, of which tuning would make no other.
                self._tunable.default_config(self._arch, problem)
                raise miss_error(self._tunable, self._arch, problem)
            far = not tuned and on_miss != "default"
            if far and (choice := self._of_tables(bucket, math.inf, "far", refusal)):
                return choice
        config = default_for_every_batch(self._tunable, self._arch, bucket, refusal)
        if config is None:
            largest = next(every_batch(self._tunable, bucket))
            default = self._tunable.default_config(self._arch, largest)
            refused = refused_somewhere(self._tunable, bucket, default, refusal)
            raise LaunchError(
                f"{self._tunable.name}: no config of {self._arch} may run {problem} at every size of "
                f"{self._axes}, so that none keeps a row's bits; the default, {default}, is refused at "
                f"{refused}; unset {environment.BATCH_INVARIANT}, or pass batch_invariant=False"
            )
        source: Source = "invariant" if asked_default or tuned else "default"
        if asked_default:
            why = f"{environment.CONFIG}=default"
        elif not tuned and on_miss == "default":
            why = f"{environment.ON_MISS}=default"
        else:
            why = "no tuned config does"
        reason = f"the default that serves every {self._axes}: {why}"
        return Choice(config=config, source=source, why=lambda: reason)

    def _of_tables(
        self, bucket: Problem, within: float, source: Source, refusal: Callable[[Config, Problem], str | None]
    ) -> Choice | None:
        wanted = without_batch(self._tunable, bucket)
        group = self._group(wanted, within)
        matches = self._matches(group)
        for one in self._ranked(matches):
            if refused_somewhere(self._tunable, bucket, one.config, refusal) is None:
                why = partial(self._reason, one, matches[0], group, wanted)
                return Choice(config=one.config, source=source, why=why)
        return None

    def _refused(self, config: Config, problem: Problem) -> str | None:
        """Why a config may not run for a problem, or is not the same for every batch."""
        return self._may_not_run(config, problem) or self._said(self._tunable.batch_refusal, config, problem)

    def _may_not_run(self, config: Config, problem: Problem) -> str | None:
        return self._said(self._legality.refusal, config, problem)

    def _said(
        self, asked: Callable[[Config, Problem], str | None], config: Config, problem: Problem
    ) -> str | None:
        """What a function of the declaration says; that it raises, where it does."""
        try:
            return asked(config, problem)
        except Exception as error:
            self._legality.failed(error, problem, str(config))
            return f"the declaration raises {type(error).__name__}"

    def _ranked(self, matches: tuple[Match, ...]) -> tuple[Ranked, ...]:
        entries = ((match.entry, match.shipped.table) for match in matches)
        return ranked(self._tunable, self._arch, entries)

    def _matches(self, group: Problem | None) -> tuple[Match, ...]:
        return () if group is None else self._by_group()[group]

    def _group(self, wanted: Problem, within: float) -> Problem | None:
        groups = self._by_group()
        if wanted in groups:
            return wanted
        return nearest(other_axes(self._tunable), wanted, groups, within=within)

    def _by_group(self) -> dict[Problem, tuple[Match, ...]]:
        """The entries of all tables by their buckets without the batch."""
        groups = self._groups
        if groups is None:
            made: dict[Problem, list[Match]] = {}
            for match in self._index.matches():
                made.setdefault(without_batch(self._tunable, match.entry.bucket), []).append(match)
            groups = self._groups = {group: tuple(found) for group, found in made.items()}
        return groups

    def _reason(self, one: Ranked, match: Match, group: Problem | None, wanted: Problem) -> str:
        worst = ",".join(f"{name}={size}" for name, size in one.worst_at.items())
        untimed = f", {one.untimed} of them without a time of it" if one.untimed else ""
        assert group is not None
        where = "" if group == wanted else f" of the nearest buckets, {_named(group)},"
        return (
            f"one config for every {self._axes}: its worst regret over {one.sizes} sizes{untimed}{where} is "
            f"{one.regret:.1%}, at {worst or 'none'}, in {match.shipped.path}"
        )


def _named(problem: Problem) -> str:
    return problem_option(problem).replace(",", " ")
