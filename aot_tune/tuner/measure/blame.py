"""Count the faults of a kernel's configs, and decide which run again.

Starts no process. The docstring of `aot_tune.tuner.measure.session` states the rules.
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

FAULTS_TO_EXCLUDE = 2
"""Number of problems with a failure of `COUNTED_STAGES` after which a config is excluded."""

TIMES_A_NEIGHBOUR = 2.0
"""Allowed silence of a config, as a multiple of the longest earlier silence on the problem."""

HOPELESS = 20.0
"""A config that hung for this many times the problem's median silence is not tried again.

Each try costs a time limit. Configs with cubins are silent for 0.05 to 0.25 s, so this holds for the least
limit as well.
"""

FEW = 3
"""Least number of configs that must have run on a problem before its median counts."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """The known faults of a kernel's configs, to be sent to another process."""

    faults: Mapping[Config, Mapping[Problem, Stage]] = field(default_factory=dict)
    """The faults of each config by problem."""

    pardoned: frozenset[tuple[Problem, Config]] = frozenset()
    """Problems and configs whose fault was forgiven once."""

    wrong: frozenset[Config] = frozenset()
    """Configs whose wrong result was confirmed on any problem."""


class FaultCounts:
    """Counts the faults of one kernel's configs by problem. The threads of several GPUs may share it.

    Args:
        on_event: Receives one line when a config is excluded.
    """

    def __init__(self, on_event: Callable[[str], None]) -> None:
        self._on_event = on_event
        self._lock = threading.RLock()
        self._faults: dict[Config, dict[Problem, Stage]] = {}
        self._pardoned: set[tuple[Problem, Config]] = set()
        self.wrong: set[Config] = set()
        """Configs whose wrong result was confirmed on any problem."""

    def pardon(self, problem: Problem, config: Config, stage: Stage) -> bool:
        """Return whether a config may run again after a fault.

        It may once on each problem: without a bound a flaky config would never end. A config that hung on
        another problem and hangs again is not pardoned, because each try costs a time limit. Nor is a config
        that damages the check once more.
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
            excluded = before < len(faults) == FAULTS_TO_EXCLUDE
        if excluded:
            self._on_event(f"excluded after faults on {FAULTS_TO_EXCLUDE} problems: {config}")

    def forget(self, problem: Problem) -> None:
        """Remove the faults on a problem: a GPU that was lost reported them."""
        with self._lock:
            for faults in self._faults.values():
                faults.pop(problem, None)
            self._pardoned = {pardon for pardon in self._pardoned if pardon[0] != problem}

    def known(self) -> Known:
        """Return the faults known now."""
        with self._lock:
            faults = {config: dict(of) for config, of in self._faults.items()}
            return Known(faults=faults, pardoned=frozenset(self._pardoned), wrong=frozenset(self.wrong))

    def replace(self, known: Known) -> None:
        """Replace all known faults."""
        with self._lock:
            self._faults = {config: dict(of) for config, of in known.faults.items()}
            self._pardoned, self.wrong = set(known.pardoned), set(known.wrong)

    def learn(self, before: Known, after: Known) -> None:
        """Add the faults that another process, which began with `before`, has seen."""
        for config, faults in after.faults.items():
            for problem, stage in faults.items():
                if problem not in before.faults.get(config, {}):
                    self.count(problem, config, stage)
        with self._lock:
            self._pardoned |= after.pardoned - before.pardoned
            self.wrong |= after.wrong - before.wrong

    def suspect(self, config: Config) -> bool:
        """Return whether a config faulted or hung on a problem."""
        return bool(self._faults.get(config))

    def excluded(self, config: Config) -> Failure | None:
        """Return the failure of an excluded config, which is not run any more; None for any other."""
        with self._lock:
            faults = list(self._faults.get(config, {}))
        if len(faults) < FAULTS_TO_EXCLUDE:
            return None
        places = " and on ".join(map(str, faults))
        return Failure(config=config, stage="fault", message=f"excluded: it faulted on {places}")


class Pace:
    """Longest silences of each problem's configs, from which the next time limit is derived."""

    def __init__(self) -> None:
        self._silences: dict[Problem, dict[Config, float]] = {}

    def note(self, problem: Problem, config: Config, seconds: float) -> None:
        """Note the longest silence of a config that did not hang."""
        silences = self._silences.setdefault(problem, {})
        silences[config] = max(seconds, silences.get(config, 0.0))

    def limit_s(self, problem: Problem, limits: Limits) -> float:
        """Return the longest silence to allow a config that has a cubin, seconds."""
        silences = self._silences.get(problem)
        if not silences:
            return limits.config_s
        return min(limits.config_s, max(limits.least_s, TIMES_A_NEIGHBOUR * max(silences.values())))

    def hopeless(self, problem: Problem, seconds: float) -> bool:
        """Return whether a silence was too long for another try of the config."""
        silences = self._silences.get(problem, {})
        return len(silences) >= FEW and seconds >= HOPELESS * statistics.median(silences.values())
