"""Which configs of a decided table are verified once more."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.sweep.decision import to_recheck
from aot_tune.tuner.sweep.kernel import KernelTimes
from aot_tune.values.config import Config
from tests.support.samples import DEFAULT, scale_table

TABLE = scale_table()
FIRST, SECOND = TABLE.portfolio
SMALL, MIDDLE, LARGE = (entry.bucket for entry in TABLE.entries)


def _timed(us: Mapping[Config, float]) -> dict[Config, Measurement]:
    return {
        config: Measurement(config=config, mean_us=one, error_margin_us=0.1, num_samples=5)
        for config, one in us.items()
    }


def _swept() -> KernelTimes:
    """SECOND loses least at MIDDLE."""
    return KernelTimes(
        portfolio_times={
            SMALL: _timed({DEFAULT: 2.0, FIRST: 3.0, SECOND: 4.0}),
            MIDDLE: _timed({DEFAULT: 12.0, FIRST: 10.0, SECOND: 11.0}),
            LARGE: _timed({DEFAULT: 60.0, FIRST: 40.0, SECOND: 50.0}),
        }
    )


def test_each_winner_is_verified_again_at_its_edge() -> None:
    assert to_recheck(TABLE, _swept()) == [(SMALL, DEFAULT), (MIDDLE, FIRST), (LARGE, SECOND)]


def test_a_member_without_an_entry_is_verified_again_where_it_loses_least() -> None:
    small, middle, large = TABLE.entries
    table = dataclasses.replace(TABLE, entries=(small, middle, dataclasses.replace(large, config=FIRST)))
    swept = _swept()
    assert to_recheck(table, swept) == [(SMALL, DEFAULT), (MIDDLE, FIRST), (MIDDLE, SECOND), (LARGE, FIRST)]
    swept.barred[MIDDLE] = {SECOND}
    assert (LARGE, SECOND) in to_recheck(table, swept), "where it is barred it need not pass"
    for edge in (SMALL, MIDDLE, LARGE):
        swept.barred[edge] = {SECOND}
    assert len(to_recheck(table, swept)) == 3, "and it is not verified for ever"


def test_what_was_not_timed_here_is_not_verified_here() -> None:
    swept = _swept()
    del swept.portfolio_times[LARGE]
    assert to_recheck(TABLE, swept) == [(SMALL, DEFAULT), (MIDDLE, FIRST)]
