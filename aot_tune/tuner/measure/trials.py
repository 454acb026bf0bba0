"""Run several trials on one problem until each has an outcome, and blame the right one for a hang or a crash.

Runs in the tuner's own process. The docstring of `aot_tune.tuner.measure.session` states the rules.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aot_tune.errors import DeclarationError
from aot_tune.tuner.measure.supervise import Limits, Supervisor
from aot_tune.tuner.measure.worker.backend import LAUNCHES, Done, Poisoned, Running, Trial
from aot_tune.tuner.measure.worker.gpu_state import GpuState
from aot_tune.tuner.outcome import STRIKES, Failure, Measurement, Outcome, Stage
from aot_tune.tuner.process.worker import RemoteError, WorkerDied, WorkerTimeout
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

FAULTS_TO_STRIKE = 2
"""Number of problems with a failure of `STRIKES` after which a config is struck."""

TIMES_A_NEIGHBOUR = 2.0
"""A config may be silent for this many times the longest silence of those that ran on the problem before."""

HOPELESS = 20.0
"""A config that hung for this many times what is usual on the problem is not tried again: each try costs a
time limit. Configs with cubins are silent for 0.05 to 0.25 s, so this holds for the least limit as well."""

FEW = 3
"""Least configs that must have run on a problem to say what is usual."""

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


def ignore(outcome: Outcome) -> None:
    """Receive an outcome and do nothing with it."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of the faults of a kernel's configs, to be handed to another process."""

    faults: Mapping[Config, Mapping[Problem, Stage]] = field(default_factory=dict)
    """The faults of each config by problem."""

    pardoned: frozenset[tuple[Problem, Config]] = frozenset()
    """Those that were forgiven once."""

    wrong: frozenset[Config] = frozenset()
    """Configs whose wrong result was confirmed on any problem."""


class Strikes:
    """Counts the faults of one kernel's configs by problem. The threads of several GPUs may share it.

    Args:
        on_event: Receives one line when a config is struck.
    """

    def __init__(self, on_event: Callable[[str], None]) -> None:
        self._on_event = on_event
        self._lock = threading.RLock()
        self._faults: dict[Config, dict[Problem, Stage]] = {}
        self._pardoned: set[tuple[Problem, Config]] = set()
        self.wrong: set[Config] = set()
        """Configs whose wrong result was confirmed on any problem."""

    def pardon(self, problem: Problem, config: Config, stage: Stage) -> bool:
        """Whether a config may run again after a fault: once on each problem, else a flaky one never ends.

        One that hung on another problem and hangs again is not pardoned: each try costs a time limit. Nor is
        one that damages the check once more.
        """
        with self._lock:
            hung = "timeout" in self._faults.get(config, {}).values()
            if (stage == "timeout" and hung) or (stage == "verify" and config in self.wrong):
                return False
            first = (problem, config) not in self._pardoned
            self._pardoned.add((problem, config))
            return first

    def remember(self, problem: Problem, config: Config, stage: Stage) -> None:
        """Count what an earlier run recorded: a config's fault, time-out or wrong result."""
        if stage == "verify":
            self.wrong.add(config)
        else:
            self.count(problem, config, stage)

    def count(self, problem: Problem, config: Config, stage: Stage) -> None:
        """Count a config's fault or time-out on a problem."""
        with self._lock:
            faults = self._faults.setdefault(config, {})
            before = len(faults)
            faults[problem] = stage
            struck = before < len(faults) == FAULTS_TO_STRIKE
        if struck:
            self._on_event(f"struck, faulted on {FAULTS_TO_STRIKE} problems: {config}")

    def forget(self, problem: Problem) -> None:
        """Count no fault on a problem any more: a GPU that was lost reported them."""
        with self._lock:
            for faults in self._faults.values():
                faults.pop(problem, None)
            self._pardoned = {one for one in self._pardoned if one[0] != problem}

    def known(self) -> Known:
        """What is known now."""
        with self._lock:
            faults = {config: dict(of) for config, of in self._faults.items()}
            return Known(faults=faults, pardoned=frozenset(self._pardoned), wrong=frozenset(self.wrong))

    def replace(self, known: Known) -> None:
        """Know this and nothing else."""
        with self._lock:
            self._faults = {config: dict(of) for config, of in known.faults.items()}
            self._pardoned, self.wrong = set(known.pardoned), set(known.wrong)

    def learn(self, before: Known, after: Known) -> None:
        """Take in what another process, which began with `before`, has found out."""
        for config, faults in after.faults.items():
            for problem, stage in faults.items():
                if problem not in before.faults.get(config, {}):
                    self.count(problem, config, stage)
        with self._lock:
            self._pardoned |= after.pardoned - before.pardoned
            self.wrong |= after.wrong - before.wrong

    def suspect(self, config: Config) -> bool:
        """Whether a config faulted or hung on a problem."""
        return bool(self._faults.get(config))

    def struck(self, config: Config) -> Failure | None:
        """The failure of a struck config, which is not run any more; None for any other."""
        with self._lock:
            faults = list(self._faults.get(config, {}))
        if len(faults) < FAULTS_TO_STRIKE:
            return None
        places = " and on ".join(map(str, faults))
        return Failure(config=config, stage="fault", message=f"struck: it faulted on {places}")


class Pace:
    """How long the configs of each problem were silent, from which follows when another one hangs."""

    def __init__(self) -> None:
        self._silences: dict[Problem, dict[Config, float]] = {}

    def note(self, problem: Problem, config: Config, seconds: float) -> None:
        """Note the longest silence of a config that did not hang."""
        silences = self._silences.setdefault(problem, {})
        silences[config] = max(seconds, silences.get(config, 0.0))

    def limit_s(self, problem: Problem, limits: Limits) -> float:
        """The longest silence to allow a config whose cubin is there."""
        silences = self._silences.get(problem)
        if not silences:
            return limits.config_s
        return min(limits.config_s, max(limits.least_s, TIMES_A_NEIGHBOUR * max(silences.values())))

    def hopeless(self, problem: Problem, seconds: float) -> bool:
        """Whether a silence is so much longer than usual that the config need not be tried again."""
        silences = self._silences.get(problem, {})
        return len(silences) >= FEW and seconds >= HOPELESS * statistics.median(silences.values())


class TrialRun:
    """Several trials on one problem: which have an outcome, which are left, and which one is running.

    Args:
        method: ``measure``, ``time``, ``time_in_state`` or ``check`` of
            `aot_tune.tuner.measure.worker.runner.TrialRunner`.
        problem: The problem.
        cubins: The trials, in the order to run them; those that faulted before come last.
        strikes: The kernel's faults so far; struck configs are not run.
        pace: How long other configs took.
        on_outcome: Receives each outcome as soon as it stands, and before it each provisional time.
        known: Provisional times that were taken before.
        launches: Further launches of each trial after its verification.
        more: Further arguments of the method.
    """

    def __init__(
        self,
        method: str,
        problem: Problem,
        cubins: Cubins,
        strikes: Strikes,
        pace: Pace,
        on_outcome: Callable[[Outcome], None] = ignore,
        *,
        known: Mapping[Config, Measurement] | None = None,
        launches: int = 0,
        more: Mapping[str, object] | None = None,
    ) -> None:
        self._method = method
        self._problem = problem
        self._cubins = cubins
        self._strikes = strikes
        self._pace = pace
        self._on_outcome = on_outcome
        self._launches = launches
        self._more = dict(more or {})
        self.outcomes: dict[Config, Outcome | None] = {}
        """The outcomes so far; None for a config that was only verified, and is right."""
        self.pending: list[Config] = []
        """The configs without an outcome, in the order to run them."""
        self.conditions: list[Conditions] = []
        """The conditions of each request that a worker answered."""
        self.verify_s = 0.0
        """Time spent verifying, seconds."""
        self._known = dict(known or {})
        self._doubted: list[Config] = []
        """Configs whose result was wrong, to be run once more in a fresh worker."""
        self._again: set[Config] = set()
        """Those that run there now."""
        self._careful = False
        self._running: Config | None = None
        self._heard_at = 0.0
        self._silence = 0.0
        self._disturbed: dict[Config, str] = {}
        for config in sorted(cubins, key=strikes.suspect):
            struck = strikes.struck(config)
            if struck is None:
                self.pending.append(config)
            else:
                self.finish(config, struck)

    def attempt(self, supervisor: Supervisor, seeds: tuple[int, ...], limits: Limits) -> None:
        """Run all pending configs in one worker, until the last or until the worker breaks."""
        worker = supervisor.ready(self._problem, seeds)
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
        """The longest silence that is allowed now; one that compiles in the worker gets the whole limit."""
        if self._running is None or self._cubins[self._running] is None:
            return limits.config_s
        return self._pace.limit_s(self._problem, limits)

    def _answered(self, states: object) -> None:
        """Take in the answer to a request, after which nothing may be left to run."""
        if self.pending:
            raise _Interrupted("fault", "the worker ended its answer before all was run")
        if states is None:
            return
        if not (isinstance(states, list) and [type(state) for state in states] == [GpuState, GpuState]):
            raise _Interrupted("fault", "the worker answered something else than two states of the GPU")
        before, after = states
        self.conditions.append(
            Conditions(problem=self._problem, before=before, after=after, disturbed=self._disturbed)
        )

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
            raise _Interrupted("fault", f"the worker said what it should not: {message!r:.200}")

    def _done(self, config: Config, message: Done) -> None:
        outcome = message.outcome
        if outcome is not None and outcome.config != config:
            raise _Interrupted("fault", f"the worker said what it should not: {message!r:.200}")
        if isinstance(outcome, Failure) and outcome.stage == "memory":
            raise _Interrupted("memory", outcome.message)
        self._running = None
        self.verify_s += message.verify_s
        self._pace.note(self._problem, config, self._silence)
        if isinstance(outcome, Measurement) and outcome.provisional:
            self._known[config] = outcome
            self._on_outcome(outcome)
        elif isinstance(outcome, Failure) and outcome.stage == "verify" and self._doubt(config):
            self.pending.remove(config)
            self._doubted.append(config)
        else:
            self.finish(config, outcome)

    def _doubt(self, config: Config) -> bool:
        """Whether a wrong result must be confirmed: once for a config, in a fresh worker.

        What found it may be to blame: memory that another config damaged unseen. Elsewhere that memory is
        another one, and the damage would not come again.
        """
        return config not in self._again and config not in self._strikes.wrong

    def _broke(
        self, supervisor: Supervisor, stage: Stage, message: str, *, silent_s: float | None = None
    ) -> None:
        """Replace a broken worker and blame the config that it was running, which has one more try."""
        supervisor.check()
        self.pending += self._doubted  # what was wrong before the worker broke runs in the next one
        self._again |= set(self._doubted)
        self._doubted = []
        config = self._running
        if config is None:
            supervisor.discard(self._problem, message)
            return
        supervisor.worked()
        supervisor.replace(f"{config}: {message}")
        hopeless = silent_s is not None and self._hopeless(config, silent_s)
        if not hopeless and self._strikes.pardon(self._problem, config, stage):
            self._known.pop(config, None)  # it has to pass all that it passed before
            self.pending.remove(config)
            self.pending.insert(0, config)
            return
        self.finish(config, Failure(config=config, stage=stage, message=message))
        if stage in STRIKES:
            self._strikes.count(self._problem, config, stage)

    def _hopeless(self, config: Config, silent_s: float) -> bool:
        return self._cubins[config] is not None and self._pace.hopeless(self._problem, silent_s)

    def finish(self, config: Config, outcome: Outcome | None) -> None:
        """Record a config's outcome; it is not run again here."""
        self.outcomes[config] = outcome
        self._known.pop(config, None)
        if config in self.pending:
            self.pending.remove(config)
        if isinstance(outcome, Failure) and outcome.stage == "verify":
            self._strikes.wrong.add(config)
        if isinstance(outcome, Measurement):
            self._known[config] = outcome
            if outcome.disturbed:
                self._disturbed[config] = outcome.disturbed
        if outcome is not None:
            self._on_outcome(outcome)


class _Interrupted(Exception):
    """Ends a request before its answer, because the worker must be replaced."""

    def __init__(self, stage: Stage, message: str) -> None:
        super().__init__(message)
        self.stage, self.message = stage, message
