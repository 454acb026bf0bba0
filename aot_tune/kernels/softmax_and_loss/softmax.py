"""Softmax over the last dimension: kernel, host function and declaration; `softmax_space` holds its space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs, workspace
from aot_tune.declare.declaration import Close
from aot_tune.errors import LaunchError
from aot_tune.kernels.host.arguments import check_apart, check_dtype, check_shape, indexable
from aot_tune.kernels.host.unused import unused_counters
from aot_tune.kernels.rows.online_softmax import LOWEST, exponential, maximum_and_sum
from aot_tune.kernels.rows.row_groups import check_all_run, exchange, fetch, highest_and_sum
from aot_tune.kernels.rows.rows import as_rows, load_part, store_part, threads
from aot_tune.kernels.softmax_and_loss import softmax_space
from aot_tune.tunable import Tunable
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem


@ct.kernel
def softmax_kernel(  # type: ignore[no-untyped-def]
    x, out, slots,
    height: ct.Constant[int], width: ct.Constant[int], parts: ct.Constant[int], inside: ct.Constant[int],
    members: ct.Constant[int], chunked: ct.Constant[bool], lanes: ct.Constant[int], vector: ct.Constant[int],
):  # fmt: skip
    """Hold `height` rows in a block, or one row in `members` blocks, as `parts` of `width` columns a block.

    If `chunked` is set, a block reads one row twice instead, `width` columns at a time.
    """
    if chunked:
        _in_chunks(x, out, ct.bid(0), (width, parts, inside, lanes, vector))
    else:
        place, member = ct.bid(0) // members, ct.bid(0) % members
        first = member * parts
        rows, tops, exponentials = (), ct.full((height, width), LOWEST, ct.float32), ()
        for part in ct.static_iter(range(parts)):  # all loads are in flight at once
            index = place, first + part
            rows = (*rows, load_part(x, index, (height, width), part < inside, ct.PaddingMode.NEG_INF))  # type: ignore[assignment]  # grows while compiling
        if members > 1:
            fetch(slots, place, member, members, lanes)
        for part in ct.static_iter(range(parts)):
            tops = ct.maximum(tops, rows[part].astype(ct.float32))
        top, total = ct.max(tops, axis=1, keepdims=True), ct.zeros((height, width), ct.float32)
        for part in ct.static_iter(range(parts)):
            exponentials = (*exponentials, exponential(rows[part].astype(ct.float32) - top))  # type: ignore[assignment]  # grows while compiling
            total = total + exponentials[part]
        total = ct.sum(total, axis=1, keepdims=True)
        if members > 1:
            shrink, total = _of_the_whole_row(slots, place, member, members, lanes, top, total)
        else:
            shrink = 1.0
        # The sum is 1 or more, or NaN: the special cases of an exact division do not occur.
        share = shrink * ct.truediv(1.0, total, rounding_mode=ct.RoundingMode.APPROX)
        for part in ct.static_iter(range(parts)):
            result = (exponentials[part] * share).astype(out.dtype)
            store_part(out, (place, first + part), result, part < inside)


def _of_the_whole_row(
    slots: Any, row: Any, member: Any, members: Any, lanes: Any, top: Any, total: Any
) -> Any:
    """Return the factor from this block's exponentials to the row's maximum, and the row's sum with it."""
    mine = ct.cat((top.reshape((1,)), total.reshape((1,))), 0)
    found = exchange(slots, row, member, members, lanes, mine)
    highest, total = highest_and_sum(found, members)
    return exponential(top - highest), total


def _in_chunks(x: Any, out: Any, row: Any, shape: Any) -> None:
    width, parts, inside, lanes, vector = shape
    top, total = maximum_and_sum(x, row, width, inside < parts, lanes, vector)
    share, chunks = 1.0 / total, x.shape[1] // width
    for chunk in range(chunks):
        _write_shares(x, out, (row, chunk), width, top, share, True)
    if inside < parts:
        _write_shares(x, out, (row, chunks), width, top, share, False)


def _write_shares(x: Any, out: Any, index: Any, width: Any, top: Any, share: Any, inside: Any) -> None:
    part = load_part(x, index, (1, width), inside, ct.PaddingMode.NEG_INF).astype(ct.float32)
    store_part(out, index, (exponential(part - top) * share).astype(out.dtype), inside)


def softmax(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute exponentials of the last dimension of `x`, divided by their sum.

    Subtracts the row's maximum, computes in float32 and rounds once; exponentials below 1.2e-38 become 0. A
    row that is all -inf, or holds NaN or inf, becomes NaN, as in torch.

    CUDA graphs: several blocks may share a row of more than 8192 columns and exchange partial results in
    memory that belongs to the stream. Run the same call once before it is captured (on the capturing stream,
    if there are several), and replay the graphs of one stream one after another.

    Args:
        x: (..., cols), bfloat16, float16 or float32, on a GPU; leading dimensions that ``view`` can flatten.
        out: The result, of the shape and dtype of `x`; it must share no memory with `x`. A new tensor is made
            if it is None.

    Returns:
        `out`, or the new tensor.

    Raises:
        LaunchError: An argument cannot be launched; the error names it and what to pass.
    """
    check_softmax(x, out=out)
    written = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if x.numel() == 0:
        return written
    flat_x, flat_out = as_rows("softmax", "x", x), as_rows("softmax", "out", written)
    counted = indexable("softmax", x=flat_x, out=flat_out)
    if out is not None:
        check_apart("softmax", "out", out, x=x)
    softmax_tunable.launch(*counted, _slots(flat_x))
    return written


def check_softmax(x: torch.Tensor, *, out: torch.Tensor | None = None) -> None:
    """Refuse shapes and dtypes that `softmax` does not take."""
    check_dtype("softmax", "x", x, torch.bfloat16, torch.float16, torch.float32)
    if x.dim() == 0:
        raise LaunchError("softmax: x has shape (); pass one dimension or more")
    if out is not None:
        check_shape("softmax", "out", out, tuple(x.shape), "x")
        check_dtype("softmax", "out", out, x.dtype)


# The declaration --------------------------------------------------------------------------------


def _slots(x: torch.Tensor) -> torch.Tensor:
    """Return memory for the exchange between blocks: int32, zero between launches.

    It is large enough for every config, since the launch chooses one only later.
    """
    most = softmax_space.slots(*x.shape)
    return workspace(x.device, 1, most).counters if most > 1 else unused_counters(x.device)


def _problem(x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor) -> Mapping[str, object]:
    return {"dtype": x.dtype, "rows": x.shape[0], "cols": x.shape[1]}


def _tiles(config: Config, problem: Problem) -> int:
    return -(-problem.size("rows") // int(config["height"])) * int(config["members"])


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    check_all_run("softmax", config, device, int(config["members"]))
    return (_tiles(config, problem),)


def _args(config: Config, x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor) -> tuple[Any, ...]:
    lanes, vector = threads(config), 16 // x.element_size()
    tile = *softmax_space.cut(config, *x.shape), int(config["members"]), config["chunked"]
    return x, out, slots, *tile, lanes, vector


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    rows, cols, dtype = problem.size("rows"), problem.size("cols"), str(problem["dtype"])
    x = inputs.randn((rows, cols), dtype, device, seed, scale=3)  # logits have a deviation of about 3
    return x, inputs.empty((rows, cols), dtype, device), _slots(x)


def _reference(x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor) -> dict[str, Close]:
    # One rounding to the output's dtype is half its eps. Before it, the float32 exponent, 40 at most here,
    # has an error of 40 / 2^24 = 2e-6, and the exponential that relative error. The absolute term is for
    # float16's subnormal numbers.
    value = torch.softmax(x.double(), dim=1)
    return {
        "out": Close(value=value, rtol=max(torch.finfo(x.dtype).eps, 1e-5), atol=1e-7),
        # The next launch must find zeros.
        "slots": Close(value=torch.zeros_like(slots), rtol=0.0, atol=0.0),
    }


_ROWS = Pow2.edges(1, 16384)[::2]
"""Rows to sweep: every other edge. A bucket between two of them is one doubling away."""

_FEW_ROWS, _SCORES, _SAMPLED = (4, 64, 1024, 16384), (64, 1024, 16384), (1, 4, 16, 64, 256)
"""Rows to sweep for columns whose neighbours are swept more closely: routers, scores and sampling."""

_FEW_SAMPLED = _SAMPLED[::2]
"""Rows to sweep for vocabularies that are declared for their divisor, or without a cast."""

softmax_tunable = Tunable(
    name="softmax",
    package=__package__,
    kernel=softmax_kernel,
    axes={"rows": Pow2(), "cols": Exact()},
    batch_axes=("rows",),
    problem=_problem,
    search_space=softmax_space.space,
    legal=softmax_space.legal,
    default=softmax_space.default,
    grid_fn=_grid,
    args_fn=_args,
    tiles=_tiles,
    make_args=_make_args,
    reference=_reference,
    outputs=("out",),
    reset=("slots",),
    typical=[
        {"dtype": "float32", "rows": _ROWS, "cols": 8},  # Mixtral, router
        {"dtype": ("bfloat16", "float32"), "rows": _ROWS, "cols": 128},  # Qwen3-MoE and gpt-oss 120b, router
        {"dtype": "float32", "rows": _ROWS, "cols": 256},  # DeepSeek-V3's count of experts
        {"dtype": "bfloat16", "rows": Pow2.edges(64, 65536)[::2], "cols": (2048, 8192)},  # attention scores
        {"dtype": "float16", "rows": (1024, 16384), "cols": 2048},  # attention scores
        {"dtype": "bfloat16", "rows": (1, 16), "cols": 2048},  # attention scores of a few queries
        {"dtype": "float32", "rows": Pow2.edges(1, 1024)[::2], "cols": 32000},  # Mixtral, sampling
        {"dtype": "float32", "rows": Pow2.edges(1, 1024)[::2], "cols": 128256},  # Llama 3.1, sampling
        {"dtype": "float32", "rows": Pow2.edges(1, 1024)[::2], "cols": 262144},  # Gemma 3, sampling
        {"dtype": "float32", "rows": _FEW_ROWS, "cols": (160, 384)},  # Qwen3-Coder 480B, Kimi K2, router
        {"dtype": "bfloat16", "rows": _SCORES, "cols": (197, 729)},  # ViT-B, SigLIP, scores
        {"dtype": "float32", "rows": _SAMPLED, "cols": (49155, 50257)},  # Granite 3, GPT-2, sampling
        {"dtype": "bfloat16", "rows": _FEW_SAMPLED, "cols": 128256},  # sampling without a cast
        {"dtype": "bfloat16", "rows": _SAMPLED, "cols": 50257},  # GPT-2, sampling without a cast
        {"dtype": "bfloat16", "rows": _FEW_ROWS, "cols": (160, 1000)},  # Qwen3-Coder 480B, router; ImageNet
        {"dtype": ("bfloat16", "float32"), "rows": _FEW_ROWS, "cols": 512},  # Qwen3-Next, router
        {"dtype": "float32", "rows": _FEW_ROWS, "cols": (1000, 2048, 8192)},  # ImageNet, scores as cast
        {"dtype": ("bfloat16", "float32"), "rows": _FEW_SAMPLED, "cols": (30522, 28996)},  # BERT, 2 and 4
        {"dtype": ("bfloat16", "float32"), "rows": _FEW_SAMPLED, "cols": (50280, 32016)},  # Mamba, Code Llama
        {"dtype": "bfloat16", "rows": _FEW_SAMPLED, "cols": 32064},  # Phi-3, sampling without a cast
    ],
)
"""Declaration: ``softmax_tunable.launch(x, out, slots)`` takes x and out as (rows, cols), and
zeros as slots."""
