"""Cross entropy of logits, and its gradient in their place: kernel, host function, declaration.

Knows nothing of tuning or tables. ``loss = log(sum(exp(logits))) - logits[target]`` of each row. The gradient
overwrites the logits, as Liger-Kernel does (``src/liger_kernel/ops/cross_entropy.py``): at a vocabulary of
100,000 and more they are the largest tensor of a training step, and no second one is made.
"""

from __future__ import annotations

import math
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
from aot_tune.errors import LaunchError
from aot_tune.kernels.arguments import LARGEST_INDEX, check_dtype, check_rank, check_shape, indexable
from aot_tune.kernels.online_softmax import exponential, maximum_and_sum
from aot_tune.kernels.rows import at_once, load_part, refusal, store_part, threads
from aot_tune.problem import Problem
from aot_tune.tunable import Close, Tunable

_NAN = math.nan


@ct.kernel
def cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits, target, loss, ignore_index, grad_scale,
    chunk: ct.Constant[int], ragged: ct.Constant[bool], lanes: ct.Constant[int], vector: ct.Constant[int],
    gradient: ct.Constant[bool], persistent: ct.Constant[bool],
):  # fmt: skip
    """Read a row once for its loss, and once more for its gradient; `ragged`: its last chunk is partly empty.

    Persistent blocks take rows until none is left: L2 may hold so few between both readings.
    """
    shape = chunk, ragged, lanes, vector, gradient
    if persistent:
        for row in range(ct.bid(0), logits.shape[0], ct.num_blocks(0)):
            _row(logits, row, target, loss, ignore_index, grad_scale, shape)
    else:
        _row(logits, ct.bid(0), target, loss, ignore_index, grad_scale, shape)


def _row(logits: Any, row: Any, target: Any, loss: Any, ignored: Any, grad_scale: Any, shape: Any) -> None:
    chunk, ragged, lanes, vector, gradient = shape
    cols, chunks = logits.shape[1], logits.shape[1] // chunk
    wanted = ct.load(target, (row,), (1,), allow_tma=False)
    if wanted.item() == ignored:
        ct.store(loss, (row,), ct.zeros((1,), ct.float32), allow_tma=False)
        if gradient:
            nothing = ct.zeros((1, chunk), logits.dtype)
            for step in range(chunks):
                store_part(logits, (row, step), nothing, True)
            if ragged:
                store_part(logits, (row, chunks), nothing, False)
    else:
        top, total = maximum_and_sum(logits, row, chunk, ragged, lanes, vector)
        # A target that is no column gives NaN, and no address is made of it.
        column = ct.where((wanted >= 0) & (wanted < cols), wanted, -1).astype(ct.int32)
        picked = ct.gather(logits, (row, column), padding_value=_NAN).astype(ct.float32)
        row_loss = ct.log(total).reshape((1,)) + (top.reshape((1,)) - picked)
        ct.store(loss, (row,), row_loss, allow_tma=False)
        if gradient:
            scale = ct.where(ct.isnan(row_loss), row_loss, grad_scale).reshape((1, 1))
            slope = top, scale / total, scale, column
            for step in range(chunks):
                _write_slopes(logits, row, step, chunk, slope, True)
            if ragged:
                _write_slopes(logits, row, chunks, chunk, slope, False)


def _write_slopes(logits: Any, row: Any, step: Any, chunk: Any, slope: Any, inside: Any) -> None:
    top, share, scale, column = slope
    part = load_part(logits, (row, step), (1, chunk), inside, ct.PaddingMode.NEG_INF).astype(ct.float32)
    part = exponential(part - top) * share
    here = (step * chunk + ct.arange(chunk, dtype=ct.int32) == column).reshape((1, chunk))
    store_part(logits, (row, step), ct.where(here, part - scale, part).astype(logits.dtype), inside)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    grad_scale: float | None = None,
) -> torch.Tensor:
    """Cross entropy of each row of logits with its target, not reduced; on request its gradient, in place.

    Computes in float32; a gradient is rounded once.

    Args:
        logits: (rows, vocabulary), bfloat16, float16 or float32, on a GPU. With `grad_scale` each element is
            overwritten by ``grad_scale * (softmax(logits)[row, column] - (column == target[row]))``, the
            gradient of ``grad_scale * loss.sum()``.
        target: (rows,), int64: each row's right column. A row whose target is neither a column nor
            `ignore_index` gets a loss of NaN, and NaN as its gradient.
        ignore_index: Rows of this target have a loss of 0 and a gradient of 0, and are not read.
        grad_scale: What the gradient is multiplied by, 1 / rows for the mean of all rows; without it no
            gradient is computed and the logits stay as they are.

    Returns:
        (rows,), float32: each row's loss.

    Raises:
        LaunchError: An argument cannot be launched; it names the argument and what to pass.
    """
    check_rank("cross_entropy", "logits", logits, "rows vocabulary")
    check_dtype("cross_entropy", "logits", logits, torch.bfloat16, torch.float16, torch.float32)
    rows, cols = logits.shape
    check_dtype("cross_entropy", "target", target, torch.int64)
    check_shape("cross_entropy", "target", target, (rows,), f"logits of {rows} rows")
    if not -LARGEST_INDEX <= ignore_index <= LARGEST_INDEX:
        raise LaunchError(f"cross_entropy: ignore_index is {ignore_index}; pass one that 32 bits hold")
    loss = torch.empty((rows,), dtype=torch.float32, device=logits.device)
    if rows == 0:
        return loss
    if cols == 0:
        raise LaunchError(f"cross_entropy: logits has shape {(rows, cols)}; pass one column or more")
    counted = indexable("cross_entropy", logits=logits, target=target)
    scale = None if grad_scale is None else float(grad_scale)
    cross_entropy_tunable.launch(*counted, loss, ignore_index, scale)
    return loss


# The search space -------------------------------------------------------------------------------


@cache
def _config(
    chunk: int, num_worker_warps: int, occupancy: int, num_ctas: int = 1, *, persistent: bool = False
) -> Config:
    return Config(
        constants={"chunk": chunk, "persistent": persistent},
        hints={"num_ctas": num_ctas, "occupancy": occupancy, "num_worker_warps": num_worker_warps},
    )


_BLOCKS = (
    # Liger-Kernel reads 32768 columns at a time with 32 warps: 32 a thread, as most here.
    *(_config(chunk, 4, occupancy) for chunk in (2048, 4096) for occupancy in (4, 8)),
    *(_config(chunk, 8, occupancy) for chunk in (4096, 8192, 16384) for occupancy in (2, 4)),
)

_CLUSTERS = tuple(_config(8192 * ctas, 8, occupancy, ctas) for ctas in (2, 4) for occupancy in (1, 2))
"""For the loss of few rows: more than one multiprocessor reads each."""

_PERSISTENT = tuple(_config(*v, persistent=True) for v in ((8192, 8, 2), (16384, 8, 1), (16384, 8, 2)))
"""For the gradient: 8192 columns spill at an occupancy of 1 (sm_90, tileiras 13.4)."""

_FEW = 64
"""Rows that leave half of a GPU idle where each has but one multiprocessor."""


def _space(arch: Arch, problem: Problem) -> tuple[Config, ...]:
    if problem["gradient"]:
        return (*_BLOCKS, *_PERSISTENT)
    return (*_BLOCKS, *_CLUSTERS) if problem.size("rows") <= _FEW else _BLOCKS


def _default(arch: Arch, problem: Problem) -> Config:
    """What spills on no arch."""
    return _config(8192, 8, 2) if problem["gradient"] or problem.size("rows") <= _FEW else _config(4096, 4, 4)


def _legal(config: Config, arch: Arch, problem: Problem) -> bool | str:
    chunk, width = int(config["chunk"]), edge(problem.size("vocabulary"))
    if chunk > max(width, 8192):  # which the default has
        return f"a chunk of {chunk} is more than half empty for {width} columns"
    return refusal(config, arch, chunk) or True


# The declaration --------------------------------------------------------------------------------


def _problem(
    logits: torch.Tensor, target: torch.Tensor, loss: torch.Tensor,
    ignore_index: int, grad_scale: float | None,
) -> Mapping[str, object]:  # fmt: skip
    # The gradient is a problem of its own: it reads twice and writes, the loss alone reads once.
    return {
        "dtype": logits.dtype,
        "gradient": grad_scale is not None,
        "rows": logits.shape[0],
        "vocabulary": logits.shape[1],
    }


def _tiles(config: Config, problem: Problem) -> int:
    return problem.size("rows")


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    rows = problem.size("rows")
    return (min(rows, at_once(config, device)) if config["persistent"] else rows,)


def _args(
    config: Config, logits: torch.Tensor, target: torch.Tensor, loss: torch.Tensor,
    ignore_index: int, grad_scale: float | None,
) -> tuple[Any, ...]:  # fmt: skip
    gradient, chunk = grad_scale is not None, int(config["chunk"])
    tile = (chunk, logits.shape[1] % chunk != 0, threads(config), 16 // logits.element_size())
    scale = grad_scale if gradient else 0.0
    return logits, target, loss, ignore_index, scale, *tile, gradient, config["persistent"]


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    rows, cols = problem.size("rows"), problem.size("vocabulary")
    logits = inputs.randn((rows, cols), str(problem["dtype"]), device, 2 * seed)
    target = inputs.randint((rows,), 0, cols, "int64", device, 2 * seed + 1)
    loss = inputs.empty((rows,), "float32", device)
    # A scale of 1, so that a gradient lies between -1 and 1 whatever the number of rows.
    return logits, target, loss, -100, 1.0 if problem["gradient"] else None


def _reference(
    logits: torch.Tensor, target: torch.Tensor, loss: torch.Tensor,
    ignore_index: int, grad_scale: float | None,
) -> dict[str, Close]:  # fmt: skip
    losses = torch.empty(loss.shape, dtype=torch.float64, device=logits.device)
    # float64 only where the logits are float32: for bfloat16 it would be four times their size.
    wide = torch.float64 if logits.dtype == torch.float32 else torch.float32
    slopes = torch.empty(logits.shape, dtype=wide, device=logits.device)
    step = max(1, _REFERENCE // logits.shape[1])
    for first in range(0, logits.shape[0], step):
        part, rows = logits[first : first + step].double(), slice(first, first + step)
        kept = target[rows] != ignore_index
        column = target[rows].where(kept, 0)[:, None]
        logs = torch.log_softmax(part, dim=1)
        losses[rows] = -logs.gather(1, column)[:, 0] * kept
        if grad_scale is None:
            slopes[rows] = part
        else:
            shares = logs.exp_().scatter_add_(1, column, -torch.ones_like(column, dtype=torch.float64))
            slopes[rows] = shares * (kept[:, None] * grad_scale)
    # The loss: a row's sum and its logarithm, in float32, are good to 1e-6 of up to 20. The gradient: one
    # rounding to the dtype is half its eps, the exponent is off by 1e-6; where the target's share is almost
    # 1, what it lacks is off by 2^-23. A typical share of the largest vocabulary is 2e-6, ten times the
    # absolute term. Logits whose gradient is not asked for must stay as they are.
    eps = max(torch.finfo(logits.dtype).eps, 1e-5)
    exact = grad_scale is None
    return {
        "loss": Close(value=losses, rtol=1e-5, atol=2e-5),
        "logits": Close(
            value=slopes, rtol=0.0 if exact else eps, atol=0.0 if exact else 2e-7 * abs(grad_scale or 0)
        ),
    }


_REFERENCE = 1 << 26
"""Elements whose reference is computed at a time: a few temporaries of 512 MiB."""


def _shapes(vocabulary: int, *, rows: Sequence[int], gradient: bool, dtype: str = "bfloat16") -> Any:
    return {"dtype": dtype, "gradient": gradient, "rows": tuple(rows), "vocabulary": vocabulary}


_SCORED = Pow2.edges(1, 16384)[::2]
"""Rows of an evaluation; every other edge, near enough to serve the buckets between."""

_TRAINED = Pow2.edges(256, 16384)[::2]
"""Rows of a training step, or of the parts that its logits are computed in."""

cross_entropy_tunable = Tunable(
    name="cross_entropy",
    package=__package__,
    kernel=cross_entropy_kernel,
    axes={"rows": Pow2(), "vocabulary": Exact()},
    problem=_problem,
    search_space=_space,
    legal=_legal,
    default=_default,
    grid_fn=_grid,
    args_fn=_args,
    tiles=_tiles,
    make_args=_make_args,
    reference=_reference,
    outputs=("loss",),
    inplace=("logits",),
    typical=[
        _shapes(32000, rows=_SCORED, gradient=False),  # Llama 2, Mistral 7B
        _shapes(32000, rows=_TRAINED, gradient=True),
        _shapes(128256, rows=_SCORED, gradient=False),  # Llama 3.1
        _shapes(128256, rows=_TRAINED, gradient=True),
        _shapes(151936, rows=_SCORED[-3:], gradient=False),  # Qwen3
        _shapes(151936, rows=_TRAINED[:-1], gradient=True),
        _shapes(262144, rows=_SCORED[:-1], gradient=False),  # Gemma 3; half as far are 129280 and 201088,
        _shapes(262144, rows=_TRAINED[:-1], gradient=True),  # DeepSeek-V3's and gpt-oss'
        _shapes(128256, rows=(1024, 4096), gradient=False, dtype="float32"),  # as transformers casts them
        _shapes(128256, rows=(1024, 4096), gradient=True, dtype="float32"),
    ],
)
"""The declaration; ``cross_entropy_tunable.launch(logits, target, loss, ignore_index, grad_scale)``."""
