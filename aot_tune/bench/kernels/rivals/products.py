"""Rivals of the kernels that multiply matrices: torch's own products.

The functions take a kernel's launch arguments.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from aot_tune.bench.kernels.contest import Call
from aot_tune.bench.kernels.standard import ACTIVATIONS, COMPILED, Rival, Standard, compiled
from aot_tune.bench.kernels.standing import Demand
from aot_tune.kernels import activations
from aot_tune.values.problem import Problem

_T = torch.Tensor

CUBLAS, GROUPED = "cuBLAS", "torch._grouped_mm"
SCALED, SCALED_FAST = "torch._scaled_mm", "torch._scaled_mm, fast sums"


def _matmul(a: _T, b: _T, out: _T, scratch: _T) -> Call:
    return lambda: torch.mm(a, b, out=out)


def _linear(x: _T, weight: _T, out: _T, bias: _T, scratch: _T, biased: bool, activation: int) -> Call:
    activate = ACTIVATIONS[activations.NAMES[activation]]
    return lambda: activate(F.linear(x, weight, bias if biased else None))


def _scaled(*, fast: bool) -> Rival:
    def rival(a: _T, b: _T, scale_a: _T, scale_b: _T, out: _T) -> Call:
        return lambda: torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out.dtype, use_fast_accum=fast)

    return rival


def _block_scaled(a: _T, b: _T, scale_a: _T, scale_b: _T, out: _T) -> Call:
    along_m = scale_a.t().contiguous().t()  # as it asks for: scales of neighbouring rows side by side
    return lambda: torch._scaled_mm(a, b, along_m, scale_b.t(), out_dtype=out.dtype, use_fast_accum=False)


def _grouped_matmul(a: _T, b: _T, offsets: _T, out: _T) -> Call:
    return lambda: torch._grouped_mm(a, b, offs=offsets)


def _gate_up(x: _T, weight: _T, out: _T) -> _T:
    gate, up = (x @ weight.flatten(0, 1).t()).chunk(2, dim=1)
    return F.silu(gate) * up


# The work ---------------------------------------------------------------------------------------


def _mnk(problem: Problem, *_: Any) -> float:
    return 2.0 * problem.size("M") * problem.size("N") * problem.size("K")


def _matrices_moved(problem: Problem, x: _T, weight: _T, out: _T, *_: Any) -> float:
    return float(x.nbytes + weight.nbytes + out.nbytes)


def _grouped_flops(problem: Problem, *_: Any) -> float:
    return 2.0 * problem.size("tokens") * problem.size("N") * problem.size("K")


def _grouped_moved(problem: Problem, a: _T, b: _T, offsets: _T, out: _T) -> float:
    """Count the bytes of the rows, of the outputs, and of the weights of experts that have rows."""
    used = int((offsets.diff(prepend=offsets.new_zeros(1)) > 0).sum())
    return float(a.nbytes + used * b[0].nbytes + out.nbytes)


def _gate_up_flops(problem: Problem, *_: Any) -> float:
    return 2 * _grouped_flops(problem)


# By kernel --------------------------------------------------------------------------------------


def _share_of(rival: str) -> Demand:
    return Demand(text=f"at least 0.9 of {rival} in the geometric mean", over=(rival,), mean=0.9)


_AS_CUBLAS = (
    Demand(
        text="at least 0.97 of cuBLAS in the geometric mean, 0.8 everywhere",
        over=(CUBLAS,),
        mean=0.97,
        worst=0.8,
    ),
    Demand(
        text="ahead of cuBLAS at M >= 2048, in the geometric mean",
        over=(CUBLAS,),
        mean=1.0,
        where=lambda shape: int(shape.problem["M"]) >= 2048,
    ),
)

STANDARDS = {
    "matmul": Standard(rivals={CUBLAS: _matmul}, demands=_AS_CUBLAS, flops=_mnk, moved=_matrices_moved),
    "linear": Standard(
        rivals={CUBLAS: _linear},
        demands=_AS_CUBLAS,
        flops=_mnk,
        moved=_matrices_moved,
    ),
    "matmul_fp8": Standard(
        rivals={SCALED: _scaled(fast=False), SCALED_FAST: _scaled(fast=True)},
        demands=(_share_of(SCALED),),
        flops=_mnk,
        matrix_dtype="float8_e4m3fn",
    ),
    "matmul_fp8_block": Standard(
        rivals={SCALED: _block_scaled},
        demands=(_share_of(SCALED),),
        flops=_mnk,
        matrix_dtype="float8_e4m3fn",
    ),
    "grouped_matmul": Standard(
        rivals={GROUPED: _grouped_matmul},
        demands=(_share_of(GROUPED),),
        flops=_grouped_flops,
        moved=_grouped_moved,
    ),
    "gate_up_swiglu": Standard(rivals={COMPILED: compiled(_gate_up)}, demands=(), flops=_gate_up_flops),
}
"""Kernel name to its standard."""
