"""Call a site of FlashInfer or TileGym at a model's shapes, one after another, under `aot-tune record`.

``python -m aot_tune.bench.children.library SITE MODEL FILE`` appends the label of each shape to FILE once its
call has ended, after ``failed`` and a tab where it failed. A shape that is in FILE already is not called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aot_tune.bench.children import replay
from aot_tune.bench.libraries.sites import (
    LATENT,
    MLA_PAGE,
    MODELS,
    PAGE,
    ROTATED,
    SITES,
    UNROTATED,
    label,
)

Call = Callable[[], object]

_BF16, _F8, _INT = torch.bfloat16, torch.float8_e4m3fn, torch.int32


class Operation(NamedTuple):
    """An operation of a library."""

    module: str
    """Module that holds it."""

    make: Callable[..., Call]
    """(the module, the numbers of a shape) -> a call on tensors that are made now."""


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=_BF16, device="cuda")


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=_BF16, device="cuda")


def _full(value: int, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, dtype=_INT, device="cuda")


def _pages(batch: int, pages: int) -> torch.Tensor:
    """Return the table of pages of each sequence."""
    return torch.arange(batch * pages, dtype=_INT, device="cuda").view(batch, pages)


def _mm(library: Any, m: int, n: int, k: int) -> Call:
    a, b, out = _normal(m, k), _normal(n, k), _empty(m, n)
    return lambda: library.mm_bf16_cutile(a, b.transpose(-2, -1), out)


def _bmm(library: Any, batch: int, m: int, n: int, k: int) -> Call:
    a, b, out = _normal(batch, m, k), _normal(batch, n, k), _empty(batch, m, n)
    return lambda: library.bmm_bf16_cutile(a, b.transpose(-2, -1), out)


def _fp8_groupwise(library: Any, m: int, n: int, k: int) -> Call:
    a, b = _normal(m, k).to(_F8), _normal(n, k).to(_F8)
    a_scale = torch.rand(m, k // 128, device="cuda")
    b_scale = torch.rand(n // 128, k // 128, device="cuda")
    out = _empty(m, n)
    return lambda: library.gemm_fp8_nt_groupwise_cutile(a, b, a_scale, b_scale, out)


def _decode_paged(
    library: Any, batch: int, heads: int, kv_heads: int, size: int, length: int, pages: int
) -> Call:
    q, out = _normal(batch, heads, size), _empty(batch, heads, size)
    k, v = (_normal(pages, PAGE, kv_heads, size) for _ in range(2))
    lengths, table = _full(length * PAGE, batch), _pages(batch, length)
    return lambda: library.fmha_decode_bsr_cutile(q, k, v, lengths, table, size**-0.5, 1.0, outputs=out)


def _decode_mla(library: Any, batch: int, heads: int, length: int, pages: int) -> Call:
    q, rotated, out = (
        _normal(batch, heads, LATENT),
        _normal(batch, heads, ROTATED),
        _empty(batch, heads, LATENT),
    )
    cache, keys = _normal(pages, MLA_PAGE, LATENT), _normal(pages, MLA_PAGE, ROTATED)
    lengths, table = _full(length * MLA_PAGE, batch), _pages(batch, length)
    scale = (UNROTATED + ROTATED) ** -0.5
    return lambda: library.decode_mla_kv_paged_cutile(
        q, rotated, cache, keys, lengths, table, scale, 1.0, outputs=out
    )


def _sequences(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lengths and the starts of sequences."""
    starts = torch.arange(0, batch * length, length, dtype=_INT, device="cuda")
    return _full(length, batch), starts


def _prefill_ragged(library: Any, batch: int, length: int, heads: int, kv_heads: int, size: int) -> Call:
    q, out = _normal(batch * length, heads, size), _empty(batch * length, heads, size)
    k, v = (_normal(batch * length, kv_heads, size) for _ in range(2))
    (lengths, starts), table = _sequences(batch, length), _full(0, batch, 1)
    return lambda: library.prefill_attention_kv_ragged_cutile(
        q, k, v, lengths, lengths, starts, table, size**-0.5, 1.0, batch, length, outputs=out
    )


def _prefill_paged(library: Any, batch: int, length: int, heads: int, kv_heads: int, size: int) -> Call:
    q, out = _normal(batch * length, heads, size), _empty(batch * length, heads, size)
    k, v = (_normal(batch * length // PAGE, PAGE, kv_heads, size) for _ in range(2))
    (lengths, starts), table = _sequences(batch, length), _pages(batch, length // PAGE)
    return lambda: library.prefill_attention_kv_paged_cutile(
        q, k, v, lengths, lengths, starts, table, size**-0.5, 1.0, batch, length, outputs=out
    )


def _rope_quantize_fp8(library: Any, tokens: int, heads: int) -> Call:
    q, k = _normal(tokens, heads, ROTATED), _normal(tokens, ROTATED)
    q_rest, k_rest = _normal(tokens, heads, LATENT), _normal(tokens, LATENT)
    angles = torch.rand(4096, ROTATED, device="cuda")
    places = torch.arange(tokens, dtype=_INT, device="cuda")
    return lambda: library.rope_quantize_fp8_cutile(q, k, q_rest, k_rest, angles, places, is_neox=False)


_GEMM, _ATTENTION = "flashinfer.gemm.kernels.cutile", "flashinfer.attention.kernels.cutile"

OPERATIONS: dict[str, Operation] = {
    **{
        name: Operation(f"tilegym.ops.cutile.{operation.module}", operation.make)
        for name, operation in replay.OPERATIONS.items()
    },
    "mm_bf16": Operation(f"{_GEMM}.mm_bf16_cutile", _mm),
    "bmm_bf16": Operation(f"{_GEMM}.bmm_bf16_cutile", _bmm),
    "fp8_groupwise": Operation(f"{_GEMM}.gemm_fp8_nt_groupwise_cutile", _fp8_groupwise),
    "decode_paged": Operation(f"{_ATTENTION}.fmha_decode_bsr_cutile", _decode_paged),
    "decode_mla": Operation(f"{_ATTENTION}.fmha_decode_bsr_cutile", _decode_mla),
    "prefill_ragged": Operation(f"{_ATTENTION}.fmha_prefill_bsr_cutile", _prefill_ragged),
    "prefill_paged": Operation(f"{_ATTENTION}.fmha_prefill_bsr_cutile", _prefill_paged),
    "rope_quantize_fp8": Operation(
        "flashinfer.quantization.kernels.cutile.rope_quantize_fp8_cutile", _rope_quantize_fp8
    ),
}
"""Operation of each site."""


def _forget(library: Any) -> None:
    """Empty the library's caches of winners: their keys may not hold all of a shape."""
    for name, cache in vars(library).items():
        if name.lower().endswith("tune_cache"):
            cache.clear()


def main(words: Sequence[str]) -> None:
    """Call a site at the shapes of a model that are not in the file of ended calls."""
    site, model, file = words
    path, operation = Path(file), OPERATIONS[site]
    ended = {line.split("\t")[-1] for line in path.read_text().splitlines()} if path.exists() else set()
    library = importlib.import_module(operation.module)
    torch.manual_seed(0)
    for shape in SITES[site].shapes(MODELS[model]):
        name = label(shape)
        if name in ended:
            continue
        failed = ""
        _forget(library)
        try:
            operation.make(library, *shape)()
            torch.cuda.synchronize()
        except Exception as error:  # such as no memory: the other shapes are recorded
            print(
                f"{site} {model} {name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True
            )
            failed = "failed\t"
        with path.open("a") as lines:
            lines.write(f"{failed}{name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
