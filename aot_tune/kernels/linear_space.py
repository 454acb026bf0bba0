"""The search space of linear: tiles, which operand gives the rows, hints; which may run, and what to sweep.

Tiles of 64 rows and more are those of Triton's tutorial (03-matrix-multiplication.py), of CUTLASS's kernels
for sm90 (128 x 256 x 64 by eight warps, alone or two that share a tile) and of what matmul is tuned to on the
H200. Tiles of 16 and 32 rows are for the few tokens of a decoding step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache

from aot_tune.arch import Arch
from aot_tune.bucket import edge
from aot_tune.config import Config
from aot_tune.inputs import named_dtype
from aot_tune.kernels.product_space import MatrixUnit, Rows, matrix_unit, overflow, waste
from aot_tune.problem import Problem

# Values of tile_m, tile_n, tile_k, swapped, num_ctas, occupancy and num_worker_warps.
_SPACE: Mapping[MatrixUnit, Rows] = {
    MatrixUnit.WARPGROUP: (
        # A few tokens: only the weight's bytes count. Narrow tiles give every multiprocessor one.
        ((16,), (32,), (256,), (0,), (1,), (1,), (4,)),
        ((16,), (64, 128), (128,), (0, 1), (1,), (1,), (4,)),
        ((16,), (64,), (256,), (1,), (1,), (1,), (4,)),
        ((32,), (64,), (128,), (0, 1), (1,), (1,), (4,)),
        ((32,), (128,), (128,), (1,), (1,), (1,), (4,)),
        # Tens of tokens to hundreds. Tiles of 128 x 128 leave half of the multiprocessors idle at 200 tokens
        # and 4096 features; halves of them feed all, but each byte is fetched from L2 more often, unless
        # two blocks share a tile and what is loaded for it.
        ((64,), (32,), (128,), (0,), (1,), (1,), (4,)),
        ((64,), (64,), (128,), (0,), (1,), (1,), (4,)),
        ((64,), (128, 256), (64, 128), (0,), (1,), (1,), (4,)),
        ((128,), (64,), (64, 128), (0,), (1,), (1,), (4,)),
        ((128,), (128,), (64, 128), (0,), (2,), (1,), (4,)),
        ((256,), (64,), (64,), (0,), (1, 2), (1,), (4,)),
        # Prompts: the most sums that stay in registers.
        ((128,), (128,), (64,), (0,), (1,), (1,), (4, 8)),
        ((128,), (128,), (128,), (0,), (1,), (1,), (4,)),
        ((128,), (256,), (64,), (0,), (1,), (1,), (8,)),
        ((256,), (128,), (64,), (0,), (1,), (1,), (8,)),
        ((256,), (128,), (64,), (0,), (2,), (1,), (4, 8)),
        ((256,), (256,), (64,), (0,), (2,), (1,), (8,)),
    ),
    MatrixUnit.TENSOR_MEMORY: (
        ((16,), (32,), (256,), (0,), (1,), (1,), (4,)),
        ((16, 32), (64, 128), (128,), (0, 1), (1,), (1,), (4,)),
        ((64,), (64, 128), (64, 128), (0,), (1,), (1,), (4,)),
        ((64,), (128, 256), (128,), (0,), (2,), (1,), (4,)),
        ((128,), (64,), (128,), (0,), (1,), (1,), (4,)),
        ((128,), (128, 256), (64,), (0,), (1, 2), (1,), (4,)),
        ((256,), (128, 256), (64,), (0,), (1, 2), (1,), (4,)),
        ((256,), (256,), (64,), (0,), (4,), (1,), (4,)),
    ),
    MatrixUnit.WARP: (
        ((16,), (32, 64), (64, 128), (0,), (1,), (1,), (4,)),
        ((32,), (64, 128), (64,), (0,), (1,), (1,), (4,)),
        ((64,), (64,), (32, 64), (0,), (1,), (2,), (4,)),
        ((64,), (128,), (32, 64), (0,), (1,), (1, 2), (4,)),
        ((128,), (64,), (32, 64), (0,), (1,), (1, 2), (4,)),
        ((128,), (128,), (32,), (0,), (1,), (1, 2), (4, 8)),
        ((128,), (128,), (64,), (0,), (1,), (1,), (4, 8)),
        ((128,), (256,), (32,), (0,), (1,), (1,), (8,)),
        ((128,), (256,), (32,), (0,), (2,), (1,), (4,)),
        ((256,), (128,), (32,), (0,), (1,), (1,), (8,)),
    ),
}


@cache  # a default is asked for at each unseen shape
def config_of(
    tile_m: int, tile_n: int, tile_k: int, swapped: int, num_ctas: int, occupancy: int, warps: int
) -> Config:
    """A config of these constants and hints; `swapped` as the kernel has it."""
    return Config(
        constants={"tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k, "swapped": swapped},
        hints={"num_ctas": num_ctas, "occupancy": occupancy, "num_worker_warps": warps},
    )


def space(arch: Arch, problem: Problem) -> Sequence[Config]:
    """All configs whose tiles fit an arch at the problem's dtype."""
    return _fitting(arch, item_bytes(problem))


@cache
def _fitting(arch: Arch, size: int) -> tuple[Config, ...]:
    every = (config_of(*values) for row in _SPACE[matrix_unit(arch)] for values in itertools.product(*row))
    return tuple(config for config in every if overflow(config, arch, item_bytes=size) is None)


def default(arch: Arch, problem: Problem) -> Config:
    """The config of untuned problems."""
    rows, wide = problem.size("M"), item_bytes(problem) > 2
    if matrix_unit(arch) is MatrixUnit.WARP:
        # Two blocks hide each other's waits; told to expect one, the compiler spills on sm80.
        tile = (64, 64, 32) if wide else (64, 128, 64) if rows <= 64 else (128, 128, 32)
        return config_of(*tile, swapped=0, num_ctas=1, occupancy=2, warps=4)
    tile = (16, 64, 128) if rows <= 16 else (64, 64, 128) if rows <= 64 else (128, 128, 64)
    return config_of(*tile, swapped=0, num_ctas=1, occupancy=1, warps=4)


def legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    """Whether a config may run a problem, or why not; the same for all sizes of a bucket."""
    refusal = overflow(config, arch, item_bytes=item_bytes(problem))
    return refusal or waste(config, edge(problem.size("M"))) or True


def item_bytes(problem: Problem) -> int:
    """Bytes of an element."""
    return named_dtype(str(problem["dtype"])).itemsize


# What to sweep ----------------------------------------------------------------------------------

_M, _MANY = tuple(4**i for i in range(7)), (256, 1024, 4096)
"""1 to 4096, and of them those of an encoder. Sizes in between are at most a doubling from one of these."""


def _shapes(n: int, k: int, *, m: tuple[int, ...] = _M, **others: object) -> Mapping[str, object]:
    return {"dtype": "bfloat16", "activation": "none", "M": m, "N": n, "K": k, **others}


TYPICAL = (
    _shapes(6144, 4096),  # Llama 3.1 8B and Qwen3 8B, queries, keys and values
    _shapes(4096, 4096),  # Llama 3.1 8B and Qwen3 8B, attention output
    _shapes(28672, 4096),  # Llama 3.1 8B, gate and up
    _shapes(4096, 14336),  # Llama 3.1 8B, down; Qwen3 8B's is near
    _shapes(10240, 8192),  # Llama 3.1 70B, queries, keys and values
    _shapes(8192, 8192),  # Llama 3.1 70B, attention output
    _shapes(8192, 28672),  # Llama 3.1 70B, down
    _shapes(10240, 5120),  # Qwen3 32B, queries, keys and values
    _shapes(51200, 5120),  # Qwen3 32B, gate and up
    _shapes(5120, 25600),  # Qwen3 32B, down
    _shapes(5120, 2880),  # gpt-oss, queries, keys and values
    _shapes(2880, 4096),  # gpt-oss, attention output
    _shapes(6144, 4096, m=(16, *_MANY), dtype="float16"),  # Llama 3.1 8B, run in float16 (AWQ, GPTQ)
    _shapes(4096, 4096, m=_MANY, dtype="float32"),
    _shapes(5120, 1280, m=_MANY, activation="gelu"),  # Whisper large v3, fc1
    _shapes(4304, 1152, m=_MANY, activation="gelu_tanh"),  # SigLIP so400m, fc1
    _shapes(16384, 4096, m=_MANY, activation="relu"),  # OPT 6.7B, fc1
    _shapes(3072, 3072, m=(1, *_MANY), activation="silu"),  # FLUX.1, embeddings of timesteps
)
