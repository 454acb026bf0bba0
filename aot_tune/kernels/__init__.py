"""Shipped kernels: host functions that take PyTorch tensors, and declarations that tune them.

A function or declaration is imported when it is first read (PEP 562): with its kernel's module and table, and
no other kernel's. Each function is also a PyTorch operator, ``torch.ops.aot_tune.rms_norm`` and so on.
`operators` explains when a call becomes the operator: only while a tracer such as torch.compile traces it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from aot_tune.kernels.operators import Shipped, attending, changing, define, returning
from aot_tune.nvidia import nvml
from aot_tune.nvidia.cutile import allow_no_temporary_folder

if TYPE_CHECKING:
    from aot_tune.kernels.decode.attention_decode import attention_decode as attention_decode
    from aot_tune.kernels.decode.attention_decode import attention_decode_tunable as attention_decode_tunable
    from aot_tune.kernels.elementwise.gated_activation import gated_activation as gated_activation
    from aot_tune.kernels.elementwise.gated_activation import (
        gated_activation_tunable as gated_activation_tunable,
    )
    from aot_tune.kernels.elementwise.rope import rope as rope
    from aot_tune.kernels.elementwise.rope import rope_tunable as rope_tunable
    from aot_tune.kernels.norms.fused_add_rms_norm import fused_add_rms_norm as fused_add_rms_norm
    from aot_tune.kernels.norms.fused_add_rms_norm import (
        fused_add_rms_norm_tunable as fused_add_rms_norm_tunable,
    )
    from aot_tune.kernels.norms.layer_norm import layer_norm as layer_norm
    from aot_tune.kernels.norms.layer_norm import layer_norm_tunable as layer_norm_tunable
    from aot_tune.kernels.norms.rms_norm import rms_norm as rms_norm
    from aot_tune.kernels.norms.rms_norm import rms_norm_tunable as rms_norm_tunable
    from aot_tune.kernels.prefill.attention import attention as attention
    from aot_tune.kernels.prefill.attention import attention_tunable as attention_tunable
    from aot_tune.kernels.prefill.attention_varlen import attention_varlen as attention_varlen
    from aot_tune.kernels.prefill.attention_varlen import attention_varlen_tunable as attention_varlen_tunable
    from aot_tune.kernels.products.fp8.matmul_fp8 import matmul_fp8 as matmul_fp8
    from aot_tune.kernels.products.fp8.matmul_fp8 import matmul_fp8_tunable as matmul_fp8_tunable
    from aot_tune.kernels.products.fp8.matmul_fp8_block import (
        matmul_fp8_block_tunable as matmul_fp8_block_tunable,
    )
    from aot_tune.kernels.products.gate_up_swiglu import gate_up_swiglu as gate_up_swiglu
    from aot_tune.kernels.products.gate_up_swiglu import gate_up_swiglu_tunable as gate_up_swiglu_tunable
    from aot_tune.kernels.products.grouped_matmul import grouped_matmul as grouped_matmul
    from aot_tune.kernels.products.grouped_matmul import grouped_matmul_tunable as grouped_matmul_tunable
    from aot_tune.kernels.products.linear import linear as linear
    from aot_tune.kernels.products.linear import linear_tunable as linear_tunable
    from aot_tune.kernels.products.matmul import matmul as matmul
    from aot_tune.kernels.products.matmul import matmul_tunable as matmul_tunable
    from aot_tune.kernels.softmax_and_loss.cross_entropy import cross_entropy as cross_entropy
    from aot_tune.kernels.softmax_and_loss.cross_entropy import cross_entropy_tunable as cross_entropy_tunable
    from aot_tune.kernels.softmax_and_loss.softmax import softmax as softmax
    from aot_tune.kernels.softmax_and_loss.softmax import softmax_tunable as softmax_tunable
    from aot_tune.tunable import Tunable

    TUNABLES: tuple[Tunable, ...]
    """Every shipped declaration, in the order of sweeps and listings."""

allow_no_temporary_folder()  # before a kernel imports cuda.tile


def _like_first(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _attended(q: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((*batch, heads, tokens), dtype=torch.float32)


def _losses(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.float32)


def _cross_entropy() -> Shipped:
    """Define its two operators: with `grad_scale` the logits are changed, without it they are not."""
    kernel = Shipped("softmax_and_loss.cross_entropy")
    loss, loss_and_gradient = (
        define(f"cross_entropy{schema} -> Tensor", kernel.later(), _losses, kernel.later("check_"))
        for schema in (
            "(Tensor logits, Tensor target, *, int ignore_index=-100)",
            ".gradient(Tensor(a!) logits, Tensor target, *, int ignore_index=-100, float grad_scale)",
        )
    )

    def traced(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("grad_scale") is not None:
            return loss_and_gradient(*args, **kwargs)
        kwargs.pop("grad_scale", None)
        return loss(*args, **kwargs)

    return kernel._replace(traced=traced)


_MASK = "*, bool causal=True, float? scale=None, int? window=None"

_LISTED = (
    # Reductions and elementwise
    returning("norms.rms_norm", "Tensor x, Tensor weight, float eps=1e-6", _like_first),
    changing("norms.fused_add_rms_norm", "Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps=1e-6"),
    returning("norms.layer_norm", "Tensor x, Tensor weight, Tensor? bias=None, float eps=1e-5", _like_first),
    returning("softmax_and_loss.softmax", "Tensor x", _like_first),
    returning(
        "elementwise.gated_activation",
        "Tensor x, *, str activation='silu'",
        lambda x, *, activation="silu": x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
    ),
    changing(
        "elementwise.rope",
        "Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, *, bool interleaved=False",
    ),
    _cross_entropy(),
    # Products
    returning("products.matmul", "Tensor a, Tensor b", lambda a, b: a.new_empty((a.shape[0], b.shape[1]))),
    returning(
        "products.linear",
        "Tensor x, Tensor weight, Tensor? bias=None, *, str? activation=None",
        lambda x, weight, bias=None, *, activation=None: x.new_empty((*x.shape[:-1], weight.shape[0])),
    ),
    returning(
        "products.fp8.matmul_fp8",
        "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, *, ScalarType out_dtype=bfloat16",
        lambda a, b, scale_a, scale_b, *, out_dtype=torch.bfloat16: a.new_empty(
            (a.shape[0], b.shape[1]), dtype=out_dtype
        ),
    ),
    Shipped("products.fp8.matmul_fp8_block"),  # behind the host function of matmul_fp8
    returning(
        "products.grouped_matmul",
        "Tensor a, Tensor b, Tensor offsets",
        lambda a, b, offsets: a.new_empty((a.shape[0], b.shape[2])),
    ),
    returning(
        "products.gate_up_swiglu",
        "Tensor x, Tensor weight",
        lambda x, weight: x.new_empty((x.shape[0], weight.shape[0] // 2)),
    ),
    # Attention
    attending("prefill.attention", f"Tensor q, Tensor k, Tensor v, {_MASK}", _attended),
    attending(
        "prefill.attention_varlen",
        "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
        f"SymInt max_seqlen_k, {_MASK}",
        _attended,
    ),
    attending(
        "decode.attention_decode",
        "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
        "*, float? scale=None, int? window=None",
        lambda q, *args, **kwargs: (q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)),
    ),
)

_SHIPPED = {kernel.name: kernel for kernel in sorted(_LISTED, key=lambda kernel: kernel.name)}

__all__ = ["TUNABLES", *(f"{name}_tunable" for name in _SHIPPED)]
__all__ += [name for name, kernel in _SHIPPED.items() if kernel.traced]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        known = ", ".join(sorted(__all__))
        raise AttributeError(f"module 'aot_tune.kernels' has no attribute {name!r}; it has {known}")
    nvml.ask_for_gpus()  # NVML answers while the kernel's module imports cuda.tile
    value: Any
    if name == "TUNABLES":
        value = tuple(kernel.imported(f"{kernel.name}_tunable") for kernel in _SHIPPED.values())
    elif name in _SHIPPED:
        value = _SHIPPED[name].public()
    else:
        value = _SHIPPED[name.removesuffix("_tunable")].imported(name)
    return globals().setdefault(name, value)  # another thread may have been first


def __dir__() -> list[str]:
    return __all__
