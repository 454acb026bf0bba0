"""`aot-tune doctor KERNEL`: why a problem gets its config, and the times that were compared.

It climbs the ladder of `choose.resolve` as a launch would, and launches nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from aot_tune import environment
from aot_tune.choose.choice import Choice, Source, tune_command
from aot_tune.choose.index import Index
from aot_tune.choose.legality import Legality
from aot_tune.choose.points import waves
from aot_tune.choose.resolve import where_of
from aot_tune.declare.checks import mistakes_on
from aot_tune.declare.declaration import Declaration
from aot_tune.declare.fingerprint.hashing import source_hash
from aot_tune.serve import loader
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.serve.launch.messages import (
    card_messages,
    compiler_messages,
    passed_over_message,
    stale_messages,
)
from aot_tune.serve.rank import is_rank
from aot_tune.tables.states import first_state
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import aligned, counted


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What the rule between measured sizes expects of one config."""

    config: Config
    """The config."""

    us: float | None
    """The expected time, microseconds; None where it is estimated from other buckets' points."""

    ratio: float
    """The expected time / that of the fastest."""

    waves: int | None
    """How often the config fills the GPU with blocks here; None where the kernel declares no tiles."""

    refusal: str | None
    """Why the config may not run for this problem; None when it may."""


@dataclass(frozen=True, kw_only=True)
class AtEdge:
    """The times of one config at the bucket's edge, in each state of the GPU."""

    config: Config
    """The config."""

    us: Mapping[str, float | None]
    """Microseconds by the state's name; None where it was not timed."""


@dataclass(frozen=True, kw_only=True)
class ServingAll:
    """What one config costs where it serves every batch."""

    config: Config
    """The config."""

    regret: float
    """The worst t / t_best - 1 over the measured sizes at which it has a time."""

    worst_at: Mapping[str, int]
    """The size of that regret, on the batch axes."""

    sizes: int
    """The number of measured sizes of every batch."""

    untimed: int
    """The number of these at which it has no time."""

    refusal: str | None
    """The size at which it may not run, and why, or why a row's bits would differ; None for a choice."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Which config a launch of one problem would run, and why."""

    kernel: str
    """The kernel's name."""

    arch: Arch
    """The arch that was asked for."""

    problem: Problem
    """The problem that was asked for."""

    bucket: Problem
    """The bucket that the problem belongs to."""

    config: Config
    """The config that a launch would run."""

    default: Config
    """The declaration's default, for comparison."""

    source: Source
    """The step of the ladder that gave the config."""

    reason: str
    """Why that step gave it, as a sentence."""

    basis: str
    """The points that the times are estimated from, each with its weight; empty when there are none."""

    compared: tuple[Compared, ...]
    """What is expected of the portfolio and the defaults, fastest first; empty without a table."""

    at_edge: tuple[AtEdge, ...]
    """The times that the table has of the bucket's edge; empty where it has those of one state alone."""

    every_batch: tuple[ServingAll, ...]
    """What each config costs that serves every batch, best first; empty where that is not asked for."""

    remarks: tuple[str, ...]
    """Warnings about the tables, what a launch would do besides, and the command that tunes a miss."""

    mistakes: tuple[str, ...]
    """What is wrong with the declaration for this problem; a launch or a sweep may fail because of it."""


def explain(tunable: Declaration, arch: Arch, problem: Problem, *, option: str | None = None) -> Explanation:
    """Climb the ladder for one problem as a launch on `arch` would, without searching.

    Args:
        tunable: The kernel's declaration.
        arch: The arch.
        problem: The problem.
        option: The option --module of the commands in the remarks; by default a launch's, which knows only
            the module of the author's functions.

    Raises:
        LaunchError: No config may run, because even the default is not legal.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        index = loader.load(
            tunable, arch
        )  # load again: tables that are loaded already do not warn a second time
        choice = dispatcher_of(tunable).choice(arch, problem)
    basis, compared = _compared(tunable, arch, problem, index, choice)
    remarks = (
        *dict.fromkeys(str(one.message) for one in caught),
        *stale_messages(tunable, arch, index, source_hash(tunable)),
        *(message for here in _cards_here(arch) for _, message in card_messages(index, here)),
        *compiler_messages(tunable, arch, index, dispatcher_of(tunable).kernels.cubins.compiler(arch)),
        *_remarks(tunable, arch, problem, choice),
    )
    if option is not None and (own := tunable.module_option):
        remarks = tuple(one.replace(own, option) for one in remarks)
    return Explanation(
        kernel=tunable.name,
        arch=arch,
        problem=problem,
        bucket=tunable.bucket_of(problem),
        config=choice.config,
        default=tunable.default_config(arch, problem),
        source=choice.source,
        reason=choice.reason,
        basis=basis,
        compared=compared,
        at_edge=_at_edge(index, choice, tunable.default_config(arch, problem)),
        every_batch=_every_batch(tunable, arch, problem),
        remarks=remarks,
        mistakes=tuple(mistakes_on(tunable, arch, problem)),
    )


def _cards_here(arch: Arch) -> tuple[str, ...]:
    """The names of this machine's GPUs of an arch."""
    return tuple(dict.fromkeys(gpu.name for gpu in loader.gpus() or () if gpu.arch == arch))


_MOST_ROWS = 20
"""Problems of a kernel that are printed, a line each; of more of them only half as many."""


def overview_lines(answers: Sequence[Explanation]) -> list[str]:
    """One line for each problem of a kernel, then how many have remarks of their own."""
    heads = ("problem", "step", "config")
    shown = answers if len(answers) <= _MOST_ROWS else answers[: _MOST_ROWS // 2]
    rows: list[tuple[str, ...]] = [(str(one.problem), one.source, str(one.config)) for one in shown]
    if len(shown) < len(answers):
        rows.append((f"and {len(answers) - len(shown)} more; --problem prints one", "", ""))
    missed = [one for one in answers if one.remarks]
    first = missed[0].remarks[0] if missed else ""
    again = f"{counted(len(missed), 'problem')} with remarks; --problem prints all of one; the first: {first}"
    return [*aligned([heads, *rows]), *([again] if missed else [])]


def explanation_lines(answer: Explanation) -> list[str]:
    """The explanation for a person."""
    rows = [
        (
            "  *" if one.config == answer.config else "   ",
            "" if one.us is None else f"{one.us:.2f} us",
            f"x{one.ratio:.3f}",
            "" if one.waves is None else counted(one.waves, "wave"),
            f"{one.config}" + (" (default)" if one.config == answer.default else ""),
            f"refused: {one.refusal}" if one.refusal else "",
        )
        for one in answer.compared
    ]
    heading = (
        "  expected times of the portfolio and the default"
        + (", as in its worst state" if answer.at_edge else "")
        + ("" if answer.basis in answer.reason else f", estimated from {answer.basis}")
        + ":"
    )
    return [
        f"{answer.kernel} {answer.problem} on {answer.arch}: {answer.config}",
        f"  {answer.source}: {answer.reason}",
        *([heading] if rows else []),
        *aligned(rows),
        *_edge_lines(answer),
        *_every_batch_lines(answer),
        *(f"  remark: {remark}" for remark in answer.remarks),
        *(f"  the declaration is wrong: {text}" for text in answer.mistakes),
    ]


def _compared(
    tunable: Declaration, arch: Arch, problem: Problem, index: Index, choice: Choice
) -> tuple[str, tuple[Compared, ...]]:
    """The points of the estimates, in words, and the estimates."""
    candidates = (index.own(problem), index.nearest(problem, float("inf")))
    found = next((one for one in candidates if one is not None and one.entry == choice.entry), None)
    if found is None:
        return "", ()
    legality, default_at = Legality(tunable, arch), partial(tunable.default_config, arch)
    own = choice.source == "own"
    ranking = index.rule(found, default_at).ranking(
        problem,
        default_at(problem),
        where=where_of(choice.source),
        beside=() if own else index.beside(found, default_at),
    )
    sm_count, tiles = found.table.built_with.sm_count, tunable.tiles
    return ranking.basis, tuple(
        Compared(
            config=config,
            us=round(ranking.us(lag), 3) if own else None,
            ratio=round(math.exp(lag - ranking.lags[0][0]), 4),
            waves=waves(tiles(config, problem), config, sm_count) if tiles else None,
            refusal=legality.refusal(config, problem),
        )
        for lag, config in ranking.lags
    )


def _at_edge(index: Index, choice: Choice, default: Config) -> tuple[AtEdge, ...]:
    entry = choice.entry
    table = next((one for one in index.tables.values() if entry is not None and entry in one.entries), None)
    if entry is None or table is None or not entry.points or not entry.points[-1].states:
        return ()
    point = entry.points[-1]
    times = {first_state(point.states): point.us, **point.states}
    return tuple(
        AtEdge(config=config, us={name: us[place] for name, us in times.items()})
        for place, config in enumerate((*table.portfolio, default))
        if point.us[place] is not None
    )


def _edge_lines(answer: Explanation) -> list[str]:
    """A row for each config with its times at the bucket's edge, a column for each state of the GPU."""
    if not answer.at_edge:
        return []
    states = list(answer.at_edge[0].us)
    rows = [
        (
            "  *" if one.config == answer.config else "   ",
            *("-" if us is None else f"{us:.2f}" for us in one.us.values()),
            f"{one.config}" + (" (default)" if one.config == answer.default else ""),
        )
        for one in answer.at_edge
    ]
    return [
        "  times at the bucket's edge in each state of the GPU, us:",
        *aligned([("   ", *states, ""), *rows]),
    ]


def _every_batch(tunable: Declaration, arch: Arch, problem: Problem) -> tuple[ServingAll, ...]:
    if not environment.batch_invariant() or not tunable.batch_axes:
        return ()
    every = dispatcher_of(tunable).every_batch(arch)
    return tuple(
        ServingAll(
            config=one.config,
            regret=round(one.regret, 4),
            worst_at=one.worst_at,
            sizes=one.sizes,
            untimed=one.untimed,
            refusal=every.refusal(one.config, problem),
        )
        for one in every.ranking(problem)
    )


def _every_batch_lines(answer: Explanation) -> list[str]:
    rows = [
        (
            "  *" if one.config == answer.config else "   ",
            f"{one.regret:.1%}" if one.worst_at else "-",
            "at " + (" ".join(f"{name}={size}" for name, size in one.worst_at.items()) or "-"),
            f"{one.sizes - one.untimed} of {one.sizes} sizes",
            str(one.config),
            f"refused: {one.refusal}" if one.refusal else "",
        )
        for one in answer.every_batch
    ]
    heading = f"  {environment.BATCH_INVARIANT}: one config serves every batch; worst regret of each:"
    return [heading, *aligned(rows)] if rows else []


def _remarks(tunable: Declaration, arch: Arch, problem: Problem, choice: Choice) -> list[str]:
    keeps_one = environment.batch_invariant()
    if keeps_one and not tunable.batch_axes:
        return [
            f"{environment.BATCH_INVARIANT} changes nothing here: {tunable.name} declares no batch_axes",
            *_other_remarks(tunable, arch, problem, choice, may_search=True),
        ]
    return _other_remarks(tunable, arch, problem, choice, may_search=not keeps_one)


def _other_remarks(
    tunable: Declaration, arch: Arch, problem: Problem, choice: Choice, *, may_search: bool
) -> list[str]:
    if message := passed_over_message(tunable, arch, problem, choice):
        return [message]
    if not choice.missed:
        return []
    remarks = [
        f"no bucket at or near this problem was tuned; tune it: {tune_command(tunable, arch, problem)}"
    ]
    if may_search and not (is_rank() or environment.search_disabled() or environment.search_seconds() == 0):
        remarks.append("a launch may search live first and remember the winner in the user's cache")
    return remarks
