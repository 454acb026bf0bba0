"""`aot-tune doctor KERNEL --coverage`: what a kernel's tables have no times for. Launches nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from aot_tune.choose.index import Index, Match
from aot_tune.choose.legality import Legality
from aot_tune.choose.nearest import NEAR_DOUBLINGS
from aot_tune.declare.declaration import Declaration
from aot_tune.declare.selection import check_callable
from aot_tune.errors import UsageError
from aot_tune.serve import loader
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Classes, Exact, Pow2, classes_of, edge
from aot_tune.values.problem import Problem
from aot_tune.values.text import aligned, counted

Kind = Literal["classes", "sizes", "divisibility", "config"]
"""Kinds of gaps, the widest first: no entry of a problem's classes (dtype, gradient, mask); no bucket within
two doublings, so that a launch is a miss; no size on an Exact axis that the same power of two divides; a
legal config of the portfolio without a time at any point that decides."""

_TITLES: dict[Kind, str] = {
    "classes": "classes without an entry: a launch is a miss",
    "sizes": "sizes farther than two doublings from every bucket: a launch is a miss",
    "divisibility": "sizes that another power of two divides than any size of a bucket",
    "config": "legal configs without a time near",
}


@dataclass(frozen=True, kw_only=True)
class Gap:
    """One thing that the tables cannot tell."""

    kind: Kind
    """Kind of the gap."""

    what: str
    """Classes, sizes, power of two or config that has no time."""

    problems: int
    """Number of problems that the gap concerns."""

    example: Problem
    """The first of these problems."""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Gaps of a kernel's tables on an arch, those of most problems first."""

    kernel: str
    """Kernel's name."""

    arch: Arch
    """Arch of the tables."""

    problems: int
    """Number of problems that were compared with the tables."""

    listed: bool
    """Whether the problems come from a file; otherwise from the kernel's own space (`space_of`)."""

    gaps: tuple[Gap, ...]
    """Gaps."""


def coverage(tunable: Declaration, arch: Arch, listed: Sequence[Problem] | None = None) -> Coverage:
    """Compare problems with a kernel's tables.

    Args:
        tunable: The kernel's declaration.
        arch: The arch.
        listed: The problems; None for those of the kernel's own space.
    """
    index = loader.load(tunable, arch)
    problems = space_of(tunable, index) if listed is None else listed
    found: dict[tuple[Kind, str], list[Problem]] = {}
    legality = Legality(tunable, arch)
    classes = {classes_of(tunable.axes, match.entry.bucket) for match in index.matches()}
    powers = _powers(tunable, (match.entry.bucket for match in index.matches()))
    for problem in problems:
        for gap in _gaps(legality, index, problem, classes, powers):
            found.setdefault(gap, []).append(problem)
    gaps = []
    for (kind, what), of in found.items():
        where = f"{_edges(tunable, of)} {what}".strip() if kind == "sizes" else what
        gaps.append(Gap(kind=kind, what=where, problems=len(of), example=of[0]))
    order = [*_TITLES]
    return Coverage(
        kernel=tunable.name,
        arch=arch,
        problems=len(problems),
        listed=listed is not None,
        gaps=tuple(sorted(gaps, key=lambda gap: (order.index(gap.kind), -gap.problems))),
    )


def coverage_lines(coverage: Coverage, *, most: int = 12) -> list[str]:
    """Return the gaps as text for the user, at most `most` of each kind."""
    origin = "of the list" if coverage.listed else "of its own space"
    lines = [
        f"{coverage.kernel} on {coverage.arch}: {counted(coverage.problems, 'problem')} {origin}, "
        f"{counted(len(coverage.gaps), 'gap') if coverage.gaps else 'no gap'}"
    ]
    for kind, title in _TITLES.items():
        gaps = [gap for gap in coverage.gaps if gap.kind == kind]
        if gaps:
            rows = [(f"  {gap.what}", counted(gap.problems, "problem"), str(gap.example)) for gap in gaps]
            lines += [f"{title}:", *aligned([("  what", "of", "for example"), *rows[:most]])]
            lines += [f"  and {len(gaps) - most} more"] if len(gaps) > most else []
    return lines


def space_of(tunable: Declaration, index: Index) -> list[Problem]:
    """Return problems that span the tables' buckets; without any, the declared problems.

    For each classes and sizes on the Exact axes: every power of two up to the largest edge on each Pow2 axis
    in turn; and for each size on an Exact axis, sizes near it that each power of two divides.
    """
    buckets = [match.entry.bucket for match in index.matches()]
    if not buckets:
        return [*tunable.typical_problems]
    most = {name: max((bucket.size(name) for bucket in buckets), default=0) for name in tunable.axes}
    problems: dict[Problem, None] = {}
    for bucket in buckets:
        for name, axis in tunable.axes.items():
            if isinstance(axis, Pow2):
                sizes: Iterable[int] = Pow2.edges(1, most[name])
            else:
                sizes = _divided(bucket.size(name))
            problems |= dict.fromkeys(bucket.replaced(**{name: size}) for size in sizes)
    return [problem for problem in problems if _may_run(tunable, problem)]


def _may_run(tunable: Declaration, problem: Problem) -> bool:
    """Whether a call can have a problem that nobody declared."""
    try:
        check_callable(tunable, problem)
    except UsageError:
        return False
    return True


def _divided(size: int) -> Iterator[int]:
    """Yield a size near one for each power of two below it, up to `_MOST_POWER`, that divides it exactly."""
    power = 1
    while power <= min(size, _MOST_POWER):
        yield (size // power | 1) * power
        power *= 2


def _powers(tunable: Declaration, buckets: Iterable[Problem]) -> dict[tuple[Classes, str], set[int]]:
    """Return the powers of two that divide the sizes of buckets, by classes and Exact axis."""
    powers: dict[tuple[Classes, str], set[int]] = {}
    for bucket in buckets:
        for name, axis in tunable.axes.items():
            if isinstance(axis, Exact):
                key = classes_of(tunable.axes, bucket), name
                powers.setdefault(key, set()).add(_power(bucket.size(name)))
    return powers


def _power(size: int) -> int:
    """Return the largest power of two, up to `_MOST_POWER`, that divides a size."""
    return min(size & -size, _MOST_POWER)


def _gaps(
    legality: Legality,
    index: Index,
    problem: Problem,
    classes: set[Classes],
    powers: dict[tuple[Classes, str], set[int]],
) -> Iterator[tuple[Kind, str]]:
    """Yield the gaps at a problem."""
    axes = legality.tunable.axes
    own_classes = classes_of(axes, problem)
    if own_classes not in classes:
        yield "classes", " ".join(f"{name}={value}" for name, value in problem.items() if name not in axes)
        return
    match = index.own(problem) or index.nearest(problem, NEAR_DOUBLINGS)
    if match is None:
        exact = (name for name, axis in axes.items() if isinstance(axis, Exact))
        yield "sizes", " ".join(f"{name}={problem[name]}" for name in exact)
    for name, axis in axes.items():
        if isinstance(axis, Exact) and _power(problem.size(name)) not in powers[own_classes, name]:
            power = _power(problem.size(name))
            yield "divisibility", f"{name} = {power} x {'any' if power == _MOST_POWER else 'odd'}"
    if match is not None:
        yield from _unseen(legality, index, problem, match)


def _edges(tunable: Declaration, problems: Sequence[Problem]) -> str:
    """Return the problems' edges on the Pow2 axes: ``rows=1..16,65536``, where powers in a row are joined."""
    texts = []
    for name, axis in tunable.axes.items():
        if isinstance(axis, Pow2):
            edges, runs = sorted({edge(problem.size(name)) for problem in problems}), list[list[int]]()
            for size in edges:
                if runs and size == 2 * runs[-1][-1]:
                    runs[-1].append(size)
                else:
                    runs.append([size])
            spans = (str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
            texts.append(f"{name}={','.join(spans)}")
    return " ".join(texts)


def _unseen(legality: Legality, index: Index, problem: Problem, match: Match) -> Iterator[tuple[Kind, str]]:
    """Yield the configs of the portfolio that may run and have no time at the points that decide."""
    default_at = partial(legality.tunable.default_config, legality.arch)
    estimator, bucket = index.estimator(match, default_at), index.bucket_of(problem)
    points = estimator.inside(match.entry) if match.entry.bucket == bucket else estimator.near(bucket)
    for place, config in enumerate(match.table.portfolio):
        timed = any(source.slowdowns[place] is not None for source in points.sources)
        if not timed and legality.allows(config, problem):
            yield "config", str(config)


_MOST_POWER = 1024
"""Largest power of two that tells sizes apart: no tile of a row is longer."""
