"""Order a kernel's problems, and stop starting problems in time. Measures nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from time import monotonic

from aot_tune.declare.discovery import FoundKernel
from aot_tune.tuner.plan.candidates import DeviceKernel, ProblemPlan, SweepPlan
from aot_tune.tuner.plan.model import predict_us
from aot_tune.tuner.plan.shortlist import MOST_CANDIDATES, predictions
from aot_tune.tuner.sweep.results import Step
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

LONG_US = 2000.0
"""Time of a problem that takes twice as long to sweep as an empty problem, microseconds: at any size each
config is loaded, compared and timed in a few dozen launches."""

_PART_OF_TIME: Mapping[Step, float] = {"candidates": 0.5, "portfolio": 0.85}
"""Fractions of the time budget after which a step starts no further problem. The portfolio with the sizes
inside takes about as long as the candidates; the rest is for the last problems and for verifying the winners.
"""


class OutOfTimeError(Exception):
    """No time is left for the missing times of a problem."""


class Budget:
    """The time of one kernel's sweep.

    Without a limit the longest problems come first, so that no GPU waits for a long problem at the end. With
    a limit the problems with the largest expected gain come first.

    Args:
        planned: The kernel's problems.
        seconds: Time for all steps, seconds; unlimited when None.
        lock: Held while the declaration's functions run.
    """

    def __init__(self, planned: SweepPlan, seconds: float | None, lock: threading.RLock) -> None:
        self._plan, self._seconds, self._lock = planned, seconds, lock
        self._started = monotonic()
        self._worths: dict[Problem, float] = {}

    def priority(self, problem_plan: ProblemPlan) -> float:
        """Return the priority of a problem; the highest begins first."""
        if self._seconds is not None:
            return self._worth(problem_plan)
        return length(
            self._plan.kernel, problem_plan.problem, problem_plan.default, len(problem_plan.candidates)
        )

    def is_late(self, step: Step) -> bool:
        """Return whether a step may start no further problem, so that later steps end in time."""
        part = _PART_OF_TIME.get(step)
        if self._seconds is None or part is None:
            return False
        return monotonic() - self._started > part * self._seconds

    def check(self, step: Step, problem_plan: ProblemPlan, *, extra: bool) -> None:
        """Raise where it is too late for the missing times of a problem.

        Args:
            step: The step.
            problem_plan: The problem. The bucket with the highest priority is always measured whole.
            extra: Whether its bucket is served without it, too.

        Raises:
            OutOfTimeError: It is too late.
        """
        if self.is_late(step):
            with self._lock:
                first = max(self._plan.problems, key=self._worth).problem
                if extra or self._plan.kernel.tunable.bucket_of(problem_plan.problem) != first:
                    raise OutOfTimeError

    def _worth(self, problem_plan: ProblemPlan) -> float:
        """Return the predicted gain at a problem's edge: the default's time over the best predicted time.

        All problems of an edge have the same gain, so that they come together.
        """
        kernel = self._plan.kernel
        edge = kernel.tunable.bucket_of(problem_plan.problem)
        if edge not in self._worths:
            plan = next(planned for planned in self._plan.problems if planned.problem == edge)
            times = predictions(kernel, plan, plan.candidates, {})
            self._worths[edge] = times[plan.default] / min(times.values()) if plan.default in times else 1.0
        return self._worths[edge]


def length(kernel: DeviceKernel, problem: Problem, default: Config, configs: int) -> float:
    """Estimate the length of a problem's sweep from its configs and its default's predicted time.

    The unit is arbitrary.
    """
    us = predict_us(kernel.launched(problem, default), kernel.device, None, None)
    return min(configs, MOST_CANDIDATES) * (1.0 + us / LONG_US)


def length_of_kernel(kernel: FoundKernel, arch: Arch, buckets: Iterable[Problem]) -> float:
    """Estimate the length of a kernel's sweep in the unit of `length`; 0 if it cannot be planned.

    The reason is reported when its sweep begins.
    """
    try:
        here = DeviceKernel(kernel, arch)
        return sum(
            length(here, bucket, here.default(bucket), len(kernel.tunable.space(arch, bucket)))
            for bucket in buckets
        )
    except Exception:  # functions of the declaration may raise anything
        return 0.0
