"""Recorded winners, judged by the times of a new search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from aot_tune.replay.record.again import Again, again
from aot_tune.replay.table import RecordedEntry
from aot_tune.tuner.outcome import Measurement
from aot_tune.values.config import Config
from tests.support import recorded_tables

ENTRY: RecordedEntry = replace(
    recorded_tables.TABLE.entries[0], mean_us=50.0, error_margin_us=0.1, first_us=75.0
)
TEXTS = ("first", ENTRY.text, "other")


def _judged(first: float | None, mine: float | None, other: float | None = 60.0) -> Again:
    us = dict(zip(TEXTS, (first, mine, other), strict=True))
    times = {
        text: Measurement(config=Config(), mean_us=time, error_margin_us=0.1, num_samples=9)
        for text, time in us.items()
        if time is not None
    }
    path = Path("sm90/mylib.ops.scale.json")
    return again("ab", path, ENTRY, "mylib.ops.scale", TEXTS[0], times, "" if mine else "half of it is NaN")


def test_a_winner_that_holds() -> None:
    judged = _judged(75.0, 50.0)
    assert judged.findings == {}
    assert (judged.table_us, judged.table_gain) == (50.0, 1.5)
    assert (judged.mean_us, judged.gain) == (50.0, 1.5)


def test_as_fast_a_gain_on_a_slower_gpu_holds() -> None:
    assert _judged(150.0, 100.0, 110.0).findings == {}


@pytest.mark.parametrize(
    ("times", "found"),
    [
        ((75.0, None), {"fails": "half of it is NaN"}),
        (
            (50.0, 52.0),
            {"slower": "4.0% slower than the first config", "weaker": "0.96x here, 1.50x in the table"},
        ),
        ((75.0, 55.0), {"weaker": "1.36x here, 1.50x in the table"}),
        ((75.0, 50.0, 45.0), {"beaten": "11.1% slower than other"}),
        ((75.0, 50.0, 49.5), {}),
    ],
)
def test_each_finding(times: tuple[float, ...], found: dict[str, str]) -> None:
    assert _judged(*times).findings == found


def test_a_first_config_that_failed_leaves_the_others_to_compare_with() -> None:
    judged = _judged(None, 50.0, 45.0)
    assert (judged.gain, list(judged.findings)) == (None, ["beaten"])


def test_a_search_in_which_all_configs_fail_fails_the_winner() -> None:
    judged = _judged(None, None, None)
    assert (judged.mean_us, judged.findings) == (None, {"fails": "half of it is NaN"})
