"""Cross entropy of logits, and its gradient in place of the logits: host function and declaration.

``loss = log(sum(exp(logits))) - logits[target]`` for each row. The gradient overwrites the logits, as in
Liger-Kernel (``src/liger_kernel/ops/cross_entropy.py``): with a vocabulary of 100,000 and more they are the
largest tensor of a training step, and no second one is made. The kernel is in `cross_entropy_tiles`, the
search space in `cross_entropy_space`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aot_tune import inputs, workspace
from aot_tune.declare.declaration import Close
from aot_tune.errors import LaunchError
from aot_tune.kernels.host.arguments import (
    LARGEST_INDEX,
    check_apart,
    check_dtype,
    check_rank,
    check_reach,
    check_shape,
    indexable,
    named,
    number,
)
from aot_tune.kernels.host.unused import unused_counters
from aot_tune.kernels.rows.row_groups import check_all_run
from aot_tune.kernels.rows.rows import threads
from aot_tune.kernels.softmax_and_loss import cross_entropy_space
from aot_tune.kernels.softmax_and_loss.cross_entropy_tiles import cross_entropy_kernel
from aot_tune.tunable import Tunable
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    grad_scale: float | None = None,
) -> torch.Tensor:
    """Compute the cross entropy of each row of logits, not reduced; on request its gradient, in place.

    Computes in float32; a gradient is rounded once.

    CUDA graphs: several blocks may share a row, if a gradient is asked for or rows are few, and exchange
    partial results in memory that belongs to the stream. Run the same call once before it is captured (on the
    capturing stream, if there are several), and replay the graphs of one stream one after another.

    Args:
        logits: (rows, vocabulary), bfloat16, float16 or float32, on a GPU. With `grad_scale` each element is
            overwritten by ``grad_scale * (softmax(logits)[row, column] - (column == target[row]))``, the
            gradient of ``grad_scale * loss.sum()``.
        target: (rows,), int64: the right column of each row. A row whose target is neither a column nor
            `ignore_index` gets a loss of NaN, and NaN as its gradient.
        ignore_index: Rows with this target get a loss of 0 and a gradient of 0, and are not read.
        grad_scale: The factor of the gradient, 1 / rows for the mean of all rows. If it is None, no gradient
            is computed and the logits stay as they are.

    Returns:
        (rows,), float32: the loss of each row.

    Raises:
        LaunchError: An argument cannot be launched; the error names it and what to pass.
    """
    scale = check_cross_entropy(logits, target, ignore_index=ignore_index, grad_scale=grad_scale)
    loss = torch.empty((logits.shape[0],), dtype=torch.float32, device=logits.device)
    if logits.shape[0] == 0:
        return loss
    counted = indexable("cross_entropy", logits=logits, target=target)
    check_reach("cross_entropy", 1, "pass logits.contiguous()", logits=counted[0])
    if scale is not None:
        check_apart("cross_entropy", "logits", logits, target=target)
    if 0 in logits.stride() and any(
        size > 1 and not step for size, step in zip(logits.shape, logits.stride(), strict=True)
    ):
        raise LaunchError(
            "cross_entropy: logits is an expanded view, whose elements share memory; pass logits.contiguous()"
        )
    slots = _slots(logits, scale is not None)
    cross_entropy_tunable.launch(*counted, loss, slots, ignore_index, scale)
    return loss


def check_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    grad_scale: float | None = None,
) -> float | None:
    """Refuse arguments that `cross_entropy` does not take; return `grad_scale` as a launch takes it."""
    check_rank("cross_entropy", "logits", logits, "rows vocabulary")
    check_dtype("cross_entropy", "logits", logits, torch.bfloat16, torch.float16, torch.float32)
    rows, cols = logits.shape
    check_dtype("cross_entropy", "target", target, torch.int64)
    check_shape("cross_entropy", "target", target, (rows,), f"logits of {rows} rows")
    if not isinstance(ignore_index, int) or not -LARGEST_INDEX <= ignore_index <= LARGEST_INDEX:
        raise LaunchError(
            f"cross_entropy: ignore_index is {named(ignore_index)}; pass an int that 32 bits hold"
        )
    if rows and not cols:
        raise LaunchError(f"cross_entropy: logits has shape {(rows, cols)}; pass one column or more")
    return None if grad_scale is None else number("cross_entropy", "grad_scale", grad_scale)


# The declaration --------------------------------------------------------------------------------


def _slots(logits: torch.Tensor, gradient: bool) -> torch.Tensor:
    """Return memory for the exchange between blocks: int32, zero between launches.

    It is large enough for every config, since the launch chooses one only later.
    """
    most = cross_entropy_space.slots(gradient, *logits.shape)
    return workspace(logits.device, 1, most).counters if most > 1 else unused_counters(logits.device)


def _problem(
    logits: torch.Tensor, target: torch.Tensor, loss: torch.Tensor,
    slots: torch.Tensor, ignore_index: int, grad_scale: float | None,
) -> Mapping[str, object]:  # fmt: skip
    # The gradient is a problem of its own: it writes the logits too, and its blocks may share rows.
    return {
        "dtype": logits.dtype,
        "gradient": grad_scale is not None,
        "rows": logits.shape[0],
        "vocabulary": logits.shape[1],
    }


def _args(
    config: Config, logits: torch.Tensor, target: torch.Tensor, loss: torch.Tensor,
    slots: torch.Tensor, ignore_index: int, grad_scale: float | None,
) -> tuple[Any, ...]:  # fmt: skip
    chunk, members, cols = int(config["chunk"]), int(config["members"]), logits.shape[1]
    # Of the width of rows that are not shared, only whether the last chunk is partly empty is compiled in: so
    # one compilation serves many vocabularies.
    held = cross_entropy_space.parts(config, cols) if members > 1 else (1, 0)
    tile = (chunk, members, *held, members == 1 and cols % chunk != 0)
    scale = 0.0 if grad_scale is None else grad_scale
    return (
        logits, target, loss, slots, ignore_index, scale, *tile, threads(config), 16 // logits.element_size(),
        grad_scale is not None,
    )  # fmt: skip


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    check_all_run("cross_entropy", config, device, int(config["members"]))
    return (cross_entropy_space.blocks(config, problem),)


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    rows, cols = problem.size("rows"), problem.size("vocabulary")
    logits = inputs.randn((rows, cols), str(problem["dtype"]), device, 2 * seed)
    target = inputs.randint((rows,), 0, cols, "int64", device, 2 * seed + 1)
    loss = inputs.empty((rows,), "float32", device)
    # With a scale of 1, gradients lie between -1 and 1 for any number of rows.
    slots = _slots(logits, bool(problem["gradient"]))
    return logits, target, loss, slots, -100, 1.0 if problem["gradient"] else None


def _reference(
    logits: torch.Tensor, target: torch.Tensor, loss: torch.Tensor,
    slots: torch.Tensor, ignore_index: int, grad_scale: float | None,
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
    # The loss: the sum of a row and its logarithm, up to 20, have a relative error of 1e-6 in float32. The
    # gradient: one rounding to the dtype is half its eps, and the exponent has an error of 1e-6; where the
    # target's share is almost 1, the difference to 1 has an error of 2^-23. A typical share in the largest
    # vocabulary is 2e-6, ten times the absolute term. Without a gradient the logits must stay as they are.
    eps = max(torch.finfo(logits.dtype).eps, 1e-5)
    exact = grad_scale is None
    return {
        "loss": Close(value=losses, rtol=1e-5, atol=2e-5),
        "logits": Close(
            value=slopes, rtol=0.0 if exact else eps, atol=0.0 if exact else 2e-7 * abs(grad_scale or 0)
        ),
        # Blocks set to zero all that they exchanged: the next launch must find zeros.
        "slots": Close(value=torch.zeros_like(slots), rtol=0.0, atol=0.0),
    }


_REFERENCE = 1 << 26
"""Elements whose reference is computed at a time: each of a few temporaries takes 512 MiB."""


def _shapes(vocabulary: int, *, rows: Sequence[int], gradient: bool, dtype: str = "bfloat16") -> Any:
    return {"dtype": dtype, "gradient": gradient, "rows": tuple(rows), "vocabulary": vocabulary}


_SCORED = Pow2.edges(1, 16384)[::2]
"""Rows of an evaluation to sweep: every other edge. A bucket between two of them is one doubling away."""

_TRAINED = Pow2.edges(256, 16384)[::2]
"""Rows of a training step to sweep, or of the parts that its logits are computed in."""

_FEW_SCORED, _FEW_TRAINED = (1, 16, 256, 4096), (16, 256, 4096)
"""Rows to sweep of vocabularies whose neighbours are swept more closely."""

cross_entropy_tunable = Tunable(
    name="cross_entropy",
    package=__package__,
    kernel=cross_entropy_kernel,
    axes={"rows": Pow2(), "vocabulary": Exact()},
    batch_axes=("rows",),
    problem=_problem,
    search_space=cross_entropy_space.space,
    legal=cross_entropy_space.legal,
    default=cross_entropy_space.default,
    grid_fn=_grid,
    args_fn=_args,
    tiles=cross_entropy_space.blocks,
    make_args=_make_args,
    reference=_reference,
    outputs=("loss",),
    inplace=("logits",),
    reset=("slots",),
    typical=[
        _shapes(32000, rows=_SCORED, gradient=False),  # Llama 2, Mistral 7B
        _shapes(32000, rows=_TRAINED, gradient=True),
        _shapes(128256, rows=_SCORED, gradient=False),  # Llama 3.1
        _shapes(128256, rows=_TRAINED, gradient=True),
        _shapes(151936, rows=_SCORED[-3:], gradient=False),  # Qwen3
        _shapes(151936, rows=_TRAINED[:-1], gradient=True),
        # DeepSeek-V3's 129280 is near enough to 128256.
        _shapes(262144, rows=_SCORED[:-1], gradient=False),  # Gemma 3
        _shapes(262144, rows=_TRAINED[:-1], gradient=True),
        _shapes(128256, rows=(1024, 4096), gradient=False, dtype="float32"),  # as transformers casts them
        _shapes(128256, rows=(1024, 4096), gradient=True, dtype="float32"),
        _shapes(128256, rows=(1024, 4096), gradient=False, dtype="float16"),  # trained in mixed precision
        _shapes(128256, rows=(1024, 4096), gradient=True, dtype="float16"),
        _shapes(50257, rows=_FEW_SCORED, gradient=False),  # GPT-2
        _shapes(49155, rows=_FEW_TRAINED, gradient=True),  # Granite 3
        _shapes(100352, rows=_FEW_TRAINED, gradient=True),  # Phi-4
        _shapes(131072, rows=_FEW_TRAINED, gradient=True),  # Mistral Small 3
        _shapes(201088, rows=_FEW_TRAINED, gradient=True),  # gpt-oss
        _shapes(50257, rows=_FEW_SCORED, gradient=False, dtype="float32"),
        _shapes(50257, rows=_FEW_TRAINED, gradient=True, dtype="float32"),
        _shapes(151936, rows=_FEW_SCORED, gradient=False, dtype="float32"),  # Qwen3
        _shapes(151936, rows=_FEW_TRAINED, gradient=True, dtype="float32"),
        # Vocabularies that 2, 4, 8, 16, 32 and 64 divide: BERT's two, Mamba, Code Llama, OPT, Phi-3.
        *(
            _shapes(vocabulary, rows=_FEW_TRAINED, gradient=gradient)
            for vocabulary in (30522, 28996, 50280, 32016, 50272, 32064)
            for gradient in (False, True)
        ),
        _shapes(50280, rows=_FEW_TRAINED, gradient=False, dtype="float32"),
        _shapes(50280, rows=_FEW_TRAINED, gradient=True, dtype="float32"),
    ],
)
"""Declaration of cross_entropy. Its `launch` takes logits, target, loss, slots (zeros to work in),
ignore_index and grad_scale."""
