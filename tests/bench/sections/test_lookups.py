"""The bench of choosing configs, which needs no GPU: that it counts what it says."""

from __future__ import annotations

import pytest

from aot_tune.bench.sections import lookups
from aot_tune.bench.sections.part import Request


@pytest.mark.long
def test_it_times_as_many_look_ups_as_it_is_asked_for() -> None:
    parts = {part.name: part for part in lookups.run(Request(look_ups=300))}
    for name in ("matmul", "rms_norm"):
        figures = parts[name].figures
        assert parts[name].kernels == (name,)
        assert figures["arch"] == "sm90"
        assert figures["look-ups"] == 300
        assert 1 < figures["median_us"] <= figures["99.9 %_us"]
        assert 0 <= figures["under 200 us"] <= 1


def test_a_quantile_is_the_upper_end_of_its_tenth() -> None:
    assert lookups._quantile([0, 5, 0, 4, 1], 0.5) == 0.2
    assert lookups._quantile([0, 5, 0, 4, 1], 0.9) == 0.4
    assert lookups._quantile([0, 5, 0, 4, 1], 1.0) == 0.5
