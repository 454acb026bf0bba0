"""A GPU in the tuner's own process: the real session, trials and runner, without a child process.

A sweep takes a second. Launches go wrong as a test says, and one config is faster than all others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

from aot_tune.tables.states import State
from aot_tune.tuner.measure import gpu_lock, supervise
from aot_tune.tuner.measure.session import MeasureSession
from aot_tune.tuner.measure.worker.backend import Trial
from aot_tune.tuner.measure.worker.runner import TrialRunner
from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.sweep import resources
from aot_tune.values.bucket import edge
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support.gpu_locks import shared_folder
from tests.support.hashed_sessions import CUBINS
from tests.support.idle_gpu import RightBackend


class Launch(NamedTuple):
    """A launch whose output is compared."""

    config: Config
    m: int
    """The size M of the problem."""

    kind: str
    """The sort of launch: verify, again, time, load, or the state of the GPU."""


class NearGpu(RightBackend):
    """A `Backend` whose times are a hash of problem and config."""

    fast: ClassVar[Config | None] = None
    """The config that takes a third of the time."""

    fast_at: ClassVar[int] = 0
    """The edge of the bucket where it does, and takes three times as long elsewhere; 0 for all buckets."""

    slow: ClassVar[float] = 1.0
    """The factor of all times."""

    wrong: ClassVar[Callable[[Launch], bool]] = lambda launch: False
    """Whether a launch is wrong."""

    launches: ClassVar[list[Launch]] = []
    """All launches whose output was compared."""

    timed: ClassVar[list[tuple[Config, int]]] = []
    """All timed configs, with the size M."""

    def __init__(self) -> None:
        self._problem, self._loaded = Problem({"M": 0}), False

    def open(self, problem: Problem, seeds: Sequence[int]) -> None:
        self._problem = problem

    def verify(self, trial: Trial) -> str | None:
        return self._compared(trial, "verify")

    def again(self, trial: Trial, number: int) -> str | None:
        return self._compared(trial, "again")

    def busy(self, seconds: float) -> None:
        self._loaded = True

    def time(self, trial: Trial) -> Measurement:
        self._last = partial(self._compared, trial, "time")
        self.timed.append((trial.config, self._problem.size("M")))
        return Measurement(config=trial.config, mean_us=self._us(trial), error_margin_us=0.01, num_samples=5)

    def sample(self, trial: Trial, state: State) -> float:
        self._last = partial(self._compared, trial, "load" if self._loaded else state)
        self._loaded = False
        return self._us(trial, state)

    def check(self) -> str | None:
        return self._last()

    def _compared(self, trial: Trial, kind: str) -> str | None:
        launch = Launch(trial.config, self._problem.size("M"), kind)
        self.launches.append(launch)
        return "half of it is NaN" if type(self).wrong(launch) else None

    def _us(self, trial: Trial, state: str = "") -> float:
        digest = hashlib.sha256(f"{self._problem} {trial.config}{state}".encode()).digest()
        us = 10.0 + int.from_bytes(digest[:2], "big") / 8192
        is_here = self.fast_at in (0, edge(self._problem.size("M")))
        return us * self.slow * (1.0 if trial.config != self.fast else 0.3 if is_here else 3.0)


class _Near:
    """The part of `aot_tune.tuner.process.worker.Worker` that a supervisor needs, in this process."""

    def __init__(self, target: str, init: Mapping[str, Any], **options: Any) -> None:
        self._heard: Callable[[object], None] = lambda message: None
        self._runner = TrialRunner(lambda message: self._heard(message), **init)

    def wait_ready(self, seconds: float) -> None:
        pass

    def request(
        self,
        method: str,
        payload: Mapping[str, Any],
        limit: object,
        heard: Callable[[object], None] = lambda message: None,
    ) -> Any:
        self._heard = heard
        answer = getattr(self._runner, method)(**payload)
        return list(answer) if isinstance(answer, tuple) else answer  # as JSON holds it

    def kill(self) -> None:
        pass

    interrupt = kill


@contextmanager
def measuring(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """Let sweeps measure on this GPU, and keep what they compile for the next run of the tests."""
    session = partial(MeasureSession, backend=f"{__name__}:NearGpu", arguments={})
    monkeypatch.setattr(resources, "MeasureSession", session)
    monkeypatch.setattr(resources, "CUBINS", CUBINS)
    monkeypatch.setattr(supervise, "Worker", _Near)
    monkeypatch.setattr(gpu_lock, "FOLDERS", (shared_folder(folder / "lock"),))
    for name, value in (("fast", None), ("fast_at", 0), ("slow", 1.0), ("wrong", lambda launch: False)):
        monkeypatch.setattr(NearGpu, name, value)
    NearGpu.launches.clear()
    NearGpu.timed.clear()
    yield
