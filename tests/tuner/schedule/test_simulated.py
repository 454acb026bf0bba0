"""Sweeps on a simulated clock: small ones whose duration is known, and all of sm90 on one and on 64 GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import pytest

from aot_tune.bench.sections import hosts
from aot_tune.declare.discovery import find_tunables
from aot_tune.tuner.schedule.simulated import KernelWork, Machine, Simulated, Work, simulate

JOURNAL = Path("tests/data/h100_norms_sweep.json")
"""The seconds of each pass of each problem in journals of an H100: timing, verifying and making arguments."""

README = Path("aot_tune/tuner/README.md")
"""Whose table this gives."""

LONGER = 1.2
"""Of the whole set one GPU takes 31 minutes, so that its passes are this many times as long as those of the
two kernels in the file."""

COMPILATION_S = 1.04
"""A compilation of one core, seconds: 16 cores of an H200's host made 192 of matmul in 12.5 s."""

COMPILATIONS, COMPILATIONS_INSIDE = 3, 1
"""Compilations of a bucket that no other bucket shares: the set has 3,047 for 1,096 buckets. Those of a size
inside a bucket are at most that many."""

SIZES = 3.5
"""Sizes of a bucket at which its portfolio is timed, the edge included: 3,884 of 1,096 buckets."""


def _works(*seconds: float, fresh: bool = False) -> tuple[Work, ...]:
    return tuple(Work(seconds=one, fresh=fresh) for one in seconds)


def _simulated(*kernels: KernelWork, gpus: int = 1, cores: int = 1) -> Simulated:
    return simulate(kernels, Machine(gpus=gpus, cores=cores, start_s=5.0, restart_s=2.0))


def test_steps_follow_one_another_and_tasks_of_a_step_share_the_gpus() -> None:
    kernel = KernelWork(name="a", steps=(_works(3, 2, 1), _works(4)))
    one, two = _simulated(kernel), _simulated(kernel, gpus=2)
    assert one.seconds == 5 + 6 + 4
    assert two.seconds == 5 + 3 + 4
    assert two.idle_s == 4, "the other GPU, during the last step"
    assert one.efficiency == 1.0


def test_a_task_waits_for_its_compilations_and_the_first_kernel_compiles_first() -> None:
    first = KernelWork(name="a", steps=((Work(seconds=1, compilations=(2, 2)),),))
    second = KernelWork(name="b", steps=((Work(seconds=1, compilations=(2,)),),))
    assert _simulated(first, second).seconds == 5 + 6 + 1
    assert _simulated(second, first, cores=2).seconds == 5 + 4 + 1
    assert _simulated(first, second).bound.startswith("compiling")


def test_the_next_kernel_fills_what_the_end_of_one_leaves() -> None:
    first = KernelWork(name="a", steps=(_works(4, 4), _works(4)))
    assert _simulated(first, KernelWork(name="b", steps=(_works(4),)), gpus=2).seconds == 5 + 8


def test_the_gpu_with_a_fresh_process_does_what_needs_one() -> None:
    kernels = [KernelWork(name=name, steps=(_works(1), _works(1, 1, fresh=True))) for name in "ab"]
    result = _simulated(*kernels, gpus=2)
    assert result.starts_s == 2 * 5 + 2, "one of them is replaced, once"


def _whole_set() -> list[KernelWork]:
    """All kernels of sm90 with their declared numbers of buckets."""
    seconds = list(json.loads(JOURNAL.read_text()).values())
    return [
        _kernel(name, len(found.tunable.buckets), seconds[number % len(seconds)])
        for number, (name, found) in enumerate(find_tunables(["aot_tune.kernels"]).items())
    ]


def _kernel(name: str, buckets: int, seconds: dict[str, Sequence[float]]) -> KernelWork:
    def works(step: str, number: int, compilations: int, *, fresh: bool = False) -> tuple[Work, ...]:
        return tuple(
            Work(seconds=LONGER * one, compilations=(COMPILATION_S,) * compilations, fresh=fresh)
            for one in islice(cycle(seconds[step]), number)
        )

    return KernelWork(
        name=name,
        planning_s=0.5,
        steps=(
            works("candidates", buckets, COMPILATIONS),
            works("portfolio", round(buckets * SIZES), COMPILATIONS_INSIDE),
            works("recheck", buckets, 0, fresh=True),
        ),
    )


@pytest.mark.parametrize(
    ("gpus", "least"), [(1, 0.97), (8, 0.94), pytest.param(64, 0.9, marks=pytest.mark.slow)]
)
def test_all_of_sm90_takes_little_longer_than_its_tasks_in_an_ideal_queue(gpus: int, least: float) -> None:
    result = hosts.simulated(_whole_set(), gpus)
    assert result.bound.startswith("measuring")
    assert result.efficiency >= least, hosts.figures(result)
    row = f"| {gpus} | {result.seconds:,.0f} | {100 * result.efficiency:.0f} % |"
    assert row in README.read_text(encoding="utf-8"), "the README's table"
