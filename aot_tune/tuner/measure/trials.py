"""Several trials on one problem, run to their ends through hangs and crashes, the right one blamed.

Runs in the tuner's own process. The rules are written in `aot_tune.tuner.measure.session`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aot_tune.errors import DeclarationError
from aot_tune.tuner.measure.supervise import Limits, Supervisor
from aot_tune.tuner.measure.worker.backend import Done, Poisoned, Running, Trial
from aot_tune.tuner.measure.worker.gpu_state import GpuState
from aot_tune.tuner.outcome import Failure, Outcome, Stage
from aot_tune.tuner.process.worker import RemoteError, WorkerDied, WorkerTimeout
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

FAULTS_TO_STRIKE = 2
"""Problems on which a config is recorded as hanging or faulting before it is struck."""

Cubins = Mapping[Config, "Path | None"]
"""Configs to run, each with its cubin compiled for the problem; None lets cuTile compile in the worker."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What one request was measured under, for the journal."""

    problem: Problem
    """The problem."""

    before: GpuState
    """Clocks and reasons at its start."""

    after: GpuState
    """And at its end."""

    disturbed: Mapping[Config, str]
    """Configs whose samples stayed spoilt for longer than was waited, and by what."""

    def as_record(self) -> dict[str, object]:
        """Plain values, for a journal."""
        return {
            "before": self.before.as_record(),
            "after": self.after.as_record(),
            "disturbed": {str(config): by for config, by in self.disturbed.items()},
        }


class Strikes:
    """The faults of one kernel's configs, by problem.

    Args:
        on_event: Told in one line when a config is struck.
    """

    def __init__(self, on_event: Callable[[str], None]) -> None:
        self._on_event = on_event
        self._faults: dict[Config, dict[Problem, str]] = {}
        self._pardoned: set[tuple[Problem, Config]] = set()

    def pardon(self, problem: Problem, config: Config) -> bool:
        """Whether a config may try again: once on each problem, or a flaky one would go on."""
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
        """Why a config is not run any more, or None."""
        faults = self._faults.get(config, {})
        if len(faults) < FAULTS_TO_STRIKE:
            return None
        places = " and on ".join(map(str, faults))
        return Failure(config=config, stage="fault", message=f"struck: it faulted on {places}")


class TrialRun:
    """Several trials on one problem: what is left to do, and who is to blame for what.

    Args:
        method: ``measure``, ``time`` or ``check`` of `aot_tune.tuner.measure.worker.runner.Bench`.
        problem: The problem.
        cubins: The trials, in the order to run them.
        strikes: The kernel's faults so far; struck configs are not run.
        on_outcome: Told each outcome as it comes.
    """

    def __init__(
        self,
        method: str,
        problem: Problem,
        cubins: Cubins,
        strikes: Strikes,
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        self._method, self._problem, self._cubins = method, problem, cubins
        self._strikes, self._on_outcome = strikes, on_outcome
        self.outcomes: dict[Config, Outcome | None] = {}
        """Of the trials that came to their end; None where one was only checked, and is right."""
        self.pending: list[Config] = []
        """Trials that have not, in the order to run them."""
        self.conditions: list[Conditions] = []
        """What was measured under, for each worker that came to its end."""
        self.verify_s = 0.0
        """Seconds spent verifying."""
        self._running: Config | None = None
        self._disturbed: dict[Config, str] = {}
        for config in cubins:
            struck = strikes.struck(config)
            if struck is None:
                self.pending.append(config)
            else:
                self.finish(config, struck)

    def attempt(self, supervisor: Supervisor, seeds: tuple[int, ...], limits: Limits) -> None:
        """Run all that is pending in one worker, until the end or until it breaks."""
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
            supervisor.close()  # what it has yet to say must not be taken for the answer to another request
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
        """The worker is of no more use. Blame the config it was running; it has one more try."""
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
        if stage in ("fault", "timeout"):
            self._strikes.count(self._problem, config, message)

    def finish(self, config: Config, outcome: Outcome | None) -> None:
        """A trial's end: nothing asks for it again."""
        self.outcomes[config] = outcome
        if config in self.pending:
            self.pending.remove(config)
        if outcome is not None:
            self._on_outcome(outcome)


class _Interrupted(Exception):
    """The rest of a request is not waited for: its worker must be replaced."""

    def __init__(self, stage: Stage, message: str) -> None:
        super().__init__(message)
        self.stage, self.message = stage, message
