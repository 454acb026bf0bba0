"""What the rule between measured sizes leaves on the present tables, with points or buckets left out.

``aot-tune bench --left-out`` prints it; it needs no GPU. A size is told as if it had not been measured, and
its times say what that costs.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from aot_tune.bench.gpu import shipped
from aot_tune.declare.declaration import Declaration
from aot_tune.errors import UsageError
from aot_tune.serve.choose.index import Index, Shipped
from aot_tune.tables.rule import pick, rule_of
from aot_tune.tables.states import in_worst_state
from aot_tune.tables.store import package_folder, read_table, table_path
from aot_tune.tables.table import Entry, Point, Table
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import NEAR_DOUBLINGS, Pow2
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from aot_tune.values.text import aligned

Left = tuple[float, float]
"""The regret of the rule's choice at a size, against portfolio and default, and that of the default."""


def inside(tunable: Declaration, table: Table) -> Iterator[Left]:
    """Leave each point out that is no edge, and tell it from the others of its bucket."""
    default_at = partial(tunable.default_config, table.arch)
    for entry, point in _points(table):
        problem, others = _at(entry, point), tuple(one for one in entry.points if one is not point)
        times = _times(tunable, table, entry, point)
        if not others or point is entry.points[-1] or default_at(problem) not in times:
            continue
        rest = dataclasses.replace(entry, points=others)
        rule = rule_of(rest, table, tunable.tiles, default_at)
        chosen = pick(rest, rule, default_at(problem), problem, times.__contains__)
        yield _left(times, chosen.config if chosen else None, default_at(problem))


def across(tunable: Declaration, table: Table, *, near: bool) -> Iterator[Left]:
    """Leave out all entries with a size's sizes on the Exact axes, and tell it from the nearest buckets.

    Args:
        tunable: The declaration.
        table: Its table.
        near: Whether to yield the sizes whose nearest bucket is within one doubling, or the others.
    """
    exact = [name for name, axis in table.axes.items() if not isinstance(axis, Pow2)]
    default_at = partial(tunable.default_config, table.arch)
    indexes: dict[tuple[object, ...], Index] = {}
    for entry, point in _points(table):
        problem, times = _at(entry, point), _times(tunable, table, entry, point)
        default = default_at(problem)
        if default not in times:
            continue
        sizes = {name: entry.bucket[name] for name in exact}
        index = indexes.get(tuple(sizes.values()))
        if index is None:
            index = indexes[tuple(sizes.values())] = _without(tunable, table, sizes)
        found = index.nearest(problem, NEAR_DOUBLINGS)
        if (found is not None) != near:
            continue
        found = found or index.nearest(problem, math.inf)
        if found is None:
            continue
        chosen = pick(
            found.entry,
            index.rule(found, default_at),
            default,
            problem,
            times.__contains__,
            where="near" if near else "far",
            beside=index.beside(found, default_at),
        )
        yield _left(times, chosen.config if chosen else None, default)


def _without(tunable: Declaration, table: Table, sizes: Mapping[str, object]) -> Index:
    """The table's entries but for those with these sizes."""
    kept = tuple(e for e in table.entries if any(e.bucket[name] != size for name, size in sizes.items()))
    rest = Shipped(table=dataclasses.replace(table, entries=kept), path=Path("table.json"))
    return Index(tunable.axes, tunable.tiles, [rest])


def _points(table: Table) -> Iterator[tuple[Entry, Point]]:
    return ((entry, point) for entry in table.entries for point in entry.points)


def _at(entry: Entry, point: Point) -> Problem:
    return entry.bucket.replaced(**point.size)


def _times(tunable: Declaration, table: Table, entry: Entry, point: Point) -> dict[Config, float]:
    """The times of the configs that may run at a point."""
    problem = _at(entry, point)
    configs = (*table.portfolio, tunable.default_config(table.arch, problem))
    times: dict[Config, float] = {}
    for config, us in zip(configs, in_worst_state(point).us, strict=True):
        if us is not None and tunable.refusal(config, table.arch, problem) is None:
            times.setdefault(config, us)
    return times


def _left(times: dict[Config, float], chosen: Config | None, default: Config) -> Left:
    least = min(times.values())
    return times[chosen or default] / least - 1, times[default] / least - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Some sizes together."""

    sizes: int
    """Number of sizes."""

    mean: float
    """Regret of the rule's choices in the geometric mean, percent."""

    high: float
    """Its 95th percentile, percent."""

    worst: float
    """The largest, percent."""

    default: float
    """Regret of the default in the geometric mean, percent."""

    lost: float
    """Sizes at which the choice takes over 3 % longer than the default, percent of all."""


def summary(left: Iterable[Left]) -> Summary | None:
    """Sum up; None without sizes."""
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
        lost=100 * sum((1 + one) / (1 + other) > 1.03 for one, other in pairs) / len(pairs),
    )


def _mean(regrets: Sequence[float]) -> float:
    return 100 * math.expm1(math.fsum(map(math.log1p, regrets)) / len(regrets))


WAYS = ("inside", "near", "far")
"""A point left out of its bucket; all buckets of a size's Exact axes left out, where others are within a
doubling; the same where they are farther away."""


def main(words: Sequence[str]) -> int:
    """Print what the rule leaves on the tables of an arch; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="aot-tune bench --left-out",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kernels = shipped()
    parser.add_argument("kernels", nargs="*", help="some of the shipped kernels; all by default")
    parser.add_argument("--arch", type=Arch.parse, default=Arch.parse("sm90"), help="the tables' arch")
    options = parser.parse_args(words)
    if unknown := [name for name in options.kernels if name not in kernels]:
        raise UsageError(f"no kernel is called {' '.join(unknown)}; there is {' '.join(kernels)}")
    rows: list[tuple[str, ...]] = [
        ("kernel", "left out", "sizes", "mean", "95 %", "worst", "default", "lost to it")
    ]
    for name, way, found in summaries(options.kernels or kernels, options.arch):
        figures = (found.mean, found.high, found.worst, found.default, found.lost)
        rows.append((name, way, str(found.sizes), *(f"{figure:.2f} %" for figure in figures)))
    print("\n".join(aligned(rows)))
    return 0


def summaries(names: Iterable[str], arch: Arch) -> Iterator[tuple[str, str, Summary]]:
    """What is left at each way for each of the shipped kernels that are named, then for all of them."""
    kernels = shipped()
    together: dict[str, list[Left]] = {way: [] for way in WAYS}
    for name in names:
        tunable = kernels[name].tunable
        path = table_path(package_folder(tunable), arch, name)
        for way, left in _of_table(tunable, read_table(path)).items() if path.exists() else ():
            together[way] += left
            if found := summary(left):
                yield name, way, found
    for way, left in together.items():
        if found := summary(left):
            yield "all", way, found


def _of_table(tunable: Declaration, table: Table) -> dict[str, list[Left]]:
    return {
        "inside": list(inside(tunable, table)),
        "near": list(across(tunable, table, near=True)),
        "far": list(across(tunable, table, near=False)),
    }
