"""Find a kernel's signatures through sizes that represent a whole bucket. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from aot_tune.choose.batch import default_for_every_batch, refused_somewhere
from aot_tune.cubins.size_classes import posed, representatives
from aot_tune.declare.declaration import Declaration
from aot_tune.nvidia import cutile
from aot_tune.tables.fit import undeclared
from aot_tune.tables.table import Table
from aot_tune.tuner.plan.candidates import DeviceKernel
from aot_tune.values.bucket import Pow2
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem


@dataclass(frozen=True, order=True)
class Compilation:
    """The hints and the signature of one cubin."""

    hints: tuple[tuple[str, int], ...]
    """Compiler hints in their canonical order."""

    signature: str
    """The compiler's assumptions about the arguments, constants included."""

    kernel: str | None = None
    """The kernel's name, where the declaration has several."""


def compilations(kernel: DeviceKernel, tables: Sequence[Table]) -> tuple[Compilation, ...]:
    """Return all compilations that serving these tables can need, sorted, each once.

    The buckets come from the tables and the typical problems. In each of them the configs are the default and
    every config of a table's portfolio and entries, where they are legal. Where none of these serves every
    batch of a declaration with batch axes, the default that does is added. As in serving, a config that is in
    no search space is left out, and no function of the declaration is called with it. Each config has a
    signature for every class of sizes in the bucket, and for a size of 1 on each Pow2 axis, which is a class
    of its own. A size beyond all buckets has one of these classes too, unless constants follow from it. Sizes
    without an axis, such as the number of pages of a cache, are taken from `make_args` for seed 0 and for
    `ODD_SEED`. In addition there are the default's weakest signatures, one for each dtype and set of
    constants.

    Args:
        kernel: The declaration on an arch.
        tables: The kernel's tables for the arch; without a table only the defaults count.

    Raises:
        DeclarationError: A function of the declaration raises; the message names it.
    """
    tabled = tuple(dict.fromkeys(_configs(kernel, tables)))
    needed: set[Compilation] = set()
    weakened: set[Compilation] = set()
    for_every_batch = cache(partial(_for_every_batch, kernel, tabled))
    for bucket in _buckets(kernel, tables):
        configs = (*tabled, *for_every_batch(_without_batch_size(kernel.tunable, bucket)))
        for problem in representatives(kernel.tunable, bucket, kernel.launch_args):
            default = kernel.tunable.default_config(kernel.arch, problem)
            wanted = [config for config in configs if _may_run(kernel, config, problem)]
            launches = _may_run(kernel, default, problem)  # no dtype runs on every arch
            for seed in posed(partial(kernel.launch_args, problem)):
                own = _compilation(kernel, problem, default, seed)
                if launches and own not in weakened:
                    weakened.add(own)
                    weak = cutile.weakest_signature(kernel.tunable.kernel_of(default), own.signature)
                    needed |= {own, replace(own, signature=weak)}
                needed |= {_compilation(kernel, problem, config, seed) for config in wanted}
    return tuple(sorted(needed))


def _may_run(kernel: DeviceKernel, config: Config, problem: Problem) -> bool:
    return kernel.tunable.refusal(config, kernel.arch, problem) is None


def _without_batch_size(tunable: Declaration, bucket: Problem) -> Problem:
    """Return the bucket at a batch of 1, which represents all buckets that differ only in the batch."""
    return bucket.replaced(**dict.fromkeys(tunable.batch_axes, 1))


def _for_every_batch(kernel: DeviceKernel, tabled: Sequence[Config], bucket: Problem) -> tuple[Config, ...]:
    """Return the default of batch-invariant launches where no config of the tables serves every batch."""
    tunable, arch = kernel.tunable, kernel.arch

    def refusal(config: Config, problem: Problem) -> str | None:
        return tunable.refusal(config, arch, problem) or tunable.batch_refusal(config, problem)

    if not tunable.batch_axes or any(
        refused_somewhere(tunable, bucket, config, refusal) is None for config in tabled
    ):
        return ()
    default = default_for_every_batch(tunable, arch, bucket, refusal)
    return () if default is None else (default,)


def _compilation(kernel: DeviceKernel, problem: Problem, config: Config, seed: int) -> Compilation:
    args = kernel.kernel_args(problem, config, seed)
    signature = cutile.signature_of(kernel.tunable.kernel_of(config), args)
    return Compilation(tuple(config.hints.items()), signature, config.kernel)


def _configs(kernel: DeviceKernel, tables: Iterable[Table]) -> Iterator[Config]:
    for table in tables:
        left_out = undeclared(kernel.tunable, table)
        yield from (config for config in table.configs if config not in left_out)


def _buckets(kernel: DeviceKernel, tables: Iterable[Table]) -> tuple[Problem, ...]:
    tabled = (entry.bucket for table in tables for entry in table.entries)
    buckets = tuple(dict.fromkeys((*tabled, *kernel.tunable.buckets)))
    pow2 = [name for name, axis in kernel.tunable.axes.items() if isinstance(axis, Pow2)]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(pow2, count) for count in range(1, len(pow2) + 1)
    )
    ones = dict.fromkeys(
        bucket.replaced(**dict.fromkeys(names, 1)) for names in subsets for bucket in buckets
    )
    return tuple(dict.fromkeys((*buckets, *(bucket for bucket in ones if _is_possible(kernel, bucket)))))


def _is_possible(kernel: DeviceKernel, problem: Problem) -> bool:
    """Return whether an undeclared problem is possible; a size may have to divide another."""
    try:
        default = kernel.tunable.default_config(kernel.arch, problem)
        kernel.kernel_args(problem, default)
        return _may_run(kernel, default, problem)
    except Exception:  # the author's code, called with sizes that the author did not declare
        return False
