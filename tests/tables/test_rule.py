"""The rule inside a bucket: its cases by hand, and what it leaves on a sweep recorded on an H200."""

from __future__ import annotations

import itertools
import timeit
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

from aot_tune.tables.rule import (
    PREDICTED_GAIN,
    BucketRule,
    Tiles,
    pick,
    rule_of,
    waves,
)
from aot_tune.tables.table import Entry, Evidence, Point, Table
from aot_tune.tuner.choose.entries import leave_one_out_regret
from aot_tune.tuner.choose.portfolio import choose_portfolio, estimates_inside
from aot_tune.tuner.plan.sizes import sizes_inside
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact, Pow2, edge
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support import recorded

NARROW, WIDE = recorded.config(64, 128, 64), recorded.config(128, 256, 64)
DEFAULT = recorded.DEFAULT


def bucket_rule(
    bucket: int,
    points: dict[int, tuple[float | None, ...]],
    *,
    portfolio: Sequence[Config] = (NARROW, WIDE),
    tiles: Tiles | None = recorded.tiles,
    least_gain: float = 0.0,
) -> BucketRule:
    return BucketRule(
        axes=recorded.AXES,
        bucket=recorded.problem(bucket),
        points=[Point(size={"M": size}, us=us) for size, us in points.items()],
        portfolio=portfolio,
        tiles=tiles,
        sm_count=recorded.SM_COUNT,
        least_gain=least_gain,
    )


def table_of(
    points: dict[int, tuple[float | None, ...]], *, winner: Config = NARROW, evidence: Evidence = "measured"
) -> Table:
    """A table of one entry, whose edge is the last of the points."""
    bucket = max(points)
    entry = Entry(
        bucket=recorded.problem(bucket),
        config=winner,
        mean_us=10.0,
        error_margin_us=0.1,
        default_us=12.0,
        regret=0.0,
        evidence=evidence,
        points=tuple(Point(size={"M": size}, us=us) for size, us in points.items()),
    )
    return Table(
        kernel="matmul",
        arch=Arch.parse("sm90"),
        source_hash="0" * 16,
        built_with=recorded.BUILT_WITH,
        axes=recorded.AXES,
        portfolio=(NARROW, WIDE),
        portfolio_regret=0.0,
        entries=(entry,),
    )


def picked(table: Table, size: int, allowed: Callable[[Config], bool] = lambda config: True) -> Config | None:
    chosen = pick(table.entries[0], table, recorded.tiles, DEFAULT, recorded.problem(size), allowed)
    return None if chosen is None else chosen.config


# Points -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bucket", "inside"),
    [(1, []), (2, []), (4, [3]), (8, [5, 6, 7]), (16, [10, 12, 14]), (256, [149, 192, 213])],
)
def test_a_bucket_has_these_sizes_inside(bucket: int, inside: list[int]) -> None:
    found = sizes_inside(recorded.AXES, recorded.problem(bucket))
    assert [problem.size("M") for problem in found] == inside
    assert all(problem["N"] == 6144 and problem["dtype"] == "bfloat16" for problem in found)


@pytest.mark.parametrize("exponent", range(3, 31))
def test_from_eight_on_sizes_inside_are_three_in_their_bucket_in_both_halves_and_one_is_ragged(
    exponent: int,
) -> None:
    bucket = 1 << exponent
    sizes = [p.size("M") for p in sizes_inside(recorded.AXES, recorded.problem(bucket))]
    assert len(sizes) == 3
    assert sizes == sorted(set(sizes))
    assert all(edge(size) == bucket and size != bucket for size in sizes)
    assert sizes[0] < bucket * 3 / 4 < sizes[2]
    assert sizes[0] % 16
    assert sizes[2] % 16


def test_several_axes_shrink_together_and_exact_ones_stay() -> None:
    axes = {"rows": Pow2(), "cols": Pow2(), "depth": Exact()}
    bucket = Problem({"rows": 64, "cols": 2, "depth": 7})
    assert [dict(problem) for problem in sizes_inside(axes, bucket)] == [
        {"rows": rows, "cols": 2, "depth": 7} for rows in (40, 48, 56)
    ]


def test_a_kernel_without_bucketed_axes_has_nothing_inside() -> None:
    assert sizes_inside({"N": Exact()}, Problem({"N": 4096})) == []


# One size ---------------------------------------------------------------------------------------------------


def test_waves_round_up_over_the_blocks_in_flight() -> None:
    assert waves(132, recorded.config(64, 64, 64), 132) == 1
    assert waves(133, recorded.config(64, 64, 64), 132) == 2
    assert waves(133, recorded.config(64, 64, 64, 1, 2), 132) == 1
    assert waves(133, recorded.config(64, 64, 64, 2, 1), 132) == 3  # 66 pairs of blocks at once
    assert waves(5, Config(hints={"num_ctas": 16}), 8) == 5, (
        "fewer multiprocessors than a cluster: one by one"
    )


def test_a_time_is_scaled_by_waves_from_the_nearest_point() -> None:
    # 64 x 128 tiles, N = 6144: a row is 48 tiles. M = 200: 4 rows, 2 waves of 132; M = 500: 8 rows, 3 waves.
    (estimate,) = bucket_rule(512, {500: (30.0, None, None)}).estimates(recorded.problem(200), DEFAULT)
    assert (estimate.config, estimate.us, estimate.scale) == (NARROW, 20.0, 2 / 3)


def test_a_full_last_tile_is_told_from_a_point_whose_last_tile_is_full() -> None:
    points = {449: (100.0, None, None), 512: (40.0, None, None)}
    full, partial = (
        bucket_rule(512, points).estimates(recorded.problem(size), DEFAULT)[0] for size in (448, 447)
    )
    assert full.point.size == {"M": 512}, "448 is a multiple of tile_m = 64, though 449 is nearer"
    assert partial.point.size == {"M": 449}


def test_a_ragged_size_is_told_from_the_nearest_point_when_no_point_is_ragged() -> None:
    (estimate,) = bucket_rule(512, {512: (40.0, None, None)}).estimates(recorded.problem(500), DEFAULT)
    assert estimate.point.size == {"M": 512}


def test_at_a_point_its_own_times_tell() -> None:
    points = {384: (9.0, 5.0, 7.0), 512: (1.0, 50.0, 70.0)}
    estimates = bucket_rule(512, points).estimates(recorded.problem(384), DEFAULT)
    assert [(e.config, e.us) for e in estimates] == [(WIDE, 5.0), (DEFAULT, 7.0), (NARROW, 9.0)]


def test_a_config_that_did_not_run_at_exactly_this_size_is_not_taken_from_another_point() -> None:
    points = {384: (None, 5.0, 7.0), 512: (1.0, 50.0, 70.0)}
    estimates = bucket_rule(512, points).estimates(recorded.problem(384), DEFAULT)
    assert NARROW not in [e.config for e in estimates]


def test_a_config_that_did_not_run_at_the_nearest_point_is_told_from_the_next() -> None:
    points = {384: (None, 5.0, 7.0), 512: (1.0, 50.0, 70.0)}
    estimates = bucket_rule(512, points).estimates(recorded.problem(390), DEFAULT)
    assert next(e for e in estimates if e.config == NARROW).point.size == {"M": 512}


def test_without_tiles_the_nearest_point_is_taken_unscaled() -> None:
    points = {300: (3.0, 9.0, 9.0), 512: (9.0, 4.0, 9.0)}
    rule = bucket_rule(512, points, tiles=None)
    assert rule.estimates(recorded.problem(320), DEFAULT)[0][:2] == (3.0, NARROW)
    assert rule.estimates(recorded.problem(500), DEFAULT)[0][:2] == (4.0, WIDE)


def test_of_points_equally_near_the_larger_tells() -> None:
    points = {256: (3.0, 9.0, 9.0), 1024: (9.0, 4.0, 9.0)}
    assert bucket_rule(1024, points, tiles=None).estimates(recorded.problem(512), DEFAULT)[0].config == WIDE


def test_a_default_of_the_portfolio_is_estimated_once() -> None:
    rule = bucket_rule(512, {512: (5.0, 6.0, 5.0)}, portfolio=(DEFAULT, WIDE))
    assert [e.config for e in rule.estimates(recorded.problem(400), DEFAULT)] == [DEFAULT, WIDE]


def test_a_rule_can_be_asked_with_another_default() -> None:
    rule = bucket_rule(512, {512: (50.0, 60.0, 5.0)})
    assert rule.estimates(recorded.problem(400), DEFAULT)[0].config == DEFAULT
    other = recorded.config(256, 128, 64)
    assert rule.estimates(recorded.problem(400), other)[0].config == other


# The pick ---------------------------------------------------------------------------------------------------


def test_the_edge_takes_the_entry_s_config_whatever_its_points_say() -> None:
    table = table_of({384: (9.0, 5.0, 7.0), 512: (9.0, 5.0, 7.0)}, winner=NARROW)
    assert picked(table, 512) == NARROW
    assert picked(table, 384) == WIDE


def test_a_config_that_is_not_allowed_gives_way_to_the_next_fastest() -> None:
    table = table_of({384: (9.0, 5.0, 7.0), 512: (9.0, 5.0, 7.0)})
    assert picked(table, 384, lambda config: config != WIDE) == DEFAULT
    assert picked(table, 512, lambda config: config != NARROW) == WIDE
    assert picked(table, 384, lambda config: False) is None


def test_where_no_point_tells_a_time_the_winner_is_taken_then_the_default() -> None:
    table = table_of({512: (None, None, None)})
    assert picked(table, 400) == NARROW
    assert picked(table, 400, lambda config: config == DEFAULT) == DEFAULT


def test_legality_is_asked_only_until_a_config_may_run() -> None:
    asked: list[Config] = []
    picked(table_of({384: (9.0, 5.0, 7.0), 512: (9.0, 5.0, 7.0)}), 384, lambda c: asked.append(c) is None)
    assert asked == [WIDE]


def test_the_reason_names_the_point_and_the_time() -> None:
    table = table_of({384: (9.0, 5.0, 7.0), 512: (9.0, 5.0, 7.0)})
    chosen = pick(table.entries[0], table, None, DEFAULT, recorded.problem(390), lambda config: True)
    assert chosen is not None
    assert "5.0 us" in chosen.reason
    assert "M=384" in chosen.reason


@pytest.mark.parametrize(
    ("us", "config"), [(10.0 / (1 + PREDICTED_GAIN), WIDE), (10.0 / (1 + PREDICTED_GAIN) + 0.01, DEFAULT)]
)
def test_a_prediction_leaves_the_default_only_for_the_full_gain(us: float, config: Config) -> None:
    points: dict[int, tuple[float | None, ...]] = {384: (20.0, us, 10.0), 512: (20.0, 20.0, 10.0)}
    assert picked(table_of(points, evidence="predicted"), 384) == config
    assert picked(table_of(points, evidence="measured"), 384) == WIDE


def test_a_pick_of_a_kept_rule_is_fast() -> None:
    times = tuple(float(i) for i in range(1, 10))
    portfolio = [recorded.config(64, n, k, 1, o) for n in (64, 128) for k in (32, 64) for o in (1, 2)]
    points: dict[int, tuple[float | None, ...]] = dict.fromkeys((149, 192, 213, 256), times)
    rule, size = bucket_rule(256, points, portfolio=portfolio), recorded.problem(233)
    seconds = min(timeit.repeat(lambda: rule.estimates(size, DEFAULT), number=50, repeat=20)) / 50
    assert seconds < 200e-6  # 50 us on an idle core: nine configs, two counts of tiles each


# Leaving points out -----------------------------------------------------------------------------------------


def left_out(points: dict[int, tuple[float | None, ...]]) -> float:
    return leave_one_out_regret(
        [Point(size={"M": size}, us=us) for size, us in points.items()],
        axes=recorded.AXES,
        bucket=recorded.problem(max(points)),
        portfolio=(NARROW, WIDE),
        default=DEFAULT,
        tiles=None,
        sm_count=recorded.SM_COUNT,
    )


def test_leaving_out_each_point_gives_the_worst_of_what_the_others_would_choose_for_it() -> None:
    # 300 is told from 384 and takes the second config, 6.0 where 4.0 is best; 384 and 512 lose less.
    assert left_out({300: (4.0, 6.0, 9.0), 384: (6.0, 5.0, 9.0), 512: (9.0, 8.0, 9.0)}) == pytest.approx(0.5)


def test_a_lone_point_leaves_no_regret_to_be_told() -> None:
    assert left_out({512: (4.0, 6.0, 9.0)}) == 0.0


def test_a_config_that_did_not_run_at_the_point_left_out_is_passed_over() -> None:
    assert left_out({384: (None, 5.0, 4.0), 512: (8.0, 8.5, 8.8)}) == pytest.approx(5.0 / 4.0 - 1)


# On the recorded sweep --------------------------------------------------------------------------------------


def portfolio_of_the_edges() -> tuple[Config, ...]:
    times = recorded.times(recorded.edges())
    estimates = estimates_inside(times, recorded.AXES, recorded.tiles, recorded.SM_COUNT)
    return choose_portfolio(times, dict.fromkeys([*times, *estimates], DEFAULT), estimates=estimates)


def recorded_rule(bucket: int, inside: Iterable[int], portfolio: Sequence[Config]) -> BucketRule:
    columns = (*portfolio, DEFAULT)
    return bucket_rule(
        bucket,
        {size: tuple(recorded.us(size, config) for config in columns) for size in (*inside, bucket)},
        portfolio=portfolio,
    )


def inside(bucket: int) -> list[int]:
    return [size for size in recorded.sizes() if edge(size) == bucket and size != bucket]


def regrets(points: Callable[[int, int], Iterable[int]]) -> Iterator[float]:
    """Regret, against all 96 configs, of every size that is no edge; `points(bucket, size)` are known."""
    portfolio = portfolio_of_the_edges()
    for bucket in recorded.edges():
        for size in inside(bucket):
            rule = recorded_rule(bucket, points(bucket, size), portfolio)
            yield recorded.regret(size, rule.estimates(recorded.problem(size), DEFAULT)[0].config)


def test_sizes_that_were_not_swept_lose_at_most_3_percent_in_the_mean_and_15_at_the_95th_percentile() -> None:
    told = list(regrets(lambda bucket, size: [other for other in inside(bucket) if other != size]))
    assert len(told) == 14
    assert recorded.geometric_mean(told) <= 0.015
    assert recorded.percentile_95(told) <= 0.075


def test_even_the_edges_alone_stay_within_the_target() -> None:
    told = list(regrets(lambda bucket, size: []))
    assert recorded.geometric_mean(told) <= 0.015
    assert recorded.percentile_95(told) <= 0.075


def test_the_default_and_the_nearest_edge_s_winner_miss_the_target_on_the_same_sizes() -> None:
    sizes = [size for bucket in recorded.edges() for size in inside(bucket)]
    assert recorded.geometric_mean(recorded.regret(size, DEFAULT) for size in sizes) > 0.03
    winners = {
        bucket: min(recorded.times()[recorded.problem(bucket)].values(), key=lambda t: t.mean_us)
        for bucket in recorded.edges()
    }
    nearest = [
        recorded.regret(size, winners[edge(size) // 2 if size < edge(size) * 0.75 else edge(size)].config)
        for size in sizes
    ]
    assert recorded.percentile_95(nearest) > 0.15


def test_a_point_in_each_half_of_a_bucket_is_needed_and_enough() -> None:
    portfolio = portfolio_of_the_edges()

    def worst(known: tuple[int, ...]) -> float:
        rule = recorded_rule(256, known, portfolio)
        others = [size for size in inside(256) if size not in known]
        return max(
            recorded.regret(size, rule.estimates(recorded.problem(size), DEFAULT)[0].config)
            for size in others
        )

    assert worst((160,)) > 0.10, "the lower half alone"
    assert worst((192, 200)) > 0.05, "the upper half alone"
    assert worst((160, 192)) == worst((160, 200)) == 0.0


def test_scaling_by_waves_is_what_makes_the_edges_tell() -> None:
    def worst(tiles: Tiles | None) -> float:
        found = []
        for bucket, size in itertools.product((512, 1024), recorded.sizes()):
            if size in inside(bucket):
                rule = bucket_rule(
                    bucket,
                    {bucket: tuple(recorded.us(bucket, c) for c in (*portfolio, DEFAULT))},
                    portfolio=portfolio,
                    tiles=tiles,
                )
                found.append(recorded.regret(size, rule.estimates(recorded.problem(size), DEFAULT)[0].config))
        return max(found)

    portfolio = portfolio_of_the_edges()
    assert worst(recorded.tiles) < 0.07
    assert worst(None) > 0.15


def test_a_rule_made_of_a_table_is_the_rule_of_its_entry() -> None:
    table = table_of({384: (9.0, 5.0, 7.0), 512: (9.0, 5.0, 7.0)})
    rule = rule_of(table.entries[0], table, recorded.tiles)
    assert rule.estimates(recorded.problem(384), DEFAULT)[0].config == WIDE
