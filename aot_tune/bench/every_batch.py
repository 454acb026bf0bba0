"""What one config for every batch costs by the committed tables, as ``bench --report`` prints it."""

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
    """The costs of one kernel's choices for every batch, each the worst over all sizes of the batch."""

    axes: Sequence[str]
    """The kernel's batch axes."""

    mean: float | None
    """Regret in the geometric mean over the other sizes, percent; None where none was measured."""

    worst: float | None
    """The largest, percent."""

    groups: int
    """Number of other sizes that are declared."""

    partly: int
    """Number of these at which the choice has no time at some size of the batch, or at any."""


def cost(tunable: Declaration, arch: Arch) -> Cost:
    """Ask for the choice at each of the declared sizes of the other axes."""
    every = dispatcher_of(tunable).every_batch(arch)
    firsts = {without_batch(tunable, bucket): bucket for bucket in tunable.buckets}
    regrets, partly = [], 0
    for bucket in firsts.values():
        config = every.choice(bucket, Options(on_miss="nearest")).config
        one = next((one for one in every.ranking(bucket) if one.config == config), None)
        partly += one is None or one.untimed > 0
        if one is not None and one.sizes > one.untimed:
            regrets.append(one.regret)
    return Cost(
        axes=tunable.batch_axes,
        mean=100 * (geometric_mean(1 + regret for regret in regrets) - 1) if regrets else None,
        worst=100 * max(regrets) if regrets else None,
        groups=len(firsts),
        partly=partly,
    )
