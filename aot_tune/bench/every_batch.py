"""Cost of one config for every batch by the committed tables, for ``bench --report``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aot_tune.choose.batch import without_batch
from aot_tune.choose.choice import Options
from aot_tune.declare.declaration import Declaration
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.tables.table import geometric_mean
from aot_tune.values.arch import Arch


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Costs of a kernel's choices for every batch, each the worst over all sizes of the batch."""

    axes: Sequence[str]
    """Batch axes of the kernel."""

    mean: float | None
    """Regret in the geometric mean over the other sizes, percent; None where none was measured."""

    worst: float | None
    """Largest regret, percent."""

    groups: int
    """Number of declared sizes of the other axes."""

    partly: int
    """Number of these sizes at which the choice has no time at some size of the batch, or at any."""


def cost(tunable: Declaration, arch: Arch) -> Cost:
    """Compute the cost of the choices at the declared sizes of the other axes."""
    every = dispatcher_of(tunable).every_batch(arch)
    firsts = {without_batch(tunable, bucket): bucket for bucket in tunable.buckets}
    regrets, partly = [], 0
    for bucket in firsts.values():
        config = every.choice(bucket, Options(on_miss="nearest")).config
        ranked = next((ranked for ranked in every.ranking(bucket) if ranked.config == config), None)
        partly += ranked is None or ranked.untimed > 0
        if ranked is not None and ranked.sizes > ranked.untimed:
            regrets.append(ranked.regret)
    return Cost(
        axes=tunable.batch_axes,
        mean=100 * (geometric_mean(1 + regret for regret in regrets) - 1) if regrets else None,
        worst=100 * max(regrets) if regrets else None,
        groups=len(firsts),
        partly=partly,
    )
