"""Turn times into a table: the portfolio, edges, points and ties. Pure: no file, no GPU, no clock.

Two tunes of an unchanged kernel differ by noise alone and must give the same bytes. So an incumbent wins
ties, an entry that keeps its config keeps its line, and a portfolio stays while it serves as well as a new
one would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from aot_tune.choose.points import Estimator
from aot_tune.errors import TuneError
from aot_tune.tables.strict_json import LONGEST_TEXT
from aot_tune.tables.table import Entry, Point, Slopes, StateTimes, Table, entry_order
from aot_tune.tuner.choose import states
from aot_tune.tuner.choose.incumbent import (
    carried_entries,
    comparable,
    differences,
    keeps_figures,
    keeps_points,
    keeps_states,
    widened,
)
from aot_tune.tuner.choose.portfolio import (
    MOST,
    WORST,
    choose_portfolio,
    clear_regrets,
    estimates_inside,
    regrets,
)
from aot_tune.tuner.choose.times import PREFERENCE, TIE, SweepTimes, Times, is_tie
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.bucket import Pow2, bucket_of
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import shortened

TIE_OF_MEANS = 0.005
"""Mean regrets of portfolios that differ by less than this tie. A mean over a sweep has less noise than a
time: in 50 repeated tunes of the recorded sweep, with its own noise, it changed by at most 0.3 %."""


def settle_portfolio(
    sweep: SweepTimes, incumbent: Table | None = None, *, keep: Collection[Problem] = ()
) -> tuple[Config, ...]:
    """Return the portfolio to measure in the second pass and to publish.

    1. The incumbent's portfolio, in its order, while all of its configs are still candidates and it serves as
       well as a new portfolio: its worst regret exceeds a portfolio's allowed regret by no more than the tie
       band, and its mean regret exceeds a new portfolio's by no more than `TIE_OF_MEANS`. A time that ties
       with the best counts as no regret.
    2. Where entries that were not swept are kept, the incumbent's portfolio with configs added at its end:
       the kept entries' points have one column for each of its configs, which stay unchanged.
    3. Otherwise a new portfolio.

    Args:
        sweep: The kernel's times, the first pass at least.
        incumbent: The table to be replaced, if any.
        keep: Buckets whose entries stay without being swept: all of the incumbent's for a partial sweep, none
            for a whole sweep.

    Raises:
        TuneError: As `choose_entries`.
    """
    incumbent = comparable(sweep, incumbent, keep)
    _refuse_wrong_defaults(sweep)
    edges = sweep.edge_times()
    estimates = estimates_inside(edges, sweep.axes, sweep.tiles, sweep.built_with.sm_count)
    defaults = {problem: sweep.default(problem) for problem in (*edges, *estimates)}

    def chosen(start: Sequence[Config] = ()) -> tuple[Config, ...]:
        most = max(MOST, len(start))
        return choose_portfolio(
            edges, defaults, most=most, estimates=estimates, start=start, least_gain=sweep.least_gain
        )

    def left(portfolio: Sequence[Config], times: Times) -> list[float]:
        return clear_regrets(times, defaults, portfolio, least_gain=sweep.least_gain)

    new = chosen()
    if incumbent is None:
        return new
    old, carried = incumbent.portfolio, carried_entries(sweep, incumbent, keep)
    known = {config for times in edges.values() for config in times}
    if carried or known.issuperset(old):
        worst_old, worst_new = (max(left(portfolio, edges), default=0.0) for portfolio in (old, new))
        mean_old, mean_new = (_mean([*left(p, edges), *left(p, estimates)]) for p in (old, new))
        if worst_old <= max(worst_new, WORST) + TIE and mean_old <= mean_new + TIE_OF_MEANS:
            return old
    return chosen(old) if carried else new


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _refuse_wrong_defaults(sweep: SweepTimes) -> None:
    for problem in (*sweep.faulty, *sweep.defaults):
        if (default := sweep.default(problem)) in sweep.wrong:
            raise TuneError(
                f"{sweep.kernel} {problem}: the default ({default}) computed a wrong result; every untuned "
                "problem would run it: correct the kernel, or declare another default"
            )


def choose_entries(
    sweep: SweepTimes,
    portfolio: Sequence[Config],
    *,
    incumbent: Table | None = None,
    keep: Collection[Problem] = (),
    slopes_of: Callable[[Table], Slopes | None] = lambda table: None,
) -> Table:
    """Choose each edge's winner and make the table.

    At an edge the fastest of the portfolio and the default wins, never a config slower than the default. If
    the incumbent ties with it, the incumbent stays. Otherwise, within half of the tie band (`PREFERENCE`),
    the default is preferred, then the config that ties at most edges, then the fastest.

    Where times were taken in several states of the GPU, the time in a config's worst state counts, compared
    with the fastest config there: the winner's regret in its worst state is the least. A config that is
    slower than the default in any state, beyond the tie band, does not win. Among the configs that tie in
    their worst states, the fastest over all states leads. A config then ties if it ties with the leader in
    each state.

    Where source, device, compiler and portfolio are unchanged, an entry keeps its line, points included, if
    its config stays and its new mean, or its gain over the default, ties with the old value. It does not if
    it shows another default, if a time at a point was spoilt (`keeps_points`), or if the line's samples were
    disturbed and the new samples were not. When every entry keeps its line, the incumbent is returned, with
    the hash of the check that it has passed now. As soon as one entry changes, `built_with` describes the
    newest sweep.

    Args:
        sweep: The kernel's times, both passes.
        portfolio: The result of `settle_portfolio`.
        incumbent: The table to be replaced.
        keep: As for `settle_portfolio`.
        slopes_of: Fits the table's slopes.

    Raises:
        TuneError: A default computes a wrong result, or a partial sweep's kept entries were made under other
            conditions: source, device, compiler or evidence.
    """
    incumbent = comparable(sweep, incumbent, keep)
    _refuse_wrong_defaults(sweep)
    portfolio, times = tuple(portfolio), sweep.times()
    defaults = {problem: sweep.default(problem) for problem in times}
    judged = sweep.judged(times)
    left = max(regrets(judged, defaults, portfolio, least_gain=sweep.least_gain), default=0.0)
    swept = _swept_entries(sweep, portfolio, times, incumbent)
    new = {entry.bucket for entry in swept if incumbent is None or entry is not incumbent.entry(entry.bucket)}
    entries = swept
    if incumbent is not None and (carried := carried_entries(sweep, incumbent, keep)):
        entries = swept + [widened(entry, incumbent.portfolio, portfolio) for entry in carried]
        left = max(left, incumbent.portfolio_regret)
    entries.sort(key=lambda entry: entry_order(sweep.axes, entry.bucket))
    if incumbent is not None and tuple(entries) == incumbent.entries and incumbent.portfolio == portfolio:
        same_check = incumbent.check_hash == sweep.check_hash
        return incumbent if same_check else replace(incumbent, check_hash=sweep.check_hash)
    table = _table(sweep, portfolio, entries, left)
    table = replace(table, slopes=slopes_of(table))
    estimator = Estimator(table, sweep.tiles, sweep.default)
    entries = [
        replace(entry, regret=max(estimator.left_out(entry).values(), default=0.0))
        if entry.bucket in new
        else entry
        for entry in entries
    ]
    return replace(table, entries=tuple(entries))


def _swept_entries(
    sweep: SweepTimes, portfolio: tuple[Config, ...], times: Times, incumbent: Table | None
) -> list[Entry]:
    """Return an entry for every swept edge: the incumbent's line where it stays, else a new entry."""
    edges = sweep.edges(times)
    races = {edge: sweep.race(edge, times) for edge in edges}
    judged = {edge: sweep.judged_race(edge, times) for edge in edges}
    tied = {
        edge: _tied(
            portfolio,
            judged[edge],
            [races[edge], *sweep.in_states(edge).values()],
            sweep.default(edge),
            sweep.least_gain,
        )
        for edge in edges
    }
    serves = Counter(config for configs in tied.values() for config in configs)
    inside: dict[Problem, list[Problem]] = {edge: [] for edge in edges}
    for problem in times:
        inside.get(bucket_of(sweep.axes, problem), []).append(problem)
    lines_may_stay = (
        incumbent is not None and incumbent.portfolio == portfolio and not differences(sweep, incumbent)
    )
    entries = []
    for edge in edges:
        old = incumbent.entry(edge) if incumbent is not None else None
        points = _points(sweep, portfolio, {problem: times[problem] for problem in inside[edge]})
        spoilt = _disturbed(sweep, portfolio, edge, [races[edge], *(times[p] for p in inside[edge])])
        if (
            old is not None
            and lines_may_stay
            and (old.disturbed is None or spoilt is not None)
            and _line_stays(
                old,
                portfolio,
                (races[edge], judged[edge], sweep.in_states(edge)),
                tied[edge],
                sweep.default(edge),
                points,
            )
        ):
            entries.append(old)
        else:
            config = _winner(judged[edge], tied[edge], sweep.default(edge), old, serves)
            entries.append(_entry(sweep, portfolio, edge, races[edge][config], races[edge], points, spoilt))
    return entries


def _tied(
    portfolio: Sequence[Config],
    judged: Mapping[Config, Measurement],
    runs: Sequence[Mapping[Config, Measurement]],
    default: Config,
    least_gain: float,
) -> list[Config]:
    """Return the leading config, then the configs that tie with it.

    Each is the default or in the portfolio.

    Args:
        portfolio: The portfolio.
        judged: The times in the configs' worst states.
        runs: The times in each state.
        default: The default, which has a time in each run.
        least_gain: The least gain over the default, as a fraction.
    """
    limit = judged[default].mean_us / (1 + least_gain)
    options = [default]
    for config in portfolio:
        faster = config in judged and judged[config].mean_us <= limit
        if config != default and faster and not any(_clearly_slower(config, default, run) for run in runs):
            options.append(config)
    best = min(options, key=lambda config: judged[config].mean_us)
    near = [config for config in options if is_tie(judged[config], judged[best])]
    leader = min(near, key=lambda config: (states.mean_ratio(config, best, runs), judged[config].mean_us))
    options.sort(key=lambda config: judged[config].mean_us)
    return [
        leader,
        *(
            config
            for config in options
            if config != leader
            and is_tie(judged[config], judged[leader])
            and not any(_clearly_slower(config, leader, run) for run in runs)
        ),
    ]


def _clearly_slower(config: Config, other: Config, run: Mapping[Config, Measurement]) -> bool:
    if config not in run or other not in run:
        return False
    return run[config].mean_us > run[other].mean_us and not is_tie(run[config], run[other])


def _line_stays(
    old: Entry,
    portfolio: Sequence[Config],
    times: tuple[Mapping[Config, Measurement], Mapping[Config, Measurement], states.StateTimes],
    tied: Sequence[Config],
    default: Config,
    points: Sequence[Point],
) -> bool:
    """Return whether an entry stays: its config ties with the fastest, and its times and sizes hold.

    Its config may now be slower than the default within a tie. That is noise, and the line shows the run in
    which it won.
    """
    race, judged, in_states = times
    time = judged.get(old.config)
    return (
        time is not None
        and is_tie(time, judged[tied[0]])
        and keeps_figures(old, race, default, portfolio)
        and keeps_states(old, in_states, default)
        and keeps_points(old, points)
    )


def _winner(
    times: Mapping[Config, Measurement],
    tied: Sequence[Config],
    default: Config,
    old: Entry | None,
    serves: Mapping[Config, int],
) -> Config:
    """Choose among tied configs: the incumbent, the default, the most frequently tied, the fastest."""
    if old is not None and old.config in tied:
        return old.config
    close = [config for config in tied if is_tie(times[config], times[tied[0]], part=PREFERENCE)]
    if default in close:
        return default
    return min(close, key=lambda config: (-serves[config], times[config].mean_us, str(config)))


# Parts of an entry ------------------------------------------------------------------------------------------


def _points(
    sweep: SweepTimes, portfolio: Sequence[Config], problems: Mapping[Problem, Mapping[Config, Measurement]]
) -> tuple[Point, ...]:
    """Return a bucket's points in ascending order, without sizes at which no config has a time."""
    names = [name for name, axis in sweep.axes.items() if isinstance(axis, Pow2)]
    points = []
    for problem in sorted(problems, key=lambda problem: [problem.size(name) for name in names]):
        times = problems[problem]
        columns = (*portfolio, sweep.default(problem))
        us = _us(columns, times)
        rows: dict[str, tuple[float | None, ...]] = {
            name: _us(columns, known) for name, known in sweep.in_states(problem).items() if known
        }
        if any(time is not None for time in us):
            size = {name: problem.size(name) for name in names}
            points.append(Point(size=size, us=us, states=rows))
    return tuple(points)


def _us(columns: Sequence[Config], times: Mapping[Config, Measurement]) -> tuple[float | None, ...]:
    return tuple(times[config].mean_us if config in times else None for config in columns)


def _entry(
    sweep: SweepTimes,
    portfolio: Sequence[Config],
    edge: Problem,
    winner: Measurement,
    times: Mapping[Config, Measurement],
    points: tuple[Point, ...],
    disturbed: str | None,
) -> Entry:
    default = sweep.default(edge)
    return Entry(
        bucket=edge,
        config=winner.config,
        mean_us=winner.mean_us,
        error_margin_us=winner.error_margin_us,
        default_us=times[default].mean_us,
        regret=0.0,
        evidence=sweep.evidence,
        points=points,
        disturbed=disturbed,
        states={
            name: StateTimes(mean_us=known[winner.config].mean_us, default_us=known[default].mean_us)
            for name, known in sweep.in_states(edge).items()
            if winner.config in known and default in known
        },
    )


def _disturbed(
    sweep: SweepTimes,
    portfolio: Sequence[Config],
    edge: Problem,
    runs: Sequence[Mapping[Config, Measurement]],
) -> str | None:
    """Return the disturbances of an entry's times, each once; None without any."""
    shown = [run[config] for run in runs for config in (*portfolio, sweep.default(edge)) if config in run]
    causes = "; ".join(dict.fromkeys(time.disturbed for time in shown if time.disturbed))
    # A table holds only a short printable text, whatever the worker sent.
    return shortened("".join(c if c.isprintable() else " " for c in causes), LONGEST_TEXT) or None


def left_at_points(
    sweep: SweepTimes,
    portfolio: Sequence[Config],
    times: Mapping[Problem, Times],
    slopes: Slopes | None = None,
) -> dict[Problem, dict[Problem, float]]:
    """Return the rule's regret at each point of buckets, estimated from the bucket's other points, by edge.

    Args:
        sweep: The kernel's times.
        portfolio: The portfolio.
        times: Edge to every measured problem of its bucket, the edge included, with its times.
        slopes: Slopes of the present table, if any.
    """
    # All planned edges, so that the largest does not depend on which are measured so far.
    edges = [problem for problem in sweep.defaults if bucket_of(sweep.axes, problem) == problem]
    entries = [
        Entry(
            bucket=edge,
            config=sweep.default(edge),
            mean_us=0.0,
            error_margin_us=0.0,
            default_us=0.0,
            regret=0.0,
            evidence=sweep.evidence,
            points=_points(sweep, portfolio, times.get(edge, {})),
        )
        for edge in dict.fromkeys((*times, *edges))
    ]
    table = replace(_table(sweep, portfolio, entries), slopes=slopes)
    estimator = Estimator(table, sweep.tiles, sweep.default)
    return {entry.bucket: estimator.left_out(entry) for entry in entries if entry.bucket in times}


def _table(
    sweep: SweepTimes, portfolio: Sequence[Config], entries: Sequence[Entry], regret: float = 0.0
) -> Table:
    return Table(
        kernel=sweep.kernel,
        arch=sweep.arch,
        source_hash=sweep.source_hash,
        check_hash=sweep.check_hash,
        built_with=sweep.built_with,
        axes=sweep.axes,
        portfolio=tuple(portfolio),
        portfolio_regret=regret,
        entries=tuple(entries),
    )
