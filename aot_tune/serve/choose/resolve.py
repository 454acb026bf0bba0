"""From a problem to a config: the ladder, climbed once per unseen problem. Pure: effects are passed in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from aot_tune.declare.declaration import Declaration
from aot_tune.errors import LaunchError
from aot_tune.serve.choose.index import Classes, Found, Index, classes_of
from aot_tune.tables.rule import Pick, pick
from aot_tune.tables.table import Entry
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import NEAR_DOUBLINGS
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem, problem_option

Source = Literal["given", "asked default", "own", "cached", "nearest", "searched", "far", "default"]
"""The step of the ladder: 1, 1, 2, 2, 3, 4, 4, 5."""

MISSES: frozenset[Source] = frozenset({"searched", "far", "default"})
"""The sources that mean that nothing was tuned for the problem or near it."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The config a problem takes, and why."""

    config: Config
    """The config to run."""

    source: Source
    """The step of the ladder that told it."""

    why: Callable[[], str] = field(compare=False, repr=False)
    """Puts `reason` into words, which few choices are asked for."""

    entry: Entry | None = None
    """The table's entry behind it."""

    @property
    def reason(self) -> str:
        """For people: which entry and point, or what was missing."""
        return self.why()

    @property
    def missed(self) -> bool:
        """Whether nothing was tuned for the problem or near it."""
        return self.source in MISSES


class Legality:
    """What may run: legal, and in the search space. One for a declaration on an arch.

    In the search space is what is in that of the very problem, or of a declared one of the same classes
    (dtypes): sizes without an entry run what was tuned for others. Which problems were met before does not
    matter, so that ranks agree.
    """

    def __init__(self, tunable: Declaration, arch: Arch) -> None:
        self._tunable = tunable
        self._arch = arch
        self._declared: dict[Classes, _Space] = {}
        self._last: tuple[Problem | None, frozenset[Config]] = (None, frozenset())

    def refusal(self, config: Config, problem: Problem) -> str | None:
        """Why a config may not run for a problem; None when it may."""
        reason = self._tunable.refusal(config, self._arch, problem)
        return reason or (None if self._in_space(config, problem) else "it is not in the search space")

    def _in_space(self, config: Config, problem: Problem) -> bool:
        classes = classes_of(self._tunable.axes, problem)
        space = self._declared.get(classes)
        if space is None:
            space = _Space()
            if len(self._declared) < _MOST_SPACES:
                self._declared[classes] = space
        return self._is_declared(config, classes, space) or config in self._here(problem)

    def _is_declared(self, config: Config, classes: Classes, space: _Space) -> bool:
        """Read declared problems' spaces, up to the first that holds the config, and keep what was read.

        Two threads may read one twice; none is left out.
        """
        declared = self._tunable.typical_problems
        while config not in space.configs:
            if (place := space.read) >= len(declared):
                return False
            if classes_of(self._tunable.axes, declared[place]) == classes:
                space.configs.update(self._tunable.search_space(self._arch, declared[place]))
            space.read = place + 1
        return True

    def _here(self, problem: Problem) -> frozenset[Config]:
        """The space of the very problem; the last one's is kept, since one choice asks several times."""
        asked, configs = self._last
        if asked is not problem:
            configs = frozenset(self._tunable.search_space(self._arch, problem))
            self._last = (problem, configs)
        return configs


_MOST_SPACES = 64
"""Sets of classes whose search space is kept: more than any kernel has dtypes."""


@dataclass(kw_only=True)
class _Space:
    """The configs of the first few declared problems of some classes."""

    configs: set[Config] = field(default_factory=set)
    read: int = 0


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
    search: Callable[[Problem, Found | None], Config | None] | None = None,
    unfit: Callable[[Config], str | None] | None = None,
) -> Choice:
    """Choose the config of a problem.

    1. the config the caller gives, or the default when AOT_TUNE_CONFIG=default
    2. its own bucket: the shipped tables, by the rule inside a bucket (`aot_tune.tables.rule`), then
       `remembered`
    3. the nearest bucket with the same classes, at most one doubling away on each axis
    4. a miss: `search`, else the nearest bucket at any distance
    5. the default

    A config that is not legal, or not in the search space, is passed over on each step.

    Args:
        tunable: The declaration.
        arch: The GPU's.
        problem: What is launched.
        index: The tables of this arch.
        legality: What may run.
        given: The caller's config.
        asked_default: Whether AOT_TUNE_CONFIG asks for the default.
        remembered: Bucket -> the winner that the user's cache holds. None for a rank.
        search: (problem, nearest entry) -> the winner of a live search, None where it is not made. None for a
            rank.
        unfit: Why a legal config cannot run on the very GPU, which may be smaller than its arch's others;
            None where it can. Such configs are passed over too, and where the default is one of them, the
            candidate most like it that fits stands in.

    Raises:
        LaunchError: The caller's config, or the default as the last resort, is not legal.
    """

    def allowed(config: Config) -> bool:
        return legality.refusal(config, problem) is None and (unfit is None or unfit(config) is None)

    def told(found: Found | None, source: Source, where: str) -> Choice | None:
        if found is None:
            return None
        chosen = pick(
            found.entry, found.shipped.table, tunable.tiles, default, problem, allowed, rule=index.rule(found)
        )
        if chosen is None:
            return None
        return Choice(
            config=chosen.config,
            source=source,
            entry=found.entry,
            why=partial(_table_s, found, where, chosen),
        )

    if given is not None:
        return _given(tunable, arch, problem, given)
    default = tunable.default_config(arch, problem)
    if asked_default:
        return _default(tunable, arch, problem, default, "asked default", "AOT_TUNE_CONFIG=default", unfit)
    if choice := told(index.own(problem), "own", "bucket"):
        return choice
    bucket = index.bucket_of(problem)
    cached = remembered(bucket) if remembered is not None else None
    if cached is not None and allowed(cached):
        return Choice(
            config=cached, source="cached", why=lambda: f"an earlier live search, bucket {_named(bucket)}"
        )
    if choice := told(index.nearest(problem, NEAR_DOUBLINGS), "nearest", "nearest bucket"):
        return choice
    far = index.nearest(problem, math.inf)
    winner = search(problem, far) if search is not None else None
    if winner is not None and allowed(winner):
        return Choice(config=winner, source="searched", why=lambda: "the winner of a live search")
    if choice := told(far, "far", "no bucket within one doubling; the nearest is"):
        return choice
    missing = (
        "no table has an entry of these dtypes" if index.tables else f"no table that can be used for {arch}"
    )
    return _default(tunable, arch, problem, default, "default", missing, unfit)


def _given(tunable: Declaration, arch: Arch, problem: Problem, config: Config) -> Choice:
    wanted = tunable.config_constants(arch)
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


def _unlike(one: Config, other: Config) -> tuple[int, float]:
    """In how many values two configs differ, and by how many doublings."""
    pairs = [
        (value, theirs[name])
        for ours, theirs in ((one.constants, other.constants), (one.hints, other.hints))
        for name, value in ours.items()
        if name in theirs and theirs[name] != value
    ]
    sizes = [(float(a), float(b)) for a, b in pairs if not isinstance(a, str) and not isinstance(b, str)]
    return len(pairs), sum(abs(math.log2(a / b)) for a, b in sizes if a > 0 and b > 0)


def tune_command(tunable: Declaration, arch: Arch, problem: Problem) -> str:
    """The command that tunes one problem."""
    values = problem_option(problem)
    return f"aot-tune tune {tunable.name} --arch {arch}{tunable.module_option} --problem {values}"


def miss_message(tunable: Declaration, arch: Arch, problem: Problem, choice: Choice) -> str:
    """One line on a problem that nothing was tuned for."""
    return (
        f"no tuned config for {tunable.name} {_named(problem)} on {arch}; took {choice.config} "
        f"({choice.reason}); tune it: {tune_command(tunable, arch, problem)}"
    )


def _table_s(found: Found, where: str, chosen: Pick) -> str:
    return f"{where} {_named(found.entry.bucket)} of {found.shipped.path}: {chosen.reason}"


def _named(problem: Problem) -> str:
    return problem_option(problem).replace(",", " ")
