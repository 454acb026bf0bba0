"""View tensors as rows, hold rows in registers, and limit what a block holds. Imports no kernel.

The kernels that work along the last dimension share it.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct
import torch

from aot_tune.errors import LaunchError
from aot_tune.kernels.host.arguments import check_dtype, check_shape
from aot_tune.values.arch import Arch
from aot_tune.values.bucket import edge
from aot_tune.values.config import Config
from aot_tune.values.device import Device

MOST_ELEMENTS = 32768
"""Elements that a block of 8 warps holds in registers, at most: 128 a thread. More would spill."""

_MOST_PARTS = 16
"""Parts of a row, at most: the code and the time to compile it grow with them."""

_OTHER_REGISTERS = 32
"""Registers that a thread needs in addition to one for each element: row-registers (README)."""

_MOST_REGISTERS, _AT_ONCE = 255, 8
"""Registers of a thread, at most, and the number that they are allocated in multiples of (CUDA C++
Programming Guide, "Technical Specifications per Compute Capability")."""


def registers(arch: Arch, resident: int) -> int:
    """Return the registers that each of `resident` threads of a multiprocessor may have."""
    return min(_MOST_REGISTERS, Device.reference(arch).registers_per_sm // resident // _AT_ONCE * _AT_ONCE)


def check_normed(kernel: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Refuse arguments that no norm takes: rows that are too wide, and a weight of another shape or dtype.

    Args:
        kernel: The name of the host function, for errors.
        x: (..., cols), bfloat16, float16 or float32; at most `MOST_ELEMENTS` columns.
        weight: (cols,), of the dtype of `x`.

    Raises:
        LaunchError: It names the argument and what to pass.
    """
    check_dtype(kernel, "x", x, torch.bfloat16, torch.float16, torch.float32)
    if not x.dim() or x.shape[-1] > MOST_ELEMENTS:
        raise LaunchError(f"{kernel}: x has shape {tuple(x.shape)}; pass a last size of 0 to {MOST_ELEMENTS}")
    check_shape(kernel, "weight", weight, (x.shape[-1],), f"x of {x.shape[-1]} columns")
    check_dtype(kernel, "weight", weight, x.dtype)


def as_rows(kernel: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as (rows, columns), without a copy.

    Raises:
        LaunchError: The strides of its leading dimensions cannot be merged into one.
    """
    if tensor.dim() == 2:
        return tensor
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError as error:
        raise LaunchError(
            f"{kernel}: {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be viewed "
            f"as rows; call {name}.contiguous() first"
        ) from error


def threads(config: Config) -> int:
    """Count the threads that share a tile: 32 for each warp that computes, in all blocks of a cluster."""
    return 32 * config.hints.get("num_worker_warps", 4) * config.hints.get("num_ctas", 1)


def at_once(config: Config, device: Device) -> int:
    """Count the blocks, or clusters where num_ctas is above 1, that a GPU runs at once."""
    return max(1, device.sm_count * config.hints.get("occupancy", 1) // config.hints.get("num_ctas", 1))


def part_refusal(width: int, cols: int) -> str | None:
    """Return why a row of `cols` columns should not be held in parts of `width` columns, or None."""
    if width > edge(cols):
        return f"a part of {width} is more than half empty for {cols} columns"
    if cols > width * _MOST_PARTS:
        return f"{cols} columns are more than {_MOST_PARTS} parts of {width}"
    return None


def refusal(config: Config, arch: Arch, elements: int, beside: int = 0) -> str | None:
    """Return why blocks of a config cannot hold `elements` elements of a tile in float32, or None.

    `beside` are registers that each thread needs in addition to those and the usual ones.
    """
    num_ctas, occupancy = config.hints.get("num_ctas", 1), config.hints.get("occupancy", 1)
    if num_ctas > 1 and arch < Arch(9, 0):
        return f"{arch} has no clusters of blocks; num_ctas must be 1"
    device = Device.reference(arch)
    needed = -(-elements // threads(config)) + _OTHER_REGISTERS + beside
    resident = threads(config) // num_ctas * occupancy
    if needed > registers(arch, resident):
        return f"{elements} elements over {threads(config)} threads spill at an occupancy of {occupancy}"
    return device.refusal(occupancy)


def too_wide(cols: int) -> LaunchError:
    """Return the error for rows of so many columns that no config holds them."""
    return LaunchError(f"no config holds rows of {cols} columns; pass rows of at most {MOST_ELEMENTS}")


def parts(height: int, width: int, rows: int, cols: int) -> tuple[int, int]:
    """Count the parts of `width` columns in a row, and those, from the first, that lie inside for all blocks.

    That number is 0 where the last block has fewer than `height` rows.
    """
    return -(-cols // width), 0 if rows % height else cols // width


def exact_width(cols: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides the columns: no part is partly empty."""
    return min(cols & -cols, most)


def load_part(array: Any, index: Any, shape: Any, inside: Any, padding: Any) -> Any:
    """Load a tile straight to registers, without a check of bounds if it is `inside`. For kernels.

    TMA would take it through shared memory.
    """
    if inside:  # unchecked-padding (README): no padding_mode with check_bounds=False
        tile = ct.load(array, index, shape, check_bounds=False, allow_tma=False)
    else:
        tile = ct.load(array, index, shape, padding_mode=padding, allow_tma=False)
    return tile


def load_parts(array: Any, index: Any, shape: Any, count: Any, inside: Any, padding: Any) -> Any:
    """Load rows in `count` parts of `shape`; all loads are in flight at once. For kernels.

    Args:
        array: (rows, cols), or (cols,).
        index: Index of the tile of rows, ``(block,)``; ``()`` for an array of one dimension.
        shape: Shape of a part.
        count: Parts of a row.
        inside: How many parts, from the first, lie wholly inside.
        padding: What fills the elements outside of the others.
    """
    loaded = ()
    for part in ct.static_iter(range(count)):
        loaded = (*loaded, load_part(array, (*index, part), shape, part < inside, padding))  # type: ignore[assignment]  # grows while compiling
    return loaded


def store_part(array: Any, index: Any, tile: Any, inside: Any) -> None:
    """Store a tile straight from registers, without a check of bounds if it is `inside`. For kernels."""
    if inside:
        ct.store(array, index, tile, check_bounds=False, allow_tma=False)
    else:
        ct.store(array, index, tile, allow_tma=False)
