"""Which sizes are measured next inside a bucket, and which configs of a table are verified once more."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aot_tune.choose.left_out import fitted_slopes
from aot_tune.choose.points import COMMON
from aot_tune.declare.fingerprint.hashing import check_hash, source_hash
from aot_tune.tables.table import Table
from aot_tune.tuner.outcome import Measurement
from aot_tune.tuner.plan.candidates import plan
from aot_tune.tuner.sweep import decision
from aot_tune.tuner.sweep.decision import Decision, to_recheck
from aot_tune.tuner.sweep.state import KernelTimes
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from tests.support.samples import DEFAULT, SM90, scale, scale_in, scale_table

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
    swept = KernelTimes()
    swept.add(SMALL, portfolio=_timed({DEFAULT: 2.0, FIRST: 3.0, SECOND: 4.0}))
    swept.add(MIDDLE, portfolio=_timed({DEFAULT: 12.0, FIRST: 10.0, SECOND: 11.0}))
    swept.add(LARGE, portfolio=_timed({DEFAULT: 60.0, FIRST: 40.0, SECOND: 50.0}))
    return swept


def test_each_winner_is_verified_again_at_its_edge() -> None:
    assert to_recheck(TABLE, _swept(), {}) == [(SMALL, DEFAULT), (MIDDLE, FIRST), (LARGE, SECOND)]


def test_a_member_without_an_entry_is_verified_again_where_it_loses_least() -> None:
    small, middle, large = TABLE.entries
    table = dataclasses.replace(TABLE, entries=(small, middle, dataclasses.replace(large, config=FIRST)))
    swept = _swept()
    assert to_recheck(table, swept, {}) == [
        (SMALL, DEFAULT),
        (MIDDLE, FIRST),
        (MIDDLE, SECOND),
        (LARGE, FIRST),
    ]
    swept.add(MIDDLE, barred=frozenset({SECOND}))
    assert (LARGE, SECOND) in to_recheck(table, swept, {}), "where it is barred it need not pass"
    for edge in (SMALL, MIDDLE, LARGE):
        swept.add(edge, barred=frozenset({SECOND}))
    assert len(to_recheck(table, swept, {})) == 3, "and it is not verified for ever"


def test_each_default_is_verified_again_at_its_edge() -> None:
    defaults = dict.fromkeys((SMALL, LARGE), DEFAULT)
    expected = [(SMALL, DEFAULT), (MIDDLE, FIRST), (LARGE, SECOND), (LARGE, DEFAULT)]
    assert to_recheck(TABLE, _swept(), defaults) == expected


def test_what_was_not_timed_here_is_not_verified_here() -> None:
    swept = _swept()
    swept.keep([SMALL, MIDDLE])
    assert to_recheck(TABLE, swept, {}) == [(SMALL, DEFAULT), (MIDDLE, FIRST)]


# Sizes inside a bucket --------------------------------------------------------------------------------------

EDGE = Problem({"dtype": "bfloat16", "M": 256, "N": 1024})


def _decision(old: Table | None = None, **changes: Any) -> Decision:
    found = scale_in(Path("/nonexistent"))["scale"]
    found = dataclasses.replace(found, tunable=dataclasses.replace(found.tunable, **changes))
    planned = plan(found, SM90, found.tunable.buckets, device=Device.reference(SM90))
    versions = {"driver": "580.1", "cuda_tile": "1.7.0", "tileiras": "13.4.92"}
    hashes = {"source_hash": source_hash(found.tunable), "check_hash": check_hash(found.tunable)}
    return Decision(planned, hashes | versions, old, whole=True)


def _inside(us: Mapping[int, tuple[float, float, float]]) -> KernelTimes:
    """At sizes of EDGE's bucket, the times of FIRST, SECOND and the default."""
    configs = (FIRST, SECOND, DEFAULT)
    swept = KernelTimes(portfolio=(FIRST, SECOND))
    for m, row in us.items():
        swept.add(EDGE.replaced(M=m), portfolio=_timed(dict(zip(configs, row, strict=True))))
    return swept


def _next(decision: Decision, us: Mapping[int, tuple[float, float, float]]) -> list[int]:
    return [size.size("M") for size in decision.next_sizes(_inside(us), [EDGE]).values()]


def test_a_size_is_added_where_the_rule_leaves_more_than_a_twentieth() -> None:
    decision = _decision()
    edge = (10.0, 12.0, 20.0)
    assert _next(decision, {149: (10.0, 9.0, 20.0), 213: (10.0, 12.0, 20.0), 256: edge}) == [178]
    assert _next(decision, {149: (10.0, 9.8, 20.0), 213: (10.0, 12.0, 20.0), 256: edge}) == []


def test_beside_a_line_that_may_stay_noise_adds_no_size() -> None:
    fresh = _decision()
    built = fresh.sweep(KernelTimes()).built_with
    old = dataclasses.replace(
        scale_table(), source_hash=fresh.sweep(KernelTimes()).source_hash, built_with=built
    )
    us = {149: (10.0, 9.4, 20.0), 213: (10.0, 12.0, 20.0), 256: (10.0, 12.0, 20.0)}
    assert _next(fresh, us) == [178], "6 %"
    assert _next(_decision(old), us) == []
    other = dataclasses.replace(old, source_hash="0" * 16)
    assert _next(_decision(other), us) == [178], "of another source no line stays"


def test_an_edge_whose_default_has_no_time_gets_no_sizes() -> None:
    swept = _inside({149: (10.0, 9.0, 20.0), 213: (10.0, 12.0, 20.0), 256: (10.0, 12.0, 20.0)})
    times = dict(swept.problems[EDGE].portfolio)
    del times[DEFAULT]
    swept.add(EDGE, portfolio=times)
    assert _decision().next_sizes(swept, [EDGE]) == {}


def test_a_bucket_begins_with_the_sizes_of_the_present_table() -> None:
    old = scale_table()
    points = tuple(dataclasses.replace(old.entries[2].points[0], size={"M": m}) for m in (140, 200, 256))
    kept = dataclasses.replace(
        old, entries=(*old.entries[:2], dataclasses.replace(old.entries[2], points=points))
    )
    assert [size.size("M") for size in _decision(kept).first_sizes(EDGE)] == [140, 200]
    assert [size.size("M") for size in _decision().first_sizes(EDGE)] == [149, 213]


def test_the_default_of_a_point_is_the_one_at_its_size() -> None:
    decision = _decision(default=lambda arch, problem: FIRST if problem.size("M") % 16 else DEFAULT)
    sweep = decision.sweep(_inside({149: (10.0, 9.0, 20.0), 256: (10.0, 12.0, 20.0)}))
    assert sweep.default(EDGE.replaced(M=149)) == FIRST
    assert sweep.default(EDGE) == DEFAULT


# Sizes near buckets -----------------------------------------------------------------------------------------


TYPICAL = [{"dtype": "bfloat16", "M": 256, "N": (1024, 2048)}]


def _two_widths() -> KernelTimes:
    """FIRST fills the GPU once for each 1024 columns (`_filled`), and takes as long as if it did not."""
    row = dict(zip((FIRST, SECOND, DEFAULT), (10.0, 12.0, 60.0), strict=True))
    swept = KernelTimes(portfolio=(FIRST, SECOND))
    for edge in (EDGE.replaced(N=n) for n in (1024, 2048)):
        swept.add(edge, candidates=_timed(row))
        for m in (149, 213, 256):
            swept.add(edge.replaced(M=m), portfolio=_timed(row))
    return swept


def _filled(config: Config, problem: Problem) -> int:
    return 132 * problem.size("N") // 1024 if config == FIRST else 132


def test_a_table_has_slopes_that_are_fitted_to_its_points() -> None:
    table = _decision(tiles=_filled, typical=TYPICAL).table(_two_widths())
    assert len(table.entries) == 2
    assert table.slopes is not None
    assert table.slopes == fitted_slopes(dataclasses.replace(scale, tiles=_filled), table)
    assert _decision(table, tiles=_filled, typical=TYPICAL).table(_two_widths()) is table


def test_a_declaration_that_raises_between_its_sizes_costs_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*args: object) -> None:
        raise ZeroDivisionError("no tiles")

    monkeypatch.setattr(decision, "fitted_slopes", raising)
    decided = _decision(tiles=_filled, typical=TYPICAL)
    table = decided.table(_two_widths())
    assert len(table.entries) == 2
    assert table.slopes is None
    line = raising.__code__.co_firstlineno + 1
    assert decided.remark == (
        "slopes are not fitted, because the declaration raises ZeroDivisionError: no tiles "
        f"({__file__}, line {line}); correct it and tune again"
    )
    with monkeypatch.context() as patch:
        patch.setattr(decision, "fitted_slopes", lambda *args: None)
        decided.table(_two_widths())
    assert decided.remark is None, "it is of the last table"
    old = dataclasses.replace(table, slopes=COMMON, source_hash="0" * 16)
    assert _decision(old, tiles=_filled, typical=TYPICAL).table(_two_widths()).slopes == COMMON
