"""Choose the config of a problem, once per unseen problem. Effects are passed in."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from aot_tune import environment
from aot_tune.choose.choice import Choice, Options, Source, miss_error, named
from aot_tune.choose.index import Index, Match
from aot_tune.choose.legality import Legality
from aot_tune.choose.nearest import NEAR_DOUBLINGS
from aot_tune.choose.points import Loads, Pick, pick
from aot_tune.errors import LaunchError, UsageError
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

if TYPE_CHECKING:
    from aot_tune.choose.batch import BatchInvariant


class Live(NamedTuple):
    """Live searches that the process may make, and their cached winners; a rank has neither."""

    remembered: Callable[[Problem], Config | None] | None = None
    """Function from a bucket to the winner that the user's cache holds."""

    search: Callable[[Problem, Match | None], Config | None] | None = None
    """Function from a problem and its nearest entry to the winner of a search; None without a search."""


PLAIN = Options()
"""Options without any request."""

NOT_LIVE = Live()
"""No search and no cached winner."""


def resolve(
    problem: Problem,
    index: Index,
    legality: Legality,
    options: Options = PLAIN,
    *,
    live: Live = NOT_LIVE,
    every_batch: BatchInvariant | None = None,
) -> Choice:
    """Choose the config of a problem.

    1. the caller's request: the config that it gives; or one config for every batch, where `every_batch`
       decides all following steps; or the default when AOT_TUNE_CONFIG=default
    2. the problem's own bucket: the shipped tables, by the rule between measured sizes
       (`aot_tune.choose.points`), then `remembered`
    3. the nearest bucket with the same classes, at most two doublings away on each axis
    4. a miss, which `on_miss` decides: ``search``, and where no search is made ``nearest``, the nearest
       bucket at any distance; ``default`` leaves this step out; ``error`` raises
    5. the default

    Each step passes over a config that is not legal or not in the search space, and, with a warning, a config
    for which a function of the declaration raises: no file and no search decides whether a launch is made.

    Args:
        problem: The launched problem.
        index: The tables of this arch.
        legality: Decides which configs may run. Legal configs that do not fit this particular GPU are passed
            over too; where the default does not fit, the fitting candidate most like it takes its place.
        options: The options of the choice.
        live: The live searches of this process.
        every_batch: Chooses one config for every batch, also in place of AOT_TUNE_CONFIG's default, which
            differs between batches. None where each batch may have its own.

    Raises:
        LaunchError: The caller's config, or the default as the last resort, is not legal.
        MissError: Nothing was tuned for the problem or near it, and `on_miss` is ``error``.
    """
    tunable, arch = legality.tunable, legality.arch

    def allowed(config: Config) -> bool:
        return legality.allows(config, problem)

    def from_table(match: Match | None, source: Source, where: str) -> Choice | None:
        if match is None:
            return None
        try:
            chosen = pick(
                match.entry,
                index.estimator(match, default_at),
                default,
                problem,
                allowed,
                bucket=None if source == "own" else index.bucket_of(problem),
                sm_count=options.sm_count,
                loads=_loads(legality, problem) if _is_of_other_model(match, options.gpu_model) else None,
            )
        except Exception as error:
            legality.failed(error, problem, f"{where} {match.entry.bucket} of {match.path}")
            return None
        if chosen is None:
            return None
        return Choice(
            config=chosen.config,
            source=source,
            entry=match.entry,
            why=partial(_table_reason, match, where, chosen),
        )

    def searched(far: Match | None) -> Config | None:
        try:
            return live.search(problem, far) if live.search is not None else None
        except UsageError:
            raise  # an environment variable has a wrong value
        except Exception as error:
            legality.failed(error, problem, "a live search")
            return None

    if options.given is not None:
        return _given(legality, problem, options.given)
    if every_batch is not None:
        return every_batch.choice(problem, options, legality.unfit)
    default, default_at = tunable.default_config(arch, problem), partial(tunable.default_config, arch)
    if options.asked_default:
        return _default(legality, problem, default, "asked default", "AOT_TUNE_CONFIG=default")
    if choice := from_table(index.own(problem), "own", "bucket"):
        return choice
    bucket = index.bucket_of(problem)
    cached = live.remembered(bucket) if live.remembered is not None else None
    if cached is not None and allowed(cached):
        return Choice(
            config=cached, source="cached", why=lambda: f"an earlier live search, bucket {named(bucket)}"
        )
    if choice := from_table(index.nearest(problem, NEAR_DOUBLINGS), "nearest", "nearest bucket"):
        return choice
    if options.on_miss == "error":
        raise miss_error(tunable, arch, problem)
    if options.on_miss == "default":
        return _default(legality, problem, default, "default", f"{environment.ON_MISS}=default")
    far = index.nearest(problem, math.inf)
    winner = searched(far) if options.on_miss == "search" else None
    if winner is not None and allowed(winner):
        return Choice(config=winner, source="searched", why=lambda: "the winner of a live search")
    if choice := from_table(far, "far", "no bucket within two doublings; the nearest is"):
        return choice
    if far is not None:
        missing = "no entry of these dtypes has a config that may run for it"
    elif index.tables:
        missing = "no table has an entry of these dtypes"
    else:
        missing = f"no table that can be used for {arch}"
    return _default(legality, problem, default, "default", missing)


def _is_of_other_model(match: Match, model: str | None) -> bool:
    """Whether an entry's times were measured on another GPU model than this one."""
    made = match.table.built_with.device_name
    return model is not None and model != made and match.entry.evidence == "measured"


def _loads(legality: Legality, problem: Problem) -> Loads | None:
    """Return a function from a config to the bytes that all its blocks load; None without `work` or `tiles`.

    It returns infinity where a function of the declaration raises.
    """
    tiles, work = legality.tunable.tiles, legality.tunable.work
    if tiles is None or work is None:
        return None

    def loads(config: Config) -> float:
        try:
            block = work(config, problem)
            return tiles(config, problem) * block.steps * block.load_bytes
        except Exception as error:
            legality.failed(error, problem, f"the work of {config}")
            return math.inf

    return loads


def _given(legality: Legality, problem: Problem, config: Config) -> Choice:
    tunable, arch = legality.tunable, legality.arch
    if missing := tunable.kernel_missing(config):
        raise LaunchError(f"{tunable.name}: config={config}: {missing}")
    wanted = tunable.config_constants(arch, config.kernel)
    if config.constants.keys() != set(wanted):
        raise LaunchError(
            f"{tunable.name}: config={config} has the constants {' '.join(config.constants) or 'none'}; "
            f"the kernel takes {' '.join(wanted) or 'none'}"
        )
    reason = tunable.refusal(config, arch, problem)
    if reason is not None:
        raise LaunchError(f"{tunable.name}: config={config} may not run for {problem} on {arch}: {reason}")
    return Choice(config=config, source="given", why=lambda: "given by the caller")


def _default(legality: Legality, problem: Problem, config: Config, source: Source, why: str) -> Choice:
    tunable, arch, unfit = legality.tunable, legality.arch, legality.unfit
    reason = tunable.refusal(config, arch, problem)
    if reason is not None:
        others = tunable.candidates(arch, problem)
        disagree = "; make default() and legal() of the declaration agree" if others else ""
        raise LaunchError(
            f"{tunable.name}: nothing may run for {problem} on {arch}: {why}, and the default, {config}, is "
            f"refused: {reason}{disagree}"
        )
    reason = unfit(config) if unfit is not None else None
    if unfit is None or reason is None:
        return Choice(config=config, source=source, why=lambda: f"the default: {why}")
    fitting = [other for other in tunable.candidates(arch, problem) if unfit(other) is None]
    if not fitting:
        raise LaunchError(reason)
    return Choice(
        config=min(fitting, key=partial(_unlike, config)),
        source=source,
        why=lambda: f"in place of the default: {why}; {reason}",
    )


def _unlike(one: Config, other: Config) -> tuple[bool, int, float]:
    """Return whether two configs are for different kernels, their number of differences, the doublings."""
    pairs = [
        (value, theirs[name])
        for ours, theirs in ((one.constants, other.constants), (one.hints, other.hints))
        for name, value in ours.items()
        if name in theirs and theirs[name] != value
    ]
    sizes = [(float(a), float(b)) for a, b in pairs if not isinstance(a, str) and not isinstance(b, str)]
    return (
        one.kernel != other.kernel,
        len(pairs),
        sum(abs(math.log2(a / b)) for a, b in sizes if a > 0 and b > 0),
    )


def _table_reason(match: Match, where: str, chosen: Pick) -> str:
    return f"{where} {named(match.entry.bucket)} of {match.path}: {chosen.reason}"
