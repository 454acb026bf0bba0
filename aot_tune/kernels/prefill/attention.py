"""Attention of prompts of one length: kernel, host function and declaration.

The tile code is in `flash`, the search space in `flash_space`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs
from aot_tune.declare.declaration import Close
from aot_tune.kernels.host.arguments import (
    LARGEST_INDEX,
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
from aot_tune.values.problem import Problem


@ct.kernel
def attention_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, scale, window,
    tile_m: ct.Constant[int], tile_n: ct.Constant[int],
    head_dim: ct.Constant[int], causal: ct.Constant[bool], windowed: ct.Constant[bool],
):  # fmt: skip
    """Compute one tile of queries of one head."""
    # The heads of a tile run at the same time and share keys in L2. The last tiles of a causal prompt, which
    # see the most keys, come first: so the tiles that finish last are short.
    heads, tiles = q.shape[2], ct.cdiv(q.shape[1], tile_m)
    head, place = ct.bid(0) % heads, ct.bid(0) // heads
    attend(
        q, k, v, out, lse, (place // tiles,), tiles - 1 - place % tiles, head, q.shape[1], k.shape[1],
        scale, window, tile_m, tile_n, head_dim, causal, windowed,
    )  # fmt: skip


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from every query to the keys of its prompt: ``softmax(q k^T scale) v`` for each head.

    Scores, softmax and sums are float32; the weights are rounded to the dtype of `v` for their product (Dao
    et al., "FlashAttention", 2022). Queries and keys end together: the position of query i is that of key ``i
    + kv_len - tokens``, as in flash-attn since 2.1. A query that sees no key gets 0, and a log-sum-exp of
    -inf.

    Args:
        q: (batch, tokens, heads, head_dim), bfloat16 or float16, on a GPU; head_dim 64 or 128. Any strides,
            so that it may be ``x.transpose(1, 2)`` of scaled_dot_product_attention's layout; it is fast if
            the last dimension is contiguous and the other strides are multiples of 8.
        k: (batch, kv_len, kv_heads, head_dim), of the dtype of `q`; kv_heads divides heads. Any strides.
        v: The values, like `k`.
        causal: Whether a query sees no keys after its own position.
        scale: The factor of the scores, above 0; None means ``1 / sqrt(head_dim)``.
        window: A sliding window as in the config of a model: the number of keys up to its own position, that
            one included, that a query sees; None means all.
        return_lse: Whether to return the log-sum-exps as well.
        out: The result, of the shape and dtype of `q`; it must share no memory with the others. A new
            contiguous tensor is made if it is None.

    Returns:
        `out` or the new tensor; with `return_lse` also (batch, heads, tokens), float32: the natural logarithm
        of the sum of the exponentials of each query's scaled scores.

    Raises:
        LaunchError: An argument cannot be launched; the error names it and what to pass.
    """
    scale, window = check_attention(q, k, v, causal=causal, scale=scale, window=window, out=out)
    batch, tokens, heads, _ = q.shape
    written = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    if k.shape[1] == 0:
        written.zero_()
        lse.fill_(float("-inf"))
    elif written.numel():
        if out is not None:
            check_apart("attention", "out", out, q=q, k=k, v=v)
        for part in _parts(q, k, v, written, lse):
            counted = indexable("attention", **dict(zip(("q", "k", "v", "out"), part, strict=False)))
            attention_tunable.launch(*counted, part[-1], scale, causal, window)
    return (written, lse) if return_lse else written


def _parts(*tensors: torch.Tensor) -> Iterable[Sequence[torch.Tensor]]:
    """Return the batch as one launch, or one for each prompt where their stride exceeds 32 bits."""
    if len(tensors[0]) == 1 or max(tensor.stride(0) for tensor in tensors) <= LARGEST_INDEX:
        return (tensors,)
    return zip(*(torch.split(tensor, 1) for tensor in tensors), strict=True)


def check_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> tuple[float, int | None]:
    """Refuse arguments that `attention` does not take; return `scale` and `window` as a launch takes them."""
    check_flag("attention", "causal", causal)
    check_rank("attention", "q", q, "batch tokens heads head_dim")
    check_rank("attention", "k", k, "batch kv_len kv_heads head_dim")
    check_dtype("attention", "q", q, torch.bfloat16, torch.float16)
    check_dtype("attention", "k", k, q.dtype)
    check_dtype("attention", "v", v, q.dtype)
    kv_len, head_dim = k.shape[1], q.shape[3]
    check_shape("attention", "k", k, (q.shape[0], kv_len, k.shape[2], head_dim), "q")
    check_shape("attention", "v", v, tuple(k.shape), "k")
    check_heads("attention", q.shape[2], k.shape[2], head_dim)
    if out is not None:
        check_shape("attention", "out", out, tuple(q.shape), "q")
        check_dtype("attention", "out", out, q.dtype)
    return scale_and_window("attention", head_dim, scale, window, kv_len)


# The declaration --------------------------------------------------------------------------------


def _problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    scale: float, causal: bool, window: int | None,
) -> Mapping[str, object]:  # fmt: skip
    (batch, tokens, heads, head_dim), kv_heads = q.shape, k.shape[2]
    check_heads("attention", heads, kv_heads, head_dim)
    return {
        "dtype": q.dtype,
        "mask": flash_space.mask(causal, window),
        "batch": batch,
        "tokens": tokens,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }


def _args(
    config: Config,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    scale: float, causal: bool, window: int | None,
) -> tuple[Any, ...]:  # fmt: skip
    return (
        q, k, v, out, lse, scale, 0 if window is None else window,
        config["tile_m"], config["tile_n"], q.shape[3], causal, window is not None,
    )  # fmt: skip


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    batch, tokens, dtype = problem.size("batch"), problem.size("tokens"), str(problem["dtype"])
    heads, kv_heads, head_dim = (problem.size(name) for name in ("heads", "kv_heads", "head_dim"))
    q = inputs.randn(
        (batch, tokens, heads, head_dim), dtype, device, 3 * seed, scale=flash_reference.QUERY_SCALE
    )
    k = inputs.randn((batch, tokens, kv_heads, head_dim), dtype, device, 3 * seed + 1)
    v = inputs.randn((batch, tokens, kv_heads, head_dim), dtype, device, 3 * seed + 2)
    out = inputs.empty((batch, tokens, heads, head_dim), dtype, device)
    lse = inputs.empty((batch, heads, tokens), "float32", device)
    causal, window = flash_space.causal_of(problem), flash_space.window_of(problem)
    return q, k, v, out, lse, head_dim**-0.5, causal, window


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    scale: float, causal: bool, window: int | None,
) -> dict[str, Close]:  # fmt: skip
    each = [
        flash_reference.reference(*sequence, scale, causal, window) for sequence in zip(q, k, v, strict=True)
    ]
    outs, sums = (torch.stack(values) for values in zip(*each, strict=True))
    return flash_reference.close(outs, sums, q.dtype)


attention_tunable = Tunable(
    name="attention",
    package=__package__,
    kernel=attention_kernel,
    axes=flash_space.AXES,
    batch_axes=("batch",),
    problem=_problem,
    search_space=flash_space.space,
    legal=flash_space.legal,
    default=flash_space.default,
    grid_fn=flash_space.grid,
    args_fn=_args,
    tiles=flash_space.tiles,
    make_args=_make_args,
    reference=_reference,
    outputs=("out", "lse"),
    typical=[
        shapes(1, Pow2.edges(128, 16384), 32, 8),  # Llama 3.1 8B, Qwen3 8B
        shapes(8, (512, 1024, 2048), 32, 8),
        shapes(1, (512, 2048, 8192), 32, 8, dtype="float16"),  # the same, run in float16 (AWQ, GPTQ)
        shapes(1, Pow2.edges(512, 16384), 64, 8),  # Llama 3.1 70B, Qwen3 32B
        shapes(8, (512, 2048), 64, 8),
        shapes(1, (512, 2048, 8192), 40, 8),  # Qwen3 14B
        shapes(1, (512, 2048, 8192), 32, 4),  # Qwen3 30B-A3B
        shapes(1, Pow2.edges(512, 16384), 64, 8, head_dim=64),  # gpt-oss 20b and 120b, every other layer
        shapes(1, Pow2.edges(512, 16384), 64, 8, head_dim=64, mask="causal_127"),  # and the layers between
        shapes(8, (512, 2048), 64, 8, head_dim=64),
        shapes(8, (512, 2048), 64, 8, head_dim=64, mask="causal_127"),
        shapes(1, (8192, 16384), 32, 8, mask="causal_4095"),  # Mistral 7B v0.1
        shapes(8, (2048,), 20, 20, head_dim=64, mask="full"),  # Whisper large's encoder, 1500 tokens
        shapes(1, (4, 16, 64), 32, 8),  # short prompts
        shapes(8, (64, 128), 32, 8),
        shapes(1, (4, 64, 512, 2048), 32, 8, head_dim=64),  # Llama 3.2 1B
        shapes(8, (512, 2048), 32, 8, head_dim=64),
        shapes(1, (16, 64, 512, 2048, 8192), 32, 32),  # Llama 2 7B
        shapes(1, (16, 64, 512, 2048), 16, 8),  # Qwen3 0.6B
        shapes(1, (64, 512, 2048, 8192), 8, 1),  # Llama 3.1 70B, a rank of eight
    ],
)
"""Declaration of attention. Its `launch` takes ``q, k, v, out, lse, scale, causal, window``."""
