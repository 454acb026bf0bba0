"""Choose the config of a problem, once per unseen problem. Effects are passed in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from aot_tune import environment
from aot_tune.choose.index import Index, Match
from aot_tune.choose.legality import Legality
from aot_tune.choose.nearest import NEAR_DOUBLINGS
from aot_tune.choose.points import Loads, Pick, Where, pick
from aot_tune.declare.declaration import Declaration
from aot_tune.environment import OnMiss
from aot_tune.errors import LaunchError, MissError, UsageError
from aot_tune.tables.table import Entry
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem, problem_option

Source = Literal[
    "given", "asked default", "invariant", "own", "cached", "nearest", "searched", "far", "default"
]
"""Where a config came from: steps 1, 1, 1, 2, 2, 3, 4, 4 and 5 of `resolve`."""

MISSES: frozenset[Source] = frozenset({"searched", "far", "default"})
"""The sources that mean that nothing was tuned for the problem or near it."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The config that a problem gets, and why."""

    config: Config
    """The config to run."""

    source: Source
    """The step of `resolve` that gave it."""

    why: Callable[[], str] = field(compare=False, repr=False)
    """Makes the text of `reason`; it is a function because few choices are asked for it."""

    entry: Entry | None = None
    """The table's entry that gave it; None where no table did."""

    @property
    def reason(self) -> str:
        """For people: the entry and point that gave the config, or what was missing."""
        return self.why()

    @property
    def missed(self) -> bool:
        """Whether nothing was tuned for the problem or near it."""
        return self.source in MISSES


Unfit = Callable[[Config], "str | None"]
"""Why a config cannot run on this very GPU; None where it can."""

Invariant = Callable[[Problem, bool, OnMiss, "Unfit | None"], Choice]
"""From a problem, and `asked_default`, `on_miss` and `unfit` of `resolve`, to one choice for every batch."""


def resolve(
    tunable: Declaration,
    arch: Arch,
    problem: Problem,
    index: Index,
    legality: Legality,
    *,
    given: Config | None = None,
    asked_default: bool = False,
    remembered: Callable[[Problem], Config | None] | None = None,
    search: Callable[[Problem, Match | None], Config | None] | None = None,
    on_miss: OnMiss = "search",
    unfit: Callable[[Config], str | None] | None = None,
    sm_count: int | None = None,
    card: str | None = None,
    invariant: Invariant | None = None,
) -> Choice:
    """Choose the config of a problem.

    1. what the caller asks for: the config that it gives; or one config for every batch, of which `invariant`
       decides all that follows; or the default when AOT_TUNE_CONFIG=default
    2. the problem's own bucket: the shipped tables, by the rule between measured sizes
       (`aot_tune.choose.points`), then `remembered`
    3. the nearest bucket with the same classes, at most one doubling away on each axis
    4. a miss, which `on_miss` decides: ``search``, and where none is made ``nearest``, the nearest bucket at
       any distance; ``default`` leaves this step out; ``error`` raises
    5. the default

    A config that is not legal, or not in the search space, is passed over on each step. So is what makes a
    function of the declaration raise, with a warning: no file and no search decides whether a launch is made.

    Args:
        tunable: The declaration.
        arch: The arch of the GPU.
        problem: What is launched.
        index: The tables of this arch.
        legality: What may run.
        given: The config that the caller gives.
        asked_default: Whether AOT_TUNE_CONFIG asks for the default.
        remembered: Bucket -> the winner that the user's cache holds. None for a rank.
        search: (problem, nearest entry) -> the winner of a live search, None where none is made. None for
            a rank.
        on_miss: What AOT_TUNE_ON_MISS says.
        unfit: Why a legal config cannot run on this particular GPU, which may be smaller than others of its
            arch; None where it can. Such configs are passed over too; where the default is one of them, the
            fitting candidate most like it takes its place.
        sm_count: Multiprocessors of the GPU that launches, by which waves are counted; None for those of the
            GPU that a table was measured on.
        card: Name of the GPU that launches; None for the one that a table was measured on. On any other,
            the bytes that a config loads decide between those that overlap.
        invariant: Chooses one config for every batch (`aot_tune.choose.batch`), also in place of
            AOT_TUNE_CONFIG's default, which differs between batches. None where that is not asked for.

    Raises:
        LaunchError: The caller's config, or the default as the last resort, is not legal.
        MissError: Nothing was tuned for the problem or near it, and `on_miss` is ``error``.
    """

    def allowed(config: Config) -> bool:
        try:
            return legality.refusal(config, problem) is None and (unfit is None or unfit(config) is None)
        except Exception as error:
            legality.failed(error, problem, str(config))
            return False

    def from_table(found: Match | None, source: Source, where: str) -> Choice | None:
        if found is None:
            return None
        try:
            chosen = pick(
                found.entry,
                index.rule(found, default_at),
                default,
                problem,
                allowed,
                where=where_of(source),
                beside=() if source == "own" else index.beside(found, default_at),
                sm_count=sm_count,
                loads=_loads(tunable, problem, legality) if _is_of_another_card(found, card) else None,
            )
        except Exception as error:
            legality.failed(error, problem, f"{where} {found.entry.bucket} of {found.shipped.path}")
            return None
        if chosen is None:
            return None
        return Choice(
            config=chosen.config,
            source=source,
            entry=found.entry,
            why=partial(_table_reason, found, where, chosen),
        )

    def searched(far: Match | None) -> Config | None:
        try:
            return search(problem, far) if search is not None else None
        except UsageError:
            raise  # an environment variable has a wrong value
        except Exception as error:
            legality.failed(error, problem, "a live search")
            return None

    if given is not None:
        return _given(tunable, arch, problem, given)
    if invariant is not None:
        return invariant(problem, asked_default, on_miss, unfit)
    default, default_at = tunable.default_config(arch, problem), partial(tunable.default_config, arch)
    if asked_default:
        return _default(tunable, arch, problem, default, "asked default", "AOT_TUNE_CONFIG=default", unfit)
    if choice := from_table(index.own(problem), "own", "bucket"):
        return choice
    bucket = index.bucket_of(problem)
    cached = remembered(bucket) if remembered is not None else None
    if cached is not None and allowed(cached):
        return Choice(
            config=cached, source="cached", why=lambda: f"an earlier live search, bucket {_named(bucket)}"
        )
    if choice := from_table(index.nearest(problem, NEAR_DOUBLINGS), "nearest", "nearest bucket"):
        return choice
    if on_miss == "error":
        raise miss_error(tunable, arch, problem)
    if on_miss == "default":
        return _default(tunable, arch, problem, default, "default", f"{environment.ON_MISS}=default", unfit)
    far = index.nearest(problem, math.inf)
    winner = searched(far) if on_miss == "search" else None
    if winner is not None and allowed(winner):
        return Choice(config=winner, source="searched", why=lambda: "the winner of a live search")
    if choice := from_table(far, "far", "no bucket within one doubling; the nearest is"):
        return choice
    if far is not None:
        missing = "no entry of these dtypes has a config that may run for it"
    elif index.tables:
        missing = "no table has an entry of these dtypes"
    else:
        missing = f"no table that can be used for {arch}"
    return _default(tunable, arch, problem, default, "default", missing, unfit)


def _is_of_another_card(found: Match, card: str | None) -> bool:
    """Whether an entry's times were measured on another card than this one."""
    made = found.shipped.table.built_with.device_name
    return card is not None and card != made and found.entry.evidence == "measured"


def _loads(tunable: Declaration, problem: Problem, legality: Legality) -> Loads | None:
    """The bytes that all blocks of a config load, infinitely many where a function of the declaration raises.

    None where the declaration does not say.
    """
    tiles, work = tunable.tiles, tunable.work
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


def where_of(source: Source) -> Where:
    """Where a problem lies, seen from the bucket that gave its config in this step."""
    return "inside" if source == "own" else "near" if source == "nearest" else "far"


def miss_error(tunable: Declaration, arch: Arch, problem: Problem) -> MissError:
    """The error of a miss where AOT_TUNE_ON_MISS is ``error``."""
    return MissError(
        f"no tuned config for {tunable.name} {_named(problem)} on {arch}, and "
        f"{environment.ON_MISS}=error; tune it: {tune_command(tunable, arch, problem)}"
    )


def _given(tunable: Declaration, arch: Arch, problem: Problem, config: Config) -> Choice:
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


def _default(
    tunable: Declaration, arch: Arch, problem: Problem, config: Config, source: Source, why: str,
    unfit: Callable[[Config], str | None] | None,
) -> Choice:  # fmt: skip
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
    """Whether two configs are for different kernels, the values in which they differ, and the doublings."""
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


def tune_command(tunable: Declaration, arch: Arch, problem: Problem) -> str:
    """The command that tunes one problem."""
    values = problem_option(problem)
    return f"aot-tune tune {tunable.name} --arch {arch}{tunable.module_option} --problem {values}"


def miss_message(tunable: Declaration, arch: Arch, problem: Problem, choice: Choice) -> str:
    """The one-line warning for a problem that nothing was tuned for."""
    return (
        f"no tuned config for {tunable.name} {_named(problem)} on {arch}; took {choice.config} "
        f"({choice.reason}); tune it: {tune_command(tunable, arch, problem)}"
    )


def _table_reason(found: Match, where: str, chosen: Pick) -> str:
    return f"{where} {_named(found.entry.bucket)} of {found.shipped.path}: {chosen.reason}"


def _named(problem: Problem) -> str:
    return problem_option(problem).replace(",", " ")
