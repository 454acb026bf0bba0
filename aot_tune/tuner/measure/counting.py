"""Read a GPU's counters in a measuring process, so that a hang is killed and no profiled launch is timed."""

from __future__ import annotations

from pathlib import Path

from aot_tune.tuner.measure.session import MeasureSession
from aot_tune.tuner.measure.worker.backend import SEEDS, Counters, Trial
from aot_tune.tuner.process.worker import RemoteError, WorkerDied, WorkerTimeout
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

COUNTERS_SECONDS = 60.0
"""Longest reading of counters, seconds. A launch takes 0.2 to 0.4 s (H100)."""

COUNTING_BACKEND = "aot_tune.tuner.measure.worker.counting:CountingBackend"


class CountingSession(MeasureSession):
    """A `MeasureSession` that reads counters too; its backend must be able to."""

    def counters(self, problem: Problem, config: Config, cubin: Path | None) -> Counters:
        """Read the GPU's counters of one launch of a verified config, in a worker that then ends."""
        worker = self._supervisor.ready(problem, SEEDS)
        try:
            trial = Trial(config=config, cubin=cubin)
            answer = worker.request("counters", {"trial": trial}, COUNTERS_SECONDS)
        except (RemoteError, WorkerDied, WorkerTimeout) as error:
            answer = Counters(refusal=f"the process that read them failed: {error}")
        self._supervisor.replace("it has read the GPU's counters")
        if not isinstance(answer, Counters):
            return Counters(refusal=f"unexpected answer {answer!r:.80}")
        return answer
