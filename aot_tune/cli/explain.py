"""`aot-tune doctor KERNEL`: reason for a problem's config, and the compared times.

Climbs the ladder of `choose.resolve` as a launch would, and launches nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import sub

from aot_tune import environment
from aot_tune.choose.batch import Ranked
from aot_tune.choose.choice import Choice, Source, tune_command
from aot_tune.choose.index import Index
from aot_tune.choose.legality import Legality
from aot_tune.choose.points import Estimates, waves
from aot_tune.declare.checks import mistakes_on
from aot_tune.declare.declaration import Declaration
from aot_tune.declare.fingerprint.hashing import source_hash
from aot_tune.serve import loader
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.serve.launch.messages import (
    compiler_messages,
    gpu_model_messages,
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
    """Expected time of one config, by the rule between measured sizes, and the factors that it is made of."""

    config: Config
    """Config."""

    us: float | None
    """Expected time, microseconds; None where it is estimated from other buckets' points."""

    ratio: float
    """Expected time / the fastest config's."""

    near: float
    """Factor of the ratio: its mean time at the points."""

    counts: float
    """Factor of the ratio: what other waves and tiles than at the points change."""

    unseen: float
    """Factor of the ratio: the charge for points at which it has no time."""

    tiles: int | None
    """Number of its tiles; None where the kernel declares no tiles."""

    waves: int | None
    """Number of times that the config fills the GPU with blocks; None where the kernel declares no tiles."""

    refusal: str | None
    """Reason why the config may not run for this problem; None when it may."""


@dataclass(frozen=True, kw_only=True)
class AtEdge:
    """Times of one config at the bucket's edge, in each state of the GPU."""

    config: Config
    """Config."""

    us: Mapping[str, float | None]
    """Microseconds by the state's name; None where the config was not timed."""


@dataclass(frozen=True, kw_only=True)
class ServingAll(Ranked):
    """Regret of one config that serves every batch."""

    refusal: str | None
    """Size at which the config may not run, and why, or why a row's bits would differ; None for a choice."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Config that a launch of one problem would run, and the reason."""

    kernel: str
    """Kernel's name."""

    arch: Arch
    """Arch of the launch."""

    problem: Problem
    """Problem of the launch."""

    bucket: Problem
    """Problem's bucket."""

    config: Config
    """Config that a launch would run."""

    default: Config
    """Declaration's default, for comparison."""

    source: Source
    """Step of the ladder that gave the config."""

    reason: str
    """Reason for that step, as a sentence."""

    basis: str
    """Points that the times are estimated from, each with its weight; empty when there are none."""

    slopes: tuple[float, ...]
    """Slopes by which counts change the times; empty where they do not count."""

    compared: tuple[Compared, ...]
    """Expected times of the portfolio and the defaults, fastest first; empty without a table."""

    at_edge: tuple[AtEdge, ...]
    """Table's times at the edge of the problem's own bucket; empty where they are of one state only."""

    every_batch: tuple[ServingAll, ...]
    """Regrets of configs that serve every batch, best first; empty without batch invariance."""

    remarks: tuple[str, ...]
    """Warnings about the tables, other effects of a launch, and the command that tunes a miss."""

    mistakes: tuple[str, ...]
    """Mistakes of the declaration for this problem. A launch or a sweep may fail because of them."""


def explain(tunable: Declaration, arch: Arch, problem: Problem, *, option: str | None = None) -> Explanation:
    """Climb the ladder for one problem as a launch on `arch` would, without searching.

    Args:
        tunable: The kernel's declaration.
        arch: The arch.
        problem: The problem.
        option: The option --module of the commands in the remarks; by default the module of the author's
            functions.

    Raises:
        LaunchError: No config may run, because even the default is not legal.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        index = loader.load(tunable, arch)  # again: loaded tables do not warn a second time
        choice = dispatcher_of(tunable).choice(arch, problem)
    estimates, compared = _compared(tunable, arch, problem, index, choice)
    remarks = (
        *dict.fromkeys(str(warning.message) for warning in caught),
        *stale_messages(tunable, arch, index, source_hash(tunable)),
        *(message for model in _gpu_models(arch) for _, message in gpu_model_messages(index, model)),
        *compiler_messages(tunable, arch, index, dispatcher_of(tunable).kernels.cubins.compiler(arch)),
        *_remarks(tunable, arch, problem, choice),
    )
    if option is not None and (own := tunable.module_option):
        remarks = tuple(remark.replace(own, option) for remark in remarks)
    return Explanation(
        kernel=tunable.name,
        arch=arch,
        problem=problem,
        bucket=tunable.bucket_of(problem),
        config=choice.config,
        default=tunable.default_config(arch, problem),
        source=choice.source,
        reason=choice.reason,
        basis="" if estimates is None else estimates.basis,
        slopes=tuple(estimates.points.slopes)
        if estimates is not None and any(estimates.points.slopes)
        else (),
        compared=compared,
        at_edge=_at_edge(tunable, arch, problem, index) if choice.source == "own" else (),
        every_batch=_every_batch(tunable, arch, problem),
        remarks=remarks,
        mistakes=tuple(mistakes_on(tunable, arch, problem)),
    )


def _gpu_models(arch: Arch) -> tuple[str, ...]:
    """Return the models of this machine's GPUs of an arch."""
    return tuple(dict.fromkeys(gpu.name for gpu in loader.gpus() or () if gpu.arch == arch))


_MOST_ROWS = 20
"""Most problems of a kernel that are printed, a line each. Of more problems half as many are printed."""


def overview_lines(answers: Sequence[Explanation]) -> list[str]:
    """Return a line for each problem of a kernel, then the number of problems with remarks."""
    heads = ("problem", "step", "config")
    shown = answers if len(answers) <= _MOST_ROWS else answers[: _MOST_ROWS // 2]
    rows: list[tuple[str, ...]] = [
        (str(answer.problem), answer.source, str(answer.config)) for answer in shown
    ]
    if len(shown) < len(answers):
        rows.append((f"and {len(answers) - len(shown)} more; --problem prints one", "", ""))
    lines = aligned([heads, *rows])
    if remarked := [answer for answer in answers if answer.remarks]:
        count, first = counted(len(remarked), "problem"), remarked[0].remarks[0]
        lines.append(f"{count} with remarks; --problem prints all of one; the first: {first}")
    return lines


def explanation_lines(answer: Explanation) -> list[str]:
    """Return the explanation as text. Rows name what differs between the configs; a heading has the rest."""
    shared, named = _named([row.config for row in answer.compared])
    is_unseen = any(row.unseen != 1 for row in answer.compared)
    rows = [
        (
            "  *" if row.config == answer.config else "   ",
            "" if row.us is None else f"{row.us:.2f} us",
            f"x{row.ratio:.3f}",
            f"= near x{row.near:.3f}",
            f"* counts x{row.counts:.3f}" if answer.slopes else "",
            f"* unseen x{row.unseen:.3f}" if is_unseen else "",
            "" if row.tiles is None else counted(row.tiles, "tile"),
            "" if row.waves is None else counted(row.waves, "wave"),
            name + (" (default)" if row.config == answer.default else ""),
            f"refused: {row.refusal}" if row.refusal else "",
        )
        for row, name in zip(answer.compared, named, strict=True)
    ]
    heading = (
        "  expected times of the portfolio and the default"
        + shared
        + (", as in its worst state" if answer.at_edge else "")
        + ("" if answer.basis in answer.reason else f", estimated from {answer.basis}")
        + ":"
    )
    return [
        f"{answer.kernel} {answer.problem} on {answer.arch}: {answer.config}",
        f"  {answer.source}: {answer.reason}",
        *([heading] if rows else []),
        *aligned(rows),
        *_slopes_lines(answer.slopes),
        *_edge_lines(answer),
        *_every_batch_lines(answer),
        *(f"  remark: {remark}" for remark in answer.remarks),
        *(f"  the declaration is wrong: {text}" for text in answer.mistakes),
    ]


def _named(configs: Sequence[Config]) -> tuple[str, list[str]]:
    """Return what all configs have in common, in words, and of each config the rest."""
    values = [
        [("kernel", config.kernel), *config.constants.items(), *config.hints.items()] for config in configs
    ]
    common = [pair for pair in values[0] if all(pair in own for own in values)] if len(values) > 1 else []

    def text(pairs: Iterable[tuple[str, object]]) -> str:
        return " ".join(f"{name}={value}" for name, value in pairs if value is not None)

    rest = [text(pair for pair in own if pair not in common) for own in values]
    return (f", all with {text(common)}" if text(common) else ""), rest


def _slopes_lines(slopes: Sequence[float]) -> list[str]:
    """Return the slopes, a line for each count."""
    if not slopes:
        return []
    listed = ", ".join(f"{name} {slope:+.3f}" for name, slope in zip(("waves", "tiles"), slopes, strict=True))
    return [f"  slopes of counts: {listed}"]


def _compared(
    tunable: Declaration, arch: Arch, problem: Problem, index: Index, choice: Choice
) -> tuple[Estimates | None, tuple[Compared, ...]]:
    """Return the estimates, if any, and their parts."""
    matches = (index.own(problem), index.nearest(problem, float("inf")))
    chosen = next((match for match in matches if match is not None and match.entry == choice.entry), None)
    if chosen is None:
        return None, ()
    legality, default_at = Legality(tunable, arch), partial(tunable.default_config, arch)
    estimator, own = index.estimator(chosen, default_at), choice.source == "own"
    points = estimator.inside(chosen.entry) if own else estimator.near(index.bucket_of(problem))
    estimates = estimator.estimates(problem, default_at(problem), points)
    sm_count, tiles = chosen.table.built_with.sm_count, tunable.tiles

    def parts(slowdown: float, place: int) -> tuple[float, float, float]:
        near, unseen = estimates.parts(place)
        return near, slowdown - near - unseen, unseen

    def row(slowdown: float, place: int) -> Compared:
        config, fastest = estimates.configs[place], estimates.ranked[0]
        factors = [*map(math.exp, map(sub, parts(slowdown, place), parts(*fastest)))]
        number = tiles(config, problem) if tiles else None
        return Compared(
            config=config,
            us=round(estimates.us(slowdown), 3) if own else None,
            ratio=round(math.exp(slowdown - fastest[0]), 4),
            near=round(factors[0], 4),
            counts=round(factors[1], 4),
            unseen=round(factors[2], 4),
            tiles=number,
            waves=None if number is None else waves(number, config, sm_count),
            refusal=legality.refusal(config, problem),
        )

    return estimates, tuple(row(*estimate) for estimate in estimates.ranked)


def _at_edge(tunable: Declaration, arch: Arch, problem: Problem, index: Index) -> tuple[AtEdge, ...]:
    match = index.own(problem)
    if match is None or not match.entry.points or not match.entry.points[-1].states:
        return ()
    point = match.entry.points[-1]
    times = {first_state(point.states): point.us, **point.states}
    configs = (*match.table.portfolio, tunable.default_config(arch, match.entry.bucket))
    return tuple(
        AtEdge(config=config, us={name: us[configs.index(config)] for name, us in times.items()})
        for config in dict.fromkeys(configs)
        if point.us[configs.index(config)] is not None
    )


def _edge_lines(answer: Explanation) -> list[str]:
    """Return the times at the bucket's edge: a row for each config, a column for each state."""
    if not answer.at_edge:
        return []
    states = list(answer.at_edge[0].us)
    shared, named = _named([row.config for row in answer.at_edge])
    rows = [
        (
            "  *" if row.config == answer.config else "   ",
            *("-" if us is None else f"{us:.2f}" for us in row.us.values()),
            name + (" (default)" if row.config == answer.default else ""),
        )
        for row, name in zip(answer.at_edge, named, strict=True)
    ]
    return [
        f"  times at the bucket's edge in each state of the GPU, us{shared}:",
        *aligned([("   ", *states, ""), *rows]),
    ]


def _every_batch(tunable: Declaration, arch: Arch, problem: Problem) -> tuple[ServingAll, ...]:
    if not environment.batch_invariant() or not tunable.batch_axes:
        return ()
    every = dispatcher_of(tunable).every_batch(arch)
    return tuple(
        ServingAll(
            config=ranked.config,
            regret=round(ranked.regret, 4),
            worst_at=ranked.worst_at,
            sizes=ranked.sizes,
            untimed=ranked.untimed,
            refusal=every.refusal(ranked.config, problem),
        )
        for ranked in every.ranking(problem)
    )


def _every_batch_lines(answer: Explanation) -> list[str]:
    rows = [
        (
            "  *" if row.config == answer.config else "   ",
            f"{row.regret:.1%}" if row.worst_at else "-",
            "at " + (" ".join(f"{name}={size}" for name, size in row.worst_at.items()) or "-"),
            f"{row.sizes - row.untimed} of {row.sizes} sizes",
            str(row.config),
            f"refused: {row.refusal}" if row.refusal else "",
        )
        for row in answer.every_batch
    ]
    heading = f"  {environment.BATCH_INVARIANT}: one config serves every batch; worst regret of each:"
    return [heading, *aligned(rows)] if rows else []


def _remarks(tunable: Declaration, arch: Arch, problem: Problem, choice: Choice) -> list[str]:
    remarks, invariant = [], environment.batch_invariant()
    if invariant and not tunable.batch_axes:
        remarks.append(
            f"{environment.BATCH_INVARIANT} changes nothing here: {tunable.name} declares no batch_axes"
        )
    if message := passed_over_message(tunable, arch, problem, choice):
        return [*remarks, message]
    if not choice.missed:
        return remarks
    remarks.append(
        f"no bucket at or near this problem was tuned; tune it: {tune_command(tunable, arch, problem)}"
    )
    forbidden = is_rank() or environment.search_disabled() or environment.search_seconds() == 0
    if not forbidden and not (invariant and tunable.batch_axes):
        remarks.append("a launch may search live first and remember the winner in the user's cache")
    return remarks
