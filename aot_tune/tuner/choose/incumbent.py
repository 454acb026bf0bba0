"""Decide which lines and unswept entries of the present table stay. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from aot_tune.errors import TuneError
from aot_tune.tables.fit import without
from aot_tune.tables.table import Entry, Point, Table
from aot_tune.tuner.choose.states import StateTimes
from aot_tune.tuner.choose.times import FINALS_BAND, TIE, SweepTimes, is_tie
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.bucket import bucket_of
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem


def comparable(sweep: SweepTimes, incumbent: Table | None, keep: Collection[Problem]) -> Table | None:
    """Return the incumbent, or None where it is a table of another arch or of other axes.

    Raises:
        TuneError: Entries that were not swept would stay, but they were made under other conditions than the
            new entries, or their portfolio holds a wrong config.
    """
    if incumbent is None or incumbent.arch != sweep.arch or dict(incumbent.axes) != dict(sweep.axes):
        return None
    carried = carried_entries(sweep, incumbent, keep)
    changed = [*differences(sweep, incumbent), *_other_check(sweep, incumbent)] if carried else []
    if carried and changed:
        raise TuneError(
            f"{sweep.kernel}: {len(carried)} entries of the table were not swept, and cannot be combined "
            f"with new ones: {'; '.join(changed)}; tune the whole kernel, or into another folder"
        )
    broken = [config for config in incumbent.portfolio if config in sweep.wrong]
    if carried and broken:
        raise TuneError(
            f"{sweep.kernel}: {broken[0]} computed a wrong result, and {len(carried)} entries that were not "
            "swept may depend on it; tune the whole kernel"
        )
    return incumbent


def check_joinable(
    sweep: SweepTimes, now: Table | None, old: Table | None, swept: Collection[Problem] = ()
) -> None:
    """Refuse a table that another tune has written meanwhile if it does not fit this sweep.

    Args:
        sweep: The new results.
        now: The table in the folder now.
        old: The table in the folder at the start of the sweep.
        swept: The buckets of a whole sweep, which would remove an entry that is neither among them nor in
            `old`. Empty for a partial sweep.

    Raises:
        TuneError: The table was made under other conditions, or has entries that would be lost.
    """
    if now is None:
        return
    changed = [*differences(sweep, now), *_other_check(sweep, now)]
    if dict(now.axes) != dict(sweep.axes):
        changed.append("its axes differ")
    if changed:
        raise TuneError(
            f"{sweep.kernel}: the table was replaced meanwhile by a table that does not fit this sweep: "
            f"{'; '.join(changed)}; run the same command again, which continues from the measured times, or "
            "tune into another folder"
        )
    known = {*swept, *(entry.bucket for entry in (old.entries if old is not None else ()))}
    lost = [entry.bucket for entry in now.entries if swept and entry.bucket not in known]
    if lost:
        raise TuneError(
            f"{sweep.kernel}: another tune has added {len(lost)} entries meanwhile that were not swept here, "
            f"first {lost[0]}; add them to `typical` to keep them, and run the same command again, which "
            "continues from the measured times"
        )


def differences(sweep: SweepTimes, incumbent: Table) -> list[str]:
    """List the differences in source, device, compiler and evidence. The driver may change."""
    old, new = incumbent.built_with, sweep.built_with
    evidence = sorted({entry.evidence for entry in incumbent.entries} or {sweep.evidence})
    pairs: list[tuple[str, object, object]] = [
        ("the source's hash", incumbent.source_hash, sweep.source_hash),
        ("the device", old.device_name, new.device_name),
        ("its count of multiprocessors", old.sm_count, new.sm_count),
        ("cuda-tile", old.cuda_tile, new.cuda_tile),
        ("tileiras", old.tileiras, new.tileiras),
        ("the evidence", " and ".join(evidence), sweep.evidence),
    ]
    return [f"{name} was {was}, is {now}" for name, was, now in pairs if was != now]


def _other_check(sweep: SweepTimes, table: Table) -> list[str]:
    """Return the check of results that a table's configs passed, where it is another one now."""
    was, now = table.check_hash, sweep.check_hash
    return [] if was == now else [f"the hash of make_args and reference was {was}, is {now}"]


def carried_entries(sweep: SweepTimes, incumbent: Table, keep: Collection[Problem]) -> list[Entry]:
    """Return the incumbent's unswept entries that stay."""
    swept, kept = set(sweep.edges(sweep.times())), set(keep)
    return [entry for entry in incumbent.entries if entry.bucket in kept and entry.bucket not in swept]


def kept_without(table: Table, failed: Mapping[Problem, Collection[Config]]) -> Table:
    """Return a table without the configs that failed, and without the buckets that they serve.

    A config serves a bucket where it wins the edge or is the fastest at a point. The default serves the
    bucket where it failed. The regrets of the other entries stay, since no such config is the fastest there.

    Args:
        table: The table.
        failed: The configs that failed by problem.
    """
    out = {config for configs in failed.values() for config in configs}.intersection(table.portfolio)
    defaults = {
        bucket_of(table.axes, problem) for problem, configs in failed.items() if not out.issuperset(configs)
    }
    columns = (*table.portfolio, None)

    def is_served(entry: Entry) -> bool:
        rows = [[(us, column) for us, column in zip(p.us, columns, strict=True) if us] for p in entry.points]
        fastest = {min(row, key=lambda time: time[0])[1] for row in rows if row}
        return entry.config in out or not fastest.isdisjoint(out) or entry.bucket in defaults

    entries = tuple(entry for entry in table.entries if not is_served(entry))
    return without(dataclasses.replace(table, entries=entries), out)


def widened(entry: Entry, old: Sequence[Config], new: Sequence[Config]) -> Entry:
    """Return a carried entry for a portfolio that grew at its end, without times of the added configs."""
    added = (None,) * (len(new) - len(old))
    if not added:
        return entry

    def of(times: tuple[float | None, ...]) -> tuple[float | None, ...]:
        return (*times[:-1], *added, times[-1])

    points = tuple(
        dataclasses.replace(
            point, us=of(point.us), states={name: of(times) for name, times in point.states.items()}
        )
        for point in entry.points
    )
    return dataclasses.replace(entry, points=points)


def had_another_default(entry: Entry, portfolio: Sequence[Config], default: Config) -> bool:
    """Return whether an entry shows that its default is not `default`. A table does not name its defaults.

    A winner outside the portfolio is the default, and a default in the portfolio has the same time in both
    of its columns.

    Args:
        entry: The present table's entry.
        portfolio: The present table's portfolio.
        default: The declared default at its edge.
    """
    if entry.config not in portfolio:
        return entry.config != default
    if default not in portfolio or not entry.points:
        return False  # nothing tells
    us = entry.points[-1].us
    return us[portfolio.index(default)] != us[-1]


def keeps_figures(
    entry: Entry, times: Mapping[Config, Measurement], default: Config, portfolio: Sequence[Config]
) -> bool:
    """Return whether an entry's times still hold.

    They do where its new time, or its gain over the default, ties with the old value, and the default is the
    same. Under a power cap, or on another GPU of the same model, all times of a problem change by the same
    factor and the gain stays. For an entry of the default itself the gain over the best other config counts.

    Args:
        entry: The present table's entry.
        times: The new times at its edge; its config and the default are included.
        default: The default at its edge.
        portfolio: The present table's portfolio.
    """
    if had_another_default(entry, portfolio, default):
        return False
    time = times[entry.config]
    old = Measurement(
        config=entry.config, mean_us=entry.mean_us, error_margin_us=entry.error_margin_us, num_samples=1
    )
    if is_tie(old, time):
        return True
    was, now = [entry.default_us], [times[default].mean_us]
    if entry.config == default:
        columns = zip(portfolio, entry.points[-1].us if entry.points else (), strict=False)
        was = [us for config, us in columns if us is not None and config != default]
        now = [times[config].mean_us for config in portfolio if config in times and config != default]
    if not was or not now:
        return False
    gain, new_gain = min(was) / entry.mean_us, min(now) / time.mean_us
    return abs(new_gain - gain) <= TIE * gain


def keeps_states(entry: Entry, states: StateTimes, default: Config) -> bool:
    """Return whether an entry's times in the GPU's other states still hold.

    They do where the states are the same, and in each the winner's time, or its gain over the default, has
    changed by `FINALS_BAND` at most: these times have fewer samples than others.
    """
    now: dict[str, tuple[float, float]] = {
        name: (known[entry.config].mean_us, known[default].mean_us)
        for name, known in states.items()
        if entry.config in known and default in known
    }
    if entry.states.keys() != now.keys():
        return False
    for name, was in entry.states.items():
        mean_us, default_us = now[name]
        gain, new_gain = was.default_us / was.mean_us, default_us / mean_us
        if min(abs(mean_us / was.mean_us - 1), abs(new_gain / gain - 1)) > FINALS_BAND:
            return False
    return True


SPOILT = 1.3
"""Largest spread between a point's configs of the ratio of new to old time. Of 18,000 published times, each
of a few launches, seven were 1.3 to 3.6 times as long as expected from the point's other times."""


def keeps_points(entry: Entry, points: Sequence[Point]) -> bool:
    """Return whether an entry's points still hold: the same sizes, and no spoilt time.

    The times of a point may all have changed, with the GPU's clock. A time that has changed by a factor of
    more than `SPOILT` relative to other times of its point and state was spoilt in one of the two sweeps.
    """
    if [dict(point.size) for point in entry.points] != [dict(point.size) for point in points]:
        return False
    for old, new in zip(entry.points, points, strict=True):
        for was, now in (
            (old.us, new.us),
            *((old.states[s], new.states[s]) for s in old.states if s in new.states),
        ):
            changes = [after / before for before, after in zip(was, now, strict=True) if before and after]
            if changes and max(changes) > SPOILT * min(changes):
                return False
    return True
