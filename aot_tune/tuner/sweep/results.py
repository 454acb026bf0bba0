"""The results of a kernel's sweep, each a record of its journal.

A record holds one result and its place in the sweep: step, problem, config and round, and the GPU. So a
result is found again with any set of configs.

All times of a problem's pass come from one GPU, because GPUs of one model differ. When another GPU takes over
a pass, because the first is lost or missing, the first GPU's times stay in the file but do not count any more
(`SweepResults.release`). A wrong result counts on any GPU, unless the GPU's results are all discarded
(`SweepResults.write_disowned`).
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from aot_tune.errors import AotTuneError, TuneError
from aot_tune.tables.states import State
from aot_tune.tuner.compile.job import Compiled, CompileFailure, CompileResult, is_transient
from aot_tune.tuner.measure.rounds import usable
from aot_tune.tuner.outcome import Failure, Measurement, Outcome, Stage
from aot_tune.tuner.sweep.journal import MOST_RECORD_BYTES, Journal, Record
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

Step = Literal[
    "candidates",
    "candidate states",
    "candidate finals",
    "portfolio",
    "portfolio states",
    "portfolio finals",
    "recheck",
]
"""A step of a sweep, in this order: all candidates are measured once at an edge; contenders in the GPU's
other states; configs near the fastest again, interleaved; the portfolio at an edge or a point inside its
bucket; the portfolio in the other states; at an edge the configs near the fastest again; the winners are
verified once more in a fresh process (``recheck``)."""

Kind = Literal["compile", "result", "spent", "listed", "unopened", "disowned"]
"""Kind of a record: a compilation's result, a config's result in a step, a step's time, the list of a
problem's candidates to measure, a problem that could not be opened, or a GPU whose earlier results do not
count."""

MESSAGE_BYTES = 4096
"""Most bytes of a failure's message in a record, as JSON text."""

ALSO = {
    "start_s": "starting processes",
    "open_s": "making arguments",
    "waited_s": "waiting for compilers",
    "idle_s": "idle",
}
"""Other uses of a GPU's time, in words, by their names in a record of the kind ``spent``. The last two passed
before the step began."""

_CUT = " [cut]"

Place = tuple[Step, Problem, Config, "State | None"]
"""Place of a result in the sweep; its last part is the GPU's state in the steps of states."""

Pass = Literal["candidates", "portfolio"]
"""A single GPU's pass over a problem: all candidates or the portfolio, each with its finals."""

PASSES: Mapping[Step, Pass] = {
    "candidates": "candidates",
    "candidate states": "candidates",
    "candidate finals": "candidates",
    "portfolio": "portfolio",
    "portfolio states": "portfolio",
    "portfolio finals": "portfolio",
}
"""Step to its pass. A recheck belongs to no pass."""

Timing = Literal["finals", "points", "states", "candidates"]
"""Kind of timing: configs near the fastest again, interleaved; the portfolio at an edge or a point; configs
in the GPU's other states; or all candidates once."""

TIMINGS: Mapping[Step, Timing] = {
    "candidates": "candidates",
    "candidate states": "states",
    "candidate finals": "finals",
    "portfolio": "points",
    "portfolio states": "states",
    "portfolio finals": "finals",
    "recheck": "candidates",
}
"""Step to its kind of timing. A recheck times nothing."""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """The candidates of a problem to measure, chosen after all were compiled."""

    configs: tuple[Config, ...]
    """The configs to measure."""

    twins: Mapping[Config, Config]
    """Maps a config to the measured config with the same launch."""


def _name(config: Config) -> str:
    """Return a short digest of a config: a record has room for hundreds of them."""
    return hashlib.sha256(str(config).encode()).hexdigest()[:10]


def _choice(candidates: Iterable[Config], exhaustive: bool) -> str:
    """Return a digest of a shortlist's candidates and mode."""
    return hashlib.sha256("\n".join([str(exhaustive), *map(str, candidates)]).encode()).hexdigest()[:16]


class SweepResults:
    """A kernel's results by step, problem and config, kept in the journal.

    Several threads may use it. A failure, which is shown to the user at once, is synced before the method
    that writes it returns; a request's times are synced when its duration is written.

    Args:
        journal: An open journal, with the results of an earlier run. None to read only `records`.
        records: The records of a journal that is not open.

    Attributes:
        resumed: Number of measurements and failures taken from the journal.
        measure_s: Time spent timing, that of earlier runs included, seconds.
        verify_s: Time spent verifying, that of earlier runs included, seconds.
    """

    def __init__(self, journal: Journal | None, records: Iterable[Record] = ()) -> None:
        self._journal = journal
        self._lock = threading.RLock()
        self._reset()
        for record in journal.records if journal is not None else records:
            self._take(record)
        self.resumed = len({*self._outcomes, *self._provisional, *self._rounds}) + len(self._rechecks)

    def _reset(self) -> None:
        self._records: list[Record] = []
        self._listed: dict[Problem, Record] = {}
        self._unopened: dict[Problem, str] = {}
        self._owners: dict[tuple[Pass, Problem], str] = {}
        self._outcomes: dict[Place, Outcome] = {}
        self._provisional: dict[Place, Measurement] = {}
        self._rounds: dict[Place, dict[int, Measurement]] = {}
        self._rechecks: dict[tuple[Problem, Config], Failure | None] = {}
        self._compiled: dict[str, str | None] = {}
        self.measure_s = self.verify_s = 0.0

    # Reading ------------------------------------------------------------------------------------------------

    def outcome(
        self, step: Step, problem: Problem, config: Config, state: State | None = None
    ) -> Outcome | None:
        """Return the final outcome, of one state in a step of states; None where it is missing."""
        return self._outcomes.get((step, problem, config, state))

    def provisional(self, step: Step, problem: Problem, config: Config) -> Measurement | None:
        """Return the provisional time, to be taken again in turn with rivals; None where it is missing."""
        return self._provisional.get((step, problem, config, None))

    def rounds(self, step: Step, problem: Problem, config: Config) -> list[Measurement]:
        """Return the times of the rounds so far, in their order."""
        rounds = self._rounds.get((step, problem, config, None), {})
        return [rounds[number] for number in sorted(rounds)]

    def owner(self, step: Step, problem: Problem) -> str | None:
        """Return the GPU that began the pass of this step; None where it has no results."""
        return self._owners.get((PASSES[step], problem))

    def is_rechecked(self, problem: Problem, config: Config) -> bool:
        """Return whether a winner was verified again."""
        return (problem, config) in self._rechecks

    def recheck_failure(self, problem: Problem, config: Config) -> Failure | None:
        """Return the failure of a second verification; None where it passed or was not made."""
        return self._rechecks.get((problem, config))

    def found_wrong(self, config: Config) -> tuple[Step, Problem, str] | None:
        """Return the step, the problem and the GPU of a config's first wrong result; None without any."""
        for record in self._records:
            if record["kind"] == "result" and record.get("stage") == "verify" and config_of(record) == config:
                return record["step"], Problem(record["problem"]), record["gpu"]
        return None

    def compile_failure(self, key: str) -> CompileFailure | None:
        """Return the permanent failure of a compilation; None without one."""
        message = self._compiled.get(key)
        if message is None:
            return None
        failure = CompileFailure(key=key, message=message, seconds=0.0)
        return None if is_transient(failure) else failure

    def listed(self, problem: Problem, candidates: Sequence[Config], *, exhaustive: bool) -> Listed | None:
        """Return the shortlist chosen from exactly some candidates; None where it is missing."""
        record = self._listed.get(problem)
        if record is None or record["of"] != _choice(candidates, exhaustive):
            return None
        by_name = {_name(config): config for config in candidates}
        if not by_name.keys() >= {*record["configs"], *record["twins"], *record["twins"].values()}:
            return None
        return Listed(
            configs=tuple(by_name[name] for name in record["configs"]),
            twins={by_name[twin]: by_name[leader] for twin, leader in record["twins"].items()},
        )

    def unopened(self, problem: Problem) -> str | None:
        """Return the reason why a problem could not be opened; None where it could, or was not tried."""
        return self._unopened.get(problem)

    def anything_compiles(self) -> bool:
        """Return whether a compilation succeeded."""
        return None in self._compiled.values()

    # Writing ------------------------------------------------------------------------------------------------

    def write(
        self,
        step: Step,
        problem: Problem,
        outcome: Outcome,
        number: int | None = None,
        *,
        gpu: str,
        state: State | None = None,
    ) -> None:
        """Write a config's outcome, or its time in the round `number`, to the journal.

        Args:
            step: The step.
            problem: The problem.
            outcome: The outcome.
            number: The round; None outside of rounds.
            gpu: The uuid of the GPU that measured it.
            state: The GPU's state, in a step of states.

        Raises:
            JournalWriteError: It could not be written; nothing may be reported as done.
        """
        place = _place(gpu, step, problem, outcome.config, number)
        record = {**place, "state": state, **_outcome_record(outcome)}
        self._append(record, sync=isinstance(outcome, Failure))

    def release(self, step: Step, problem: Problem) -> None:
        """Discard another GPU's results in the pass of this step, except wrong results.

        The next record of the pass, by another GPU, has the same effect in later runs.
        """
        with self._lock:
            released = PASSES[step]
            self._owners.pop((released, problem), None)
            for results in (self._outcomes, self._provisional, self._rounds):
                for place in [key for key in results if PASSES[key[0]] == released and key[1] == problem]:
                    if not _is_wrong(results[place]):
                        del results[place]

    def write_recheck(self, problem: Problem, config: Config, failure: Failure | None, *, gpu: str) -> None:
        """Write the result of a winner's second verification."""
        result = {"stage": None} if failure is None else _outcome_record(failure)
        record = {**_place(gpu, "recheck", problem, config, None), **result}
        self._append(record, sync=failure is not None)

    def write_compiled(
        self, step: Step, problem: Problem, config: Config, result: CompileResult, *, gpu: str
    ) -> None:
        """Write the result of a compilation, unless the journal has it."""
        message = result.message if isinstance(result, CompileFailure) else None
        if result.key in self._compiled and self._compiled[result.key] == _cut(message):
            return
        place = {**_place(gpu, step, problem, config, None), "kind": "compile", "key": result.key}
        cached = isinstance(result, Compiled) and result.cached
        place["seconds"] = 0.0 if cached else round(result.seconds, 3)
        if isinstance(result, Compiled):
            self._append({**place, "code": result.code})
        else:
            self._append({**place, "message": _cut(message)}, sync=True)

    def write_listed(
        self, problem: Problem, candidates: Sequence[Config], listed: Listed, *, exhaustive: bool, gpu: str
    ) -> None:
        """Write the list of candidates to measure, unless it is too long for a record."""
        record = {
            "kind": "listed",
            "gpu": gpu,
            "step": "candidates",
            "problem": dict(problem),
            "of": _choice(candidates, exhaustive),
            "configs": [_name(config) for config in listed.configs],
            "twins": {_name(twin): _name(leader) for twin, leader in listed.twins.items()},
        }
        if len(json.dumps(record)) < MOST_RECORD_BYTES - 100:
            self._append(record)

    def write_unopened(self, step: Step, problem: Problem, reason: str, *, gpu: str) -> None:
        """Write the reason why a problem could not be opened."""
        place = {"kind": "unopened", "gpu": gpu, "step": step, "problem": dict(problem)}
        self._append({**place, "message": _cut(reason)}, sync=True)

    def write_disowned(self, step: Step, problem: Problem, reason: str, *, gpu: str) -> None:
        """Write that no earlier result of a GPU counts, as if it had measured nothing."""
        place = {"kind": "disowned", "gpu": gpu, "step": step, "problem": dict(problem)}
        self._append({**place, "message": _cut(reason)}, sync=True)

    def write_spent(
        self,
        step: Step,
        problem: Problem,
        *,
        measure_s: float,
        verify_s: float,
        conditions: Iterable[Mapping[str, Any]],
        gpu: str,
        **also_s: float,
    ) -> None:
        """Write the time that a step took on a problem, and the GPU's state around each request.

        Args:
            step: The step.
            problem: The problem.
            measure_s: Time spent timing: the time that no other argument explains, seconds.
            verify_s: Time spent verifying, seconds.
            conditions: The GPU's states.
            gpu: The uuid of the GPU.
            also_s: The times of `ALSO`, seconds.
        """
        spent = {"kind": "spent", "gpu": gpu, "step": step, "problem": dict(problem)}
        states: list[Mapping[str, Any]] = [dict(state) for state in conditions]
        # A step of many requests keeps its first and last states: a record is bounded.
        kept = [*states[:2], *states[-2:]] if len(states) > 4 else states
        times = {"measure_s": measure_s, "verify_s": verify_s, **also_s}
        self._append({**spent, **times, "conditions": kept}, sync=True)

    def _append(self, record: Record, *, sync: bool = False) -> None:
        assert self._journal is not None
        with self._lock:
            try:
                self._journal.add(record)
            except ValueError as error:
                raise TuneError(f"a result does not fit into the journal: {error}") from error
            self._take(record)
        if sync:
            self._journal.sync()

    def _take(self, record: Record) -> None:
        """Add a record; it replaces an earlier record of its place."""
        self._records.append(record)
        if record["kind"] == "disowned":
            kept = [
                earlier
                for earlier in self._records
                if earlier["gpu"] != record["gpu"] or earlier["kind"] in ("compile", "spent")
            ]
            self._reset()
            for earlier in kept:
                self._take(earlier)
            return
        if record["kind"] == "spent":
            self.measure_s += record["measure_s"]
            self.verify_s += record["verify_s"]
            return
        if record["kind"] == "compile":
            self._compiled[record["key"]] = record.get("message")
            return
        if record["kind"] == "listed":
            self._listed[Problem(record["problem"])] = record
            return
        if record["kind"] == "unopened":
            self._unopened[Problem(record["problem"])] = record["message"]
            return
        step, problem, config = record["step"], Problem(record["problem"]), config_of(record)
        outcome = outcome_of(record)
        self._unopened.pop(problem, None)
        if step != "recheck":
            if self.owner(step, problem) not in (None, record["gpu"]):
                self.release(step, problem)
            self._owners[PASSES[step], problem] = record["gpu"]
        if step == "recheck":
            assert not isinstance(outcome, Measurement)
            self._rechecks[problem, config] = outcome
        elif isinstance(outcome, Measurement) and record["round"] is not None:
            self._rounds.setdefault((step, problem, config, None), {})[record["round"]] = outcome
        elif isinstance(outcome, Measurement) and outcome.provisional:
            self._provisional[step, problem, config, None] = outcome
        elif outcome is not None:
            self._outcomes[step, problem, config, record["state"]] = outcome


def _is_wrong(result: object) -> bool:
    return isinstance(result, Failure) and result.stage == "verify"


# Records ----------------------------------------------------------------------------------------------------


def _place(gpu: str, step: Step, problem: Problem, config: Config, number: int | None) -> Record:
    return {
        "kind": "result",
        "gpu": gpu,
        "step": step,
        "problem": dict(problem),
        "config": config.document,
        "round": number,
        "state": None,
    }


def accepts(record: Record) -> bool:
    """Return whether a record is sound: the journal treats any other as damage."""
    try:
        return _is_sound(record)
    except (AotTuneError, AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return False


def config_of(record: Mapping[str, Any]) -> Config:
    """Return the config of a result or compilation."""
    return Config(**record["config"])


def outcome_of(record: Mapping[str, Any]) -> Outcome | None:
    """Return the outcome of a result; None for a winner that passed its second verification."""
    config = config_of(record)
    if "stage" not in record:
        return Measurement(
            config=config,
            mean_us=record["mean_us"],
            error_margin_us=record["error_margin_us"],
            num_samples=record["num_samples"],
            provisional=record["provisional"],
            disturbed=record["disturbed"],
        )
    if record["stage"] is None:
        return None
    return Failure(config=config, stage=record["stage"], message=record["message"])


def _is_sound(record: Record) -> bool:
    kind = record["kind"]
    if kind not in get_args(Kind) or record["step"] not in get_args(Step):
        return False
    if not isinstance(record["gpu"], str) or not Problem(record["problem"]):
        return False
    if kind == "spent":
        times = [record["measure_s"], record["verify_s"], *(record.get(name, 0.0) for name in ALSO)]
        return min(map(_number, times)) >= 0
    if kind == "compile":
        config_of(record)
        sound = isinstance(record["key"], str) and isinstance(record.get("message", ""), str)
        return sound and _number(record.get("seconds", 0.0)) >= 0
    if kind in ("unopened", "disowned"):
        return isinstance(record["message"], str)
    if kind == "listed":
        names = [*record["configs"], *record["twins"], *record["twins"].values()]
        return isinstance(record["of"], str) and all(isinstance(name, str) for name in names)
    number = record["round"]
    if number is not None and (type(number) is not int or number < 0):
        return False
    state = record["state"]
    if state not in (get_args(State) if TIMINGS[record["step"]] == "states" else (None,)):
        return False
    outcome = outcome_of(record)
    if outcome is None or isinstance(outcome, Failure):
        passed = outcome is None and record["step"] == "recheck"
        return passed or (record["stage"] in get_args(Stage) and isinstance(record["message"], str))
    disturbed = outcome.disturbed
    return (
        record["step"] != "recheck"
        and isinstance(outcome.provisional, bool)
        and (disturbed is None or isinstance(disturbed, str))
        and type(outcome.num_samples) is int
        and _number(outcome.mean_us) >= 0
        and _number(outcome.error_margin_us) >= 0
        and usable(outcome)
    )


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.80} is not a number")
    return float(value)


def _outcome_record(outcome: Outcome) -> Record:
    if isinstance(outcome, Failure):
        return {"stage": outcome.stage, "message": _cut(outcome.message)}
    return {
        "mean_us": outcome.mean_us,
        "error_margin_us": outcome.error_margin_us,
        "num_samples": outcome.num_samples,
        "provisional": outcome.provisional,
        "disturbed": _cut(outcome.disturbed),
    }


def _cut(message: str | None) -> str | None:
    """Cut a message to at most `MESSAGE_BYTES` as JSON text, with a mark at a cut end."""
    if message is None or len(json.dumps(message)) <= MESSAGE_BYTES:
        return message
    shortest, longest = 0, MESSAGE_BYTES
    while shortest < longest:
        middle = (shortest + longest + 1) // 2
        if len(json.dumps(message[:middle] + _CUT)) <= MESSAGE_BYTES:
            shortest = middle
        else:
            longest = middle - 1
    return message[:shortest] + _CUT
