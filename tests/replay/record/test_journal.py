"""Which records of a search's journal are read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aot_tune.replay.record.journal import SearchJournal, accepts
from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.sweep.journal import Journal
from aot_tune.values.config import Config

IDENTITY = {"gpu": "NVIDIA H200"}
CONFIG = Config(constants={"place": 0})
TIMED = {"search": "a", "config": 0, "what": "timed", "round": None, "mean_us": 10.0}
TIMED |= {"error_margin_us": 0.5, "num_samples": 5}


def test_what_a_search_writes_is_read_again(tmp_path: Path) -> None:
    outcome = Measurement(config=CONFIG, mean_us=10.0, error_margin_us=0.5, num_samples=5)
    for _ in range(2):
        with Journal.open(tmp_path / "x.jsonl", IDENTITY, accepts=accepts) as journal:
            search = SearchJournal(journal, "a")
            search.begin(0)
            search.write(0, outcome)
            search.write(0, outcome, number=1)
    with Journal.open(tmp_path / "x.jsonl", IDENTITY, accepts=accepts) as journal:
        again = SearchJournal(journal, "a")
    assert (again.outcome(0), again.round(0, 1)) == (outcome, outcome)


def test_a_config_of_an_interrupted_run_is_not_to_blame(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "x.jsonl", IDENTITY, accepts=accepts) as journal:
        for at, run in enumerate(["interrupted", "crashed", "mine"]):
            SearchJournal(journal, "a", run=run).begin(at)
    with Journal.open(tmp_path / "x.jsonl", IDENTITY, accepts=accepts) as journal:
        search = SearchJournal(journal, "a", run="mine", interrupted={"interrupted"})
        assert [search.killed(at) for at in range(3)] == [False, True, True]
        search.begin(0)
    with Journal.open(tmp_path / "x.jsonl", IDENTITY, accepts=accepts) as journal:
        assert SearchJournal(journal, "a", interrupted={"interrupted"}).killed(0)


@pytest.mark.parametrize(
    "change",
    [
        {"search": None},
        {"config": -1},
        {"config": True},
        {"mean_us": 10**400},
        {"mean_us": "fast"},
        {"num_samples": None},
        {"round": "first"},
        {"what": "lost"},
        {"what": "begun", "run": []},
        {"what": "failed", "stage": "nowhere", "message": ""},
        {"what": "failed", "stage": "verify", "message": 1},
    ],
)
def test_a_record_of_another_form_is_set_aside_and_measured_again(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / "x.jsonl"
    with Journal.open(path, IDENTITY) as journal:
        journal.append(TIMED)
        journal.append({**TIMED, **change})
    with Journal.open(path, IDENTITY, accepts=accepts) as journal:
        assert list(journal.records) == [TIMED]
