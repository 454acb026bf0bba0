"""Choose one config for every size of a batch, so that a row's bits do not depend on the batch.

Effects are passed in. Nothing is searched and no cache is read: the choice depends on the tables and the
declaration alone. Archives compiled ahead hold its cubins too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from aot_tune import environment
from aot_tune.choose.choice import Choice, Options, Source, miss_error, named
from aot_tune.choose.index import Index, Match
from aot_tune.choose.legality import Legality, Unfit
from aot_tune.choose.nearest import NEAR_DOUBLINGS, Buckets
from aot_tune.declare.declaration import Declaration
from aot_tune.environment import OnMiss
from aot_tune.errors import LaunchError
from aot_tune.tables.states import in_worst_state
from aot_tune.tables.table import Entry, Table
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import bucket_of, edge
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

Refusal = Callable[[Config, Problem], "str | None"]
"""Function that returns why a config may not run for a problem, or that with it a row's bits depend on the
batch; None where neither applies."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """Config with its worst regret over all measured sizes of a batch."""

    config: Config
    """Config whose regret is given."""

    regret: float
    """Worst t / t_best - 1 over the sizes at which the config has a time; 0 without any."""

    worst_at: Mapping[str, int]
    """Size of the worst regret, by axis; empty without any time."""

    sizes: int
    """Number of measured sizes."""

    untimed: int
    """Number of measured sizes at which the config has no time, because it counted as unsuitable."""


def without_batch(tunable: Declaration, problem: Problem) -> Problem:
    """Return a problem without its sizes on the batch axes; the choice depends on the rest."""
    return Problem({name: value for name, value in problem.items() if name not in tunable.batch_axes})


def every_batch(tunable: Declaration, problem: Problem) -> Iterator[Problem]:
    """Yield the problem at every bucket of the batch axes, from the largest declared one down to 1."""
    typical = tunable.typical_problems
    largest = [max(edge(declared.size(name)) for declared in typical) for name in tunable.batch_axes]
    sizes = ([1 << power for power in range(size.bit_length() - 1, -1, -1)] for size in largest)
    for values in itertools.product(*sizes):
        yield problem.replaced(**dict(zip(tunable.batch_axes, values, strict=True)))


def refused_somewhere(tunable: Declaration, problem: Problem, config: Config, refusal: Refusal) -> str | None:
    """Return why a config cannot serve a problem at every size of its batch; None where it can.

    Args:
        tunable: The declaration.
        problem: The problem; its sizes on the batch axes do not count.
        config: The config.
        refusal: Returns why a config may not run for a problem, or depends on the batch.
    """
    for sized in every_batch(tunable, problem):
        if reason := refusal(config, sized):
            return f"{sized}: {reason}"
    return None


def ranked(tunable: Declaration, arch: Arch, entries: Iterable[tuple[Entry, Table]]) -> tuple[Ranked, ...]:
    """Rank the configs of some buckets' tables by their worst regret, least first.

    A config without a time at some sizes comes after configs with times at more sizes. Ties keep the
    portfolio's order.

    Args:
        tunable: The declaration.
        arch: The tables' arch.
        entries: The buckets that differ in the batch alone, each with its table.
    """
    configs: dict[Config, None] = {}
    sizes: list[tuple[Problem, dict[Config, float]]] = []
    for entry, table in entries:
        configs.update(dict.fromkeys(table.portfolio))
        for point in map(in_worst_state, entry.points):
            problem = entry.bucket.replaced(**point.size)
            columns = (*table.portfolio, tunable.default_config(arch, problem))
            # For a default that is in the portfolio too, the portfolio's time counts.
            times = {
                config: us
                for config, us in reversed([*zip(columns, point.us, strict=True)])
                if us is not None
            }
            sizes.append((problem, times))
    results = [_ranked(tunable.batch_axes, config, sizes) for config in configs]
    return tuple(sorted(results, key=lambda result: (result.untimed, round(result.regret, 9))))


def _ranked(
    axes: Sequence[str], config: Config, sizes: Sequence[tuple[Problem, Mapping[Config, float]]]
) -> Ranked:
    regrets = [
        (times[config] / min(times.values()) - 1, problem) for problem, times in sizes if config in times
    ]
    regret, worst = max(regrets, key=lambda pair: pair[0], default=(0.0, None))
    return Ranked(
        config=config,
        regret=regret,
        worst_at={} if worst is None else {name: worst.size(name) for name in axes},
        sizes=len(sizes),
        untimed=len(sizes) - len(regrets),
    )


def default_for_every_batch(
    tunable: Declaration, arch: Arch, problem: Problem, refusal: Refusal
) -> Config | None:
    """Return the default of the largest batch whose default may run at every size; None where none may."""
    defaults = (tunable.default_config(arch, sized) for sized in every_batch(tunable, problem))
    for config in dict.fromkeys(defaults):
        if refused_somewhere(tunable, problem, config, refusal) is None:
            return config
    return None


_MOST_KEPT = 4096
"""Most choices that are kept, as many as plans of launches."""


class BatchInvariant:
    """Choices of a declaration on an arch that hold for every size of a batch."""

    def __init__(self, index: Index, legality: Legality) -> None:
        self._tunable = tunable = legality.tunable
        self._arch = legality.arch
        self._index = index
        self._legality = legality
        self._kept_groups: tuple[Mapping[Problem, tuple[Match, ...]], Buckets] | None = None
        self._kept: dict[tuple[Problem, bool, OnMiss], Choice] = {}
        self._axes = " and ".join(tunable.batch_axes)

    def choice(self, problem: Problem, options: Options, unfit: Unfit | None = None) -> Choice:
        """Choose the config for a problem and all problems that differ from it in the batch alone.

        1. the tables' buckets with equal other sizes, of any batch: the config with the least worst regret
           over them, of the configs that may run at every size and that the declaration's `invariant` does
           not refuse
        2. as 1, for the buckets whose other sizes are nearest, at most two doublings away on each axis
        3. a miss, where there are no such buckets: as 1, for the nearest buckets at any distance, unless
           `options.on_miss` is ``default``
        4. the default of the largest batch whose default may run at every size

        Args:
            problem: The launched problem.
            options: The options of the choice; nothing is searched.
            unfit: Returns why a legal config cannot run on this particular GPU; None without this check.

        Raises:
            LaunchError: No config may run at every size.
            MissError: Nothing was tuned for the problem or near it, and `options.on_miss` is ``error``.
        """
        bucket = bucket_of(self._tunable.axes, problem)
        key = (without_batch(self._tunable, bucket), options.asked_default, options.on_miss)
        choice = self._kept.get(key) if unfit is None else None
        if choice is None:
            choice = self._new_choice(problem, bucket, options, unfit)
            if unfit is None and len(self._kept) < _MOST_KEPT:
                self._kept[key] = choice
        if reason := self._may_not_run(choice.config, problem):
            raise LaunchError(
                f"{self._tunable.name}: {choice.config} serves every batch up to the largest declared one, "
                f"and may not run {problem}: {reason}; launch fewer {self._axes} at a time"
            )
        return choice

    def ranking(self, problem: Problem) -> tuple[Ranked, ...]:
        """Rank the configs of the nearest buckets' tables by their regret over all sizes of the batch."""
        wanted = without_batch(self._tunable, bucket_of(self._tunable.axes, problem))
        return self._ranked(self._group(wanted, math.inf)[1])

    def refusal(self, config: Config, problem: Problem) -> str | None:
        """Return why a config cannot serve a problem at every size of its batch; None where it can."""
        bucket = bucket_of(self._tunable.axes, problem)
        return refused_somewhere(self._tunable, bucket, config, self._refused)

    def _new_choice(self, problem: Problem, bucket: Problem, options: Options, unfit: Unfit | None) -> Choice:
        """Choose for all problems of these other sizes, independent of the batch of `problem`."""
        asked_default, on_miss = options.asked_default, options.on_miss

        def refusal(config: Config, at: Problem) -> str | None:
            return self._refused(config, at) or (unfit(config) if unfit is not None else None)

        tuned = bool(self._group(without_batch(self._tunable, bucket), NEAR_DOUBLINGS)[1])
        if not asked_default:
            if choice := self._of_tables(bucket, NEAR_DOUBLINGS, "invariant", refusal):
                return choice
            if not tuned and on_miss == "error":
                # It raises for a size that no config can run: tuning would not help.
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
                f"{self._axes}, so no config keeps a row's bits; the default, {default}, is refused at "
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

    def _of_tables(self, bucket: Problem, within: float, source: Source, refusal: Refusal) -> Choice | None:
        wanted = without_batch(self._tunable, bucket)
        group, matches = self._group(wanted, within)
        for result in self._ranked(matches):
            if refused_somewhere(self._tunable, bucket, result.config, refusal) is None:
                why = partial(self._reason, result, matches[0], group, wanted)
                return Choice(config=result.config, source=source, why=why)
        return None

    def _refused(self, config: Config, problem: Problem) -> str | None:
        """Return why a config may not run for a problem, or depends on the batch."""
        if reason := self._may_not_run(config, problem):
            return reason
        return self._checked(self._tunable.batch_refusal, config, problem)

    def _may_not_run(self, config: Config, problem: Problem) -> str | None:
        return self._checked(self._legality.refusal, config, problem)

    def _checked(self, check: Refusal, config: Config, problem: Problem) -> str | None:
        """Return the result of a function of the declaration; a reason too where it raises."""
        try:
            return check(config, problem)
        except Exception as error:
            self._legality.failed(error, problem, str(config))
            return f"the declaration raises {type(error).__name__}"

    def _ranked(self, matches: tuple[Match, ...]) -> tuple[Ranked, ...]:
        entries = ((match.entry, match.table) for match in matches)
        return ranked(self._tunable, self._arch, entries)

    def _group(self, wanted: Problem, within: float) -> tuple[Problem | None, tuple[Match, ...]]:
        """Return the nearest group and its entries, of which none is malformed."""
        groups, buckets = self._groups()
        if wanted in groups:
            group = wanted
        elif near := buckets.nearest(wanted, within):
            group = [*groups][near[-1]]
        else:
            return None, ()
        if all(match.entry.is_sound() for match in groups[group]):
            return group, groups[group]
        self._index.leave_malformed_out()
        self._kept_groups = None
        return self._group(wanted, within)

    def _groups(self) -> tuple[Mapping[Problem, tuple[Match, ...]], Buckets]:
        """Group the entries of all tables by their buckets without the batch; and these buckets."""
        kept = self._kept_groups
        if kept is None:
            tunable, groups = self._tunable, dict[Problem, tuple[Match, ...]]()
            for match in self._index.matches():
                group = without_batch(tunable, match.entry.bucket)
                groups[group] = (*groups.get(group, ()), match)
            axes = {name: axis for name, axis in tunable.axes.items() if name not in tunable.batch_axes}
            kept = self._kept_groups = groups, Buckets(axes, [*groups])
        return kept

    def _reason(self, result: Ranked, match: Match, group: Problem | None, wanted: Problem) -> str:
        worst = ",".join(f"{name}={size}" for name, size in result.worst_at.items())
        untimed = f", {result.untimed} of them without a time of it" if result.untimed else ""
        assert group is not None
        where = "" if group == wanted else f" of the nearest buckets, {named(group)},"
        return (
            f"one config for every {self._axes}: its worst regret over {result.sizes} sizes{untimed}{where} "
            f"is {result.regret:.1%}, at {worst or 'none'}, in {match.path}"
        )
