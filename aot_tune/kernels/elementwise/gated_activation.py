"""Activation and gate of a feed-forward layer: kernel, host function, search space and declaration.

``out = activation(gate) * up``: SwiGLU with a SiLU, GeGLU with a GELU (Shazeer, "GLU Variants Improve
Transformer", 2020). Gate and up are the halves of one tensor, the result of a fused projection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs
from aot_tune.declare.declaration import Close
from aot_tune.errors import LaunchError
from aot_tune.kernels import activations
from aot_tune.kernels.host.arguments import check_apart, check_dtype, check_reach, check_shape, indexable
from aot_tune.kernels.rows.rows import as_rows, load_part, store_part
from aot_tune.tunable import Tunable
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import Exact, Pow2, edge
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

_MOST_BLOCKS = 65535
"""Blocks along the grid's second and along its third dimension, at most."""

_MOST_ROWS = 65520
"""Rows of a launch, at most: a block for each row must fit the grid. It is a multiple of 16, since signatures
distinguish such sizes."""

_MOST_COLUMNS = _MOST_BLOCKS * 256
"""Columns of gate or up, at most: they lie along the grid's second dimension, and each tile may have 256."""


@ct.kernel
def gated_activation_kernel(  # type: ignore[no-untyped-def]
    x, out, activation: ct.Constant[int], tile: ct.Constant[int], width: ct.Constant[int],
    even: ct.Constant[bool],
):  # fmt: skip
    """Compute `tile` elements a block: `width` columns of one row or several.

    The grid is (1, columns, rows), so that blocks that run at the same time read neighbouring memory. `even`
    says that all tiles lie inside.
    """
    height, (rows, cols) = tile // width, out.shape
    # divided-bid (README): bid(0) is not used, since every load would wait for a division.
    row, col = ct.bid(2), ct.bid(1)
    if even:
        _compute(x, out, (row, col), (height, width), activation, True)
    else:
        # checked-load-branch (README): so only the tiles at the borders check their bounds.
        if rows - row * height >= height and cols - col * width >= width:
            _compute(x, out, (row, col), (height, width), activation, True)
        else:
            _compute(x, out, (row, col), (height, width), activation, False)


def _compute(x: Any, out: Any, place: Any, shape: Any, activation: Any, inside: Any) -> None:
    # The last gate tile of a row may reach into up: no result that is stored depends on that.
    cols, anything = out.shape[1], ct.PaddingMode.UNDETERMINED
    gate = load_part(x, place, shape, inside, anything).astype(ct.float32)
    up = load_part(x.slice(1, cols, x.shape[1]), place, shape, inside, anything).astype(ct.float32)
    gated = activations.apply(gate, activation) * up
    store_part(out, place, gated.astype(out.dtype), inside)


def gated_activation(
    x: torch.Tensor, *, activation: str = "silu", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Apply an activation to the first half of the last dimension of `x` and multiply it with the second.

    Computes in float32 and rounds once.

    Args:
        x: (..., 2 * cols), bfloat16, float16 or float32, on a GPU: the gate's columns before up's, as vLLM's
            ``silu_and_mul`` takes them. The leading dimensions are such that ``view`` can flatten them.
        activation: "silu" (SwiGLU), "gelu" (GeGLU, by erf) or "gelu_tanh" (GeGLU, by tanh, as Gemma has it).
        out: (..., cols), the result, of the dtype of `x`; it must share no memory with `x`. A new tensor is
            made if it is None.

    Returns:
        `out`, or the new tensor.

    Raises:
        LaunchError: An argument cannot be launched; the error names it and what to pass.
    """
    check_gated_activation(x, activation=activation, out=out)
    written = x.new_empty((*x.shape[:-1], x.shape[-1] // 2)) if out is None else out
    if written.numel() == 0:
        return written
    flat_x, flat_out = as_rows("gated_activation", "x", x), as_rows("gated_activation", "out", written)
    counted = indexable("gated_activation", x=flat_x, out=flat_out)
    check_reach("gated_activation", 1, "pass x.contiguous()", x=counted[0])
    if out is not None:
        check_apart("gated_activation", "out", out, x=x)
    number = activations.NUMBERS[activation]
    if flat_x.shape[0] <= _MOST_ROWS:
        gated_activation_tunable.launch(*counted, number)
    else:
        for part in zip(*(torch.split(tensor, _MOST_ROWS) for tensor in counted), strict=True):
            gated_activation_tunable.launch(*part, number)
    return written


def check_gated_activation(
    x: torch.Tensor, *, activation: str = "silu", out: torch.Tensor | None = None
) -> None:
    """Refuse shapes, dtypes and activations that `gated_activation` does not take."""
    check_dtype("gated_activation", "x", x, torch.bfloat16, torch.float16, torch.float32)
    activations.check_activation("gated_activation", activation, *ACTIVATIONS)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise LaunchError(
            f"gated_activation: x has shape {tuple(x.shape)}; its last size must be even: the columns of the "
            "gate, then as many of up"
        )
    if x.shape[-1] // 2 > _MOST_COLUMNS:
        raise LaunchError(
            f"gated_activation: x has shape {tuple(x.shape)}; pass it in several calls, or with more rows: "
            f"gate and up may have {_MOST_COLUMNS} columns each"
        )
    if out is not None:
        wanted = (*x.shape[:-1], x.shape[-1] // 2)
        check_shape("gated_activation", "out", out, wanted, f"x of shape {tuple(x.shape)}")
        check_dtype("gated_activation", "out", out, x.dtype)


# The declaration --------------------------------------------------------------------------------

_FEW_TILES = {256: 4, 512: 4, 1024: 4, 2048: 8}
"""num_worker_warps by the elements of a block, for small problems: many small blocks finish soonest, although
a thread has only 4 or 8 bytes of a tile of 256 or 512. Fewer than 4 warps cannot be had: four-warps
(README)."""

_MANY_TILES = ((1024, 4), (2048, 4), (2048, 8), (4096, 8))
"""(elements of a block, num_worker_warps): each thread has 16 bytes of gate and of up, once or twice."""

_OCCUPANCIES = (1, 4, 8)
"""Occupancies to search, some of NVIDIA's TileGym (ops/cutile/silu_and_mul.py): occupancy-code (README)."""

_FEW = 2**20
"""Elements of a problem below which tiles of 256 are searched: on an H200 they won up to 64 rows of 14336."""

_FEWEST = 2**18
"""Elements of a problem up to which all blocks of 256 run at once on a GPU of 64 multiprocessors."""

_LEAST_WIDTH = 64
"""Columns of a tile, at least, where they divide the row: 128 consecutive bytes are long enough."""

_RAGGED_WIDTH = 256
"""Columns of a tile, at least, where bounds are checked in any case."""

_MOST_EVEN_ROWS = 16
"""Most rows of a tile of an `even` grid: the signature already states whether 16 divides all rows."""


def _config(tile: int, warps: int, occupancy: int = _OCCUPANCIES[0]) -> Config:
    return Config(constants={"tile": tile}, hints={"occupancy": occupancy, "num_worker_warps": warps})


_FEW_SPACE, _MANY_SPACE = (
    tuple(_config(tile, warps, occupancy) for tile, warps in tiles for occupancy in _OCCUPANCIES)
    for tiles in (tuple(_FEW_TILES.items()), _MANY_TILES)
)


def _elements(problem: Problem) -> int:
    """Return the elements of the result, the same number for all problems of a bucket."""
    return edge(problem.size("rows")) * problem.size("cols")


def _space(arch: Arch, problem: Problem) -> tuple[Config, ...]:
    return _FEW_SPACE if _elements(problem) < _FEW else _MANY_SPACE


def _legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    if _blocks(config, problem.size("rows"), problem.size("cols"))[0] > _MOST_BLOCKS:
        return f"the grid holds {_MOST_BLOCKS} rows of blocks; launch fewer rows, as gated_activation() does"
    return True


def _default(arch: Arch, problem: Problem) -> Config:
    elements = _elements(problem)
    tile = 256 if elements <= _FEWEST else 512 if elements < _FEW else 1024
    return _config(tile, _FEW_TILES[tile])


def _problem(x: torch.Tensor, out: torch.Tensor, activation: int) -> Mapping[str, object]:
    rows, cols = out.shape
    return {"dtype": x.dtype, "activation": activations.NAMES[activation], "rows": rows, "cols": cols}


def _width(config: Config, rows: int, cols: int) -> int:
    """Return a tile's columns: the largest power of two that divides the row, if that is wide enough.

    It is wider where the tile would be taller than all rows, or where the blocks along a row would exceed the
    grid. All problems of a bucket get the same width.
    """
    tile, divisor = int(config["tile"]), cols & -cols
    even = divisor >= max(_LEAST_WIDTH, tile // _MOST_EVEN_ROWS)
    least = divisor if even else _RAGGED_WIDTH
    fitting = edge(-(-cols // _MOST_BLOCKS))
    return min(tile, edge(cols), max(least, tile // edge(rows), fitting))


def _blocks(config: Config, rows: int, cols: int) -> tuple[int, int]:
    """Return the blocks down the rows and along them."""
    width = _width(config, rows, cols)
    return -(-rows // (int(config["tile"]) // width)), -(-cols // width)


def _tiles(config: Config, problem: Problem) -> int:
    return math.prod(_blocks(config, problem.size("rows"), problem.size("cols")))


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    down, along = _blocks(config, problem.size("rows"), problem.size("cols"))
    return 1, along, down


def _args(config: Config, x: torch.Tensor, out: torch.Tensor, activation: int) -> tuple[Any, ...]:
    (rows, cols), tile = out.shape, int(config["tile"])
    width = _width(config, rows, cols)
    height, (down, along) = tile // width, _blocks(config, rows, cols)
    even = down * height == rows and along * width == cols and height <= _MOST_EVEN_ROWS
    return x, out, activation, tile, width, even


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    rows, cols, dtype = problem.size("rows"), problem.size("cols"), str(problem["dtype"])
    x = inputs.randn((rows, 2 * cols), dtype, device, seed)
    return x, inputs.empty((rows, cols), dtype, device), activations.NUMBERS[str(problem["activation"])]


def _reference(x: torch.Tensor, out: torch.Tensor, activation: int) -> Close:
    gate, up = x.chunk(2, dim=1)
    # One rounding to the output's dtype is half its eps; the float32 approximations before have a relative
    # error of 5e-6. The absolute term is for float16's subnormal numbers.
    value = activations.reference(gate, activations.NAMES[activation]).mul_(up)
    return Close(value=value, rtol=max(torch.finfo(x.dtype).eps, 1e-5), atol=1e-6)


_ROWS = tuple(4**i for i in range(8))
"""Rows to sweep, 1 to 16384. Sizes in between are at most one doubling from one of these."""

_FEW_ROWS = (4, 16, 64, 1024)
"""Rows to sweep for columns whose neighbours are swept more closely: mostly few, where columns matter."""


def _sizes(
    *cols: int, activation: str = "silu", dtype: str = "bfloat16", rows: tuple[int, ...] = _ROWS
) -> dict[str, object]:
    return {"dtype": dtype, "activation": activation, "rows": rows, "cols": cols}


gated_activation_tunable = Tunable(
    name="gated_activation",
    package=__package__,
    kernel=gated_activation_kernel,
    axes={"rows": Pow2(), "cols": Exact()},
    batch_axes=("rows",),
    problem=_problem,
    search_space=_space,
    legal=_legal,
    default=_default,
    grid_fn=_grid,
    args_fn=_args,
    tiles=_tiles,
    make_args=_make_args,
    reference=_reference,
    outputs=("out",),
    typical=[
        _sizes(768, 2048),  # the experts of Qwen3 30B-A3B and of DeepSeek-V3
        _sizes(12288, 25600),  # Qwen3 8B and 32B
        _sizes(14336, 28672),  # Llama 3.1 8B and 70B
        _sizes(14336, dtype="float16"),  # Llama 3.1 8B, run in float16 (AWQ, GPTQ)
        _sizes(14336, 21504, activation="gelu_tanh"),  # Gemma 2 9B, Gemma 3 27B
        _sizes(2624, activation="gelu", rows=_ROWS[4:]),  # ModernBERT large, which never decodes
        _sizes(1408, 3072, rows=_FEW_ROWS),  # the experts of GLM-4.5-Air; Qwen3 0.6B
        _sizes(2880, 3420, rows=_FEW_ROWS),  # the experts of gpt-oss; Qwen2.5-VL, vision
        _sizes(9728, 11008, rows=_FEW_ROWS),  # Qwen3 4B; Qwen2.5 3B and Llama 2 7B
        _sizes(18944, 27648, rows=_FEW_ROWS),  # Qwen2.5 7B and 32B
        _sizes(10240, activation="gelu_tanh", rows=_FEW_ROWS),  # Gemma 3 4B
        _sizes(1710, 855, rows=_FEW_ROWS),  # Qwen2.5-VL, vision, on two and four GPUs
        _sizes(1440, 720, 360, rows=_FEW_ROWS),  # the experts of gpt-oss on two, four and eight GPUs
    ],
)
"""Declaration: ``gated_activation_tunable.launch(x, out, activation)`` takes x as (rows,
2 * cols), out as (rows, cols), and the activation by its number."""
