"""Run the trials of a request until each has an outcome, and blame hangs and crashes.

Runs in the tuner's own process. The docstring of `aot_tune.tuner.measure.session` states the rules.
"""

from __future__ import annotations

import time

from aot_tune.errors import DeclarationError
from aot_tune.tuner.measure.blame import FaultCounts, Pace
from aot_tune.tuner.measure.request import (
    Conditions,
    Finals,
    Measure,
    OnOutcome,
    Recheck,
    Reported,
    Request,
    TimeInState,
    ignore,
)
from aot_tune.tuner.measure.supervise import Limits, Supervisor
from aot_tune.tuner.measure.worker.backend import LAUNCHES, Done, Poisoned, Running, Trial
from aot_tune.tuner.measure.worker.gpu_state import GpuState
from aot_tune.tuner.outcome import COUNTED_STAGES, Failure, Measurement, Outcome, Stage
from aot_tune.tuner.process.worker import RemoteError, WorkerDied, WorkerTimeout
from aot_tune.values.config import Config


class TrialRun:
    """The trials of a request: their outcomes, the pending configs and the running config.

    Args:
        request: The request; trials run in the order of its configs, configs that faulted before last.
        fault_counts: The kernel's faults so far; excluded configs are not run.
        pace: The silences of other configs.
        on_outcome: Receives each outcome as soon as it is final, and before it each provisional time.
        number: The number of a round of finals, which is reported with its outcomes. Provisional times of a
            round are not reported.
    """

    def __init__(
        self,
        request: Request,
        fault_counts: FaultCounts,
        pace: Pace,
        on_outcome: OnOutcome = ignore,
        *,
        number: int | None = None,
    ) -> None:
        self._method, self._more = _method(request)
        self._problem, self._cubins = request.problem, request.configs
        self._fault_counts = fault_counts
        self._pace = pace
        self._on_outcome = on_outcome
        self._number = number
        self._seeds = request.seeds
        self._launches = request.launches if isinstance(request, Recheck) else 0
        self.outcomes: dict[Config, Outcome | None] = {}
        """The outcomes so far; None for a config that was only verified and is correct."""
        self.pending: list[Config] = []
        """The configs without an outcome, in the order to run them."""
        self.conditions: list[Conditions] = []
        """The conditions of each request that a worker answered."""
        self.verify_s = 0.0
        """Time spent verifying, seconds."""
        self._known = dict(request.known) if isinstance(request, Measure) else {}
        self._doubted: list[Config] = []
        """Configs with a wrong result, to run once more in a fresh worker."""
        self._again: set[Config] = set()
        """Configs that run there now."""
        self._careful = False
        self._running: Config | None = None
        self._heard_at = 0.0
        self._silence = 0.0
        for config in sorted(self._cubins, key=fault_counts.suspect):
            failure = fault_counts.excluded(config)
            if failure is None:
                self.pending.append(config)
            else:
                self.finish(config, failure)

    def attempt(self, supervisor: Supervisor, limits: Limits) -> None:
        """Run all pending configs in one worker, until the last or until the worker breaks."""
        worker = supervisor.ready(self._problem, self._seeds)
        payload: dict[str, object] = {"trials": [self._trial(config) for config in self.pending]}
        if self._method != "check":
            payload |= {"known": list(self._known.values()), "careful": self._careful, **self._more}
        self._running, self._heard_at = None, time.monotonic()
        supervisor.unused = supervisor.unused and self._method == "check"
        try:
            states = worker.request(self._method, payload, lambda: self._limit_s(limits), self._heard)
            self._answered(states)
        except WorkerTimeout as error:
            self._broke(supervisor, "timeout", f"hung: {error}", silent_s=error.seconds)
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
            if self._doubted:
                supervisor.replace(f"wrong results are checked in a fresh worker: {self._doubted[0]}")
                self.pending, self._again, self._doubted = self._doubted, set(self._doubted), []

    def _trial(self, config: Config) -> Trial:
        launches = LAUNCHES if config in self._again else self._launches
        return Trial(config=config, cubin=self._cubins[config], launches=launches)

    def _limit_s(self, limits: Limits) -> float:
        """Return the longest silence allowed now. A compilation in the worker gets the whole limit."""
        if self._running is None or self._cubins[self._running] is None:
            return limits.config_s
        return self._pace.limit_s(self._problem, limits)

    def _answered(self, states: object) -> None:
        """Check the answer to a request, after which no config may be pending."""
        if self.pending:
            raise _Interrupted("fault", "the worker answered before all configs ran")
        if states is None:
            return
        if not (isinstance(states, list) and [type(state) for state in states] == [GpuState, GpuState]):
            raise _Interrupted("fault", "the worker's answer is not two states of the GPU")
        before, after = states
        self.conditions.append(Conditions(before=before, after=after))

    def _heard(self, message: object) -> None:
        now = time.monotonic()
        if self._running is not None:
            self._silence = max(self._silence, now - self._heard_at)
        self._heard_at = now
        if isinstance(message, Running) and message.config in self.pending:
            if message.config != self._running:
                self._running, self._silence = message.config, 0.0
        elif isinstance(message, Poisoned) and message.config is None:
            self._careful, self._running = True, None
            raise _Interrupted(message.stage, message.message)
        elif isinstance(message, Poisoned) and message.config in self.pending:
            self._running = message.config
            raise _Interrupted(message.stage, message.message)
        elif isinstance(message, Done) and self._running is not None:
            self._done(self._running, message)
        else:
            raise _Interrupted("fault", f"unexpected message from the worker: {message!r:.200}")

    def _done(self, config: Config, message: Done) -> None:
        outcome = message.outcome
        if outcome is not None and outcome.config != config:
            raise _Interrupted("fault", f"unexpected message from the worker: {message!r:.200}")
        if isinstance(outcome, Failure) and outcome.stage == "memory":
            raise _Interrupted("memory", outcome.message)
        self._running = None
        self.verify_s += message.verify_s
        self._pace.note(self._problem, config, self._silence)
        if isinstance(outcome, Measurement) and outcome.provisional:
            self._known[config] = outcome
            if self._number is None:
                self._on_outcome(Reported(outcome=outcome))
        elif isinstance(outcome, Failure) and outcome.stage == "verify" and self._doubt(config):
            self.pending.remove(config)
            self._doubted.append(config)
        else:
            self.finish(config, outcome)

    def _doubt(self, config: Config) -> bool:
        """Return whether a wrong result must be confirmed: once for a config, in a fresh worker.

        Another config may have damaged the memory of the check unseen. A fresh worker has other memory, where
        the damage does not recur.
        """
        return config not in self._again and config not in self._fault_counts.wrong

    def _broke(
        self, supervisor: Supervisor, stage: Stage, message: str, *, silent_s: float | None = None
    ) -> None:
        """Replace a broken worker and blame its running config, which has one more try."""
        supervisor.check()
        self.pending += self._doubted  # configs that were wrong before the worker broke run in the next one
        self._again |= set(self._doubted)
        self._doubted = []
        config = self._running
        if config is None:
            supervisor.discard(self._problem, message)
            return
        supervisor.worked()
        supervisor.replace(f"{config}: {message}")
        hopeless = silent_s is not None and self._hopeless(config, silent_s)
        if not hopeless and self._fault_counts.pardon(self._problem, config, stage):
            self._known.pop(config, None)  # it has to pass all checks again
            self.pending.remove(config)
            self.pending.insert(0, config)
            return
        self.finish(config, Failure(config=config, stage=stage, message=message))
        if stage in COUNTED_STAGES:
            self._fault_counts.count(self._problem, config, stage)

    def _hopeless(self, config: Config, silent_s: float) -> bool:
        return self._cubins[config] is not None and self._pace.hopeless(self._problem, silent_s)

    def finish(self, config: Config, outcome: Outcome | None) -> None:
        """Record a config's outcome; the config is not run again in this request."""
        self.outcomes[config] = outcome
        self._known.pop(config, None)
        if config in self.pending:
            self.pending.remove(config)
        if isinstance(outcome, Failure) and outcome.stage == "verify":
            self._fault_counts.wrong.add(config)
        if isinstance(outcome, Measurement):
            self._known[config] = outcome
        if outcome is not None:
            self._on_outcome(Reported(outcome=outcome, number=self._number))


def _method(request: Request) -> tuple[str, dict[str, object]]:
    """Return the method of the worker's ``TrialRunner``, and the arguments that only it takes."""
    match request:
        case Measure():
            return "measure", {"least_us": request.least_us}
        case Finals():
            return "time", {}
        case TimeInState():
            return "time_in_state", {"state": request.state}
        case Recheck():
            return "check", {}
    raise TypeError(f"{request!r:.200} is no request")


class _Interrupted(Exception):
    """Ends a request before its answer, because the worker must be replaced."""

    def __init__(self, stage: Stage, message: str) -> None:
        super().__init__(message)
        self.stage, self.message = stage, message
