"""Matrix product of a mixture of experts: kernel, host function and declaration.

Rows sorted by expert are multiplied by the matrix of their expert; the number of rows of each expert is known
only on the GPU. A block takes every `num_blocks`-th tile. It finds the expert of a tile by a search in the
running sums of tiles, which is fast for many experts, or by a walk from expert to expert, which is fast for
many tiles of each. The search space is `grouped_matmul_space`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cuda.tile as ct
import torch

from aot_tune import inputs
from aot_tune.declare.declaration import Close, Work
from aot_tune.kernels.host.arguments import check_apart, check_dtype, check_rank, check_shape, indexable
from aot_tune.kernels.host.padding import padded
from aot_tune.kernels.products.grouped_matmul_space import ITEM_BYTES, default, legal, space
from aot_tune.kernels.products.product_space import persistent_grid, tile_of, work_of
from aot_tune.tunable import Tunable
from aot_tune.values.bucket import Exact, Pow2
from aot_tune.values.config import Config
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem

_GROUP = 8
"""Rows of tiles that are taken together, down before along, to keep L2 warm: nearly every matmul is tuned to
this number."""


@ct.kernel
def grouped_matmul_kernel(  # type: ignore[no-untyped-def]
    a, b, offsets, out,
    tile_m: ct.Constant[int], tile_n: ct.Constant[int], tile_k: ct.Constant[int], search: ct.Constant[bool],
    experts: ct.Constant[int],
):  # fmt: skip
    """Compute every `num_blocks`-th tile, expert after expert; `experts` is a power of two that holds all."""
    if search:
        _search(a, b, offsets, out, tile_m, tile_n, tile_k, experts)
    else:
        _walk(a, b, offsets, out, tile_m, tile_n, tile_k)


def _search(
    a: Any, b: Any, offsets: Any, out: Any, tile_m: Any, tile_n: Any, tile_k: Any, experts: Any
) -> None:
    tiles_n = ct.cdiv(b.shape[2], tile_n)
    # Bounded, so that wrong offsets give wrong results and no access outside of the arrays.
    number = ct.arange(experts, dtype=ct.int32)
    stops = ct.minimum(ct.maximum(ct.gather(offsets, number, padding_value=0), 0), a.shape[0])
    starts = ct.minimum(ct.maximum(ct.gather(offsets, number - 1, padding_value=0), 0), a.shape[0])
    tiles = (ct.maximum(stops - starts, 0) + tile_m - 1) // tile_m * tiles_n
    afters = ct.cumsum(tiles)
    for tile in range(ct.bid(0), ct.max(afters), ct.num_blocks(0)):
        its = (afters - tiles <= tile) & (tile < afters)
        expert, start, stop = _chosen(its, number), _chosen(its, starts), _chosen(its, stops)
        m, n = _place(tile - _chosen(its, afters - tiles), ct.cdiv(stop - start, tile_m), tiles_n)
        result = _product(a, b, expert, start + m * tile_m, n, tile_m, tile_n, tile_k)
        # A store without TMA: its descriptor would be rewritten for every tile. Latency 1, or the compiler
        # may reserve warps for it.
        mine = _rows(out, start, stop)
        ct.store(mine, (m, n), result.astype(out.dtype), allow_tma=False, latency=1)


def _walk(a: Any, b: Any, offsets: Any, out: Any, tile_m: Any, tile_n: Any, tile_k: Any) -> None:
    tiles_n = ct.cdiv(b.shape[2], tile_n)
    tile, before, start = ct.bid(0), 0, 0
    # An expert without tiles costs a load, which is issued one expert ahead, and a dozen scalar instructions.
    for expert in range(b.shape[0]):
        stop = min(max(ct.load(offsets, (expert,), ()), start), a.shape[0])  # bounded, as in a search
        tiles_m = ct.cdiv(stop - start, tile_m)
        after = before + tiles_m * tiles_n
        while tile < after:
            m, n = _place(tile - before, tiles_m, tiles_n)
            result = _product(a, b, expert, start + m * tile_m, n, tile_m, tile_n, tile_k)
            ct.store(_rows(out, start, stop), (m, n), result.astype(out.dtype))
            tile += ct.num_blocks(0)
        before, start = after, stop


def _chosen(mask: Any, values: Any) -> Any:
    """Return the value whose mask is set; one is."""
    return ct.sum(ct.where(mask, values, 0))


def _place(index: Any, tiles_m: Any, tiles_n: Any) -> Any:
    """Return the row and the column of one of an expert's tiles."""
    first = index // (_GROUP * tiles_n) * _GROUP
    rows = min(tiles_m - first, _GROUP)
    place = index % (_GROUP * tiles_n)
    return first + place % rows, place // rows


def _rows(out: Any, start: Any, stop: Any) -> Any:
    """Slice an expert's rows, so that its last tile ends with them; in 64 bits: narrow-offsets (README)."""
    return out.slice(axis=0, start=ct.astype(start, ct.int64), stop=ct.astype(stop, ct.int64))


def _product(a: Any, b: Any, expert: Any, row: Any, n: Any, tile_m: Any, tile_n: Any, tile_k: Any) -> Any:
    """Compute one tile, in float32."""
    zero = ct.PaddingMode.ZERO
    # A tile may begin at any row and reach into the next expert's rows, whose products are not stored: so one
    # TMA descriptor serves all of A, where a slice of each expert's rows would need its own.
    rows_of_a = a.tiled_view((tile_m, tile_k), padding_mode=zero, traversal_steps=(1, tile_k))
    # The sums are kept transposed for the reasons given in gate_up_swiglu, and the first step is before
    # the loop: zero-start (README).
    x = rows_of_a.load((row, 0))
    y = ct.load(b, (expert, 0, n), (1, tile_k, tile_n), padding_mode=zero).reshape((tile_k, tile_n))
    acc = ct.mma(y.transpose(), x.transpose(), ct.zeros((tile_n, tile_m), ct.float32))
    for step in range(1, ct.cdiv(a.shape[1], tile_k)):
        x = rows_of_a.load((row, step))
        y = ct.load(b, (expert, step, n), (1, tile_k, tile_n), padding_mode=zero).reshape((tile_k, tile_n))
        acc = ct.mma(y.transpose(), x.transpose(), acc)
    return acc.transpose()


def grouped_matmul(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply each expert's rows of `a` by the expert's matrix, accumulating in float32.

    Rows from ``offsets[e - 1]`` (0 for the first expert) to before ``offsets[e]`` of the product are those
    rows of `a` times ``b[e]``, as in ``torch._grouped_mm(a, b, offs=offsets)``. If rows of `a` or `b`
    (columns, where those are contiguous) do not all start at a multiple of 16 bytes, the call makes a copy
    whose rows do.

    Args:
        a: (tokens, K), bfloat16 or float16, on a GPU, sorted by expert; any strides.
        b: (experts, K, N), of the dtype of `a`; any strides, so that weights of shape (experts, N, K) pass
            as ``weights.transpose(1, 2)``.
        offsets: (experts,), int32, on the GPU: where each expert's rows end. Not decreasing, at most
            `tokens`; this is not checked, as it would wait for the GPU. An expert may have no rows. Rows
            after the last offset are not computed: they keep what `out` holds.
        out: (tokens, N), the result, of the dtype of `a`; it must share no memory with the others. A new
            tensor is made if it is None.

    Returns:
        `out`, or the new tensor.

    Raises:
        LaunchError: An argument cannot be launched; the error names it and what to pass.
    """
    check_grouped_matmul(a, b, offsets, out=out)
    (tokens, k), (experts, _, n) = a.shape, b.shape
    written = torch.empty((tokens, n), dtype=a.dtype, device=a.device) if out is None else out
    if written.numel() == 0 or experts == 0:
        return written
    if k == 0:
        return written.zero_()  # sums of nothing
    a, b, offsets, counted = indexable("grouped_matmul", a=a, b=b, offsets=offsets, out=written)
    if out is not None:
        check_apart("grouped_matmul", "out", out, a=a, b=b, offsets=offsets)
    grouped_matmul_tunable.launch(padded(a), padded(b), offsets, counted)
    return written


def check_grouped_matmul(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, *, out: torch.Tensor | None = None
) -> None:
    """Refuse shapes and dtypes that `grouped_matmul` does not take."""
    check_rank("grouped_matmul", "a", a, "tokens K")
    check_rank("grouped_matmul", "b", b, "experts K N")
    check_rank("grouped_matmul", "offsets", offsets, "experts")
    check_dtype("grouped_matmul", "a", a, torch.bfloat16, torch.float16)
    check_dtype("grouped_matmul", "b", b, a.dtype)
    check_dtype("grouped_matmul", "offsets", offsets, torch.int32)
    (tokens, k), (experts, _, n) = a.shape, b.shape
    check_shape("grouped_matmul", "b", b, (experts, k, n), f"a of {k} columns")
    check_shape("grouped_matmul", "offsets", offsets, (experts,), f"b of {experts} experts")
    if out is not None:
        check_shape("grouped_matmul", "out", out, (tokens, n), "the product")
        check_dtype("grouped_matmul", "out", out, a.dtype)


# The declaration --------------------------------------------------------------------------------


def _problem(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor
) -> Mapping[str, object]:
    (tokens, k), (experts, _, n) = a.shape, b.shape
    return {"dtype": a.dtype, "tokens": tokens, "experts": experts, "N": n, "K": k}


def _tiles(config: Config, problem: Problem) -> int:
    """Count the tiles if rows were spread evenly over all experts, or over as many experts as rows."""
    tile_m, tile_n, _ = tile_of(config)
    tokens = problem.size("tokens")
    experts = min(problem.size("experts"), tokens)
    return experts * -(-tokens // (experts * tile_m)) * -(-problem.size("N") // tile_n)


def _work(config: Config, problem: Problem) -> Work:
    return work_of(config, problem.size("K"), item_bytes=ITEM_BYTES)


def _grid(config: Config, device: Device, problem: Problem) -> tuple[int, ...]:
    (tile_m, tile_n, _), tokens = tile_of(config), problem.size("tokens")
    # The most tiles that there can be: each expert may end in a partly filled one.
    tiles_m = tokens // tile_m + min(problem.size("experts"), tokens)
    return persistent_grid(config, device, tiles_m * -(-problem.size("N") // tile_n))


def _args(
    config: Config, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor
) -> tuple[Any, ...]:
    experts = 1 << (b.shape[0] - 1).bit_length()
    return a, b, offsets, out, *tile_of(config), config["search"], experts


def _make_args(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    tokens, experts, dtype = problem.size("tokens"), problem.size("experts"), str(problem["dtype"])
    n, k = problem.size("N"), problem.size("K")
    a = padded(inputs.randn((tokens, k), dtype, device, 4 * seed))
    weights = inputs.randn((experts, n, k), dtype, device, 4 * seed + 1, scale=k**-0.5)  # products around 1
    offsets = _uneven_offsets(tokens, experts, device, 4 * seed + 2)
    return a, padded(weights).transpose(1, 2), offsets, inputs.empty((tokens, n), dtype, device)


_SPREAD = 0.4
"""Standard deviation of the logarithm of an expert's popularity: the most popular of 128 experts gets about
2.5 times its share."""


def _uneven_offsets(tokens: int, experts: int, device: Any, seed: int) -> torch.Tensor:
    """Draw ends of the experts' rows: each expert draws a popularity, then each row draws its expert."""
    if torch.device(device).type == "meta":
        return inputs.empty((experts,), "int32", device)
    popularity = inputs.randn((experts,), "float32", device, seed, scale=_SPREAD).exp().cumsum(0)
    drawn = inputs.uniform((tokens,), 0, 1, "float32", device, seed + 1).sort().values
    offsets = torch.searchsorted(drawn, popularity / popularity[-1], out_int32=True)
    offsets[-1] = tokens
    return offsets


def _reference(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> Close:
    exact = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    start = 0
    for expert, stop in enumerate(offsets.tolist()):
        if start < stop:
            torch.mm(a[start:stop].double(), b[expert].double(), out=exact[start:stop])
        start = stop
    # As for matmul: one rounding to the output's dtype is half its eps, and the absolute term is for the
    # float32 sums, which the matrix units truncate.
    return Close(value=exact, rtol=torch.finfo(a.dtype).eps, atol=2e-3)


_TOKENS, _FEW_TOKENS = (8, 64, 512, 4096, 32768), (16, 512, 8192)
"""Tokens to sweep, and for experts whose neighbours are swept more closely. Buckets between take the config
of the nearest edge."""


def _shapes(
    experts: int, n: int, k: int, dtype: str = "bfloat16", *, tokens: tuple[int, ...] = _TOKENS
) -> dict[str, object]:
    return {"dtype": dtype, "tokens": tokens, "experts": experts, "N": n, "K": k}


grouped_matmul_tunable = Tunable(
    name="grouped_matmul",
    package=__package__,
    kernel=grouped_matmul_kernel,
    axes={"tokens": Pow2(), "experts": Exact(), "N": Exact(), "K": Exact()},
    batch_axes=("tokens",),
    problem=_problem,
    search_space=lambda arch, problem: space(arch),
    legal=legal,
    default=default,
    grid_fn=_grid,
    args_fn=_args,
    tiles=_tiles,
    work=_work,
    make_args=_make_args,
    reference=_reference,
    outputs=("out",),
    typical=[  # gate and up, then down
        *(_shapes(8, 28672, 4096), _shapes(8, 4096, 14336)),  # Mixtral 8x7B
        *(_shapes(8, 28672, 4096, "float16"), _shapes(8, 4096, 14336, "float16")),  # the same (AWQ, GPTQ)
        *(_shapes(256, 4096, 7168), _shapes(256, 7168, 2048)),  # DeepSeek-V3
        *(_shapes(32, 5760, 2880), _shapes(32, 2880, 2880)),  # gpt-oss 20b
        *(_shapes(128, 5760, 2880), _shapes(128, 2880, 2880)),  # gpt-oss 120b
        *(_shapes(128, 1536, 2048), _shapes(128, 2048, 768)),  # Qwen3 30B-A3B
        *(_shapes(128, 3072, 4096), _shapes(128, 4096, 1536)),  # Qwen3 235B-A22B
        _shapes(8, 6144, 16384, tokens=_FEW_TOKENS),  # Mixtral 8x22B, down
        _shapes(16, 5120, 8192, tokens=_FEW_TOKENS),  # Llama 4 Scout, down
        _shapes(128, 2816, 4096, tokens=_FEW_TOKENS),  # GLM-4.5-Air, gate and up
        _shapes(512, 1024, 2048, tokens=_FEW_TOKENS),  # Qwen3-Next 80B-A3B, gate and up
        _shapes(512, 2048, 512, tokens=_FEW_TOKENS),  # and down
    ],
)
"""Declaration: ``grouped_matmul_tunable.launch(a, b, offsets, out)`` takes what `grouped_matmul` takes.

Its `tokens` are the rows of `a`: the tokens of a batch times the experts that each is sent to.
"""
