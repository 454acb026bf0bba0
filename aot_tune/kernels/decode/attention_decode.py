"""Attention of one new token a sequence over a paged KV cache: host function and declaration.

The kernel is in `flash_decoding`, the search space in `attention_decode_space`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from aot_tune import inputs, workspace
from aot_tune.declare.declaration import Close
from aot_tune.errors import LaunchError
from aot_tune.kernels.decode import attention_decode_space, decode_workspace
from aot_tune.kernels.decode.flash_decoding import attention_decode_kernel
from aot_tune.kernels.host.arguments import (
    LARGEST_INDEX,
    check_apart,
    check_dtype,
    check_rank,
    check_shape,
    check_window,
    indexable,
    number,
)
from aot_tune.kernels.rows.row_groups import check_all_run
from aot_tune.tunable import Tunable
from aot_tune.values.bucket import Exact, Pow2, edge
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend with each sequence's last token to the keys in its pages.

    Computes in float32 (flash decoding, Dao et al., 2023); the weights of the softmax are rounded to the
    dtype of `v_cache` for their product with the values.

    CUDA graphs: `seq_lens` and `block_table` may be changed between replays. The blocks of a sequence
    exchange partial results in memory that belongs to the stream. Run the same call once before it is
    captured (on the capturing stream, if there are several), and replay the graphs of one stream one after
    another.

    Args:
        q: (batch, heads, head_dim), bfloat16 or float16, on a GPU; any strides. head_dim is 64 or 128, and
            heads a multiple of kv_heads, up to 64 times as many: consecutive heads share a KV head.
        k_cache: (pages, page_size, kv_heads, head_dim), of the dtype of `q`; any strides, so that a cache of
            (pages, kv_heads, page_size, head_dim) may be passed with ``transpose(1, 2)``. page_size is a
            power of two of 16 or more.
        v_cache: The values, like `k_cache`.
        block_table: (batch, max_pages), int32: the pages of each sequence in order. Entries beyond a
            sequence's last page, or before its window, are not used.
        seq_lens: (batch,), int32: keys of each sequence, 0 to max_pages * page_size.
        scale: The factor of the scores, a finite number; None means head_dim ** -0.5.
        window: Number of last keys that a sequence attends to, its own included; None means all.
        return_lse: Whether to return the log-sum-exp of the scores too.
        out: The result, of the shape and dtype of `q`; it must share no memory with the others. A new tensor
            is made if it is None.

    Returns:
        `out`, or the new tensor; 0 for an empty sequence. With `return_lse` also (batch, heads), float32: the
        natural logarithm of the sum of the exponentials of the scaled scores; -inf for an empty sequence.

    Raises:
        LaunchError: An argument cannot be launched; the error names it and what to pass.
    """
    scale, window = check_attention_decode(
        q, k_cache, v_cache, block_table, seq_lens, scale=scale, window=window, out=out
    )
    (batch, heads, _), (pages, _, kv_heads, _) = q.shape, k_cache.shape
    written = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty((batch, heads), dtype=torch.float32, device=q.device)
    if batch and heads and pages and block_table.shape[1]:
        counted = indexable(
            "attention_decode", q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table,
            seq_lens=seq_lens, out=written,
        )  # fmt: skip
        if out is not None:
            caches = {"k_cache": k_cache, "v_cache": v_cache}
            check_apart(
                "attention_decode", "out", out, q=q, **caches, block_table=block_table, seq_lens=seq_lens
            )
        attention_decode_tunable.launch(*counted, lse, _scratch(q, kv_heads), scale, window)
    else:  # no keys anywhere
        written.zero_()
        lse.fill_(-math.inf)
    return (written, lse) if return_lse else written


def check_attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> tuple[float, int]:
    """Refuse arguments that `attention_decode` does not take; return `scale` and `window` for a launch."""
    name = "attention_decode"
    check_rank(name, "q", q, "batch heads head_dim")
    check_rank(name, "k_cache", k_cache, "pages page_size kv_heads head_dim")
    check_rank(name, "block_table", block_table, "batch max_pages")
    check_dtype(name, "q", q, torch.bfloat16, torch.float16)
    check_dtype(name, "k_cache", k_cache, q.dtype)
    check_dtype(name, "v_cache", v_cache, q.dtype)
    check_dtype(name, "block_table", block_table, torch.int32)
    check_dtype(name, "seq_lens", seq_lens, torch.int32)
    (batch, heads, head_dim), (pages, page_size, kv_heads, _) = q.shape, k_cache.shape
    _check_heads(name, heads, kv_heads, head_dim, page_size)
    check_shape(name, "k_cache", k_cache, (pages, page_size, kv_heads, head_dim), "q")
    check_shape(name, "v_cache", v_cache, tuple(k_cache.shape), "k_cache")
    check_shape(name, "block_table", block_table, (batch, block_table.shape[1]), "q")
    check_shape(name, "seq_lens", seq_lens, (batch,), "q")
    if out is not None:
        check_shape(name, "out", out, tuple(q.shape), "q")
        check_dtype(name, "out", out, q.dtype)
    scale = head_dim**-0.5 if scale is None else number(name, "scale", scale)
    if not math.isfinite(scale):
        raise LaunchError(f"{name}: scale is {scale}; pass a finite number")
    check_window(name, window)
    return scale, LARGEST_INDEX if window is None else min(window, LARGEST_INDEX)


def _check_heads(name: str, heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    """Refuse heads and pages that no config is made for."""
    if head_dim not in _HEAD_DIMS:
        raise LaunchError(f"{name}: q has a head_dim of {head_dim}; pass 64 or 128")
    if page_size < _SMALLEST_PAGE or edge(page_size) != page_size:
        raise LaunchError(
            f"{name}: k_cache has pages of {page_size} keys; pass a power of two of {_SMALLEST_PAGE} or more"
        )
    if kv_heads == 0 or heads % kv_heads or heads > _LARGEST_GROUP * kv_heads:
        raise LaunchError(
            f"{name}: q has {heads} heads and k_cache {kv_heads}; pass a multiple of k_cache's heads, "
            f"1 to {_LARGEST_GROUP} times as many"
        )


_HEAD_DIMS = (64, 128)
_SMALLEST_PAGE = 16

_LARGEST_GROUP = 64
"""Query heads of a KV head, at most: the registers of a block hold their sums."""


# The declaration --------------------------------------------------------------------------------


def _scratch(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return memory for the exchange of blocks: (blocks, words of a block), int64, zero between launches.

    It is large enough for every config, since the launch chooses one only later.
    """
    rows = decode_workspace.rows(q.shape[1] // kv_heads)
    zeros = workspace(q.device, 1, 2 * decode_workspace.MOST_LEFT).counters  # int32
    return zeros.view(torch.int64).view(-1, decode_workspace.left(rows, q.shape[2]))


def _problem(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
    seq_lens: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, scratch: torch.Tensor,
    scale: float, window: int,
) -> Mapping[str, object]:  # fmt: skip
    (batch, heads, head_dim), (_, page_size, kv_heads, _) = q.shape, k_cache.shape
    _check_heads("attention_decode", heads, kv_heads, head_dim, page_size)
    most = block_table.shape[1] * page_size
    return {
        "dtype": q.dtype,
        "windowed": window < most,
        "batch": batch,
        "context": min(window, most),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "page_size": page_size,
    }


def _args(config: Config, *args: Any) -> tuple[Any, ...]:
    q, (_, page_size, kv_heads, _), window = args[0], args[1].shape, args[9]
    group, windowed = q.shape[1] // kv_heads, window < args[3].shape[1] * page_size
    shapes = group, decode_workspace.rows(group), q.shape[2], page_size, windowed
    short = attention_decode_space.loads_at_once(config, page_size, window, windowed)
    sequences = attention_decode_space.tile_of_sequences(config, q.shape[0], kv_heads, windowed)
    chosen = (config[name] for name in ("splits", "balanced", "tile_n", "gather"))
    return *args, *shapes, short, sequences, *chosen


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    check_all_run("attention_decode", config, device, int(config["splits"]))
    return (attention_decode_space.checked_blocks(config, device, problem),)


_WINDOWS = 32
"""Length of the longest sequence in windows, in the arguments that are made for a windowed problem."""


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    batch, heads, kv_heads = problem.size("batch"), problem.size("heads"), problem.size("kv_heads")
    head_dim, page_size, dtype = problem.size("head_dim"), problem.size("page_size"), str(problem["dtype"])
    window = problem.size("context") if problem["windowed"] else LARGEST_INDEX
    longest = problem.size("context") * (_WINDOWS if problem["windowed"] else 1)
    width = -(-longest // page_size)
    q = inputs.randn((batch, heads, head_dim), dtype, device, 5 * seed)
    # The number of pages of a cache may be divisible by 16 or not.
    more = (-batch * width % 16 or 1) if inputs.has_odd_sizes(seed) else 0
    cache = (batch * width + more, page_size, kv_heads, head_dim)
    k_cache, v_cache = (inputs.randn(cache, dtype, device, 5 * seed + i) for i in (1, 2))
    # Distinct pages in any order; lengths within a factor of four, at least one of them the longest.
    shuffled = inputs.randn((batch * width,), "float32", device, 5 * seed + 3).argsort()
    seq_lens = inputs.randint((batch,), -(-longest // 4), longest + 1, "int32", device, 5 * seed + 4)
    seq_lens[0] = longest
    out = inputs.empty((batch, heads, head_dim), dtype, device)
    lse = inputs.empty((batch, heads), "float32", device)
    table = shuffled.to(torch.int32).reshape(batch, width)
    return (
        q, k_cache, v_cache, table, seq_lens, out, lse, _scratch(q, kv_heads), head_dim**-0.5, window,
    )  # fmt: skip


def _reference(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
    seq_lens: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, scratch: torch.Tensor,
    scale: float, window: int,
) -> dict[str, Close]:  # fmt: skip
    each = []
    for queries, pages, length in zip(q, block_table, seq_lens.tolist(), strict=True):
        used = pages[: -(-length // k_cache.shape[1])].long()
        k, v = (cache[used].flatten(0, 1)[max(length - window, 0) : length] for cache in (k_cache, v_cache))
        grouped = queries.reshape(k.shape[1], -1, q.shape[2]).double()
        scores = torch.einsum("hgd,nhd->hgn", grouped, k.double()) * scale
        sums = torch.einsum("hgn,nhd->hgd", scores.softmax(dim=2), v.double())
        each.append((sums.reshape(queries.shape), scores.logsumexp(dim=2).reshape(-1)))
    value, log_sums = (torch.stack(parts) for parts in zip(*each, strict=True))
    # Half an eps is the output's own rounding. The rounding of the weights adds a sum of many errors, 0.15
    # eps of a typical output; one of 10^7 outputs has six times that error. If 64 of 32768 values were
    # mistaken for others, most outputs would change by 0.06 of a typical one. Log-sums are float32
    # throughout: leaving 64 keys out changes them by 2e-3.
    eps = torch.finfo(q.dtype).eps
    return {
        "out": Close(value=value, rtol=eps, atol=2 * eps * value.square().mean().sqrt().item()),
        "lse": Close(value=log_sums, rtol=1e-5, atol=1e-4),
        # Blocks set to zero all that they exchanged: the next launch must find zeros.
        "scratch": Close(value=torch.zeros_like(scratch), rtol=0.0, atol=0.0),
    }


def _shapes(
    heads: int, kv_heads: int, *, head_dim: int = 128, page_size: int = 16, dtype: str = "bfloat16",
    contexts: Sequence[int] = (2048, 8192, 32768), windowed: bool = False,
) -> Iterator[dict[str, object]]:  # fmt: skip
    """Return a model's problems; every size between two of them is at most a doubling away from one."""
    for batch, context in itertools.product((1, 8, 64, 256), contexts):
        if 4 * batch * context * kv_heads * head_dim <= _MOST_CACHE_BYTES:
            yield {
                "dtype": dtype, "windowed": windowed, "batch": batch, "context": context, "heads": heads,
                "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size,
            }  # fmt: skip


_MOST_CACHE_BYTES = 2**33
"""Bytes of the keys and values of a declared problem, at most."""

attention_decode_tunable = Tunable(
    name="attention_decode",
    package=__package__,
    kernel=attention_decode_kernel,
    axes={
        "batch": Pow2(),
        "context": Pow2(),
        "heads": Exact(),
        "kv_heads": Exact(),
        "head_dim": Exact(),
        "page_size": Exact(),
    },
    batch_axes=("batch", "context"),  # the table of pages is as wide as the longest sequence needs
    invariant=attention_decode_space.invariant,
    problem=_problem,
    search_space=attention_decode_space.space,
    legal=attention_decode_space.legal,
    fits=attention_decode_space.fits,
    default=attention_decode_space.default,
    grid_fn=_grid,
    args_fn=_args,
    tiles=attention_decode_space.blocks,
    make_args=_make_args,
    reference=_reference,
    outputs=("out", "lse"),
    reset=("scratch",),
    typical=[
        *_shapes(32, 8),  # Llama 3.1 8B, Qwen3 8B
        *_shapes(64, 8),  # Llama 3.1 70B, Qwen3 32B
        *_shapes(8, 1),  # Llama 3.1 70B, a rank of eight
        *_shapes(32, 4),  # Qwen3 30B-A3B
        *_shapes(64, 8, head_dim=64),  # gpt-oss 20b and 120b
        *_shapes(64, 8, head_dim=64, contexts=(128,), windowed=True),  # and every other layer of theirs
        *_shapes(32, 8, page_size=64, contexts=(8192,)),  # Llama 3.1 8B in larger pages
        *_shapes(32, 8, dtype="float16", contexts=(8192,)),  # Llama 3.1 8B, run in float16 (AWQ, GPTQ)
        *_shapes(32, 8, contexts=(64, 256)),  # Llama 3.1 8B, short contexts
        *_shapes(8, 1, contexts=(256,)),  # Llama 3.1 70B, a rank of eight
        *_shapes(64, 8, head_dim=64, contexts=(256,)),  # gpt-oss 20b and 120b
        *_shapes(14, 2, head_dim=64, contexts=(256, 4096)),  # Qwen2.5 0.5B
        *_shapes(32, 32, contexts=(256, 4096)),  # Llama 2 7B
        *_shapes(32, 8, head_dim=64, contexts=(512, 4096, 32768)),  # Llama 3.2 1B
        *_shapes(28, 4, contexts=(512, 4096)),  # Qwen2.5 7B
        *_shapes(16, 2, contexts=(512, 4096)),  # Qwen2.5 3B
    ],
)
"""Declaration of attention_decode. Its `launch` takes q, k_cache, v_cache, block_table, seq_lens, out, lse,
scratch (zeros to work in), scale and window."""
