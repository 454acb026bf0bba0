"""Sites of FlashInfer 0.7.2.post1 that compile on their first call, called unchanged on the stand-in driver.

Run as a program it calls one site, and prints what reached the driver:
``python -m tests.support.flashinfer_sites NAME SIZE``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from aot_tune.bench.libraries import fetched
from tests.support.library_sites import F32, INT, ROOT, Site, call, empty

FOLDER = ROOT / fetched.FOLDER
"""Where `make` puts the library."""

MISSING = f"FlashInfer is not in {FOLDER}: make flashinfer"

FP8, SCALE = torch.float8_e4m3fn, torch.float8_e8m0fnu


def _moe(module: Any, tokens: int) -> object:
    experts, hidden, inner, top = 8, 256, 128, 2
    from flashinfer.fused_moe.api import SwiGLU  # type: ignore[import-not-found]

    config = module.GemmConfig(tile_n=64, tile_k=64, occupancy=1)
    workspace = module.allocate_workspace(
        num_tokens=tokens, hidden_size=hidden, intermediate_size=inner, num_experts=experts, top_k=top,
        is_gated=True, block_sizes=[16], device=torch.device("meta"),
    )  # fmt: skip
    return module.run_moe(
        empty(tokens, hidden), empty(tokens, top, dtype=INT), empty(tokens, top, dtype=F32),
        empty(experts, hidden, 2 * inner), empty(experts, inner, hidden), empty(tokens, hidden), workspace,
        activation=SwiGLU(), block_size=16, gemm1_config=config, gemm2_config=config,
    )  # fmt: skip


def _decode(module: Any, batch: int, pages: int) -> object:
    cache, table = empty(batch * pages, 64, 4, 128), empty(batch, pages, dtype=INT)
    return module.fmha_decode_bsr_cutile(
        empty(batch, 16, 128), cache, cache.clone(), empty(batch, dtype=INT), table, 0.1, 1.0
    )


def _mla(module: Any, batch: int) -> object:
    cache, rope = empty(batch * 32, 64, 512), empty(batch * 32, 64, 64)
    return module.decode_mla_kv_paged_cutile(
        empty(batch, 16, 512), empty(batch, 16, 64), cache, rope, empty(batch, dtype=INT),
        empty(batch, 32, dtype=INT), 0.1, 1.0,
    )  # fmt: skip


def _prefill(module: Any, length: int, *, paged: bool, lpt: bool) -> object:
    batch, counts = 2, empty(2, dtype=INT)
    kind = "paged" if paged else "ragged"
    function = getattr(module, f"prefill_attention_kv_{kind}_cutile")
    cache = empty(64, 64, 2, 128) if paged else empty(batch * length, 2, 128)
    table = empty(batch, 32, dtype=INT)
    return function(
        empty(batch * length, 8, 128), cache, cache.clone(), counts, counts.clone(), empty(3, dtype=INT),
        table, 0.1, 1.0, batch, length, use_lpt_scheduler=lpt,
    )  # fmt: skip


def _fp8(module: Any, rows: int) -> object:
    a, b, scales = empty(rows, 512, dtype=FP8), empty(256, 512, dtype=FP8), empty(rows, 4, dtype=F32)
    return module.gemm_fp8_nt_groupwise_cutile(a, b, scales, empty(2, 4, dtype=F32), empty(rows, 256))


def _rope(module: Any, tokens: int) -> object:
    return module.rope_quantize_fp8_cutile(
        empty(tokens, 8, 64), empty(tokens, 64), empty(tokens, 8, 128), empty(tokens, 128),
        empty(4096, 64, dtype=F32), empty(tokens, dtype=INT), is_neox=False,
    )  # fmt: skip


def _ragged(module: Any, rows: int) -> object:
    return module.ragged_bmm(empty(4 * rows, 128), empty(4, 256, 128), empty(5, dtype=INT), rows)


def _masked_scaled(module: Any, rows: int) -> object:
    a, b = empty(4, rows, 256, dtype=FP8), empty(4, 256, 256, dtype=FP8)
    scales = empty(4, rows // 128, 2, 2, 256, dtype=SCALE), empty(4, 2, 2, 2, 256, dtype=SCALE)
    return module.masked_scaled_bmm(a, b, *scales, empty(4, dtype=INT), "mxfp8")


def _ragged_scaled(module: Any, rows: int) -> object:
    a, b = empty(4 * rows, 256, dtype=FP8), empty(4, 256, 256, dtype=FP8)
    scales = empty(4 * rows // 128, 2, 2, 256, dtype=SCALE), empty(4, 2, 2, 2, 256, dtype=SCALE)
    return module.ragged_scaled_bmm(a, b, *scales, empty(5, dtype=INT), rows, "mxfp8")


def _alpha_beta(module: Any, rows: int, beta: float) -> object:
    return module.gemm_alpha_beta(empty(rows, 256), empty(512, 256), empty(rows, 512), beta=beta)


_GEMM, _ATTENTION = "gemm.kernels.cutile", "attention.kernels.cutile"
_QUANTIZATION = "quantization.kernels.cutile"

SITES = {
    "moe": Site("fused_moe.cutile.moe", _moe, 64, searches=0),
    "group quantize": Site(
        f"{_QUANTIZATION}.per_token_group_quant_8bit_cutile",
        lambda m, n: m.per_token_group_quant_8bit_cutile(empty(n, 512), 128),
        64,
        searches=0,
    ),
    "decode split": Site(f"{_ATTENTION}.fmha_decode_bsr_cutile", lambda m, n: _decode(m, n, 64), 4, 3),
    "decode paged": Site(f"{_ATTENTION}.fmha_decode_bsr_cutile", lambda m, n: _decode(m, n, 16), 8, 7),
    "decode mla": Site(f"{_ATTENTION}.fmha_decode_bsr_cutile", _mla, 8, 7),
    "bmm bf16": Site(
        f"{_GEMM}.bmm_bf16_cutile",
        lambda m, n: m.bmm_bf16_cutile(empty(4, n, 128), empty(4, 256, 128).mT, empty(4, n, 256)),
        512,
        500,
    ),
    "mm bf16": Site(
        f"{_GEMM}.mm_bf16_cutile",
        lambda m, n: m._gemm_alpha_beta_cutile(empty(n, 256), empty(512, 256), empty(n, 512)),
        512,
    ),
    "fp8 groupwise": Site(f"{_GEMM}.gemm_fp8_nt_groupwise_cutile", _fp8, 512),
    "gemm beta": Site(f"{_GEMM}.gemm_alpha_beta_cutile", lambda m, n: _alpha_beta(m, n, 0.5), 512, 400),
    "gemm": Site(f"{_GEMM}.gemm_alpha_beta_cutile", lambda m, n: _alpha_beta(m, n, 0.0), 512, 400),
    "ragged bmm swapped": Site(f"{_GEMM}.ragged_bmm_cutile", _ragged, 128, 120),
    "ragged bmm": Site(f"{_GEMM}.ragged_bmm_cutile", _ragged, 256, 250),
    "masked bmm": Site(
        f"{_GEMM}.masked_bmm_cutile",
        lambda m, n: m.masked_bmm(empty(4, n, 128), empty(4, 128, 256), empty(4, dtype=INT)),
        256,
        200,
    ),
    "masked scaled bmm": Site(f"{_GEMM}.masked_scaled_bmm_cutile", _masked_scaled, 128, 256, arch="sm100"),
    "ragged scaled bmm": Site(f"{_GEMM}.ragged_scaled_bmm_cutile", _ragged_scaled, 128, 256, arch="sm100"),
    "rope quantize": Site(f"{_QUANTIZATION}.rope_quantize_fp8_cutile", _rope, 64),
    **{
        f"prefill {'paged' if paged else 'ragged'}{' lpt' * lpt}": Site(
            f"{_ATTENTION}.fmha_prefill_bsr_cutile",
            lambda m, n, paged=paged, lpt=lpt: _prefill(m, n, paged=paged, lpt=lpt),
            256,
            None if lpt else 250,
        )
        for paged in (False, True)
        for lpt in (False, True)
    },
}
"""All of the library's searches, and two of its operations that search nothing."""


if __name__ == "__main__":
    call("flashinfer", SITES, *sys.argv[1:])
