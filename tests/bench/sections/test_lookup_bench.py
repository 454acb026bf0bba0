"""The bench of look-ups goes the way of a process that serves: past what live searches left in a cache."""

from __future__ import annotations

import os

import pytest

from aot_tune import environment
from aot_tune.bench.sections import lookups
from aot_tune.bench.sections.part import Request


@pytest.mark.long
def test_b12_a_look_up_past_the_cache_stays_in_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """B12: how many they are is the bench's to say; here all else of a test run goes on at once."""
    monkeypatch.setenv(environment.CACHE_DIR, "/not/there")
    parts = {part.name: part.figures for part in lookups.run(Request(look_ups=300))}
    assert os.environ[environment.CACHE_DIR] == "/not/there"  # what lies in the user's own is not read
    for name in ("matmul", "rms_norm"):
        figures = parts[name]
        assert figures["from the cache"] >= 300 // lookups._OFTEN
        assert 1 < figures["median_us"] <= 1000
        assert figures["median_us"] <= figures["99.9 %_us"] <= figures["99.99 %_us"]
