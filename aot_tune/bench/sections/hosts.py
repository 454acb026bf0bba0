"""Simulate the sweep whose journals are here on other machines: how long it takes, and what bounds it.

Nothing is measured. The order of tasks and compilations is that of real sweeps (`tuner/schedule/`), and all
durations are those of the journals, which any GPU wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from aot_tune.bench.sections.part import Part, Request
from aot_tune.tuner.schedule.simulated import KernelWork, Machine, Simulated, Work, simulate
from aot_tune.tuner.sweep import journal as journals
from aot_tune.tuner.sweep.journal import Record
from aot_tune.tuner.sweep.report import JOURNALS
from aot_tune.tuner.sweep.results import PASSES, Pass, accepts
from aot_tune.values.problem import Problem
from aot_tune.values.text import counted

CORES = 16
"""Cores for each GPU of a host, as clouds lend them."""

START_S = 5.5
"""Time in which a measuring process starts, seconds: importing torch and creating a context on an H100."""

RESTART_S = 1.5
"""Time in which a fresh one replaces it whose imports are done beforehand, seconds."""

HOSTS = ((1, 1), (1, 8), (8, 8))
"""Numbers of hosts and of GPUs of each that are simulated."""

_STEPS = (*get_args(Pass), "recheck")
"""The steps of a simulated kernel: each pass is one."""


def run(request: Request) -> Iterator[Part]:
    """Simulate hosts of several sizes."""
    paths = sorted(path for path in JOURNALS.glob("*/*") if path.suffix in (".done", ".jsonl"))
    works = [work_of(path.stem, journals.read(path, accepts).records) for path in paths]
    if not works:
        said = f"{JOURNALS} holds no journals: measure a sweep first, aot-tune tune"
        yield Part(name="none", figures={"nothing to simulate": said})
        return
    for hosts, gpus in HOSTS:
        name = f"{counted(hosts, 'host')} of {counted(gpus, 'GPU')}"
        yield Part(name=name, figures=figures(simulated(works, hosts * gpus)))


def simulated(works: Sequence[KernelWork], gpus: int) -> Simulated:
    """A sweep of these kernels, the longest first, with `CORES` for each GPU."""
    longest_first = sorted(works, key=lambda work: -sum(one.seconds for step in work.steps for one in step))
    return simulate(
        longest_first, Machine(gpus=gpus, cores=CORES * gpus, start_s=START_S, restart_s=RESTART_S)
    )


def work_of(name: str, records: Sequence[Record]) -> KernelWork:
    """What a kernel's journal says of its tasks: each pass of a problem, and its compilations."""
    seconds: dict[tuple[str, Problem], float] = {}
    compilations: dict[tuple[str, Problem], list[float]] = {}
    for record in records:
        step = PASSES.get(record["step"], "recheck")
        place = (step, Problem(record["problem"]))
        if record["kind"] == "spent":
            spent = record["measure_s"] + record["verify_s"] + record.get("open_s", 0.0)
            seconds[place] = seconds.get(place, 0.0) + spent
        elif record["kind"] == "compile":
            compilations.setdefault(place, []).append(record.get("seconds", 0.0))
    return KernelWork(
        name=name,
        steps=tuple(
            tuple(
                Work(
                    seconds=spent,
                    compilations=tuple(compilations.get(place, ())),
                    fresh=step == "recheck",
                )
                for place, spent in seconds.items()
                if place[0] == step
            )
            for step in _STEPS
        ),
    )


def figures(result: Simulated) -> dict[str, Any]:
    """A simulated sweep in words."""
    return {
        "whole sweep_s": round(result.seconds, 1),
        "efficiency": round(result.efficiency, 2),
        "bounded by": result.bound,
        "at least_s": {what: round(seconds, 1) for what, seconds in result.bounds.items()},
        "idle, all GPUs_s": round(result.idle_s, 1),
        "starting processes, all GPUs_s": round(result.starts_s, 1),
    }
