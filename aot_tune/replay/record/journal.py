"""Outcomes of one search in the journal of its kernel."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, get_args

from aot_tune.tuner.outcome import Failure, Measurement, Stage
from aot_tune.tuner.sweep.journal import Journal, Record
from aot_tune.values.config import Config

_LONGEST_MESSAGE = 2_000
"""Most characters of a failure's message that are kept."""


class SearchJournal:
    """Outcomes of one search, by the config's place in the search space.

    Args:
        journal: The journal of the kernel, which all its searches share.
        key: The name of this search in the journal.
        run: The run of `aot-tune record` that this process belongs to.
        interrupted: Other runs that did not end by themselves. A config that such a run began runs again.
    """

    def __init__(
        self, journal: Journal, key: str, *, run: str = "", interrupted: Collection[str] = ()
    ) -> None:
        self._journal = journal
        self._key = key
        self._run = run
        self._interrupted = interrupted
        self._begun: set[int] = set()
        self._outcomes: dict[int, Measurement | Failure] = {}
        self._rounds: dict[tuple[int, int], Measurement] = {}
        for record in journal.records:
            if record.get("search") == key:
                self._read(record)

    def _read(self, record: Mapping[str, Any]) -> None:
        at = record["config"]
        if record["what"] == "begun":
            if record["run"] not in self._interrupted:
                self._begun.add(at)
            return
        if record["what"] == "abandoned":
            self._begun.discard(at)
            return
        config = Config(constants={"place": at})
        if record["what"] == "failed":
            stage, message = record["stage"], record["message"]
            self._outcomes[at] = Failure(config=config, stage=stage, message=message)
            return
        time = Measurement(
            config=config,
            mean_us=record["mean_us"],
            error_margin_us=record["error_margin_us"],
            num_samples=record["num_samples"],
        )
        if record["round"] is None:
            self._outcomes[at] = time
        else:
            self._rounds[at, record["round"]] = time

    def outcome(self, at: int) -> Measurement | Failure | None:
        """Return an earlier run's outcome; None where there is none."""
        return self._outcomes.get(at)

    def round(self, at: int, number: int) -> Measurement | None:
        """Return an earlier run's time in a round of the finals; None where there is none."""
        return self._rounds.get((at, number))

    def killed(self, at: int) -> bool:
        """Return whether an earlier run began a config and ended before its outcome."""
        return at in self._begun and at not in self._outcomes

    def begin(self, at: int) -> None:
        """Write that a config runs next."""
        if at not in self._begun:
            self._journal.append({"search": self._key, "config": at, "what": "begun", "run": self._run})

    def abandon(self, at: int) -> None:
        """Write that a config was interrupted for a reason that is not its own."""
        self._journal.append({"search": self._key, "config": at, "what": "abandoned"})

    def write(self, at: int, outcome: Measurement | Failure, *, number: int | None = None) -> None:
        """Write an outcome to disk.

        Args:
            at: The config's place.
            outcome: The config's time or failure.
            number: The round of the finals; None for the first time.
        """
        if number is None and self._outcomes.get(at) == outcome:
            return
        record: dict[str, Any] = {"search": self._key, "config": at}
        if isinstance(outcome, Failure):
            message = outcome.message[:_LONGEST_MESSAGE]
            record |= {"what": "failed", "stage": outcome.stage, "message": message}
        else:
            record |= {
                "what": "timed",
                "round": number,
                "mean_us": outcome.mean_us,
                "error_margin_us": outcome.error_margin_us,
                "num_samples": outcome.num_samples,
            }
        self._journal.append(record)


def accepts(record: Record) -> bool:
    """Return whether a record is valid for a search."""
    place, what = record.get("config"), record.get("what")
    if not isinstance(record.get("search"), str) or type(place) is not int or place < 0:
        return False
    if what == "failed":
        return record.get("stage") in get_args(Stage) and isinstance(record.get("message"), str)
    if what == "timed":
        times = (record.get("mean_us"), record.get("error_margin_us"), record.get("num_samples"))
        return all(map(_is_number, times)) and (record.get("round") is None or type(record["round"]) is int)
    return what == "abandoned" or (what == "begun" and isinstance(record.get("run"), str))


def _is_number(value: object) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer that no float holds
        return False
