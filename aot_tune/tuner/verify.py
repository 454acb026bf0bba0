"""Measure entries of tables again, on fresh seeds, as a sweep times its portfolio. Writes no table.

Each drawn entry is one task: its winner, the default and the rivals in the table's times are verified and
timed at the bucket's edge, in the GPU's states, and in finals. `aot_tune.tuner.choose.verdict` judges them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

from aot_tune.declare.discovery import FoundKernel
from aot_tune.tables.states import State
from aot_tune.tables.table import Entry, Table
from aot_tune.tuner.choose.incumbent import had_another_default
from aot_tune.tuner.choose.verdict import Finding, Verdict, rivals, verdict
from aot_tune.tuner.measure.supervise import ProblemFailedError
from aot_tune.tuner.measure.worker.backend import RECHECK_SEEDS
from aot_tune.tuner.outcome import Failure, Stage
from aot_tune.tuner.plan.candidates import DeviceKernel, ProblemPlan, SweepPlan, plan_only
from aot_tune.tuner.sweep.budget import Budget
from aot_tune.tuner.sweep.gpus import GpuPool, GpuSlot, Task
from aot_tune.tuner.sweep.journal import Journal
from aot_tune.tuner.sweep.problem import ProblemPass
from aot_tune.tuner.sweep.progress import InTurn, Progress, Started
from aot_tune.tuner.sweep.report import SweepRequest
from aot_tune.tuner.sweep.resources import opened
from aot_tune.tuner.sweep.results import Step, SweepResults, accepts
from aot_tune.tuner.sweep.state import KernelState
from aot_tune.values.config import Config
from aot_tune.values.device import Device

_UNKNOWN: tuple[Stage, ...] = ("memory", "timing")
"""Stages of failures that say nothing of the config."""

_PLACES: tuple[tuple[Step, State | None], ...] = (
    ("portfolio", None),
    *(("portfolio states", state) for state in get_args(State)),
    ("portfolio finals", None),
)
"""Steps of a pass in which a config may fail, with the GPU's state."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Entries of one table to measure again."""

    kernel: FoundKernel
    """The kernel."""

    table: Table
    """Its table."""

    entries: tuple[Entry, ...]
    """The entries."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The verdicts on some tables."""

    device: Device
    """The GPU."""

    driver: str
    """Version of its driver."""

    verdicts: tuple[tuple[Verdict, ...], ...]
    """The verdicts of each table, in the order of the entries."""


def verify(request: SweepRequest, drawn: Sequence[Drawn], seed: int, progress: Progress) -> Verified:
    """Measure the drawn entries again on one GPU.

    Args:
        request: The arch, the GPU, and where and how to compile.
        drawn: The entries by table, at least one.
        seed: The seed of the draw, from which the arguments' seeds follow.
        progress: Receives each event.

    Raises:
        TuneError: The GPU is taken or lost, or nothing can be compiled.
        DeclarationError: A declaration contradicts itself.
    """
    progress = InTurn(progress)
    seeds = (max(RECHECK_SEEDS) + 1 + seed, max(RECHECK_SEEDS) + 2 + seed)
    with (
        opened(request, progress) as resources,
        tempfile.TemporaryDirectory(prefix="aot-tune-verify-") as folder,
        GpuPool(
            request.gpus, resources.session, progress.note, resources.order, resources.choice
        ) as gpu_pool,
    ):
        device, conditions = gpu_pool.open(drawn[0].kernel)
        resources.order.extend(each.kernel.tunable.name for each in drawn)
        feed, verdicts, passes = resources.feed(), [], []
        for each in drawn:
            kernel = DeviceKernel(each.kernel, request.arch, device)
            plans = {entry.bucket: _planned(kernel, each.table, entry) for entry in each.entries}
            planned = SweepPlan(kernel=kernel, problems=tuple(plans.values()))
            name = kernel.tunable.name
            journal = Journal.open(Path(folder, f"{name}.jsonl"), {"kernel": name}, accepts=accepts)
            state = KernelState(planned, feed, SweepResults(journal), progress, exhaustive=False)
            state.submit(planned.jobs)
            passes.append((each, planned, state, journal))
        for each, planned, state, journal in passes:
            with journal:
                verdicts.append(_verdicts(each, planned, state, gpu_pool, seeds, progress))
    return Verified(device=device, driver=conditions.get("driver", ""), verdicts=tuple(verdicts))


def _planned(kernel: DeviceKernel, table: Table, entry: Entry) -> ProblemPlan:
    plan = plan_only(kernel, entry.bucket, rivals(entry, table.portfolio))
    # Both are timed in every state and in the finals, however slow they are.
    return replace(plan, incumbent=entry.config if entry.config in plan.candidates else None)


def _verdicts(
    drawn: Drawn,
    planned: SweepPlan,
    state: KernelState,
    gpu_pool: GpuPool,
    seeds: tuple[int, int],
    progress: Progress,
) -> tuple[Verdict, ...]:
    """Measure one table's entries and judge them."""
    kernel, budget = planned.kernel, Budget(planned, None, state.lock)
    progress.show(
        Started(
            kernel=kernel.tunable.name, arch=kernel.arch, problems=len(planned.problems),
            jobs=len(planned.jobs), device=kernel.device.name,
        )
    )  # fmt: skip

    def measure(place: int, slot: GpuSlot) -> None:
        plan = planned.problems[place]
        state.begins(plan.problem, place, len(planned.problems))
        try:
            ProblemPass(state, budget, plan, slot, seeds=seeds).portfolio(finals=True)
        except ProblemFailedError as error:
            state.leave_out("portfolio", plan.problem, error.reason, slot.gpu)

    tasks = [
        Task(kernel=kernel.declared, work=partial(measure, place), length=-place)
        for place in range(len(planned.problems))
    ]
    gpu_pool.run(tasks, state.report_compilations)
    return tuple(
        _judged(drawn.table, entry, plan, kernel, state)
        for entry, plan in zip(drawn.entries, planned.problems, strict=True)
    )


def _judged(
    table: Table, entry: Entry, plan: ProblemPlan, kernel: DeviceKernel, state: KernelState
) -> Verdict:
    problem = plan.problem
    if problem in state.times.unopened:
        return Verdict(entry=entry, findings={"unknown": state.times.unopened[problem]})
    for config, name in ((entry.config, "its winner"), (plan.default, "its default")):
        if (failure := _failure(config, plan, kernel, state.results)) is not None:
            known = failure.stage not in _UNKNOWN and (config == entry.config or failure.stage == "verify")
            finding: Finding = "fails" if known else "unknown"
            first = next(iter(failure.message.splitlines()), "")
            return Verdict(entry=entry, findings={finding: f"{name} ({config}): {failure.stage}: {first}"})
    compare = not had_another_default(entry, table.portfolio, plan.default)
    return verdict(entry, plan.default, state.times.problems[problem], gains_compare=compare)


def _failure(
    config: Config, plan: ProblemPlan, kernel: DeviceKernel, results: SweepResults
) -> Failure | None:
    """Return why a config has no time at a problem; None where it has."""
    if config not in plan.candidates:
        refused = kernel.failure(plan.problem, config)
        return refused or Failure(config=config, stage="legal", message="it is in no search space")
    outcomes = (results.outcome(step, plan.problem, config, state) for step, state in _PLACES)
    return next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
