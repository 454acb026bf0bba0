"""A measuring backend whose times are a hash of problem and config: whole sweeps end with the same bytes.

Each verification and each time is a line of the file ``log``, which all workers of a folder share. It takes
a while, as on a GPU, so that the tuner keeps up with the worker.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

from aot_tune.tables.states import State
from aot_tune.tuner.measure.worker.backend import Trial
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.problem import Problem
from tests.support.idle_gpu import RightBackend

_SECONDS = 0.05
"""Duration of a verification or a timing, seconds."""


class HashedBackend(RightBackend):
    """A `Backend` on no GPU, which finds everything right."""

    def __init__(self, *, folder: str) -> None:
        self._log = Path(folder) / "log"
        self._problem = Problem({"M": 0})

    def open(self, problem: Problem, seeds: Sequence[int]) -> None:
        self._problem = problem

    def verify(self, trial: Trial) -> str | None:
        self._write("verify", trial)
        return None

    def time(self, trial: Trial) -> Measurement:
        self._write("time", trial)
        return Measurement(config=trial.config, mean_us=self._us(trial), error_margin_us=0.01, num_samples=5)

    def sample(self, trial: Trial, state: State) -> float:
        self._write(f"sample {state}", trial)
        return self._us(trial, state)

    def _us(self, trial: Trial, state: str = "") -> float:
        digest = hashlib.sha256(f"{self._problem} {trial.config}{state}".encode()).digest()
        return 10.0 + int.from_bytes(digest[:2], "big") / 4096

    def _write(self, what: str, trial: Trial) -> None:
        time.sleep(_SECONDS)
        with self._log.open("a") as file:
            file.write(f"{what} {self._problem}: {trial.config}\n")
