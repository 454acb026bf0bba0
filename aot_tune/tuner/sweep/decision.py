"""Choose a kernel's portfolio and new table from its times and its present table. Reads no file."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

from aot_tune.choose.left_out import fitted_slopes
from aot_tune.declare.declaration import Declaration
from aot_tune.tables.table import BuiltWith, Slopes, Table
from aot_tune.tuner.choose.entries import choose_entries, left_at_points, settle_portfolio
from aot_tune.tuner.choose.incumbent import check_joinable, comparable, differences
from aot_tune.tuner.choose.times import TIE, ProblemTimes, SweepTimes
from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.plan.candidates import SweepPlan
from aot_tune.tuner.plan.sizes import LEFT_AT_MOST, is_odd, next_size, sizes_inside
from aot_tune.tuner.sweep.state import KernelTimes
from aot_tune.values.bucket import bucket_of
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import described


class Decision:
    """Chooses the portfolio and the table of one kernel's sweep.

    Args:
        planned: The kernel's problems.
        identity: The conditions under which they are measured.
        old: The present table.
        whole: Whether all declared problems are swept; else the present table's other entries stay.

    Raises:
        TuneError: Entries that would stay were made under other conditions than the new entries; nothing
            was measured yet.
    """

    def __init__(
        self, planned: SweepPlan, identity: Mapping[str, str], old: Table | None, *, whole: bool
    ) -> None:
        self.tunable, device = planned.kernel.tunable, planned.kernel.device
        self._default_at = planned.kernel.default
        self.old = old
        """The present table, whose entries win ties and may stay."""
        self.remark: str | None = None
        """A line for the user about the last result of `table`, if any."""
        self._whole = whole
        self._joined = False
        self._empty = SweepTimes(
            kernel=self.tunable.name,
            arch=planned.kernel.arch,
            source_hash=identity["source_hash"],
            check_hash=identity["check_hash"],
            built_with=BuiltWith(
                device_name=device.name,
                sm_count=device.sm_count,
                cuda_tile=identity["cuda_tile"],
                tileiras=identity["tileiras"],
                driver=identity["driver"],
            ),
            axes=self.tunable.axes,
            tiles=self.tunable.tiles,
            defaults={problem_plan.problem: problem_plan.default for problem_plan in planned.problems},
            problems={},
        )
        comparable(self._empty, old, self._keep)  # raises before anything is measured

    def sweep(self, swept: KernelTimes) -> SweepTimes:
        """Return the measured times in the form for the choice."""
        inside = {problem: self._default_at(problem) for problem in swept.problems}
        return replace(
            self._empty,
            defaults={**inside, **self._empty.defaults},
            problems=swept.problems,
            wrong=frozenset(swept.wrong),
            faulty=swept.faulty,
        )

    def portfolio(self, swept: KernelTimes) -> tuple[Config, ...]:
        """Return the configs to time at every edge and every point inside a bucket."""
        return settle_portfolio(self.sweep(swept), self.old, keep=self._keep)

    def first_sizes(self, edge: Problem) -> list[Problem]:
        """Return the first sizes to measure inside a bucket.

        They are the present table's sizes, if any, so that its line may stay.
        """
        old = self.old.entry(edge) if self.old is not None else None
        inside = [edge.replaced(**point.size) for point in old.points] if old is not None else []
        return [size for size in inside if size != edge] or sizes_inside(self.tunable.axes, edge)

    def next_sizes(self, swept: KernelTimes, edges: Collection[Problem]) -> dict[Problem, Problem]:
        """Return the next size to measure in each bucket where the rule is not good enough, by edge.

        The size depends only on the bucket's times. Where the present table's line may stay, the rule must be
        worse by a tie, so that noise adds no size.
        """
        sweep, axes = self.sweep(swept), self.tunable.axes
        times: dict[Problem, dict[Problem, Mapping[Config, Measurement]]] = {edge: {} for edge in edges}
        for problem, known in sweep.problems.items():
            times.get(bucket_of(axes, problem), {})[problem] = known.portfolio
        portfolio = [config for config in swept.portfolio if config not in swept.wrong]
        may_stay = set()
        if self.old is not None and not differences(self._empty, self.old):
            may_stay = {entry.bucket for entry in self.old.entries}
        timed = {
            edge: inside for edge, inside in times.items() if sweep.default(edge) in inside.get(edge, {})
        }
        slopes = None if self.old is None else self.old.slopes
        sizes = {}
        for edge, left in left_at_points(sweep, portfolio, timed, slopes).items():
            at_most = LEFT_AT_MOST + (TIE if edge in may_stay else 0.0)
            if (size := next_size(axes, edge, left, at_most=at_most)) is not None:
                sizes[edge] = size
        return sizes

    def table(self, swept: KernelTimes) -> Table:
        """Choose the table to publish.

        Raises:
            TuneError: As `choose_entries`.
        """
        self.remark = None
        sweep = self.sweep(swept)
        portfolio = swept.portfolio
        if self._joined:
            # The configs of another tune were not timed everywhere here: they win none of this sweep's edges.
            portfolio = self._joined_portfolio(sweep, swept)
            untimed = set(portfolio) - self._timed(swept)
            sweep = _without(sweep, untimed)
        return choose_entries(
            sweep, portfolio, incumbent=self.old, keep=self._keep, slopes_of=partial(self._slopes, sweep)
        )

    def _slopes(self, sweep: SweepTimes, table: Table) -> Slopes | None:
        old = comparable(sweep, self.old, self._keep)
        present = None if old is None else old.slopes
        # Functions of the declaration may raise at sizes where nothing was timed: no reason to lose a sweep.
        try:
            return fitted_slopes(self.tunable, table, present)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.remark = (
                f"slopes are not fitted, because the declaration raises {described(error)} "
                f"({place.filename}, line {place.lineno}); correct it and tune again"
            )
        return present

    def join(self, now: Table | None) -> None:
        """Take into account the table that another tune has written since the sweep began.

        A whole sweep keeps its portfolio. A partial sweep takes over the other tune's portfolio, because the
        other entries' points have one column for each of its configs. The configs that this sweep's edges
        need are added at its end, as if that table had been present from the start.

        Raises:
            TuneError: The two tables cannot be joined (`check_joinable`).
        """
        check_joinable(self._empty, now, self.old, tuple(self._empty.defaults) if self._whole else ())
        self.old = now
        self._joined = not self._whole

    def _joined_portfolio(self, sweep: SweepTimes, swept: KernelTimes) -> tuple[Config, ...]:
        timed = self._timed(swept)
        untimed = {config for known in sweep.problems.values() for config in known.candidates} - timed
        return settle_portfolio(_without(sweep, untimed), self.old, keep=self._keep)

    @property
    def _keep(self) -> tuple[Problem, ...]:
        if self._whole or self.old is None:
            return ()
        return tuple(entry.bucket for entry in self.old.entries)

    def _timed(self, swept: KernelTimes) -> set[Config]:
        return {*swept.portfolio, *self._empty.defaults.values()}


def _without(sweep: SweepTimes, configs: set[Config]) -> SweepTimes:
    """Return a sweep without the first-pass times of some configs."""

    def without(known: ProblemTimes) -> ProblemTimes:
        left = {config: time for config, time in known.candidates.items() if config not in configs}
        return replace(known, candidates=left)

    return replace(sweep, problems={problem: without(known) for problem, known in sweep.problems.items()})


# Verifying again --------------------------------------------------------------------------------------------


def to_recheck(
    table: Table, swept: KernelTimes, defaults: Mapping[Problem, Config]
) -> list[tuple[Problem, Config]]:
    """Return the configs of a table to verify once more before it is published, each with its problem.

    They are each winner and each default, at their edges, and each member of the portfolio without an entry,
    at the edge where it loses least: the rule between measured sizes and live searches choose among all
    members.

    Args:
        table: The table.
        swept: The measured times.
        defaults: The default at each edge, where it may run.
    """
    checks = {
        entry.bucket: list(dict.fromkeys([entry.config, defaults.get(entry.bucket, entry.config)]))
        for entry in table.entries
        if entry.bucket in swept.problems
    }
    winning = {entry.config for entry in table.entries}
    for member in table.portfolio:
        edge = swept.best_edge(member, checks)
        if edge is not None and member not in winning:
            checks[edge].append(member)
    return [(edge, config) for edge, configs in checks.items() for config in configs]


def to_verify(table: Table, swept: KernelTimes, tunable: Declaration) -> list[Problem]:
    """Return the problems at which the portfolio is verified, not timed, before a table is published.

    They are the declared problems of the swept buckets, and an odd size of each, without the problems at
    which the portfolio was timed: it was verified there.
    """
    axes = tunable.axes
    inside: dict[Problem, dict[Problem, None]] = {
        entry.bucket: {} for entry in table.entries if entry.bucket in swept.problems
    }
    for problem in (*swept.problems, *tunable.typical_problems):
        inside.get(bucket_of(axes, problem), {})[problem] = None
    for bucket, problems in inside.items():
        if not any(is_odd(axes, problem) for problem in problems):
            problems.update(dict.fromkeys(sizes_inside(axes, bucket)[-1:]))
    return [problem for problems in inside.values() for problem in problems if problem not in swept.problems]
