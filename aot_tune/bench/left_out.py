"""Regret of the rule between measured sizes on the present tables, with points or buckets left out.

``aot-tune bench --left-out`` prints it and needs no GPU. The rule chooses for a size as if it had not been
measured, and the size's times give the regret of the choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import typer

from aot_tune.bench import words
from aot_tune.bench.gpu import shipped
from aot_tune.choose.left_out import Left, across, inside
from aot_tune.declare.declaration import Declaration
from aot_tune.declare.selection import chosen_arch
from aot_tune.tables.store import package_folder, read_table, table_path
from aot_tune.tables.table import Table
from aot_tune.values.arch import Arch
from aot_tune.values.text import aligned


@dataclasses.dataclass(frozen=True, kw_only=True)
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


WAYS = ("inside", "near", "far")
"""Ways to leave out: a point of its bucket; all buckets of a size's Exact axes where other buckets are within
a doubling (near) or farther away (far)."""


def main(arguments: Sequence[str]) -> int:
    """Print the rule's regret; return the exit status."""
    return words.called(_printed, arguments, "aot-tune bench --left-out")


def _printed(
    kernels: Annotated[
        list[str] | None, typer.Argument(metavar="KERNEL", help="Shipped kernels; all by default.")
    ] = None,
    arch: Annotated[str, typer.Option(metavar="sm90", help="The tables' arch.")] = "sm90",
) -> int:
    """Print the regret of the rule between measured sizes on the present tables; needs no GPU.

    A point left out of its bucket (inside); all buckets of a size's exact axes left out, where others are
    within a doubling (near), or farther away (far).
    """
    words.check_known(kernels or (), shipped(), "no kernel is called")
    rows: list[tuple[str, ...]] = [
        ("kernel", "left out", "sizes", "mean", "95 %", "worst", "default", "lost to it")
    ]
    for name, way, total in summaries(kernels or shipped(), chosen_arch(arch)):
        figures = (total.mean, total.high, total.worst, total.default, total.lost)
        rows.append((name, way, str(total.sizes), *(f"{figure:.2f} %" for figure in figures)))
    print("\n".join(aligned(rows)))
    return 0


def summaries(names: Iterable[str], arch: Arch) -> Iterator[tuple[str, str, Summary]]:
    """Summarise each way for each of the named shipped kernels, then for all of them."""
    kernels = shipped()
    together: dict[str, list[Left]] = {way: [] for way in WAYS}
    for name in names:
        tunable = kernels[name].tunable
        path = table_path(package_folder(tunable), arch, name)
        for way, left in _of_table(tunable, read_table(path)).items() if path.exists() else ():
            together[way] += left
            if total := summary(left):
                yield name, way, total
    for way, left in together.items():
        if total := summary(left):
            yield "all", way, total


def _of_table(tunable: Declaration, table: Table) -> dict[str, list[Left]]:
    return {
        "inside": list(inside(tunable, table)),
        "near": list(across(tunable, table, near=True)),
        "far": list(across(tunable, table, near=False)),
    }
