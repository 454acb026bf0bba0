"""The results of a kernel's sweep so far, kept in its journal. Knows neither a GPU nor a compiler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aot_tune.tuner.outcome import Failure, Measurement, Outcome
from aot_tune.tuner.sweep.journal import Journal
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

Step = Literal["candidates", "candidate finals", "portfolio", "portfolio finals", "recheck"]
"""A step of a sweep, in this order: all candidates are measured at an edge once; those near the fastest
again, interleaved; the portfolio at an edge or a point inside its bucket; at an edge those near the fastest
again; the winners are verified once more in a fresh process (``recheck``)."""

_KIND = "page"
"""The ``kind`` of a step's record in the journal. The word is part of the format on disk: journals of earlier
releases have it."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one step on one problem."""

    outcomes: tuple[Outcome, ...]
    """One outcome for each config."""

    measure_s: float = 0.0
    """Time spent on timing, seconds."""

    verify_s: float = 0.0
    """Time spent on comparing with the reference, seconds."""

    conditions: tuple[Mapping[str, Any], ...] = ()
    """The GPU's state before and after each request: clocks, why they are held back, whether locked."""

    def measurements(self) -> dict[Config, Measurement]:
        """The outcomes that are times, by config."""
        return {outcome.config: outcome for outcome in self.outcomes if isinstance(outcome, Measurement)}

    def failures(self) -> tuple[Failure, ...]:
        """The outcomes that are failures."""
        return tuple(outcome for outcome in self.outcomes if isinstance(outcome, Failure))


class SweepResults:
    """A kernel's results by step, problem and configs; each is on disk before `write` returns.

    Args:
        journal: An open journal; the results of an earlier run are taken from it.

    Attributes:
        resumed: Number of outcomes taken from the journal.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._results: dict[tuple[Step, Problem, frozenset[Config]], StepResult] = {}
        self.resumed = 0
        for record in journal.records:
            if record.get("kind") == _KIND:
                step, problem, result = _from_record(record)
                self._results[step, problem, _configs(result.outcomes)] = result
                self.resumed += len(result.outcomes)

    def read(self, step: Step, problem: Problem, configs: Iterable[Config]) -> StepResult | None:
        """The result for exactly these configs, or None when they were not measured together."""
        return self._results.get((step, problem, frozenset(configs)))

    def write(self, step: Step, problem: Problem, result: StepResult) -> None:
        """Write a result to disk, then keep it.

        Raises:
            TuneError: It could not be written; nothing is reported as done.
        """
        self._journal.append(_record(step, problem, result))
        self._results[step, problem, _configs(result.outcomes)] = result


def _configs(outcomes: Iterable[Outcome]) -> frozenset[Config]:
    return frozenset(outcome.config for outcome in outcomes)


def _record(step: Step, problem: Problem, result: StepResult) -> dict[str, Any]:
    return {
        "kind": _KIND,
        "step": step,
        "problem": dict(problem),
        "outcomes": [_outcome_record(outcome) for outcome in result.outcomes],
        "measure_s": result.measure_s,
        "verify_s": result.verify_s,
        "conditions": [dict(one) for one in result.conditions],
    }


def _from_record(record: Mapping[str, Any]) -> tuple[Step, Problem, StepResult]:
    result = StepResult(
        outcomes=tuple(_outcome(each) for each in record["outcomes"]),
        measure_s=record["measure_s"],
        verify_s=record["verify_s"],
        conditions=tuple(record["conditions"]),
    )
    return record["step"], Problem(record["problem"]), result


def _outcome_record(outcome: Outcome) -> dict[str, Any]:
    config = {"constants": dict(outcome.config.constants), "hints": dict(outcome.config.hints)}
    if isinstance(outcome, Failure):
        return {**config, "stage": outcome.stage, "message": outcome.message}
    return {
        **config,
        "mean_us": outcome.mean_us,
        "error_margin_us": outcome.error_margin_us,
        "num_samples": outcome.num_samples,
    }


def _outcome(record: Mapping[str, Any]) -> Outcome:
    config = Config(constants=record["constants"], hints=record["hints"])
    if "stage" in record:
        return Failure(config=config, stage=record["stage"], message=record["message"])
    return Measurement(
        config=config,
        mean_us=record["mean_us"],
        error_margin_us=record["error_margin_us"],
        num_samples=record["num_samples"],
    )
