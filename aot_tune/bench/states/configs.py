"""Which configs of a problem are worth timing: those that serving may take."""

from __future__ import annotations

from aot_tune.serve.choose import loader
from aot_tune.serve.launch.dispatch import dispatcher_of
from aot_tune.tuner.plan.candidates import DeviceKernel
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem


def worth_timing(kernel: DeviceKernel, problem: Problem) -> list[Config]:
    """The chosen config, the default, and those of the portfolio, all of which may run there."""
    tunable, arch = kernel.tunable, kernel.arch
    known = [
        dispatcher_of(tunable).choice(arch, problem, device=kernel.device).config,
        tunable.default_config(arch, problem),
        *(config for one in loader.load(tunable, arch).tables for config in one.table.portfolio),
    ]
    legal = set(tunable.candidates(arch, problem))
    return [config for config in dict.fromkeys(known) if config in legal]
