"""Public host functions, each also a PyTorch operator: ``torch.ops.aot_tune.rms_norm`` and so on.

`operators` explains when a call becomes the operator: only while a tracer such as torch.compile traces it.
"""

from __future__ import annotations

from typing import Any

import torch

from aot_tune.kernels.decode.attention_decode import attention_decode as _attention_decode
from aot_tune.kernels.decode.attention_decode import check_attention_decode
from aot_tune.kernels.elementwise.gated_activation import check_gated_activation
from aot_tune.kernels.elementwise.gated_activation import gated_activation as _gated_activation
from aot_tune.kernels.elementwise.rope import check_rope
from aot_tune.kernels.elementwise.rope import rope as _rope
from aot_tune.kernels.norms.fused_add_rms_norm import check_fused_add_rms_norm
from aot_tune.kernels.norms.fused_add_rms_norm import fused_add_rms_norm as _fused_add_rms_norm
from aot_tune.kernels.norms.layer_norm import check_layer_norm
from aot_tune.kernels.norms.layer_norm import layer_norm as _layer_norm
from aot_tune.kernels.norms.rms_norm import check_rms_norm
from aot_tune.kernels.norms.rms_norm import rms_norm as _rms_norm
from aot_tune.kernels.operators import attending, changing, define, named_as, returning, traces
from aot_tune.kernels.prefill.attention import attention as _attention
from aot_tune.kernels.prefill.attention import check_attention
from aot_tune.kernels.prefill.attention_varlen import attention_varlen as _attention_varlen
from aot_tune.kernels.prefill.attention_varlen import check_attention_varlen
from aot_tune.kernels.products.fp8.matmul_fp8 import check_matmul_fp8
from aot_tune.kernels.products.fp8.matmul_fp8 import matmul_fp8 as _matmul_fp8
from aot_tune.kernels.products.gate_up_swiglu import check_gate_up_swiglu
from aot_tune.kernels.products.gate_up_swiglu import gate_up_swiglu as _gate_up_swiglu
from aot_tune.kernels.products.grouped_matmul import check_grouped_matmul
from aot_tune.kernels.products.grouped_matmul import grouped_matmul as _grouped_matmul
from aot_tune.kernels.products.linear import check_linear
from aot_tune.kernels.products.linear import linear as _linear
from aot_tune.kernels.products.matmul import check_matmul
from aot_tune.kernels.products.matmul import matmul as _matmul
from aot_tune.kernels.softmax_and_loss.cross_entropy import check_cross_entropy
from aot_tune.kernels.softmax_and_loss.cross_entropy import cross_entropy as _cross_entropy
from aot_tune.kernels.softmax_and_loss.softmax import check_softmax
from aot_tune.kernels.softmax_and_loss.softmax import softmax as _softmax


def _like_first(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# Reductions and elementwise ---------------------------------------------------------------------

rms_norm = returning(_rms_norm, "Tensor x, Tensor weight, float eps=1e-6", _like_first, check_rms_norm)

fused_add_rms_norm = changing(
    _fused_add_rms_norm,
    "Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps=1e-6",
    check_fused_add_rms_norm,
)

layer_norm = returning(
    _layer_norm,
    "Tensor x, Tensor weight, Tensor? bias=None, float eps=1e-5",
    _like_first,
    check_layer_norm,
)

softmax = returning(_softmax, "Tensor x", _like_first, check_softmax)

gated_activation = returning(
    _gated_activation,
    "Tensor x, *, str activation='silu'",
    lambda x, *, activation="silu": x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
    check_gated_activation,
)

rope = changing(
    _rope,
    "Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, *, bool interleaved=False",
    check_rope,
)


def _losses(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.float32)


_loss = define(
    "cross_entropy(Tensor logits, Tensor target, *, int ignore_index=-100) -> Tensor",
    _cross_entropy,
    _losses,
    check_cross_entropy,
)
_loss_and_gradient = define(
    "cross_entropy.gradient(Tensor(a!) logits, Tensor target, *, int ignore_index=-100, float grad_scale)"
    " -> Tensor",
    _cross_entropy,
    _losses,
    check_cross_entropy,
)


@named_as(_cross_entropy)
def cross_entropy(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: D103 (the host function's)
    if not traces():
        return _cross_entropy(*args, **kwargs)
    if kwargs.get("grad_scale") is not None:
        return _loss_and_gradient(*args, **kwargs)  # type: ignore[no-any-return]
    kwargs.pop("grad_scale", None)
    return _loss(*args, **kwargs)  # type: ignore[no-any-return]


# Products ---------------------------------------------------------------------------------------

matmul = returning(
    _matmul, "Tensor a, Tensor b", lambda a, b: a.new_empty((a.shape[0], b.shape[1])), check_matmul
)

linear = returning(
    _linear,
    "Tensor x, Tensor weight, Tensor? bias=None, *, str? activation=None",
    lambda x, weight, bias=None, *, activation=None: x.new_empty((*x.shape[:-1], weight.shape[0])),
    check_linear,
)

matmul_fp8 = returning(
    _matmul_fp8,
    "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, *, ScalarType out_dtype=bfloat16",
    lambda a, b, scale_a, scale_b, *, out_dtype=torch.bfloat16: a.new_empty(
        (a.shape[0], b.shape[1]), dtype=out_dtype
    ),
    check_matmul_fp8,
)

grouped_matmul = returning(
    _grouped_matmul,
    "Tensor a, Tensor b, Tensor offsets",
    lambda a, b, offsets: a.new_empty((a.shape[0], b.shape[2])),
    check_grouped_matmul,
)

gate_up_swiglu = returning(
    _gate_up_swiglu,
    "Tensor x, Tensor weight",
    lambda x, weight: x.new_empty((x.shape[0], weight.shape[0] // 2)),
    check_gate_up_swiglu,
)

# Attention --------------------------------------------------------------------------------------


def _attended(q: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((*batch, heads, tokens), dtype=torch.float32)


_MASK = "*, bool causal=True, float? scale=None, int? window=None"

attention = attending(_attention, f"Tensor q, Tensor k, Tensor v, {_MASK}", _attended, check_attention)

attention_varlen = attending(
    _attention_varlen,
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    f"SymInt max_seqlen_k, {_MASK}",
    _attended,
    check_attention_varlen,
)

attention_decode = attending(
    _attention_decode,
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
    "*, float? scale=None, int? window=None",
    lambda q, *args, **kwargs: (q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)),
    check_attention_decode,
)
