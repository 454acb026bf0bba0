"""Attention of packed prompts: kernel, host function and declaration.

The tile code is in `flash`, the search space in `flash_space`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs
from aot_tune.declare.declaration import Close
from aot_tune.errors import LaunchError
from aot_tune.kernels.host.arguments import (
    check_apart,
    check_dtype,
    check_flag,
    check_rank,
    check_shape,
    indexable,
)
from aot_tune.kernels.prefill import flash_reference, flash_space
from aot_tune.kernels.prefill.flash import attend, check_heads, scale_and_window
from aot_tune.kernels.prefill.flash_space import shapes
from aot_tune.tunable import Tunable
from aot_tune.values.bucket import Pow2
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem


@ct.kernel
def attention_varlen_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, scale, window,
    tile_m: ct.Constant[int], tile_n: ct.Constant[int],
    head_dim: ct.Constant[int], causal: ct.Constant[bool], windowed: ct.Constant[bool],
):  # fmt: skip
    """Compute one tile of queries of one head of one sequence, if the sequence reaches that far."""
    heads, tiles = q.shape[1], ct.cdiv(max_seqlen_q, tile_m)  # ordered as in `attention`
    index = ct.bid(1) * ct.num_blocks(0) + ct.bid(0)
    head, place = index % heads, index // heads
    sequence, m = place // tiles, tiles - 1 - place % tiles
    if sequence < cu_seqlens_q.shape[0] - 1:
        q_start, q_end = _span(cu_seqlens_q, sequence, q.shape[0])
        if m * tile_m < q_end - q_start:
            k_start, k_end = _span(cu_seqlens_k, sequence, k.shape[0])
            # Slices end where the sequence does: nothing is stored behind it, and loads from there give zeros
            # and not the values of the next sequence, which may be NaN. No slice may be empty; the row that a
            # sequence without keys gets is not read.
            k_first = min(k_start, k.shape[0] - 1)
            k_last = max(k_end, k_first + 1)
            attend(
                _rows(q, q_start, q_end), _rows(k, k_first, k_last), _rows(v, k_first, k_last),
                _rows(out, q_start, q_end), lse.slice(1, q_start, q_end), (), m, head,
                q_end - q_start, k_end - k_start, scale, window, tile_m, tile_n, head_dim, causal, windowed,
            )  # fmt: skip


def _rows(array: Any, start: Any, stop: Any) -> Any:
    """Slice the rows of an array, with bounds in 64 bits: narrow-offsets (README)."""
    return array.slice(0, ct.astype(start, ct.int64), ct.astype(stop, ct.int64))


def _span(cu_seqlens: Any, sequence: Any, rows: Any) -> Any:
    """Return a sequence's first row and the row after its last, both bounded: no access leaves the arrays."""
    start = min(max(ct.load(cu_seqlens, (sequence,), (1,)).item(), 0), rows)
    return start, min(max(ct.load(cu_seqlens, (sequence + 1,), (1,)).item(), start), rows)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from every query to the keys of its own sequence, many sequences packed one after another.

    Sequence s has the queries from ``cu_seqlens_q[s]`` to before ``cu_seqlens_q[s + 1]``, and its keys
    likewise; it may have none of either. Arithmetic and positions are those of `attention`. Rows before the
    first or after the last sequence are not written.

    Args:
        q: (total_q, heads, head_dim), bfloat16 or float16, on a GPU; head_dim 64 or 128. Any strides, as for
            `attention`.
        k: (total_k, kv_heads, head_dim), of the dtype of `q`; kv_heads divides heads.
        v: The values, like `k`.
        cu_seqlens_q: (sequences + 1,), int32, ascending from 0 or more to total_q or less: where each
            sequence of `q` starts, and where the last one ends. The values are not checked, which would wait
            for the GPU: with others the results are wrong, but nothing outside of the tensors is accessed.
        cu_seqlens_k: The same for `k`.
        max_seqlen_q: The length of the longest sequence of `q`, or more; queries beyond it are not computed.
        max_seqlen_k: The length of the longest sequence of `k`, or more.
        causal: Whether a query sees no keys after its own position.
        scale: The factor of the scores, above 0; None means ``1 / sqrt(head_dim)``.
        window: As for `attention`: the number of keys that a query sees, its own included.
        return_lse: Whether to return the log-sum-exps as well.
        out: The result, of the shape and dtype of `q`; it must share no memory with the others. A new
            contiguous tensor is made if it is None.

    Returns:
        `out` or the new tensor; with `return_lse` also (heads, total_q), float32: the natural logarithm of
        the sum of the exponentials of each query's scaled scores.

    Raises:
        LaunchError: An argument cannot be launched; the error names it and what to pass.
    """
    scale, window = check_attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        causal=causal, scale=scale, window=window, out=out,
    )  # fmt: skip
    total_q, heads, _ = q.shape
    written = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty((heads, total_q), dtype=torch.float32, device=q.device)
    if k.shape[0] == 0:
        written.zero_()
        lse.fill_(float("-inf"))
    elif written.numel() and max_seqlen_q and cu_seqlens_q.shape[0] > 1:
        *counted, starts_q, starts_k = indexable(
            "attention_varlen", q=q, k=k, v=v, out=written,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        )  # fmt: skip
        if out is not None:
            read = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
            check_apart("attention_varlen", "out", out, **read)
        attention_varlen_tunable.launch(
            *counted, lse, starts_q, starts_k, min(max_seqlen_q, total_q), scale, causal, window
        )
    return (written, lse) if return_lse else written


def check_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> tuple[float, int | None]:
    """Refuse arguments that `attention_varlen` does not take; return `scale` and `window` for a launch."""
    check_flag("attention_varlen", "causal", causal)
    check_rank("attention_varlen", "q", q, "total_q heads head_dim")
    check_rank("attention_varlen", "k", k, "total_k kv_heads head_dim")
    check_dtype("attention_varlen", "q", q, torch.bfloat16, torch.float16)
    check_dtype("attention_varlen", "k", k, q.dtype)
    check_dtype("attention_varlen", "v", v, q.dtype)
    check_shape("attention_varlen", "k", k, (*k.shape[:2], q.shape[2]), "q")
    check_shape("attention_varlen", "v", v, tuple(k.shape), "k")
    check_heads("attention_varlen", q.shape[1], k.shape[1], q.shape[2])
    check_rank("attention_varlen", "cu_seqlens_q", cu_seqlens_q, "sequences+1")
    check_dtype("attention_varlen", "cu_seqlens_q", cu_seqlens_q, torch.int32)
    check_dtype("attention_varlen", "cu_seqlens_k", cu_seqlens_k, torch.int32)
    check_shape("attention_varlen", "cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape), "cu_seqlens_q")
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not isinstance(longest, int) or longest < 0:
            raise LaunchError(f"attention_varlen: {name} is {longest!r}; pass the longest length, an int")
    if out is not None:
        check_shape("attention_varlen", "out", out, tuple(q.shape), "q")
        check_dtype("attention_varlen", "out", out, q.dtype)
    return scale_and_window("attention_varlen", q.shape[2], scale, window, max_seqlen_k)


# The declaration --------------------------------------------------------------------------------


def _problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    scale: float, causal: bool, window: int | None,
) -> Mapping[str, object]:  # fmt: skip
    (_, heads, head_dim), kv_heads = q.shape, k.shape[1]
    check_heads("attention_varlen", heads, kv_heads, head_dim)
    return {
        "dtype": q.dtype,
        "mask": flash_space.mask(causal, window),
        "batch": cu_seqlens_q.shape[0] - 1,
        "tokens": max_seqlen_q,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }


def _args(
    config: Config,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    scale: float, causal: bool, window: int | None,
) -> tuple[Any, ...]:  # fmt: skip
    return (
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, scale, 0 if window is None else window,
        config["tile_m"], config["tile_n"], q.shape[2], causal, window is not None,
    )  # fmt: skip


_MOST_IN_A_ROW = 2**20
"""Blocks along the grid's first dimension, which holds fewer than 2**24. If there are more blocks, the grid
is filled up with empty ones."""


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    tiles = flash_space.tiles(config, problem)
    return (tiles,) if tiles <= _MOST_IN_A_ROW else (_MOST_IN_A_ROW, -(-tiles // _MOST_IN_A_ROW))


def _lengths(batch: int, longest: int) -> list[int]:
    """Return a batch's lengths: the longest, and others evenly spaced down to an eighth of it, not sorted."""
    lengths = [max(1, longest - longest * 7 * i // (8 * batch)) for i in range(batch)]
    return [lengths[i * 5 % batch] for i in range(batch)] if batch % 5 else lengths


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    tokens, dtype = problem.size("tokens"), str(problem["dtype"])
    heads, kv_heads, head_dim = (problem.size(name) for name in ("heads", "kv_heads", "head_dim"))
    lengths = _lengths(problem.size("batch"), tokens)
    total = sum(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    q = inputs.randn((total, heads, head_dim), dtype, device, 3 * seed, scale=flash_reference.QUERY_SCALE)
    # The last sequence may have further keys before its queries: so many that 16 divides one of both totals.
    before = (-total % 16 or 1) if inputs.has_odd_sizes(seed) else 0
    k = inputs.randn((total + before, kv_heads, head_dim), dtype, device, 3 * seed + 1)
    v = inputs.randn((total + before, kv_heads, head_dim), dtype, device, 3 * seed + 2)
    out = inputs.empty((total, heads, head_dim), dtype, device)
    lse = inputs.empty((heads, total), "float32", device)
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    cu_seqlens_k = torch.tensor([*starts[:-1], total + before], dtype=torch.int32, device=device)
    causal, window = flash_space.causal_of(problem), flash_space.window_of(problem)
    return q, k, v, out, lse, cu_seqlens, cu_seqlens_k, tokens, head_dim**-0.5, causal, window


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    scale: float, causal: bool, window: int | None,
) -> dict[str, Close]:  # fmt: skip
    each = [
        flash_reference.reference(q[q_start:q_end], k[k_start:k_end], v[k_start:k_end], scale, causal, window)
        for (q_start, q_end), (k_start, k_end) in zip(_spans(cu_seqlens_q), _spans(cu_seqlens_k), strict=True)
    ]
    outs, sums = zip(*each, strict=True)
    return flash_reference.close(torch.cat(outs), torch.cat(sums, dim=1), q.dtype)


def _spans(cu_seqlens: torch.Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(cu_seqlens.tolist()))


attention_varlen_tunable = Tunable(
    name="attention_varlen",
    package=__package__,
    kernel=attention_varlen_kernel,
    axes=flash_space.AXES,
    batch_axes=("batch", "tokens"),  # the longest sequence is another one in another batch
    problem=_problem,
    search_space=flash_space.space,
    legal=flash_space.legal,
    default=flash_space.default,
    grid_fn=_grid,
    args_fn=_args,
    tiles=flash_space.tiles,
    make_args=_make_args,
    reference=_reference,
    outputs=("out", "lse"),
    typical=[
        shapes(1, (512, 2048, 8192), 32, 8),  # Llama 3.1 8B, Qwen3 8B
        shapes(4, Pow2.edges(512, 8192), 32, 8),
        shapes(16, Pow2.edges(128, 2048), 32, 8),
        shapes(64, (128, 512), 32, 8),
        shapes(4, (1024, 4096), 32, 8, dtype="float16"),  # the same, run in float16 (AWQ, GPTQ)
        shapes(4, (1024, 4096), 64, 8),  # Llama 3.1 70B, Qwen3 32B
        shapes(16, (256, 1024), 64, 8),
        shapes(4, (1024, 4096), 32, 4),  # Qwen3 30B-A3B
        shapes(16, (256, 1024), 32, 4),
        shapes(4, (512, 2048, 8192), 64, 8, head_dim=64),  # gpt-oss 20b and 120b, every other layer
        shapes(16, (256, 1024), 64, 8, head_dim=64),
        shapes(4, (512, 2048, 8192), 64, 8, head_dim=64, mask="causal_127"),  # and the layers between
        shapes(16, (256, 1024), 64, 8, head_dim=64, mask="causal_127"),
        shapes(16, (128, 512), 12, 12, head_dim=64, mask="full"),  # ModernBERT base
        shapes(4, (64, 256), 32, 8),  # short prompts
        shapes(16, (16, 64), 32, 8),
        shapes(64, (16, 64), 32, 8),
        shapes(4, (256, 1024), 24, 8),  # Llama 3.2 3B
        shapes(16, (64, 256), 24, 8),
        shapes(4, (256, 1024), 32, 8, head_dim=64),  # Llama 3.2 1B
        shapes(16, (64, 256), 32, 8, head_dim=64),
        shapes(4, (256, 1024, 4096), 8, 1),  # Llama 3.1 70B, a rank of eight
        shapes(16, (64, 256), 8, 1),
        shapes(4, (256, 1024), 32, 32),  # Llama 2 7B
        shapes(4, (64, 256, 1024), 16, 8),  # Qwen3 0.6B
    ],
)
"""Declaration of attention_varlen. Its `launch` takes ``q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
max_seqlen_q, scale, causal, window``."""
