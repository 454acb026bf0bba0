"""Find the signatures that a kernel meets, through sizes that represent all of a bucket. Pure."""

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
    """The name of the kernel, where the declaration has several."""


def compilations(kernel: DeviceKernel, tables: Sequence[Table]) -> tuple[Compilation, ...]:
    """Every (hints, signature) that serving these tables can ask for, sorted, each once.

    The buckets are those of the tables and of the typical problems. In each of them the configs are the
    default and every config of a table's portfolio and entries, where they are legal; and where none of these
    serves every batch of a declaration that names batch axes, the default that does. As in serving, one that
    is in no search space is left out, and no function of the declaration is asked about it. Each config has a
    signature for every class of sizes in the bucket, and for a size of 1 on each Pow2 axis, which is a class
    of its own. A size beyond all buckets has one of these classes too, unless constants follow from it. Sizes
    that no axis names, such as the number of pages of a cache, are those that `make_args` returns for seed 0
    and for `ODD_SEED`. In addition there are the default's weakest signatures, one for each dtype and set of
    constants.

    Args:
        kernel: The declaration on an arch.
        tables: The kernel's tables for the arch; without one the defaults alone count.

    Raises:
        DeclarationError: A function of the declaration raises; the message says which.
    """
    tabled = tuple(dict.fromkeys(_configs(kernel, tables)))
    found: set[Compilation] = set()
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
                    found |= {own, replace(own, signature=weak)}
                found |= {_compilation(kernel, problem, config, seed) for config in wanted}
    return tuple(sorted(found))


def _may_run(kernel: DeviceKernel, config: Config, problem: Problem) -> bool:
    return kernel.tunable.refusal(config, kernel.arch, problem) is None


def _without_batch_size(tunable: Declaration, bucket: Problem) -> Problem:
    """The bucket at a batch of 1, which stands for all buckets that differ in the batch alone."""
    return bucket.replaced(**dict.fromkeys(tunable.batch_axes, 1))


def _for_every_batch(kernel: DeviceKernel, tabled: Sequence[Config], bucket: Problem) -> tuple[Config, ...]:
    """The default that a batch-invariant launch takes where no config of the tables serves every batch."""
    tunable, arch = kernel.tunable, kernel.arch

    def refusal(config: Config, problem: Problem) -> str | None:
        return tunable.refusal(config, arch, problem) or tunable.batch_refusal(config, problem)

    if not tunable.batch_axes or any(
        refused_somewhere(tunable, bucket, config, refusal) is None for config in tabled
    ):
        return ()
    found = default_for_every_batch(tunable, arch, bucket, refusal)
    return () if found is None else (found,)


def _compilation(kernel: DeviceKernel, problem: Problem, config: Config, seed: int) -> Compilation:
    args = kernel.kernel_args(problem, config, seed)
    signature = cutile.signature_of(kernel.tunable.kernel_of(config), args)
    return Compilation(tuple(config.hints.items()), signature, config.kernel)


def _configs(kernel: DeviceKernel, tables: Iterable[Table]) -> Iterator[Config]:
    for table in tables:
        left_out = undeclared(kernel.tunable, table)
        tabled = (*table.portfolio, *(entry.config for entry in table.entries))
        yield from (config for config in tabled if config not in left_out)


def _buckets(kernel: DeviceKernel, tables: Iterable[Table]) -> tuple[Problem, ...]:
    tabled = (entry.bucket for table in tables for entry in table.entries)
    buckets = tuple(dict.fromkeys((*tabled, *kernel.tunable.buckets)))
    pow2 = [name for name, axis in kernel.tunable.axes.items() if isinstance(axis, Pow2)]
    some = itertools.chain.from_iterable(
        itertools.combinations(pow2, count) for count in range(1, len(pow2) + 1)
    )
    ones = dict.fromkeys(bucket.replaced(**dict.fromkeys(names, 1)) for names in some for bucket in buckets)
    return tuple(dict.fromkeys((*buckets, *(one for one in ones if _may_be_asked(kernel, one)))))


def _may_be_asked(kernel: DeviceKernel, problem: Problem) -> bool:
    """Whether a kernel can have an undeclared problem; one of its sizes may have to divide another."""
    try:
        default = kernel.tunable.default_config(kernel.arch, problem)
        kernel.kernel_args(problem, default)
        return _may_run(kernel, default, problem)
    except Exception:  # the author's code, called with sizes that the author did not declare
        return False
