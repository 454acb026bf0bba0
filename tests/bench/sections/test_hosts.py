"""Other machines are simulated from the journals that are here."""

from __future__ import annotations

from pathlib import Path

import pytest

from aot_tune.bench.sections import hosts
from aot_tune.bench.sections.part import Request
from aot_tune.tuner.sweep.journal import Journal
from aot_tune.tuner.sweep.results import SweepResults, accepts
from aot_tune.values.problem import Problem

SMALL, LARGE = Problem({"M": 1}), Problem({"M": 64})


@pytest.fixture
def journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hosts, "JOURNALS", tmp_path)
    path = tmp_path / "sm90" / "scale.jsonl"
    spent = {"verify_s": 0.5, "conditions": [], "gpu": "GPU-1"}
    with Journal.open(path, {"kernel": "scale"}, accepts=accepts) as journal:
        results = SweepResults(journal)
        for problem, seconds in ((SMALL, 1.0), (LARGE, 3.0)):
            results.write_spent("candidates", problem, measure_s=seconds, start_s=9.0, **spent)
            results.write_spent("candidate finals", problem, measure_s=seconds, **spent)
            results.write_spent("portfolio", problem, measure_s=seconds, **spent)
            results.write_spent("recheck", problem, measure_s=0.0, open_s=0.25, **spent)
    return path


def test_the_passes_of_a_journal_are_the_tasks_of_the_simulation(journals: Path) -> None:
    [work] = [hosts.work_of("scale", hosts.journals.read(journals, accepts).records)]
    assert [[one.seconds for one in step] for step in work.steps] == [[3.0, 7.0], [1.5, 3.5], [0.75, 0.75]]
    assert [one.fresh for step in work.steps for one in step] == [False] * 4 + [True] * 2


def test_each_size_of_machine_is_told_with_what_bounds_it(journals: Path) -> None:
    parts = {part.name: part.figures for part in hosts.run(Request())}
    assert list(parts) == ["1 host of 1 GPU", "1 host of 8 GPUs", "8 hosts of 8 GPUs"]
    alone = parts["1 host of 1 GPU"]
    assert alone["whole sweep_s"] == hosts.START_S + 10 + 5 + hosts.RESTART_S + 1.5
    assert alone["bounded by"].startswith("measuring")
    assert parts["8 hosts of 8 GPUs"]["bounded by"].startswith("the longest kernel alone")


def test_without_journals_it_says_what_makes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "JOURNALS", tmp_path)
    [part] = hosts.run(Request())
    assert "aot-tune tune" in str(part.figures)
