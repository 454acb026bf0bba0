"""A small table of a made-up matmul, and what it is made of, for tests of reading, writing and ordering."""

from __future__ import annotations

import dataclasses

from aot_tune.tables.table import BuiltWith, Entry, Point, StateTimes, Table
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

BUILT_WITH = BuiltWith(
    device_name="NVIDIA H200", sm_count=132, cuda_tile="1.7.0", tileiras="13.4.92", driver="580.159.04"
)
SMALL = Config(constants={"tile_m": 64}, hints={"num_ctas": 1, "occupancy": 2})
LARGE = Config(constants={"tile_m": 128}, hints={"num_ctas": 2})


def small_entry(m: int, dtype: str = "bfloat16") -> Entry:
    """A measured entry of the bucket that ends at M."""
    return Entry(
        bucket=Problem({"dtype": dtype, "M": m, "N": 6144}),
        config=SMALL,
        mean_us=23.1,
        error_margin_us=0.1,
        default_us=30.2,
        regret=0.01,
        evidence="measured",
        points=(
            Point(size={"M": m * 5 // 8}, us=(23.0, None, 30.0)),
            Point(size={"M": m}, us=(23.1, 24.0, 30.2)),
        ),
    )


TABLE = Table(
    kernel="matmul",
    arch=Arch(9, 0),
    source_hash="3f0c9a51d2e4b678",
    check_hash="51d2e4b6783f0c9a",
    built_with=BUILT_WITH,
    axes={"M": Pow2(), "N": Exact()},
    portfolio=(SMALL, LARGE),
    portfolio_regret=0.024,
    entries=(small_entry(64), small_entry(128), small_entry(64, "float16")),
)

_SPLIT = Config(constants={"tile_m": 64}, hints={"num_ctas": 1}, kernel="split_k")

WITH_STATES = dataclasses.replace(
    TABLE,
    portfolio=(SMALL, _SPLIT),
    entries=(
        dataclasses.replace(
            small_entry(64),
            disturbed="another process ran on the GPU",
            states={"cool": StateTimes(mean_us=20.0, default_us=26.0)},
            points=(
                Point(size={"M": 40}, us=(23.0, None, 30.0), states={"cool": (19.0, None, 25.0)}),
                Point(size={"M": 64}, us=(23.1, 24.0, 30.2)),
            ),
        ),
        dataclasses.replace(small_entry(128), config=_SPLIT),
    ),
)
"""A table with a value for each optional key but `slopes`."""
