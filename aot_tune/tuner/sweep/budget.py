"""Decide which problems of a kernel come first, and when no further one begins. Measures nothing."""

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
"""A problem of this time takes twice as long to sweep as one of no size, microseconds: at any size each
config is loaded, compared and timed in a few dozen launches."""

_PART_OF_TIME: Mapping[Step, float] = {"candidates": 0.5, "portfolio": 0.85}
"""The parts of a limited time after which a step begins with no further problem. The portfolio with the sizes
inside takes about as long as the candidates; the rest is for the last problems and for verifying the winners.
"""


class OutOfTimeError(Exception):
    """No time is left for what is missing of a problem."""


class Budget:
    """The time of one kernel's sweep.

    Without a limit the longest problems come first, so that no GPU waits for a long one at the end. In a
    limited time those come first at which tuning may gain most.

    Args:
        planned: The kernel's problems.
        seconds: Time for all steps, seconds; unlimited when None.
        lock: Held while the declaration's functions run.
    """

    def __init__(self, planned: SweepPlan, seconds: float | None, lock: threading.RLock) -> None:
        self._plan, self._seconds, self._lock = planned, seconds, lock
        self._started = monotonic()
        self._worths: dict[Problem, float] = {}

    def priority(self, each: ProblemPlan) -> float:
        """How early a problem begins: the greatest first."""
        if self._seconds is not None:
            return self._worth(each)
        return length(self._plan.kernel, each.problem, each.default, len(each.candidates))

    def is_late(self, step: Step) -> bool:
        """Whether no problem of a step may begin any more, so that the later steps end in time."""
        part = _PART_OF_TIME.get(step)
        if self._seconds is None or part is None:
            return False
        return monotonic() - self._started > part * self._seconds

    def check(self, step: Step, each: ProblemPlan, *, extra: bool) -> None:
        """Raise where it is too late for what is missing of a problem.

        Args:
            step: The step.
            each: The problem. One at the edge that is worth most, or inside its bucket, is always measured.
            extra: Whether its bucket is served without it, too.

        Raises:
            OutOfTimeError: It is too late.
        """
        if self.is_late(step):
            with self._lock:
                first = max(self._plan.problems, key=self._worth).problem
                if extra or self._plan.kernel.tunable.bucket_of(each.problem) != first:
                    raise OutOfTimeError

    def _worth(self, each: ProblemPlan) -> float:
        """The predicted gain at a problem's edge: its default's time over that of the model's best config.

        All problems of an edge are worth the same, so that they come together.
        """
        kernel = self._plan.kernel
        edge = kernel.tunable.bucket_of(each.problem)
        if edge not in self._worths:
            plan = next(one for one in self._plan.problems if one.problem == edge)
            times = predictions(kernel, plan, plan.candidates, {})
            self._worths[edge] = times[plan.default] / min(times.values()) if plan.default in times else 1.0
        return self._worths[edge]


def length(kernel: DeviceKernel, problem: Problem, default: Config, configs: int) -> float:
    """The length of a problem's sweep, in any unit: by its configs and its default's predicted time."""
    us = predict_us(kernel.launched(problem, default), kernel.device, None, None)
    return min(configs, MOST_CANDIDATES) * (1.0 + us / LONG_US)


def length_of_kernel(found: FoundKernel, arch: Arch, buckets: Iterable[Problem]) -> float:
    """The length of a kernel's sweep, in the same unit; 0 for one that cannot be planned.

    The reason is reported when its turn comes.
    """
    try:
        kernel = DeviceKernel(found, arch)
        return sum(
            length(kernel, bucket, kernel.default(bucket), len(found.tunable.space(arch, bucket)))
            for bucket in buckets
        )
    except Exception:  # functions of the declaration may raise anything
        return 0.0
