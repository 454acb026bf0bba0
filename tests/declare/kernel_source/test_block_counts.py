"""What a kernel's blocks multiply, load and store, counted without running them on a GPU."""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct
import pytest
import torch

from aot_tune.declare.kernel_source.block_counts import NotCountedError, count_blocks
from aot_tune.kernels.products.fp8.matmul_fp8_block import matmul_fp8_block_tunable
from aot_tune.kernels.products.gate_up_swiglu import gate_up_swiglu_tunable
from aot_tune.kernels.products.linear import linear_tunable
from aot_tune.kernels.products.matmul import matmul_tunable
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.device import Device

SM90 = Arch.parse("sm90")
_SCALE = 2


def _meta(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@ct.function
def _rows_of(a, place, tile: ct.Constant[int]):
    return ct.load(a, (place, 0), (tile, a.shape[1])).astype(ct.float32) * _SCALE


@ct.kernel
def _looping(a, b, out, tile: ct.Constant[int]):
    acc = ct.zeros((tile, tile), dtype=ct.float32)
    for k in range(ct.num_tiles(a, 1, (tile, tile))):
        left = ct.load(a, (ct.bid(0), k), (tile, tile))
        right = ct.load(b, (k, 0), (tile, tile))
        acc = ct.mma(left, right, acc)
    ct.store(out, (ct.bid(0), 0), acc.astype(out.dtype))


@ct.kernel
def _triangle(x, out, tile: ct.Constant[int]):
    total = ct.full((tile,), 0.0, dtype=ct.float32)
    for place in range(ct.bid(0) + 1):
        total += ct.sum(_rows_of(x, place, tile), axis=1)
    if ct.bid(0) == 0:
        total = -total
    ct.store(out, (ct.bid(0),), total)


@ct.kernel
def _gathering(x, index, out, tile: ct.Constant[int]):
    places = ct.load(index, (ct.bid(0),), (tile,))
    rows = ct.gather(x, (places[:, None], ct.arange(8, dtype=ct.int32)[None, :]))
    ct.atomic_add(out, (places[:, None], ct.arange(8, dtype=ct.int32)[None, :]), rows)


@ct.kernel
def _padded(x, out, tile: ct.Constant[int]):
    places = (
        ct.arange(tile, dtype=ct.int32)[:, None] + ct.bid(0) * tile,
        ct.arange(8, dtype=ct.int32)[None, :],
    )
    rows = ct.gather(x, places, padding_value=ct.float16(0.0))
    if x.dtype == ct.float16 and out.dtype == x.dtype:
        ct.scatter(out, places, rows)


@ct.kernel
def _ragged(x, lengths, out, tile: ct.Constant[int]):
    for place in range(ct.load(lengths, (ct.bid(0),), ()).item()):
        ct.store(out, (place,), ct.load(x, (place,), (tile,)))


def test_a_loop_counts_as_often_as_it_runs() -> None:
    counts = count_blocks(_looping, (_meta(64, 512), _meta(512, 16), _meta(64, 16), 16), (4,))
    assert counts.steps == 32
    assert counts.flops == 32 * 2 * 16**3
    assert counts.load_bytes == 32 * 2 * 16 * 16 * 2
    assert counts.store_bytes == 16 * 16 * 2


def test_blocks_of_unlike_work_count_in_the_mean() -> None:
    """The first loads one tile, the last nine, the one between them five."""
    counts = count_blocks(_triangle, (_meta(72, 32), _meta(72, dtype=torch.float32), 8), (9, 1, 1))
    assert counts.load_bytes == 5 * 8 * 32 * 2
    assert counts.store_bytes == 8 * 4
    assert (counts.steps, counts.flops) == (1, 0)


def test_gathered_and_added_elements_count_by_their_indices() -> None:
    args = (_meta(64, 8), _meta(32, dtype=torch.int32), _meta(64, 8), 4)
    counts = count_blocks(_gathering, args, (8,))
    assert counts.load_bytes == 4 * 4 + 4 * 8 * 2
    assert counts.store_bytes == 4 * 8 * 2


def test_a_loop_over_what_was_loaded_is_not_counted_and_its_line_is_told() -> None:
    args = (_meta(64), _meta(4, dtype=torch.int32), _meta(64), 4)
    told = r"depends on what was loaded \(test_block_counts.py, line \d+\)"
    with pytest.raises(NotCountedError, match=told):
        count_blocks(_ragged, args, (4,))


def test_numbers_of_a_dtype_may_be_made_and_dtypes_compared() -> None:
    counts = count_blocks(_padded, (_meta(64, 8), _meta(64, 8), 4), (4, 2))
    assert counts.load_bytes == 4 * 8 * 2
    assert counts.store_bytes == 4 * 8 * 2
    assert counts.axes == {0}


def test_blocks_that_go_on_for_long_are_not_counted() -> None:
    with pytest.raises(NotCountedError, match="more than 100 times"):
        count_blocks(_looping, (_meta(64, 512), _meta(512, 16), _meta(64, 16), 16), (4,), 100)


def test_the_kernels_own_functions_stay_as_they_are() -> None:
    before: Any = _looping._annotated_function.pyfunc
    count_blocks(_looping, (_meta(64, 512), _meta(512, 16), _meta(64, 16), 16), (4,))
    assert _looping._annotated_function.pyfunc is before
    assert before.__globals__["ct"] is ct


@pytest.mark.parametrize(
    "tunable", [matmul_tunable, linear_tunable, gate_up_swiglu_tunable, matmul_fp8_block_tunable]
)
def test_what_is_counted_of_a_shipped_product_is_the_work_it_declares(tunable: Tunable) -> None:
    """The authors wrote `work` by hand; blocks of a persistent kernel have unequal numbers of tiles."""
    assert tunable.work is not None
    assert tunable.tiles is not None
    problem = tunable.typical_problems[0]
    device = Device.reference(SM90)
    args = tunable.make_args(problem, torch.device("meta"), 0)
    for config in tunable.candidates(SM90, problem)[::9]:
        grid = tunable.grid(config, device, problem)
        counts = count_blocks(tunable.kernel_of(config), tunable.args_fn_on(device)(config, *args), grid)
        work, share = tunable.work(config, problem), math.prod(grid) / tunable.tiles(config, problem)
        assert counts.flops * share == pytest.approx(work.steps * work.flops, rel=0.05), config
        assert counts.load_bytes * share == pytest.approx(work.steps * work.load_bytes, rel=0.05), config
        assert counts.store_bytes * share == pytest.approx(work.store_bytes, rel=0.05), config
