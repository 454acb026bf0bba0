"""What times amount to: ratios, demands held or missed, shares of the roofline, the lines that tell them."""

from __future__ import annotations

import pytest

from aot_tune.bench.kernels.standing import LARGE_BYTES, NEVER_SLOWER, Demand, Shape, lines, verdict


def shape(
    m: int, *, size: float = 1e6, roofline: float = 5.0, failed: dict[str, str] | None = None, **us: float
) -> Shape:
    return Shape(
        problem={"M": m},
        config="tile=1",
        bytes=size,
        flops=0.0,
        roofline_us=roofline,
        us=us,
        failed=failed or {},
    )


def test_the_fastest_of_several_contenders_counts() -> None:
    one = shape(1, tuned=10, flash=12, cudnn=8)
    assert one.ahead(("flash", "cudnn")) == 0.8
    assert one.ahead(("flash", "absent")) == 1.2
    assert one.ahead(("absent",)) is None
    assert shape(1, flash=12).ahead(("flash",)) is None


@pytest.mark.parametrize(
    ("mean", "worst", "held"),
    [(0.99, None, True), (1.01, None, False), (None, 0.5, True), (0.9, 0.51, False)],
)
def test_a_demand_is_of_the_geometric_mean_of_the_worst_or_of_both(
    mean: float | None, worst: float | None, held: bool
) -> None:
    shapes = [shape(1, tuned=10, other=5), shape(2, tuned=10, other=20)]  # 0.5 and 2
    answer = verdict(Demand(text="as fast", over=("other",), mean=mean, worst=worst), shapes)
    assert answer.held is held
    assert answer.mean == pytest.approx(1)
    assert (answer.worst, answer.worst_at, answer.shapes) == (0.5, "M=1", 2)
    assert str(answer) == (
        f"{'held' if held else 'MISSED'}: as fast (geometric mean 1.000, worst 0.500 at M=1; 2 shapes)"
    )


def test_a_demand_is_asked_of_its_shapes_alone() -> None:
    demand = Demand(text="ahead", over=("other",), mean=1, where=lambda shape: int(shape.problem["M"]) > 1)
    assert verdict(demand, [shape(1, tuned=10, other=1), shape(2, tuned=10, other=11)]).held
    assert str(verdict(demand, [shape(1, tuned=10, other=1)])) == "not measured: ahead"


def test_a_tuned_config_may_be_slower_than_the_default_by_noise_and_no_more() -> None:
    assert verdict(NEVER_SLOWER, [shape(1, tuned=10.2, default=10)]).held
    assert not verdict(NEVER_SLOWER, [shape(1, tuned=10.4, default=10)]).held


def test_the_lines_of_a_kernel_tell_all_of_it() -> None:
    shapes = [
        shape(1, tuned=10, default=20, ours=11, theirs=9),
        shape(2, size=LARGE_BYTES, tuned=10, default=10, ours=12, failed={"theirs": "OutOfMemory"}),
    ]
    told = "\n".join(lines(shapes, ("ours", "theirs")))
    assert "over its default               1.414x   worst 1.000x at M=2" in told
    assert "over the best of them          1.039x   worst 0.900x at M=1" in told
    assert "over theirs                    0.900x   worst 0.900x at M=1" in told
    assert "of its roofline, from 64 MiB   50.0 %   worst 50.0 % at M=2" in told
    assert "no time of theirs: 1 shapes, first OutOfMemory (M=2)" in told


def test_of_nothing_there_is_nothing_to_tell() -> None:
    assert lines([], ("ours",)) == []
