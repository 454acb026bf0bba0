"""The shipped kernels: host functions on PyTorch tensors, and the declarations that tune them."""

from aot_tune.kernels.attention import attention_tunable
from aot_tune.kernels.attention_varlen import attention_varlen_tunable
from aot_tune.kernels.cross_entropy import cross_entropy_tunable
from aot_tune.kernels.fused_add_rms_norm import fused_add_rms_norm_tunable
from aot_tune.kernels.gated_activation import gated_activation_tunable
from aot_tune.kernels.layer_norm import layer_norm_tunable
from aot_tune.kernels.linear import linear_tunable
from aot_tune.kernels.matmul import matmul_tunable
from aot_tune.kernels.ops import (
    attention,
    attention_varlen,
    cross_entropy,
    fused_add_rms_norm,
    gated_activation,
    layer_norm,
    linear,
    matmul,
    rms_norm,
    rope,
    softmax,
)
from aot_tune.kernels.rms_norm import rms_norm_tunable
from aot_tune.kernels.rope import rope_tunable
from aot_tune.kernels.softmax import softmax_tunable

__all__ = [
    "attention",
    "attention_tunable",
    "attention_varlen",
    "attention_varlen_tunable",
    "cross_entropy",
    "cross_entropy_tunable",
    "fused_add_rms_norm",
    "fused_add_rms_norm_tunable",
    "gated_activation",
    "gated_activation_tunable",
    "layer_norm",
    "layer_norm_tunable",
    "linear",
    "linear_tunable",
    "matmul",
    "matmul_tunable",
    "rms_norm",
    "rms_norm_tunable",
    "rope",
    "rope_tunable",
    "softmax",
    "softmax_tunable",
]
