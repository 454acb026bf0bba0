"""Run several trials on one problem until each has an outcome, and blame the right one for a hang or a crash.

Runs in the tuner's own process. The docstring of `aot_tune.tuner.measure.session` states the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aot_tune.errors import DeclarationError
from aot_tune.tuner.measure.supervise import Limits, Supervisor
from aot_tune.tuner.measure.worker.backend import Done, Poisoned, Running, Trial
from aot_tune.tuner.measure.worker.gpu_state import GpuState
from aot_tune.tuner.outcome import STRIKES, Failure, Outcome, Stage
from aot_tune.tuner.process.worker import RemoteError, WorkerDied, WorkerTimeout
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

FAULTS_TO_STRIKE = 2
"""Number of problems with a failure of `STRIKES` after which a config is struck."""

Cubins = Mapping[Config, "Path | None"]
"""The configs to run, each with its cubin for the problem; with None cuTile compiles in the worker."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions of one request, for the journal."""

    problem: Problem
    """The problem."""

    before: GpuState
    """The GPU's state at the start of the request."""

    after: GpuState
    """The GPU's state at its end."""

    disturbed: Mapping[Config, str]
    """The configs whose samples are spoilt because a disturbance outlasted the patience, and that
    disturbance."""

    def as_record(self) -> dict[str, object]:
        """The conditions as plain values for a journal."""
        return {
            "before": self.before.as_record(),
            "after": self.after.as_record(),
            "disturbed": {str(config): by for config, by in self.disturbed.items()},
        }


class Strikes:
    """Counts the faults of one kernel's configs by problem.

    Args:
        on_event: Receives one line when a config is struck.
    """

    def __init__(self, on_event: Callable[[str], None]) -> None:
        self._on_event = on_event
        self._faults: dict[Config, dict[Problem, str]] = {}
        self._pardoned: set[tuple[Problem, Config]] = set()

    def pardon(self, problem: Problem, config: Config) -> bool:
        """Whether a config may run again after a fault: once on each problem, else a flaky one never ends."""
        first = (problem, config) not in self._pardoned
        self._pardoned.add((problem, config))
        return first

    def count(self, problem: Problem, config: Config, message: str) -> None:
        """Count a config's fault or time-out on a problem."""
        faults = self._faults.setdefault(config, {})
        before = len(faults)
        faults[problem] = message
        if before < len(faults) == FAULTS_TO_STRIKE:
            self._on_event(f"struck, faulted on {FAULTS_TO_STRIKE} problems: {config}")

    def struck(self, config: Config) -> Failure | None:
        """The failure of a struck config, which is not run any more; None for any other."""
        faults = self._faults.get(config, {})
        if len(faults) < FAULTS_TO_STRIKE:
            return None
        places = " and on ".join(map(str, faults))
        return Failure(config=config, stage="fault", message=f"struck: it faulted on {places}")


class TrialRun:
    """Several trials on one problem: which have an outcome, which are left, and which one is running.

    Args:
        method: ``measure``, ``time`` or ``check`` of `aot_tune.tuner.measure.worker.runner.TrialRunner`.
        problem: The problem.
        cubins: The trials, in the order to run them.
        strikes: The kernel's faults so far; struck configs are not run.
    """

    def __init__(
        self,
        method: str,
        problem: Problem,
        cubins: Cubins,
        strikes: Strikes,
    ) -> None:
        self._method = method
        self._problem = problem
        self._cubins = cubins
        self._strikes = strikes
        self.outcomes: dict[Config, Outcome | None] = {}
        """The outcomes so far; None for a config that was only verified, and is right."""
        self.pending: list[Config] = []
        """The configs without an outcome, in the order to run them."""
        self.conditions: list[Conditions] = []
        """The conditions of each request that a worker answered."""
        self.verify_s = 0.0
        """Time spent verifying, seconds."""
        self._running: Config | None = None
        self._disturbed: dict[Config, str] = {}
        for config in cubins:
            struck = strikes.struck(config)
            if struck is None:
                self.pending.append(config)
            else:
                self.finish(config, struck)

    def attempt(self, supervisor: Supervisor, seeds: tuple[int, ...], limits: Limits) -> None:
        """Run all pending configs in one worker, until the last or until the worker breaks."""
        worker = supervisor.ready(self._problem, seeds)
        trials = [Trial(config=config, cubin=self._cubins[config]) for config in self.pending]
        self._running = None
        supervisor.unused = supervisor.unused and self._method == "check"
        try:
            states = worker.request(self._method, {"trials": trials}, limits.config_s, self._heard)
        except WorkerTimeout as error:
            self._broke(supervisor, "timeout", f"hung: {error}")
        except WorkerDied as error:
            self._broke(supervisor, "fault", str(error))
        except RemoteError as error:
            if error.kind == "DeclarationError":
                raise DeclarationError(error.message) from error
            self._broke(supervisor, "fault", str(error))
        except _Interrupted as error:
            self._broke(supervisor, error.stage, error.message)
        except BaseException:
            supervisor.close()  # its later messages must not be taken for the answer to another request
            raise
        else:
            supervisor.worked()
            if states is not None:
                before, after = states
                self.conditions.append(
                    Conditions(problem=self._problem, before=before, after=after, disturbed=self._disturbed)
                )

    def _heard(self, message: Running | Done | Poisoned) -> None:
        if isinstance(message, Running):
            self._running = message.config
            return
        if isinstance(message, Poisoned):
            raise _Interrupted("fault", message.message)
        config, outcome = self._running, message.outcome
        assert config is not None
        if isinstance(outcome, Failure) and outcome.stage == "memory":
            raise _Interrupted("memory", outcome.message)
        if message.disturbance:
            self._disturbed[config] = message.disturbance
        self._running = None
        self.verify_s += message.verify_s
        self.finish(config, outcome)

    def _broke(self, supervisor: Supervisor, stage: Stage, message: str) -> None:
        """Replace a broken worker and blame the config that it was running, which has one more try."""
        config = self._running
        if config is None:
            supervisor.discard(message)
            return
        supervisor.worked()
        supervisor.replace(f"{config}: {message}")
        if self._strikes.pardon(self._problem, config):
            self.pending.remove(config)
            self.pending.insert(0, config)
            return
        self.finish(config, Failure(config=config, stage=stage, message=message))
        if stage in STRIKES:
            self._strikes.count(self._problem, config, message)

    def finish(self, config: Config, outcome: Outcome | None) -> None:
        """Record a config's outcome; it is not run again here."""
        self.outcomes[config] = outcome
        if config in self.pending:
            self.pending.remove(config)


class _Interrupted(Exception):
    """Ends a request before its answer, because the worker must be replaced."""

    def __init__(self, stage: Stage, message: str) -> None:
        super().__init__(message)
        self.stage, self.message = stage, message
