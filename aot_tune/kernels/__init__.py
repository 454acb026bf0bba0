"""Shipped kernels: host functions that take PyTorch tensors, and declarations that tune them."""

# ruff: noqa: E402 - the modules imported below import cuda.tile
from aot_tune.nvidia.cutile import allow_no_temporary_folder

allow_no_temporary_folder()

from aot_tune.kernels.decode.attention_decode import attention_decode_tunable
from aot_tune.kernels.elementwise.gated_activation import gated_activation_tunable
from aot_tune.kernels.elementwise.rope import rope_tunable
from aot_tune.kernels.norms.fused_add_rms_norm import fused_add_rms_norm_tunable
from aot_tune.kernels.norms.layer_norm import layer_norm_tunable
from aot_tune.kernels.norms.rms_norm import rms_norm_tunable
from aot_tune.kernels.ops import (
    attention,
    attention_decode,
    attention_varlen,
    cross_entropy,
    fused_add_rms_norm,
    gate_up_swiglu,
    gated_activation,
    grouped_matmul,
    layer_norm,
    linear,
    matmul,
    matmul_fp8,
    rms_norm,
    rope,
    softmax,
)
from aot_tune.kernels.prefill.attention import attention_tunable
from aot_tune.kernels.prefill.attention_varlen import attention_varlen_tunable
from aot_tune.kernels.products.fp8.matmul_fp8 import matmul_fp8_tunable
from aot_tune.kernels.products.fp8.matmul_fp8_block import matmul_fp8_block_tunable
from aot_tune.kernels.products.gate_up_swiglu import gate_up_swiglu_tunable
from aot_tune.kernels.products.grouped_matmul import grouped_matmul_tunable
from aot_tune.kernels.products.linear import linear_tunable
from aot_tune.kernels.products.matmul import matmul_tunable
from aot_tune.kernels.softmax_and_loss.cross_entropy import cross_entropy_tunable
from aot_tune.kernels.softmax_and_loss.softmax import softmax_tunable

TUNABLES = (
    attention_tunable,
    attention_decode_tunable,
    attention_varlen_tunable,
    cross_entropy_tunable,
    fused_add_rms_norm_tunable,
    gate_up_swiglu_tunable,
    gated_activation_tunable,
    grouped_matmul_tunable,
    layer_norm_tunable,
    linear_tunable,
    matmul_tunable,
    matmul_fp8_tunable,
    matmul_fp8_block_tunable,
    rms_norm_tunable,
    rope_tunable,
    softmax_tunable,
)
"""Every shipped declaration, in the order of sweeps and listings."""

__all__ = [
    "TUNABLES",
    "attention",
    "attention_decode",
    "attention_decode_tunable",
    "attention_tunable",
    "attention_varlen",
    "attention_varlen_tunable",
    "cross_entropy",
    "cross_entropy_tunable",
    "fused_add_rms_norm",
    "fused_add_rms_norm_tunable",
    "gate_up_swiglu",
    "gate_up_swiglu_tunable",
    "gated_activation",
    "gated_activation_tunable",
    "grouped_matmul",
    "grouped_matmul_tunable",
    "layer_norm",
    "layer_norm_tunable",
    "linear",
    "linear_tunable",
    "matmul",
    "matmul_fp8",
    "matmul_fp8_block_tunable",
    "matmul_fp8_tunable",
    "matmul_tunable",
    "rms_norm",
    "rms_norm_tunable",
    "rope",
    "rope_tunable",
    "softmax",
    "softmax_tunable",
]
