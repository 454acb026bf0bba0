"""Which signatures a kernel meets: sizes that stand for all of a bucket, and their signatures. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from aot_tune import cutile
from aot_tune.config import Config
from aot_tune.problem import Problem
from aot_tune.size_classes import posed
from aot_tune.size_classes import representatives as representatives
from aot_tune.table import Table
from aot_tune.tunable import Tunable
from aot_tune.tuner.plan import Kernel


@dataclass(frozen=True, order=True)
class Compilation:
    """What one cubin is compiled for."""

    hints: tuple[tuple[str, int], ...]
    """Compiler hints in their canonical order."""

    signature: str
    """What the compiler assumes of the arguments, constants included."""


def compilations(kernel: Kernel, tables: Sequence[Table]) -> tuple[Compilation, ...]:
    """Every (hints, signature) that serving these tables can ask for, sorted, each once.

    Of each bucket of the tables and of the typical problems: the default, and every config of a table's
    portfolio and entries that is legal there; for every class of sizes in the bucket. A size beyond all
    buckets has one of these classes too. Sizes that no axis names, as the pages of a cache, are those that
    `make_args` gives for seed 0 and for seed 1. Beside them the default's weakest signatures: one a dtype and
    set of constants.

    Args:
        kernel: The declaration on an arch.
        tables: Its tables there; none leaves the defaults.

    Raises:
        DeclarationError: The declaration cannot be asked; it says what raised.
    """
    configs = tuple(dict.fromkeys(_configs(tables)))
    found: set[Compilation] = set()
    weakened: set[Compilation] = set()
    for bucket in _buckets(kernel.tunable, tables):
        for problem in representatives(kernel.tunable, bucket):
            default = kernel.tunable.default_config(kernel.arch, problem)
            wanted = [config for config in configs if _may_run(kernel, config, problem)]
            for seed in posed(partial(kernel.launch_args, problem)):
                own = _compilation(kernel, problem, default, seed)
                if own not in weakened:
                    weakened.add(own)
                    weak = cutile.weakest_signature(kernel.tunable.kernel, own.signature)
                    found |= {own, Compilation(own.hints, weak)}
                found |= {_compilation(kernel, problem, config, seed) for config in wanted}
    return tuple(sorted(found))


def _may_run(kernel: Kernel, config: Config, problem: Problem) -> bool:
    return kernel.tunable.refusal(config, kernel.arch, problem) is None


def _compilation(kernel: Kernel, problem: Problem, config: Config, seed: int) -> Compilation:
    signature = cutile.signature_of(kernel.tunable.kernel, kernel.kernel_args(problem, config, seed))
    return Compilation(tuple(config.hints.items()), signature)


def _configs(tables: Iterable[Table]) -> Iterator[Config]:
    for table in tables:
        yield from table.portfolio
        yield from (entry.config for entry in table.entries)


def _buckets(tunable: Tunable, tables: Iterable[Table]) -> tuple[Problem, ...]:
    tabled = (entry.bucket for table in tables for entry in table.entries)
    return tuple(dict.fromkeys((*tabled, *tunable.buckets)))
