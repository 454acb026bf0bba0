"""The bench of choosing configs, which needs no GPU: that it counts what it says."""

from __future__ import annotations

import pytest

from aot_tune.bench.sections import lookups


def test_it_times_as_many_look_ups_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "_LOOK_UPS", 300)
    told = lookups.run()
    assert told["arch"] == "sm90"
    for name in ("matmul", "rms_norm"):
        figures = told[name]
        assert figures["look-ups"] == 300
        assert 1 < figures["median_us"] <= figures["99.9 %_us"]
        assert 0 <= figures["under 200 us"] <= 1


def test_a_quantile_is_the_upper_end_of_its_tenth() -> None:
    assert lookups._quantile([0, 5, 0, 4, 1], 0.5) == 0.2
    assert lookups._quantile([0, 5, 0, 4, 1], 0.9) == 0.4
    assert lookups._quantile([0, 5, 0, 4, 1], 1.0) == 0.5
