"""Count the faults of a kernel's configs, and decide which config hangs, runs again or is excluded.

Knows no process. The docstring of `aot_tune.tuner.measure.session` states the rules.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from aot_tune.tuner.measure.supervise import Limits
from aot_tune.tuner.outcome import Failure, Stage
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
