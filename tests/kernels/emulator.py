"""Tile code run on the CPU, block after block, on torch tensors. Not a test itself.

Holds only what the shipped kernels use of cuda.tile. It shows that their indexing and arithmetic are right;
what the compiler makes of them is for the GPU tests.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aot_tune import cutile
from aot_tune.config import Config
from aot_tune.device import Device
from aot_tune.tunable import Tunable
from tests.samples import SM90


class Tile:
    """A tile: fixed shape, arithmetic with tiles and scalars."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def astype(self, dtype: torch.dtype) -> Tile:
        return Tile(self.values.to(dtype))

    def reshape(self, shape: tuple[int, ...]) -> Tile:
        return Tile(self.values.reshape(shape))


def _binary(operation: Callable[[Any, Any], Any]) -> Callable[[Tile, Any], Tile]:
    return lambda self, other: Tile(operation(self.values, getattr(other, "values", other)))


for _name in ("add", "sub", "mul", "truediv"):
    setattr(Tile, f"__{_name}__", _binary(getattr(operator, _name)))


def run(
    tunable: Tunable, args: Sequence[Any], config: Config, monkeypatch: pytest.MonkeyPatch, *, sms: int = 3
) -> int:
    """Run a declaration's kernel on CPU tensors, as `launch` would on a GPU of `sms` multiprocessors.

    Returns:
        The number of blocks.
    """
    function = cutile.python_function(tunable.kernel)
    device = Device.reference(SM90).with_sm_count("emulated", sms)
    (blocks,) = tunable.grid_fn(config, device, tunable.problem_of(*args))
    kernel_args = tunable.args_fn(config, *args)
    written: dict[int, torch.Tensor] = {}
    for block in range(blocks):
        monkeypatch.setattr(
            importlib.import_module(function.__module__), "ct", _tile_functions(block, blocks, written)
        )
        function(*kernel_args)
    for name, arg in zip(tunable.parameters, args, strict=True):
        if name in tunable.mutated:
            count = written[arg.data_ptr()]
            assert bool((count == 1).all()), (
                f"{name} has elements written {count.min()} to {count.max()} times"
            )
    return blocks


def _tile_functions(block: int, blocks: int, written: dict[int, torch.Tensor]) -> SimpleNamespace:
    def load(
        array: torch.Tensor, index: Any, shape: Any, *, padding_mode: Any = None, allow_tma: Any = None
    ) -> Tile:
        # Outside of the array stands what was asked for, or what no result may depend on.
        tile = torch.full(shape, 0.0 if padding_mode == "zero" else torch.nan, dtype=array.dtype)
        part = array[_slices(array, index, shape)]
        tile[tuple(slice(size) for size in part.shape)] = part
        return Tile(tile)

    def store(array: torch.Tensor, index: Any, tile: Tile, *, allow_tma: Any = None) -> None:
        assert tile.values.dtype == array.dtype
        place = _slices(array, index, tile.values.shape)
        array[place] = tile.values[tuple(slice(size) for size in array[place].shape)]
        written.setdefault(array.data_ptr(), torch.zeros(array.shape, dtype=torch.int32))[place] += 1

    def mma(x: Tile, y: Tile, acc: Tile) -> Tile:
        return Tile(acc.values + x.values.float() @ y.values.float())

    return SimpleNamespace(
        bid=lambda axis: block,
        num_blocks=lambda axis: blocks,
        cdiv=lambda x, y: -(-x // y),
        load=load,
        store=store,
        mma=mma,
        zeros=lambda shape, dtype: Tile(torch.zeros(shape, dtype=dtype)),
        sum=lambda tile, axis, keepdims: Tile(tile.values.sum(axis, keepdim=keepdims)),
        rsqrt=lambda tile: Tile(torch.rsqrt(tile.values)),
        PaddingMode=SimpleNamespace(ZERO="zero"),
        float32=torch.float32,
    )


def _slices(array: torch.Tensor, index: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    starts = [place * size for place, size in zip(index, shape, strict=True)]
    assert all(start < size for start, size in zip(starts, array.shape, strict=True)), (
        "a tile outside of its array"
    )
    return tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))
