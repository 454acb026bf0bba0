"""The serving bench without a GPU: what is told of several processes."""

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
    monkeypatch.setattr(serving, "_REPEATS", len(told))
    monkeypatch.setattr(bench, "_child", lambda scenario, **_: next(answers))
    return bench._several("first_launches")


def test_of_several_processes_the_median_and_the_least_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert several(TOLD[:3], monkeypatch) == {"ms": 5.0, "ms, the least": 4.0, "source": "own"}
    assert several(TOLD, monkeypatch) == {"ms": 8.0, "ms, the least": 4.0, "source": "far"}


def test_a_process_that_failed_is_told_and_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert several([*TOLD, {"failed": "no GPU"}, *TOLD], monkeypatch) == {"failed": "no GPU"}


@pytest.mark.process
def test_a_process_that_fails_tells_its_last_words(tmp_path: Path) -> None:
    bench = serving._Bench.__new__(serving._Bench)
    bench._folder, bench._archives, bench._caches = tmp_path, tmp_path / "archives", 0
    assert "failed" in bench._child("no_such_scenario")
