"""The reading alone that the bench times beside attention_decode: the same pages of the same heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aot_tune.bench.kernels.rivals import paged_read
from aot_tune.declare.discovery import FoundKernel
from aot_tune.kernels.decode import flash_decoding
from aot_tune.kernels.decode.attention_decode import attention_decode_tunable
from aot_tune.nvidia import cutile
from aot_tune.nvidia.cubin import resources
from aot_tune.tunable import Tunable
from aot_tune.tuner.plan.candidates import DeviceKernel
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem
from tests.support import emulator
from tests.support.samples import SM90


def config(splits: int, *, tile_n: int = 64, balanced: bool = False, gather: bool = True) -> Config:
    return Config(
        constants={"splits": splits, "balanced": balanced, "tile_n": tile_n, "gather": gather},
        hints={"num_ctas": 1, "occupancy": 2},
    )


def loads_of(
    tunable: Tunable, module: Any, args: tuple[Any, ...], one: Config, at_once: int
) -> list[tuple[object, ...]]:
    """What a kernel asks of `paged_cache`, on CPU tensors: pages, head and tile of each load."""
    found: list[tuple[object, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        tiles, windows = module.keys_and_values, module.tiles_of_window

        def keys_and_values(caches: Any, numbers: Any, head: Any, tile: Any, *sizes: Any) -> Any:
            found.append(("tile", [int(number) for number in numbers], int(head), int(tile), sizes))
            return tiles(caches, numbers, head, tile, *sizes)

        def tiles_of_window(caches: Any, table: Any, place: Any, pages: Any, *sizes: Any) -> Any:
            found.append(("window", *map(int, place), *map(int, pages), sizes))
            return windows(caches, table, place, pages, *sizes)

        patch.setattr(module, "keys_and_values", keys_and_values)
        patch.setattr(module, "tiles_of_window", tiles_of_window)
        emulator.run(tunable, args, one, patch, sms=16, at_once=at_once)
    return sorted(found, key=repr)


def problem(**sizes: Any) -> Problem:
    usual = {
        "dtype": "bfloat16",
        "windowed": False,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "page_size": 16,
    }
    return Problem({**usual, **sizes})


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("one", "sizes", "kind"),
    [
        (config(1), {"batch": 3, "context": 300}, "tile"),
        (config(4), {"batch": 2, "context": 400}, "tile"),
        (config(2, tile_n=128), {"batch": 2, "context": 400}, "tile"),
        (config(4, gather=False), {"batch": 2, "context": 400, "page_size": 64}, "tile"),
        (config(4, balanced=True), {"batch": 5, "context": 500}, "tile"),
        (config(4), {"batch": 17, "context": 200}, "tile"),  # the longest first
        (config(1), {"batch": 4, "context": 128, "windowed": True}, "window"),
        (config(2), {"batch": 2, "context": 256, "windowed": True}, "tile"),
    ],
    ids=str,
)
def test_it_asks_for_what_attention_decode_asks_for(one: Config, sizes: dict[str, Any], kind: str) -> None:
    args = attention_decode_tunable.make_args(problem(**sizes), torch.device("cpu"), 4)
    wanted = loads_of(attention_decode_tunable, flash_decoding, args, one, at_once=32)
    assert {load[0] for load in wanted} == {kind}
    for cache in args[1:3]:
        cache.fill_(1)
    lse = args[6].zero_()
    assert loads_of(paged_read.paged_read_tunable, paged_read, args, one, at_once=1) == wanted
    assert bool((lse > 0).any(dim=1).all()), "nothing of what is loaded is stored: it need not be loaded"


@pytest.mark.process
@pytest.mark.parametrize(
    ("one", "sizes"),
    [
        (config(16, balanced=True), {"batch": 8, "context": 8192, "head_dim": 128}),
        (config(1), {"batch": 256, "context": 128, "windowed": True}),
    ],
    ids=["balanced", "window"],
)
def test_it_compiles(one: Config, sizes: dict[str, Any]) -> None:
    kernel = DeviceKernel(
        FoundKernel(module=paged_read.__name__, tunable=paged_read.paged_read_tunable), SM90
    )
    job = kernel.job(problem(**sizes), one)
    cubin = cutile.compile_cubin(kernel.tunable.kernel, job.hints, job.signature, SM90, timeout_s=120)
    assert resources(cubin).stack_bytes == 0
