"""Operations of TileGym and FlashInfer, called as the libraries have them on tensors made here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from aot_tune.bench.libraries.sites import LATENT, MLA_PAGE, PAGE, ROTATED, UNROTATED

Call = Callable[[], object]

_BF16, _F8, _INT = torch.bfloat16, torch.float8_e4m3fn, torch.int32


class Operation(NamedTuple):
    """An operation of a library."""

    module: str
    """Module that holds it."""

    make: Callable[..., Call]
    """(the module, the numbers of a shape) -> a call on tensors that are made now."""


# TileGym ----------------------------------------------------------------------------------------


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def _matmul(library: Any, m: int, n: int, k: int) -> Call:
    a, b = _normal(m, k), _normal(k, n)
    return lambda: library.matmul(a, b)


def _static_persistent_matmul(library: Any, m: int, n: int, k: int) -> Call:
    a, b = _normal(m, k), _normal(k, n)
    return lambda: library.matmul(a, b, static_persistent=True)


def _attention(library: Any, batch: int, heads: int, kv_heads: int, length: int, size: int) -> Call:
    q, k, v = (_normal(batch, count, length, size) for count in (heads, kv_heads, kv_heads))
    return lambda: library.tile_fmha(q, k, v, is_causal=True)


def _softmax(library: Any, rows: int, cols: int) -> Call:
    x = _normal(rows, cols)
    return lambda: library.softmax(x)


def _rms_norm(library: Any, rows: int, cols: int) -> Call:
    x, weight = _normal(rows, cols), _normal(cols)
    return lambda: library.rms_norm(x, (cols,), weight, 1e-6)


def _silu_and_mul(library: Any, rows: int, hidden: int) -> Call:
    x = _normal(rows, 2 * hidden)
    return lambda: library.silu_and_mul(x)


def _tilegym_bmm(library: Any, batch: int, m: int, n: int, k: int) -> Call:
    a, b = _normal(batch, m, k), _normal(batch, k, n)
    return lambda: library.bmm(a, b)


def _rope(library: Any, batch: int, heads: int, kv_heads: int, length: int, size: int) -> Call:
    q, k = (_normal(batch, count, length, size) for count in (heads, kv_heads))
    angles = _normal(1, length, size // 2).repeat(1, 1, 2)  # a rotation, so that values stay as large
    cos, sin = angles.cos(), angles.sin()
    return lambda: library.apply_rope_base(q, k, cos, sin)


def _layer_norm(library: Any, rows: int, cols: int) -> Call:
    x, weight, bias = _normal(rows, cols), _normal(cols), _normal(cols)
    return lambda: library.layer_norm(x, 1, 2, weight, bias, 1e-5)


def _persistent_layer_norm(library: Any, rows: int, cols: int) -> Call:
    x, weight, bias = _normal(rows, cols), _normal(cols), _normal(cols)
    return lambda: library.persistent_layer_norm(x, (cols,), weight, bias, 1e-5)


# FlashInfer -------------------------------------------------------------------------------------


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=_BF16, device="cuda")


def _full(value: int, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, dtype=_INT, device="cuda")


def _pages(batch: int, pages: int, room: int = 0) -> torch.Tensor:
    """Return the table of pages of each sequence, with room for as many, or for more."""
    table = torch.arange(batch * pages, dtype=_INT, device="cuda").view(batch, pages)
    return torch.nn.functional.pad(table, (0, room - pages)) if room else table


def scale_of(width: int, stretch: int) -> float:
    """Return the scale of attention, computed as servers do where YaRN stretches it: it is compiled in."""
    scale: float = width**-0.5
    mscale = 0.1 * math.log(stretch) + 1.0
    return scale * mscale * mscale


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
    library: Any, batch: int, heads: int, kv_heads: int, size: int, length: int, pages: int, room: int = 0
) -> Call:
    q, out = _normal(batch, heads, size), _empty(batch, heads, size)
    k, v = (_normal(pages, PAGE, kv_heads, size) for _ in range(2))
    lengths, table = _full(length * PAGE, batch), _pages(batch, length, room)
    return lambda: library.fmha_decode_bsr_cutile(q, k, v, lengths, table, size**-0.5, 1.0, outputs=out)


def _decode_mla(
    library: Any, batch: int, heads: int, length: int, pages: int, room: int = 0, stretch: int = 1
) -> Call:
    q, rotated, out = (
        _normal(batch, heads, LATENT),
        _normal(batch, heads, ROTATED),
        _empty(batch, heads, LATENT),
    )
    cache, keys = _normal(pages, MLA_PAGE, LATENT), _normal(pages, MLA_PAGE, ROTATED)
    lengths, table = _full(length * MLA_PAGE, batch), _pages(batch, length, room)
    scale = scale_of(UNROTATED + ROTATED, stretch)
    return lambda: library.decode_mla_kv_paged_cutile(
        q, rotated, cache, keys, lengths, table, scale, 1.0, outputs=out
    )


def _sequences(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lengths and the starts of sequences."""
    starts = torch.arange(0, batch * length, length, dtype=_INT, device="cuda")
    return _full(length, batch), starts


def _prefill_ragged(
    library: Any,
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    size: int,
    width: int = 0,
    stretch: int = 1,
) -> Call:
    tokens, width = batch * length, width or size
    q, out = _normal(tokens, heads, width), _empty(tokens, heads, size)
    k, v = _normal(tokens, kv_heads, width), _normal(tokens, kv_heads, size)
    (lengths, starts), table = _sequences(batch, length), _full(0, batch, 1)
    scale = scale_of(width, stretch)
    return lambda: library.prefill_attention_kv_ragged_cutile(
        q, k, v, lengths, lengths, starts, table, scale, 1.0, batch, length, outputs=out
    )


def _prefill_paged(library: Any, batch: int, length: int, heads: int, kv_heads: int, size: int) -> Call:
    q, out = _normal(batch * length, heads, size), _empty(batch * length, heads, size)
    k, v = (_normal(batch * length // PAGE, PAGE, kv_heads, size) for _ in range(2))
    (lengths, starts), table = _sequences(batch, length), _pages(batch, length // PAGE)
    return lambda: library.prefill_attention_kv_paged_cutile(
        q, k, v, lengths, lengths, starts, table, size**-0.5, 1.0, batch, length, outputs=out
    )


def _rope_quantize_fp8(library: Any, tokens: int, heads: int, rows: int = 4096, bits: int = 32) -> Call:
    q, k = _normal(tokens, heads, ROTATED), _normal(tokens, ROTATED)
    q_rest, k_rest = _normal(tokens, heads, LATENT), _normal(tokens, LATENT)
    angles = torch.rand(rows, ROTATED, device="cuda")
    places = torch.arange(tokens, dtype=_INT if bits == 32 else torch.int64, device="cuda")
    return lambda: library.rope_quantize_fp8_cutile(q, k, q_rest, k_rest, angles, places, is_neox=False)


_TILEGYM, _GEMM = "tilegym.ops.cutile", "flashinfer.gemm.kernels.cutile"
_ATTENTION = "flashinfer.attention.kernels.cutile"

OPERATIONS: dict[str, Operation] = {
    "matmul": Operation(f"{_TILEGYM}.matmul", _matmul),
    "static_persistent_matmul": Operation(f"{_TILEGYM}.matmul", _static_persistent_matmul),
    "attention": Operation(f"{_TILEGYM}.attention", _attention),
    "softmax": Operation(f"{_TILEGYM}.softmax", _softmax),
    "rms_norm": Operation(f"{_TILEGYM}.rms_norm", _rms_norm),
    "silu_and_mul": Operation(f"{_TILEGYM}.silu_and_mul", _silu_and_mul),
    "bmm": Operation(f"{_TILEGYM}.bmm", _tilegym_bmm),
    "rope": Operation(f"{_TILEGYM}.rope", _rope),
    "layer_norm": Operation(f"{_TILEGYM}.layer_norm", _layer_norm),
    "persistent_layer_norm": Operation(f"{_TILEGYM}.layer_norm_legacy", _persistent_layer_norm),
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
"""The operations by name; TileGym's rms_norm and layer_norm make no search."""
