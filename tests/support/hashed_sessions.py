"""Measuring sessions in this process whose times are a hash of problem and config, on any number of GPUs.

Some configs, never the default, are wrong at some sizes, so that members of the portfolio fall. A GPU can be
lost.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from aot_tune.tuner.measure.request import (
    Finals,
    OnOutcome,
    Recheck,
    Reported,
    Request,
    Spent,
    TimeInState,
    ignore,
)
from aot_tune.tuner.measure.supervise import GpuLostError, MeasuringStopped
from aot_tune.tuner.outcome import Failure, Measurement, Outcome
from aot_tune.tuner.sweep import resources
from aot_tune.values.arch import Arch
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support.samples import DEFAULT

CUBINS = Path("build/test-cubins").absolute()
"""The folder of what is compiled."""

PAUSE_S = 0.001
"""What an outcome takes, seconds: time for the other GPUs' threads."""


class HashedSession:
    """The part of `aot_tune.tuner.measure.session.MeasureSession` that a sweep needs."""

    lost_after: ClassVar[dict[int, int]] = {}
    """By index, the number of outcomes after which a GPU is lost; 0 for one that is lost from the start."""

    devices: ClassVar[dict[int, Device]] = {}
    """By index, the GPUs that are no reference devices."""

    broken: ClassVar[dict[int, str]] = {}
    """By index, the GPUs on which all is wrong: ``always``, or only when verified again, ``late``."""

    slower: ClassVar[dict[int, float]] = {}
    """By index, what the times of a GPU are multiplied by."""

    wrong_part = 0.01
    """The part of all configs and problems whose result is wrong, those of the default left out."""

    stops_after: ClassVar[list[int]] = []
    """The number of outcomes, of all GPUs, after which the sweep is stopped."""

    seconds = 0.0
    """What an outcome takes on the clock `now`, seconds."""

    now: ClassVar[list[float]] = [0.0]
    """Seconds on a clock that only outcomes move."""

    starting_s = 0.0
    """What the start of a GPU's process takes, as told, seconds."""

    told: ClassVar[list[tuple[int, Problem, Config]]] = []
    """All outcomes, each with the GPU's index."""

    def __init__(self, found: Any, index: int, *, on_event: Any = None, fault_counts: Any = None) -> None:
        self.index = index
        self.spent = Spent(start_s=self.starting_s)
        self._stopped = False

    @classmethod
    def reset(cls) -> None:
        """Forget what a test has set."""
        for one in (cls.lost_after, cls.devices, cls.broken, cls.slower, cls.stops_after, cls.told):
            one.clear()
        cls.now[0] = 0.0

    def __enter__(self) -> HashedSession:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def interrupt(self) -> None:
        self._stopped = True

    def turn_to(self, found: Any, fault_counts: Any) -> None:
        pass

    def identity(self) -> dict[str, str]:
        name = Device.reference(Arch.parse("sm90")).name
        versions = {"driver": "580.1", "cuda_tile": "1.7.0", "tileiras": "13.4.92"}
        return {"gpu": name, "uuid": f"GPU-{self.index}", **versions}

    def device(self) -> Device:
        if self.lost_after.get(self.index) == 0:
            raise GpuLostError(f"GPU {self.index} does not answer")
        return self.devices.get(self.index) or Device.reference(Arch.parse("sm90"))

    def answer(self, request: Request, on_outcome: OnOutcome = ignore) -> list[Outcome]:
        problem, outcomes = request.problem, list[Outcome]()
        if isinstance(request, Finals):
            for number in range(3):
                for config in request.configs:
                    if len(request.taken.get(config, ())) <= number:
                        on_outcome(Reported(outcome=self._outcome(problem, config), number=number))
            outcomes = [self._measured(problem, config) for config in request.configs]
            for outcome in outcomes:
                on_outcome(Reported(outcome=outcome))
            return outcomes
        if isinstance(request, Recheck):
            outcomes = [self._outcome(problem, config, "late") for config in request.configs]
            return [one for one in outcomes if isinstance(one, Failure)]
        for config in request.configs:
            outcome = self._outcome(problem, config)
            if isinstance(request, TimeInState):  # what is wrong has failed before
                outcome = self._measured(problem, config, request.state)
            outcomes.append(outcome)
            on_outcome(Reported(outcome=outcome))
        return outcomes

    def _outcome(self, problem: Problem, config: Config, when: str = "") -> Outcome:
        time.sleep(PAUSE_S)
        self.now[0] += self.seconds
        if self._stopped:
            raise MeasuringStopped
        mine = sum(index == self.index for index, _, _ in self.told)
        if mine >= self.lost_after.get(self.index, 1 << 30):
            raise GpuLostError(f"GPU {self.index} does not answer")
        if self.stops_after and len(self.told) >= self.stops_after[0]:
            raise KeyboardInterrupt
        self.told.append((self.index, problem, config))
        if self.broken.get(self.index) in ("always", when):
            return Failure(config=config, stage="verify", message="all of it is NaN")
        if config != DEFAULT and _part(f"wrong {when} {problem} {config}") < self.wrong_part:
            return Failure(config=config, stage="verify", message="half of it is NaN")
        return self._measured(problem, config)

    def _measured(self, problem: Problem, config: Config, when: str = "") -> Measurement:
        us = (10.0 + 10.0 * _part(f"{problem} {config}{when}")) * self.slower.get(self.index, 1.0)
        return Measurement(config=config, mean_us=us, error_margin_us=0.01, num_samples=5)


@contextmanager
def measuring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let sweeps measure with these sessions, and keep what they compile for the next run of the tests."""
    monkeypatch.setattr(resources, "MeasureSession", HashedSession)
    monkeypatch.setattr(resources, "CUBINS", CUBINS)
    HashedSession.reset()
    yield
    HashedSession.reset()


def _part(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / (1 << 32)
