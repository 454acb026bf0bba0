"""Draw entries of tables to measure again, and judge their new times. Pure.

The sample is random and stratified by kernel. With `CONFIDENCE` it bounds the entries that would fail
(`bound`), whatever the failing entries' kernels are: a stratum that was drawn more thinly counts as the
worse one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aot_tune.tables.states import edge_times, first_state, in_worst_state
from aot_tune.tables.table import Entry, Table, geometric_mean
from aot_tune.tuner.choose import states as in_states
from aot_tune.tuner.choose.times import FINALS_BAND, TIE, ProblemTimes, Run, is_tie
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.config import Config

CONFIDENCE = 0.95
"""Probability with which the bound on failing entries holds."""

PART = 0.05
"""Part of all entries below which `enough` keeps the bound."""

RIVALS = 1.10
"""Members of the portfolio up to this multiple of the winner's time in the table are timed with it."""

Finding = Literal["fails", "slower", "weaker", "beaten", "unknown"]
"""Finding on an entry: its winner fails here, as by a wrong result; the winner is slower than the default in
every state of the GPU; it gains less over the default than in the table; a member of the portfolio is faster
by more than `FINALS_BAND`; or nothing can be said, as of disturbed samples."""

FAILING: tuple[Finding, ...] = ("fails", "slower")
"""Findings with which a table does not hold. The others are reported."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result for one entry."""

    entry: Entry
    """The entry, as in the table."""

    findings: Mapping[Finding, str]
    """Each finding, in words; empty for an entry that holds as it is."""

    mean_us: float | None = None
    """The winner's time here, microseconds; None where it has none."""

    default_us: float | None = None
    """The default's time here, from the same rounds, microseconds."""

    gain: float | None = None
    """Gain over the default here: the mean over the states that the table has too."""

    table_gain: float | None = None
    """Gain over the default in the table, in the same states."""


# The sample -------------------------------------------------------------------------------------------------


def shares(strata: Sequence[int], count: int) -> list[int]:
    """Return how many members to draw of each stratum: one at least, else where the fewest part is drawn.

    Args:
        strata: The number of members of each stratum.
        count: The number to draw in all; more are drawn where there are more strata.
    """
    drawn = [min(1, size) for size in strata]
    while sum(drawn) < min(count, sum(strata)):
        open_ = [place for place, size in enumerate(strata) if drawn[place] < size]
        drawn[min(open_, key=lambda place: (drawn[place] / strata[place], -strata[place]))] += 1
    return drawn


def draw(tables: Sequence[Table], count: int | None, seed: int) -> list[tuple[Entry, ...]]:
    """Draw entries of each table at random, in the tables' order; the same for the same seed and tables.

    Args:
        tables: The tables.
        count: The number of entries in all; `enough` of them where None.
        seed: The seed.
    """
    strata = [len(table.entries) for table in tables]
    sizes = shares(strata, enough(strata) if count is None else count)
    return [
        tuple(
            table.entries[place]
            for place in sorted(
                random.Random(f"{seed} {table.kernel}").sample(range(len(table.entries)), size)
            )
        )
        for table, size in zip(tables, sizes, strict=True)
    ]


def bound(strata: Sequence[tuple[int, int]]) -> int:
    """Return a number with `CONFIDENCE` above that of all failing members, where no drawn one fails.

    With that many failing members, distributed over the strata in the worst way, a sample without any has
    a probability of at most 1 - `CONFIDENCE`. The worst way puts each where it is drawn least probably.

    Args:
        strata: The numbers of drawn and of all members, by stratum.
    """
    failing, unseen = [0] * len(strata), 1.0
    while unseen > 1 - CONFIDENCE and sum(failing) < sum(size for _, size in strata):
        chances = [
            (size - drawn - bad) / (size - bad) if bad < size else 0.0
            for (drawn, size), bad in zip(strata, failing, strict=True)
        ]
        place = max(range(len(strata)), key=chances.__getitem__)
        unseen *= chances[place]
        failing[place] += 1
    return sum(failing)


def enough(strata: Sequence[int]) -> int:
    """Return the fewest members to draw that bound failing ones below `PART`; all where none suffice."""
    counts = range(len(strata), sum(strata))
    return next(
        (
            count
            for count in counts
            if bound(list(zip(shares(strata, count), strata, strict=True))) < PART * sum(strata)
        ),
        sum(strata),
    )


def rivals(entry: Entry, portfolio: Sequence[Config]) -> list[Config]:
    """Return the entry's winner, then the members that are near it at the edge in the table's times."""
    times = in_worst_state(entry.points[-1]).us if entry.points else ()
    timed = {config: us for config, us in zip(portfolio, times, strict=False) if us is not None}
    limit = RIVALS * timed.get(entry.config, entry.mean_us)
    return list(dict.fromkeys([entry.config, *(config for config, us in timed.items() if us <= limit)]))


# The verdict ------------------------------------------------------------------------------------------------


def verdict(entry: Entry, default: Config, times: ProblemTimes, *, gains_compare: bool = True) -> Verdict:
    """Judge an entry by new times at its edge.

    Args:
        entry: The entry, whose winner and default both have times.
        default: The default.
        times: The portfolio's times, in the GPU's states and in the finals.
        gains_compare: Whether the table's default was this one.
    """
    race = times.runoff if {entry.config, default} <= times.runoff.keys() else times.portfolio
    runs: dict[str, Run] = {first_state(times.portfolio_states): race}
    runs |= times.portfolio_states.items()
    both = {name: run for name, run in runs.items() if {entry.config, default} <= run.keys()}
    mine, theirs = race[entry.config], race[default]
    disturbed = next((time.disturbed for run in both.values() for time in run.values() if time.disturbed), "")
    if disturbed:
        return Verdict(entry=entry, findings={"unknown": f"its samples are disturbed: {disturbed}"})
    findings: dict[Finding, str] = {}
    if all(_is_slower(run[entry.config], run[default]) for run in both.values()):
        least = min(run[entry.config].mean_us / run[default].mean_us for run in both.values())
        findings["slower"] = f"in every state at least {least - 1:.1%} slower than the default"
    table = {name: times for name, times in edge_times(entry).items() if name in both}
    gain = geometric_mean(both[name][default].mean_us / both[name][entry.config].mean_us for name in table)
    table_gain = geometric_mean(theirs_us / mine_us for mine_us, theirs_us in table.values())
    noise = entry.error_margin_us / entry.mean_us + sum(
        time.error_margin_us / time.mean_us for time in (mine, theirs)
    )
    if table and gains_compare and table_gain / gain - 1 > max(TIE, noise):
        findings["weaker"] = f"{gain:.2f}x here, {table_gain:.2f}x in the table"
    if beaten := _beaten(entry.config, times):
        findings["beaten"] = beaten
    compared = {"gain": gain, "table_gain": table_gain} if table and gains_compare else {"gain": gain}
    return Verdict(
        entry=entry, findings=findings, mean_us=mine.mean_us, default_us=theirs.mean_us, **compared
    )


def _is_slower(mine: Measurement, theirs: Measurement) -> bool:
    return mine.mean_us > theirs.mean_us and not is_tie(mine, theirs)


def _beaten(winner: Config, times: ProblemTimes) -> str:
    """Describe a config that is clearly faster than the winner, each in its worst state; empty for none."""
    judged = in_states.in_worst_state(times.portfolio, times.portfolio_states)
    best = min(judged.values(), key=lambda time: time.mean_us)
    behind = judged[winner].mean_us / best.mean_us - 1
    if behind <= FINALS_BAND or is_tie(judged[winner], best):
        return ""
    return f"{behind:.1%} slower in its worst state than {best.config}"
