"""What a kernel's sweep has measured so far, kept in its journal. Knows neither a GPU nor a compiler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aot_tune.tuner.outcome import Failure, Measurement, Outcome
from aot_tune.tuner.sweep.journal import Journal
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

Step = Literal["candidates", "candidate finals", "portfolio", "portfolio finals", "recheck"]
"""Which step a record belongs to: all candidates at an edge once; those near the fastest again, interleaved;
the portfolio at an edge or a point inside, and again; the winners once more in a fresh process."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """What one step found out about one problem."""

    outcomes: tuple[Outcome, ...]
    """One a config."""

    measure_s: float = 0.0
    """Seconds spent on timing."""

    verify_s: float = 0.0
    """Seconds spent on comparing with the reference."""

    conditions: tuple[Mapping[str, Any], ...] = ()
    """The GPU's state before and after each request: clocks, why they are held back, whether locked."""

    def measurements(self) -> dict[Config, Measurement]:
        """The outcomes that are times, by config."""
        return {outcome.config: outcome for outcome in self.outcomes if isinstance(outcome, Measurement)}

    def failures(self) -> tuple[Failure, ...]:
        """The outcomes that are failures."""
        return tuple(outcome for outcome in self.outcomes if isinstance(outcome, Failure))


class Book:
    """A kernel's pages by step, problem and configs; each is on disk before `write` returns.

    Args:
        journal: An open journal; its earlier records become pages.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._pages: dict[tuple[Step, Problem, frozenset[Config]], Page] = {}
        self.resumed = 0
        for record in journal.records:
            if record.get("kind") == "page":
                step, problem, page = _page(record)
                self._pages[step, problem, _configs(page.outcomes)] = page
                self.resumed += len(page.outcomes)

    def read(self, step: Step, problem: Problem, configs: Iterable[Config]) -> Page | None:
        """The page of exactly these configs, or None when they were not measured together."""
        return self._pages.get((step, problem, frozenset(configs)))

    def write(self, step: Step, problem: Problem, page: Page) -> Page:
        """Put a page on disk, then keep it.

        Raises:
            TuneError: It could not be written; nothing is reported as done.
        """
        self._journal.append(_record(step, problem, page))
        self._pages[step, problem, _configs(page.outcomes)] = page
        return page


def _configs(outcomes: Iterable[Outcome]) -> frozenset[Config]:
    return frozenset(outcome.config for outcome in outcomes)


def _record(step: Step, problem: Problem, page: Page) -> dict[str, Any]:
    return {
        "kind": "page",
        "step": step,
        "problem": dict(problem),
        "outcomes": [_outcome_record(outcome) for outcome in page.outcomes],
        "measure_s": page.measure_s,
        "verify_s": page.verify_s,
        "conditions": [dict(one) for one in page.conditions],
    }


def _page(record: Mapping[str, Any]) -> tuple[Step, Problem, Page]:
    page = Page(
        outcomes=tuple(_outcome(each) for each in record["outcomes"]),
        measure_s=record["measure_s"],
        verify_s=record["verify_s"],
        conditions=tuple(record["conditions"]),
    )
    return record["step"], Problem(record["problem"]), page


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
