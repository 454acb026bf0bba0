"""The shipped kernels: three host functions on PyTorch tensors, and the declarations that tune them."""

from aot_tune.kernels.matmul import matmul, matmul_tunable
from aot_tune.kernels.rms_norm import rms_norm, rms_norm_tunable
from aot_tune.kernels.rope import rope, rope_tunable

__all__ = ["matmul", "matmul_tunable", "rms_norm", "rms_norm_tunable", "rope", "rope_tunable"]
