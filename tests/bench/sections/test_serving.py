"""The serving bench without a GPU: how it sums up several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aot_tune.bench.sections import serving

TOLD = [
    {"ms": ms, "source": source} for ms, source in ((5.0, "own"), (8.0, "own"), (4.0, "own"), (9.0, "far"))
]


def several(told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Any:
    bench = serving._Bench.__new__(serving._Bench)
    answers = iter(told)
    bench._repeats = len(told)
    monkeypatch.setattr(bench, "_child", lambda scenario, **_: next(answers))
    return bench._several("first_launches")


def test_of_several_processes_the_median_and_the_least_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert several(TOLD[:3], monkeypatch) == {
        "ms": 5.0, "ms, the least": 4.0, "source": "own", "processes": 3,
    }  # fmt: skip
    assert several(TOLD, monkeypatch) == {
        "ms": 8.0, "ms, the least": 4.0, "source": "far", "processes": 4,
    }  # fmt: skip


def test_a_process_that_failed_is_reported_and_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert several([*TOLD, {"failed": "no GPU"}, *TOLD], monkeypatch) == {"failed": "no GPU"}


def test_a_process_that_fails_reports_its_last_line(tmp_path: Path) -> None:
    bench = serving._Bench.__new__(serving._Bench)
    bench._folder, bench._archives, bench._caches = tmp_path, tmp_path / "archives", 0
    assert "failed" in bench._child("no_such_scenario")
