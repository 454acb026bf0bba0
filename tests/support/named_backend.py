"""A measuring backend that is told which kernel it measures, and says in a log which process does what.

The log is the file that the environment variable `LOG` names. A kernel whose name begins with ``alone`` goes
with no other kernel in one process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from aot_tune.tables.states import State
from aot_tune.tuner.measure.worker.backend import Trial
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.problem import Problem
from tests.support.idle_gpu import RightBackend

LOG = "AOT_TUNE_TESTS_LOG"


def _log(what: str) -> None:
    with Path(os.environ[LOG]).open("a") as file:
        file.write(f"{os.getpid()} {what}\n")


if LOG in os.environ:
    _log("imports")


class NamedBackend(RightBackend):
    """A `Backend` on no GPU, which takes as many microseconds as its kernel's name is long."""

    def __init__(self, *, module: str, name: str, gpu_index: int) -> None:
        self._name = name
        _log(f"builds {name}")

    def turn_to(self, **arguments: object) -> None:
        if str(arguments["name"]).startswith("alone"):
            raise ImportError("two versions of one library")
        self._name = str(arguments["name"])
        _log(f"turns to {self._name}")

    def open(self, problem: Problem, seeds: Sequence[int]) -> None:
        _log(f"opens {self._name} {problem}")

    def verify(self, trial: Trial) -> str | None:
        return None

    def time(self, trial: Trial) -> Measurement:
        us = float(len(self._name))
        return Measurement(config=trial.config, mean_us=us, error_margin_us=0.01, num_samples=5)

    def sample(self, trial: Trial, state: State) -> float:
        return float(len(self._name))
