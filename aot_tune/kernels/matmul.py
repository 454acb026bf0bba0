"""Matrix product: kernel, host function, declaration. Knows nothing of tuning or tables.

Persistent blocks take the tiles of C in an order that keeps L2 warm: `group` rows of tiles at a time, down
the group before along it (the grouped order of Triton's matrix multiplication tutorial).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs
from aot_tune.arch import Arch
from aot_tune.bucket import Exact, Pow2, edge
from aot_tune.config import Config
from aot_tune.device import Device
from aot_tune.kernels.arguments import check_apart, check_dtype, check_rank, check_shape, check_sizes
from aot_tune.problem import Problem
from aot_tune.tunable import Close, Tunable, Work


@ct.kernel
def matmul_kernel(  # type: ignore[no-untyped-def]
    a, b, c,
    tile_m: ct.Constant[int], tile_n: ct.Constant[int], tile_k: ct.Constant[int], group: ct.Constant[int],
):  # fmt: skip
    """Compute every `num_blocks`-th tile of C, accumulating in float32."""
    zero = ct.PaddingMode.ZERO
    tiles_m, tiles_n = ct.cdiv(a.shape[0], tile_m), ct.cdiv(b.shape[1], tile_n)
    steps = ct.cdiv(a.shape[1], tile_k)
    for tile in range(ct.bid(0), tiles_m * tiles_n, ct.num_blocks(0)):
        first = tile // (group * tiles_n) * group
        rows = min(tiles_m - first, group)
        place = tile % (group * tiles_n)
        m, n = first + place % rows, place // rows
        # The first step stands before the loop. Begun from zeros inside it, the compiler folds "step 0 starts
        # from zero" into the loop and selects every accumulator anew at each step, or waits for each product
        # before the next: of 108 configs 31 were seen to pipeline on sm_90 (tileiras 13.4). So, 80 do.
        x = ct.load(a, (m, 0), (tile_m, tile_k), padding_mode=zero)
        y = ct.load(b, (0, n), (tile_k, tile_n), padding_mode=zero)
        acc = ct.mma(x, y, ct.zeros((tile_m, tile_n), ct.float32))
        for step in range(1, steps):
            x = ct.load(a, (m, step), (tile_m, tile_k), padding_mode=zero)
            y = ct.load(b, (step, n), (tile_k, tile_n), padding_mode=zero)
            acc = ct.mma(x, y, acc)
        ct.store(c, (m, n), acc.astype(c.dtype))


def matmul(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply two matrices, accumulating in float32.

    Args:
        a: (M, K), bfloat16 or float16, on a GPU; any strides.
        b: (K, N), of the dtype of `a`; any strides, so that a linear layer's ``weight.t()`` will do.
        out: (M, N), where to write, of the dtype of `a`, apart from both in memory; a new tensor without it.

    Returns:
        `out`, or the new tensor.

    Raises:
        LaunchError: An argument cannot be launched; it names the argument and what to pass.
    """
    check_rank("matmul", "a", a, "M K")
    check_rank("matmul", "b", b, "K N")
    check_dtype("matmul", "a", a, torch.bfloat16, torch.float16)
    check_dtype("matmul", "b", b, a.dtype)
    (m, k), n = a.shape, b.shape[1]
    check_shape("matmul", "b", b, (k, n), f"a of {k} columns")
    if out is None:
        out = torch.empty((m, n), dtype=a.dtype, device=a.device)
    check_shape("matmul", "out", out, (m, n), "the product")
    check_dtype("matmul", "out", out, a.dtype)
    if out.numel() == 0:
        return out
    if k == 0:
        return out.zero_()  # a sum of nothing
    check_sizes("matmul", a=a, b=b, out=out)
    check_apart("matmul", "out", out, a=a, b=b)
    matmul_tunable.launch(a, b, out)
    return out


# The search space -------------------------------------------------------------------------------

_Rows = Sequence[tuple[tuple[int, ...], ...]]
"""Values of tile_m, tile_n, tile_k, group, num_ctas and occupancy; a row stands for their product."""

_WARPGROUP: _Rows = (
    # A few tokens: only the bytes of B count. Narrow tiles give every multiprocessor one; steps are deep.
    ((16,), (32, 64, 128), (128, 256), (8,), (1,), (1, 2)),
    ((32,), (64, 128), (128,), (8,), (1,), (1, 2)),
    ((64,), (32, 64), (128, 256), (8,), (1,), (1, 2)),
    # Tens of tokens to hundreds.
    ((64,), (64, 128), (64,), (8,), (1,), (1, 2)),
    ((64,), (128,), (128,), (8,), (1, 2), (1, 2)),
    ((64,), (256,), (64, 128), (8,), (1, 2), (1,)),
    ((128,), (64,), (64, 128), (8,), (1,), (1, 2)),
    # Prompts: the most accumulators that stay in registers; two blocks share a tile or a multiprocessor.
    ((128,), (128,), (64, 128), (8, 16), (1, 2), (1, 2)),
    ((128,), (256,), (64, 128), (8, 16), (2,), (1,)),
    ((256,), (128,), (64, 128), (8, 16), (2,), (1,)),
    ((256,), (128,), (64,), (8, 16), (2,), (2,)),
    ((256,), (64,), (64, 128), (8,), (1,), (1,)),
)
"""sm90. Its own matrix unit takes 64 rows or more; fewer run on the older one, a warp wide."""

_TENSOR_MEMORY: _Rows = (
    ((16,), (32, 64, 128), (128, 256), (8,), (1,), (1, 2)),
    ((32,), (64, 128), (128,), (8,), (1,), (1, 2)),
    ((64,), (64, 128), (64, 128), (8,), (1,), (1, 2)),
    ((64,), (128, 256), (128,), (8,), (2,), (1,)),
    ((128,), (64,), (64, 128), (8,), (1,), (1, 2)),
    ((128,), (128, 256), (64, 128), (8, 16), (1, 2), (1, 2)),
    ((256,), (128, 256), (64, 128), (8, 16), (1, 2), (1,)),
)
"""sm100 to sm110: accumulators have a memory of their own, twice what registers would hold."""

_WARP: _Rows = (
    ((16,), (32, 64, 128), (64, 128), (8,), (1,), (1, 2)),
    ((32,), (64, 128), (64, 128), (8,), (1,), (1, 2)),
    ((64,), (64,), (64, 128), (8,), (1,), (1, 2)),
    ((64,), (128, 256), (32, 64), (8,), (1,), (1, 2)),
    ((128, 256), (64,), (32, 64), (8,), (1,), (1, 2)),
    ((128,), (128,), (32, 64), (8, 16), (1, 2), (1, 2)),
    ((128,), (256,), (32, 64), (8, 16), (2,), (1,)),
    ((256,), (128,), (32, 64), (8, 16), (2,), (1,)),
)
"""sm80 to sm89, sm120 and later: matrix units fed from registers, a warp at a time."""


def _rows(arch: Arch) -> _Rows:
    return {9: _WARPGROUP, 10: _TENSOR_MEMORY, 11: _TENSOR_MEMORY}.get(arch.major, _WARP)


@cache  # _default asks for one at each unseen shape
def _config(tile_m: int, tile_n: int, tile_k: int, group: int, num_ctas: int, occupancy: int) -> Config:
    return Config(
        constants={"tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k, "group": group},
        hints={"num_ctas": num_ctas, "occupancy": occupancy},
    )


@cache
def _space(arch: Arch) -> tuple[Config, ...]:
    every = (_config(*v) for row in _rows(arch) for v in itertools.product(*row))
    return tuple(config for config in every if _does_not_fit(config, arch) is None)


def _default(arch: Arch, problem: Problem) -> Config:
    few = problem.size("M") <= 64
    if _rows(arch) is _WARP:
        # Two blocks hide each other's waits; told to expect one, the compiler spills on sm80.
        return _config(*((64, 128, 64) if few else (128, 128, 32)), group=8, num_ctas=1, occupancy=2)
    return _config(*((64, 64, 128) if few else (128, 128, 64)), group=8, num_ctas=1, occupancy=1)


# What is allowed --------------------------------------------------------------------------------

_REGISTER_ACCUMULATORS = 128 * 128
"""Sums a block keeps in registers. On sm_90 every config with more spilled, and none with fewer."""

_TENSOR_MEMORY_ACCUMULATORS = 128 * 512
"""Sums in a multiprocessor's tensor memory: 128 lanes of 512 columns (PTX ISA, tcgen05)."""

_ITEM_BYTES = 2  # bfloat16 and float16

_ALWAYS_ROWS = 64
"""Tiles of this many rows suit every problem, so that a default does."""


def _legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    return _does_not_fit(config, arch) or _does_not_suit(config, problem) or True


def _does_not_fit(config: Config, arch: Arch) -> str | None:
    """Why a config is not for an arch, or None."""
    tile_m, tile_n, tile_k, _ = _tile(config)
    num_ctas, occupancy = _hints(config)
    if num_ctas > 1 and arch < Arch(9, 0):
        return f"{arch} has no clusters of blocks; num_ctas must be 1"
    sums = tile_m * tile_n // num_ctas
    if _rows(arch) is _TENSOR_MEMORY:
        if sums * occupancy > _TENSOR_MEMORY_ACCUMULATORS:
            return f"{occupancy} tiles of {tile_m} x {tile_n} over {num_ctas} blocks overflow tensor memory"
    elif sums > _REGISTER_ACCUMULATORS:
        return f"a tile of {tile_m} x {tile_n} over {num_ctas} blocks overflows the registers"
    # Two steps must fit: with one, each load is waited for. Blocks that share a tile split its long side.
    stage = (max(tile_m, tile_n) // num_ctas + min(tile_m, tile_n)) * tile_k * _ITEM_BYTES
    available = Device.reference(arch).shared_memory_per_sm
    if 2 * stage * occupancy > available:
        return f"{occupancy} blocks of 2 x {stage} bytes overflow {available} of shared memory"
    return None


def _does_not_suit(config: Config, problem: Problem) -> str | None:
    """Why a config is a waste on a problem's bucket, or None; the default never is."""
    tile_m, _, _, group = _tile(config)
    rows = edge(problem.size("M"))
    if tile_m > max(_ALWAYS_ROWS, 2 * rows):
        return f"a tile of {tile_m} rows is more than half empty for up to {rows}"
    if tile_m < _ALWAYS_ROWS and rows > 4 * tile_m:
        return f"tiles of {tile_m} rows read B more than four times over for up to {rows}"
    if group > 8 and -(-rows // tile_m) <= 8:
        return f"group {group} orders the tiles of up to {rows} rows as group 8 does"
    return None


# The declaration --------------------------------------------------------------------------------


def _tile(config: Config) -> tuple[int, int, int, int]:
    """tile_m, tile_n, tile_k and group of a config."""
    return int(config["tile_m"]), int(config["tile_n"]), int(config["tile_k"]), int(config["group"])


def _hints(config: Config) -> tuple[int, int]:
    """num_ctas and occupancy of a config, which a caller's own may leave out."""
    return config.hints.get("num_ctas", 1), config.hints.get("occupancy", 1)


def _problem(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Mapping[str, object]:
    return {"dtype": a.dtype, "M": a.shape[0], "N": b.shape[1], "K": a.shape[1]}


def _tiles(config: Config, problem: Problem) -> int:
    return -(-problem.size("M") // int(config["tile_m"])) * -(-problem.size("N") // int(config["tile_n"]))


def _work(config: Config, problem: Problem) -> Work:
    tile_m, tile_n, tile_k, _ = _tile(config)
    return Work(
        steps=-(-problem.size("K") // tile_k),
        flops=2.0 * tile_m * tile_n * tile_k,
        load_bytes=float((tile_m + tile_n) * tile_k * _ITEM_BYTES),
        store_bytes=float(tile_m * tile_n * _ITEM_BYTES),
    )


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    num_ctas, occupancy = _hints(config)
    return (max(1, min(device.sm_count * occupancy // num_ctas, _tiles(config, problem))),)


def _args(config: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
    return a, b, out, *_tile(config)


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    m, n, k, dtype = problem.size("M"), problem.size("N"), problem.size("K"), str(problem["dtype"])
    a = inputs.randn((m, k), dtype, device, 2 * seed)
    b = inputs.randn((k, n), dtype, device, 2 * seed + 1, scale=k**-0.5)  # so that C is of the order of 1
    return a, b, inputs.empty((m, n), dtype, device)


def _reference(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Close:
    # One rounding to the output's dtype is half its eps. The absolute term is for the float32 sums, which the
    # matrix units truncate: 2^-23 of a running sum near 1, 1800 times for the largest K, is 2e-4. A step of
    # tile_k left out would show as 0.05.
    return Close(value=a.double() @ b.double(), rtol=torch.finfo(a.dtype).eps, atol=2e-3)


_M, _BOTH = Pow2.edges(1, 16384), ("bfloat16", "float16")

matmul_tunable = Tunable(
    name="matmul",
    package=__package__,
    kernel=matmul_kernel,
    axes={"M": Pow2(), "N": Exact(), "K": Exact()},
    problem=_problem,
    search_space=lambda arch, problem: _space(arch),
    legal=_legal,
    default=_default,
    grid_fn=_grid,
    args_fn=_args,
    tiles=_tiles,
    work=_work,
    make_args=_make_args,
    reference=_reference,
    outputs=("out",),
    typical=[
        {"dtype": _BOTH, "M": _M, "N": 6144, "K": 4096},  # Llama 3.1 8B, queries, keys and values
        {"dtype": "bfloat16", "M": _M, "N": 4096, "K": 4096},  # Llama 3.1 8B, attention output
        {"dtype": _BOTH, "M": _M, "N": 28672, "K": 4096},  # Llama 3.1 8B, gate and up
        {"dtype": _BOTH, "M": _M, "N": 4096, "K": 14336},  # Llama 3.1 8B, down
        {"dtype": "bfloat16", "M": _M, "N": 10240, "K": 8192},  # Llama 3.1 70B, queries, keys and values
        {"dtype": "bfloat16", "M": _M, "N": 8192, "K": 28672},  # Llama 3.1 70B, down
        {"dtype": "bfloat16", "M": _M, "N": 5120, "K": 25600},  # Qwen3 32B, down
        {"dtype": "bfloat16", "M": _M, "N": 5120, "K": 2048},  # Qwen3 30B-A3B, queries, keys and values
        {"dtype": "bfloat16", "M": _M, "N": 5120, "K": 2880},  # gpt-oss, queries, keys and values
        {"dtype": "bfloat16", "M": _M, "N": 2880, "K": 4096},  # gpt-oss, attention output
        {"dtype": "bfloat16", "M": _M, "N": 24576, "K": 1536},  # DeepSeek-V3, queries from their latent
        {"dtype": "bfloat16", "M": _M, "N": 7168, "K": 16384},  # DeepSeek-V3, attention output
    ],
)
"""The declaration; ``matmul_tunable.launch(a, b, out)`` takes the shapes that `matmul` takes."""
