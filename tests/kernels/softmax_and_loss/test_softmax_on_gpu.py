"""softmax on a real GPU: right over dtypes, ragged sizes, size 1, views, infinities and its search space."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aot_tune import workspace
from aot_tune.kernels.rows import row_groups
from aot_tune.kernels.softmax_and_loss.softmax import softmax, softmax_tunable
from tests.support.agree import problem
from tests.support.kernels_on_gpu import check, here, normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("defaults_only")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "cols"),
    [(1, 1), (1, 4096), (3, 5), (1000, 8), (999, 129), (17, 2880), (300, 14336), (5, 32768), (3, 32769),
     (40, 50257), (7, 128256), (2, 300001)],
)  # fmt: skip
def test_softmax_agrees_with_the_reference(rows: int, cols: int, dtype: str) -> None:
    check(softmax_tunable, problem(dtype=dtype, rows=rows, cols=cols))


@pytest.mark.parametrize("rows", [401, 512])
@pytest.mark.parametrize("cols", [8, 100, 128, 2048, 8192, 32000, 50257, 128256, 262144])
def test_softmax_agrees_in_every_config(rows: int, cols: int) -> None:
    # More rows than the GPU holds blocks at a time.
    check(softmax_tunable, problem(dtype="float32", rows=rows, cols=cols), every=1)


@pytest.mark.parametrize("cols", [7, 5000, 40000, 128256])
def test_infinities_nan_and_the_lowest_numbers_come_out_as_torchs_do(cols: int) -> None:
    x = normal(6, cols, dtype=torch.float32)
    x[0, 1:] = -torch.inf
    x[1] = -torch.inf
    x[2, 3], x[3, 3] = torch.nan, torch.inf
    x[4] = torch.finfo(torch.float32).min
    x[5, :5] = 3e38
    wanted, one = torch.softmax(x, dim=1), problem(dtype="float32", rows=6, cols=cols)
    for config in softmax_tunable.candidates(here(), one)[::3]:
        out, slots = (
            torch.empty_like(x),
            workspace(x.device, 1, row_groups.ints(6, row_groups.MOST_LANES)).counters,
        )
        softmax_tunable.launch(x, out, slots, config=config)
        torch.testing.assert_close(out, wanted, equal_nan=True, rtol=1e-5, atol=1e-7)
        assert not bool(slots.any())


@pytest.mark.parametrize("cols", [32000, 128256])
def test_rows_that_blocks_share_come_out_the_same_again_and_again(cols: int) -> None:
    x = normal(700, cols, dtype=torch.float32)
    one = problem(dtype="float32", rows=700, cols=cols)
    slots = workspace(x.device, 1, row_groups.ints(700, row_groups.MOST_LANES)).counters
    for config in softmax_tunable.candidates(here(), one):
        if int(config["members"]) > 1:
            first = torch.empty_like(x)
            softmax_tunable.launch(x, first, slots, config=config)
            for _ in range(20):
                out = torch.empty_like(x)
                softmax_tunable.launch(x, out, slots, config=config)
                assert torch.equal(out, first), config
            assert not bool(slots.any())


def test_a_graph_and_several_streams_share_rows_rightly() -> None:
    x = normal(64, 128256, dtype=torch.float32)
    wanted = softmax(x)
    streams: list[Any] = [torch.cuda.Stream() for _ in range(4)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    outs = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(softmax(x))
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out in outs)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(x)
    with torch.cuda.graph(graph):
        softmax(x, out=out)
        softmax(out.log(), out=out)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(out, wanted)


def test_softmax_takes_any_rank_and_rows_of_a_wider_tensor() -> None:
    for x in (normal(256), normal(2, 3, 256), normal(7, 512)[:, 128:384], normal(7, 300)[:, 5:261]):
        wanted = torch.softmax(x.double(), dim=-1)
        torch.testing.assert_close(softmax(x).double(), wanted, rtol=1e-2, atol=1e-6)
    wide = torch.full((7, 80000), torch.nan, device="cuda")
    x = normal(7, 40000, dtype=torch.float32)
    softmax(x, out=wide[:, 40000:])
    torch.testing.assert_close(wide[:, 40000:], torch.softmax(x, dim=1))
    assert bool(wide[:, :40000].isnan().all()), "written outside of out"


@pytest.mark.parametrize("cols", [8192, 128256])
def test_softmax_is_right_beyond_2_to_the_31_elements(cols: int) -> None:
    rows = 2**31 // cols + 100  # 4.3 GB
    x = normal(rows, cols)
    out = softmax(x)
    for part in (slice(0, 100), slice(rows - 100, rows)):
        wanted = torch.softmax(x[part].double(), dim=1)
        torch.testing.assert_close(out[part].double(), wanted, rtol=1e-2, atol=1e-6)
    torch.cuda.empty_cache()
