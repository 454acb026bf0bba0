"""Sites of TileGym 1.5.1 that tune on their first call, called unchanged on the stand-in driver.

Run as a program it calls one site, and prints what reached the driver:
``python -m tests.support.tilegym_sites NAME SIZE``.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.support.library_sites import F32, INT, INT64, THIRD_PARTY, Site, call, empty

FOLDER = THIRD_PARTY / "tilegym"
"""Where `make` puts the library."""

MISSING = f"TileGym is not in {FOLDER}: make third-party"


def _rope(module: Any, rows: int) -> object:
    q, k, angles = empty(1, 8, rows, 64), empty(1, 2, rows, 64), empty(1, rows, 64)
    return module.apply_rope_base(q, k, angles, angles.clone())


def _delta_rule(module: Any, batch: int) -> object:
    q, k, v = empty(batch, 1, 2, 64), empty(batch, 1, 2, 64), empty(batch, 1, 4, 64)
    g, beta = empty(batch, 1, 4, dtype=F32), empty(batch, 1, 4)
    return module.recurrent_gated_delta_rule(q, k, v, g, beta, initial_state=None, output_final_state=False)


def _group_gemm(module: Any, rows: int) -> object:
    return module.group_gemm([empty(rows, 128), empty(rows, 64)], [empty(128, 256), empty(64, 256)])


def _attention(module: Any, length: int) -> object:
    q, k = empty(1, 8, length, 64), empty(1, 2, length, 64)
    return module.tile_fmha(q, k, k.clone(), is_causal=True)


def _activation_gradient(module: Any, tokens: int) -> object:
    experts, hidden, inner, total = 4, 256, 128, 2 * tokens
    module.moe_actgrad_bwd(
        dout=empty(tokens, hidden), h=empty(total, 2 * inner), w2=empty(experts, inner, hidden),
        dh=empty(total, 2 * inner), ds=empty(total, dtype=F32), b2=None, db2=None,
        a_prime=empty(total, inner), topk_scores=empty(total, dtype=F32),
        expert_frequency_offset=empty(experts + 1, dtype=INT), x_gather_idx=empty(total, dtype=INT),
        s_scatter_idx=empty(total, dtype=INT), activation_type="swiglu", max_tokens_per_expert=tokens,
    )  # fmt: skip
    return None


def _chunk_cumsum(module: Any, tokens: int) -> object:
    return module._chunk_cumsum(empty(32, dtype=F32), empty(2, tokens, 32), 64)


def _add_norm_backward(module: Any, rows: int) -> object:
    y, w, rstd = empty(rows, 512), empty(512), empty(rows, dtype=F32)
    return module._fused_add_rms_norm_backward_ct(y, y.clone(), y.clone(), w, rstd, 0.0, 0, 512)


def _ragged(module: Any, rows: int) -> object:
    total, groups = 4 * rows, empty(5, dtype=INT)
    return module.ragged_bmm(empty(total, 128), empty(4, 256, 128), groups, rows)


def _policy_loss(module: Any, batch: int) -> object:
    logits, ids = empty(batch, 33, 512), empty(batch, 32, dtype=INT64)
    old, advantages = empty(batch, 32, dtype=F32), empty(batch, dtype=F32)
    return module._grpo_loss_forward_ct(
        logits, old, None, ids, advantages, None, 1.0, 0.0, 0.2, 0.2, 0, 1.0, 1.05, 0.0, False, None, 32, None
    )


def _cross_entropy(module: Any, rows: int) -> object:
    return module.cross_entropy(empty(rows, 512), empty(rows, dtype=INT64))


SITES = {
    "bmm": Site("ops.cutile.bmm", lambda m, n: m.bmm(empty(n, 64, 128), empty(n, 128, 256)), 8, 7),
    "matmul": Site("ops.cutile.matmul", lambda m, n: m.matmul(empty(n, 128), empty(128, 256)), 512, 400),
    "static persistent matmul": Site(
        "ops.cutile.matmul",
        lambda m, n: m.matmul(empty(n, 128), empty(128, 256), static_persistent=True),
        512,
        400,
    ),
    "rope": Site("ops.cutile.rope", _rope, 512),
    "silu_and_mul": Site("ops.cutile.silu_and_mul", lambda m, n: m.silu_and_mul(empty(n, 512)), 500, 400),
    "softmax": Site("ops.cutile.softmax", lambda m, n: m.softmax(empty(n, 512), use_tma=True), 500),
    "recurrent_gated_delta_rule": Site("ops.cutile.recurrent_gated_delta_rule", _delta_rule, 16, searches=3),
    "group_gemm": Site("ops.cutile.group_gemm", _group_gemm, 512, 400),
    "attention": Site("ops.cutile.attention", _attention, 500, 400, as_found=("grid", "symbol")),
    "geglu": Site(
        "suites.unsloth.cutile.geglu",
        lambda m, n: m.geglu_exact_forward(empty(1, n, 512), empty(1, n, 512)),
        64,
    ),
    "swiglu": Site(
        "suites.unsloth.cutile.swiglu", lambda m, n: m.swiglu_fg(empty(1, n, 512), empty(1, n, 512)), 64
    ),
    "moe_actgrad_bwd": Site("ops.cutile.moe_actgrad_bwd", _activation_gradient, 512, 400),
    "mamba2": Site("ops.cutile.mamba2", _chunk_cumsum, 512, 448),
    "fused_add_rms_norm": Site("suites.liger.cutile.fused_add_rms_norm", _add_norm_backward, 512),
    "ragged_bmm": Site("suites.flashinfer.cutile.gemm.ragged_bmm", _ragged, 128, 120, searches=2),
    "grpo_loss": Site("suites.liger.cutile.grpo_loss", _policy_loss, 4),
    "cross_entropy": Site("suites.liger.cutile.cross_entropy", _cross_entropy, 512, as_found=("hints",)),
}


if __name__ == "__main__":
    call("tilegym", SITES, *sys.argv[1:])
