"""Regret of the rule between measured sizes on the present tables, with points or buckets left out.

``aot-tune bench --left-out`` prints it and needs no GPU. The rule chooses for a size as if it had not been
measured, and the size's times give the regret of the choice. Slopes are fitted anew to each table without the
sizes on the Exact axes that are judged, and held to slopes that are fitted to the other tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from aot_tune.bench import words
from aot_tune.bench.gpu import shipped
from aot_tune.choose.left_out import Case, Equations, LeaveOut, Left, fitted
from aot_tune.choose.nearest import distance
from aot_tune.choose.points import NO_SLOPES, RULE, Exact, Rule
from aot_tune.declare.selection import chosen_arch
from aot_tune.tables.store import package_folder, read_table, table_path
from aot_tune.tables.table import Slopes, Table
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Pow2, classes_of
from aot_tune.values.problem import Problem
from aot_tune.values.text import aligned


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary of some sizes."""

    sizes: int
    """Number of sizes."""

    mean: float
    """Regret of the rule's choices in the geometric mean, percent."""

    high: float
    """95th percentile of this regret, percent."""

    worst: float
    """Largest regret, percent."""

    default: float
    """Regret of the default in the geometric mean, percent."""

    lost: float
    """Sizes at which the choice takes over 3 % longer than the default, percent of all."""


def summary(left: Iterable[Left]) -> Summary | None:
    """Summarise some sizes; None without sizes."""
    pairs = list(left)
    if not pairs:
        return None
    chosen = sorted(regret for regret, _ in pairs)
    return Summary(
        sizes=len(pairs),
        mean=_mean(chosen),
        high=100 * chosen[math.ceil(0.95 * len(chosen)) - 1],
        worst=100 * chosen[-1],
        default=_mean([default for _, default in pairs]),
        lost=100 * sum((1 + choice) / (1 + default) > 1.03 for choice, default in pairs) / len(pairs),
    )


def _mean(regrets: Sequence[float]) -> float:
    return 100 * math.expm1(math.fsum(map(math.log1p, regrets)) / len(regrets))


Way = Literal["inside", "near", "far"]
"""Ways to leave out: a point of its bucket; all buckets with its sizes on the Exact axes, where other buckets
of its classes are within a doubling on each axis (near) or farther away (far)."""

WAYS: tuple[Way, ...] = ("inside", "near", "far")


def way(table: Table, bucket: Problem) -> Way | None:
    """Return how far others are from a bucket that is left out; None where none is of its classes."""
    axes, classes = table.axes, classes_of(table.axes, bucket)
    exact = [name for name, axis in axes.items() if not isinstance(axis, Pow2)]
    apart = [
        distance([*map(bucket.size, axes)], [*map(other.size, axes)], 1.0)
        for other in (entry.bucket for entry in table.entries)
        if classes_of(axes, other) == classes and any(other[name] != bucket[name] for name in exact)
    ]
    is_near = any(doublings is not None for doublings in apart)
    return "near" if is_near else "far" if apart else None


Lefts = Mapping[str, Mapping[str, Sequence[Left]]]
"""Regrets by kernel and way."""


class Judge:
    """Cases of some kernels' tables, and slopes that were fitted without the sizes that are judged.

    Args:
        names: Shipped kernels that are judged; slopes are held to those of all.
        arch: The tables' arch.
        rule: The rule.
    """

    def __init__(self, names: Iterable[str], arch: Arch, rule: Rule = RULE) -> None:
        self.names, self.rule = list(names), rule
        paths = {name: table_path(package_folder(k.tunable), arch, name) for name, k in shipped().items()}
        tables = {name: read_table(path) for name, path in paths.items() if path.exists()}
        self.tables = {name: LeaveOut(shipped()[name].tunable, tables[name], rule) for name in tables}
        self.equations = {name: left_out.equations() for name, left_out in self.tables.items()}
        self._slopes: dict[tuple[str, Exact], Slopes] = {}
        self._cases: dict[str, list[tuple[Way, Case]]] = {}

    def common(self, without: str = "") -> Slopes:
        """Return the slopes that fit all tables together, but for one kernel's."""
        others = [equations for name, equations in self.equations.items() if name != without]
        inside, outside = (Equations.joined(each) for each in zip(*others, strict=True))
        return fitted((inside, outside), NO_SLOPES)

    def slopes(self, name: str, shape: Exact) -> Slopes:
        """Return the slopes of a kernel's table without some sizes on the Exact axes."""
        key = (name, shape)
        if key not in self._slopes:
            self._slopes[key] = fitted(self.tables[name].equations(shape), self.common(name))
        return self._slopes[key]

    def cases(self, name: str) -> list[tuple[Way, Case]]:
        """Return a kernel's cases in which the default has a time; inside buckets all but edges. Kept."""
        if name not in self._cases:
            left_out, ways, cases = self.tables[name], dict[Problem, Way | None](), list[tuple[Way, Case]]()
            for case in (*left_out.inside, *left_out.outside()):
                bucket = case.source.entry.bucket
                if case.default not in case.slowdowns or (case.is_inside and case.source.problem == bucket):
                    continue
                if not case.is_inside and bucket not in ways:
                    ways[bucket] = way(left_out.table, bucket)
                if left := "inside" if case.is_inside else ways[bucket]:
                    cases.append((left, case))
            self._cases[name] = cases
        return self._cases[name]

    def lefts(self, choose: Choose) -> Lefts:
        """Return the regrets of choices, by kernel and way."""
        lefts: dict[str, dict[str, list[Left]]] = {}
        for name in self.names:
            if name in self.tables:
                by_way: dict[str, list[Left]] = {way: [] for way in WAYS}
                for left, case in self.cases(name):
                    by_way[left].append(choose(name, case))
                lefts[name] = by_way
        return lefts

    def refitted(self, name: str, case: Case) -> Left:
        """Choose by the rule, with slopes fitted without the case's sizes on the Exact axes."""
        return case.left(self.slopes(name, self.tables[name].exact(case)), self.rule)

    def winner(self, name: str, case: Case) -> Left:
        """Choose the winner of the nearest bucket, inside a bucket its own."""
        portfolio = self.tables[name].table.portfolio
        config = case.nearest.config
        return case.regrets(portfolio.index(config) if config in portfolio else case.default)

    def by(self, rule: Rule) -> Choose:
        """Return the choice by a rule with other parameters."""
        return lambda name, case: case.left(self.slopes(name, self.tables[name].exact(case)), rule)


Choose = Callable[[str, Case], Left]
"""Function from a kernel and a case to the regret of its choice."""


_TINY = 1e-9
"""Parameter without effect; 0 has another meaning, or divides."""


def parts(names: Sequence[str], arch: Arch) -> Iterator[tuple[str, Lefts]]:
    """Yield the regrets of the rule, of the rule without each of its parts, and of simpler choices."""
    judge = Judge(names, arch)
    yield "the rule", judge.lefts(judge.refitted)
    yield "slopes of the other tables alone", judge.lefts(lambda name, c: c.left(judge.common(name)))
    yield "no slopes", judge.lefts(lambda name, case: case.left(NO_SLOPES))
    yield "no charge for unseen points", judge.lefts(judge.by(RULE._replace(unseen=0.0)))
    always = RULE._replace(overlap=0.0, few_us=0.0)
    yield "the default only where it is fastest", judge.lefts(judge.by(always))
    yield "differences of few microseconds count", judge.lefts(judge.by(RULE._replace(few_us=0.0)))
    for title, rule in (
        ("one bucket", RULE._replace(most_near=1)),
        ("buckets of its classes", RULE._replace(other_class=99.0)),
        ("all points of all buckets", RULE._replace(whole=RULE.most_near)),
        ("no shrinking far away", RULE._replace(far=_TINY)),
        ("counts also where all are equal", RULE._replace(equal=_TINY)),
    ):
        other = Judge(names, arch, rule)
        yield title, other.lefts(other.refitted)
    yield "the nearest bucket's winner", judge.lefts(judge.winner)
    yield "the default", judge.lefts(lambda name, case: case.regrets(case.default))


def main(arguments: Sequence[str]) -> int:
    """Print the rule's regret; return the exit status."""
    return words.called(_printed, arguments, "aot-tune bench --left-out")


def _printed(
    kernels: Annotated[
        list[str] | None, typer.Argument(metavar="KERNEL", help="Shipped kernels; all by default.")
    ] = None,
    arch: Annotated[str, typer.Option(metavar="sm90", help="The tables' arch.")] = "sm90",
    ablate: Annotated[bool, typer.Option("--ablate", help="Print what each part of the rule gives.")] = False,
) -> int:
    """Print the regret of the rule between measured sizes on the present tables; needs no GPU.

    A point left out of its bucket (inside); all buckets of a size's exact axes left out, where others are
    within a doubling (near), or farther away (far). Slopes are fitted without what is left out.
    """
    words.check_known(kernels or (), shipped(), "no kernel is called")
    names, on = kernels or list(shipped()), chosen_arch(arch)
    rows: list[tuple[str, ...]] = [
        (
            "rule" if ablate else "kernel",
            "left out",
            "sizes",
            "mean",
            "95 %",
            "worst",
            "default",
            "lost to it",
        )
    ]
    for name, way, total in ablated(parts(names, on)) if ablate else by_kernel(next(parts(names, on))[1]):
        figures = (total.mean, total.high, total.worst, total.default, total.lost)
        rows.append((name, way, str(total.sizes), *(f"{figure:.2f} %" for figure in figures)))
    print("\n".join(aligned(rows)))
    if ablate:
        print(f"slopes that fit all tables together: {Judge(names, on).common()}")
    return 0


def by_kernel(lefts: Lefts) -> Iterator[tuple[str, str, Summary]]:
    """Summarise each way for each kernel, then for all of them."""
    for name, by_way in (*lefts.items(), ("all", _together(lefts))):
        for way, left in by_way.items():
            if total := summary(left):
                yield name, way, total


def ablated(every: Iterable[tuple[str, Lefts]]) -> Iterator[tuple[str, str, Summary]]:
    """Summarise each way for each of `parts`, all kernels together."""
    for title, lefts in every:
        for way, left in _together(lefts).items():
            if total := summary(left):
                yield title, way, total


def _together(lefts: Lefts) -> Mapping[str, Sequence[Left]]:
    return {way: [left for by_way in lefts.values() for left in by_way[way]] for way in WAYS}
