"""Why a problem gets its config, as data: the ladder's answer and the times it compared. Launches nothing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aot_tune import environment
from aot_tune.declare.checks import mistakes_on
from aot_tune.declare.declaration import Declaration
from aot_tune.declare.fingerprint.hashing import source_hash
from aot_tune.declare.mistakes import of_problems
from aot_tune.serve.choose import loader
from aot_tune.serve.choose.index import Index
from aot_tune.serve.choose.resolve import Choice, Legality, Source, tune_command
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.serve.launch.messages import passed_over_message, stale_messages
from aot_tune.serve.rank import is_rank
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import aligned, counted


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What the rule inside the bucket expects of one config."""

    config: Config
    """The config."""

    us: float
    """Expected time, microseconds."""

    point: Mapping[str, int]
    """The measured size that it was told from."""

    scale: float
    """Waves at the problem over waves at that point."""

    refusal: str | None
    """Why it may not run for this problem; None when it may."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a launch of one problem would run, and why."""

    kernel: str
    """The kernel."""

    arch: Arch
    """The arch asked for."""

    problem: Problem
    """The problem."""

    bucket: Problem
    """The bucket it belongs to."""

    config: Config
    """The config a launch would take."""

    default: Config
    """The declaration's default, for comparison."""

    source: Source
    """The step of the ladder that told it."""

    reason: str
    """Why, for people."""

    compared: tuple[Compared, ...]
    """The times that were compared, fastest first; empty where no table had any."""

    remarks: tuple[str, ...]
    """Warnings of the tables, what a launch would do beyond this, and the command that tunes a miss."""

    mistakes: tuple[str, ...]
    """What is wrong with the declaration for this problem; a launch or a sweep may stop at it."""


def explain(tunable: Declaration, arch: Arch, problem: Problem) -> Explanation:
    """Climb the ladder for one problem as a launch on `arch` would, without searching.

    Raises:
        LaunchError: Nothing may run: the default itself is not legal.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        index = loader.load(tunable, arch)  # anew, since what is loaded already has given its warnings
        choice = dispatcher_of(tunable).choice(arch, problem)
    return Explanation(
        kernel=tunable.name,
        arch=arch,
        problem=problem,
        bucket=tunable.bucket_of(problem),
        config=choice.config,
        default=tunable.default_config(arch, problem),
        source=choice.source,
        reason=choice.reason,
        compared=_compared(tunable, arch, problem, index, choice),
        remarks=(
            *dict.fromkeys(str(one.message) for one in caught),
            *stale_messages(tunable, arch, index, source_hash(tunable)),
            *_remarks(tunable, arch, problem, choice),
        ),
        mistakes=tuple(mistakes_on(tunable, arch, problem)),
    )


def overview_lines(told: Sequence[Explanation]) -> list[str]:
    """Many problems of a kernel, one line each, and what all their remarks come to."""
    heads = ("problem", "step", "config")
    rows = [(str(one.problem), one.source, str(one.config)) for one in told]
    missed = [one for one in told if one.remarks]
    again = f"{counted(len(missed), 'problem')} with remarks; name one with --problem to see why"
    wrong = [one for one in told if one.mistakes]
    return [
        *aligned([heads, *rows]),
        *([again] if missed else []),
        *(
            f"the declaration is wrong: {of_problems(text, one.problem, len(wrong) - 1)}"
            for one in wrong[:1]
            for text in one.mistakes
        ),
    ]


def explanation_lines(told: Explanation) -> list[str]:
    """The explanation for a person."""
    rows = [
        (
            "  *" if one.config == told.config else "   ",
            f"{one.us:.2f} us",
            " ".join(f"{name}={size}" for name, size in one.point.items()) or "-",
            f"x{one.scale:.2f} waves",
            f"{one.config}" + (" (default)" if one.config == told.default else ""),
            f"refused: {one.refusal}" if one.refusal else "",
        )
        for one in told.compared
    ]
    return [
        f"{told.kernel} {told.problem} on {told.arch}: {told.config}",
        f"  {told.source}: {told.reason}",
        *(["  expected of the portfolio and the default, and the point each is told from:"] if rows else []),
        *aligned(rows),
        *(f"  remark: {remark}" for remark in told.remarks),
        *(f"  the declaration is wrong: {text}" for text in told.mistakes),
    ]


def _compared(
    tunable: Declaration, arch: Arch, problem: Problem, index: Index, choice: Choice
) -> tuple[Compared, ...]:
    candidates = (index.own(problem), index.nearest(problem, float("inf")))
    found = next((one for one in candidates if one is not None and one.entry == choice.entry), None)
    if found is None:
        return ()
    legality = Legality(tunable, arch)
    estimates = index.rule(found).estimates(problem, tunable.default_config(arch, problem))
    return tuple(
        Compared(
            config=estimate.config,
            us=round(estimate.us, 3),
            point=estimate.point.size,
            scale=round(estimate.scale, 4),
            refusal=legality.refusal(estimate.config, problem),
        )
        for estimate in estimates
    )


def _remarks(tunable: Declaration, arch: Arch, problem: Problem, choice: Choice) -> list[str]:
    if message := passed_over_message(tunable, arch, problem, choice):
        return [message]
    if not choice.missed:
        return []
    remarks = [f"nothing was tuned for it or near it; tune it: {tune_command(tunable, arch, problem)}"]
    if not (is_rank() or environment.search_disabled() or environment.search_seconds() == 0):
        remarks.append("a launch may search live first, and remember the winner in the user's cache")
    return remarks
