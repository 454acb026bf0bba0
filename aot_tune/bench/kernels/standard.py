"""Declare a kernel's standard: other implementations, the work it must do, the demands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from aot_tune.bench.kernels.contest import Call
from aot_tune.bench.kernels.standing import COPY, LARGE_BYTES, Demand
from aot_tune.declare.declaration import Declaration
from aot_tune.declare.discovery import FoundKernel
from aot_tune.values.problem import Problem

Rival = Callable[..., Call]
"""Function of the launch arguments that returns the call to time; raises where it cannot do a shape."""

COMPILED = "torch.compile"
"""Name of the rival that torch.compile makes."""

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
"""Activations of torch by the names that kernels take."""


def _moved(tunable: Declaration, args: Sequence[Any]) -> float:
    """Count the bytes of all tensors, each once, or twice where it is changed in place."""
    named = zip(tunable.parameters, args, strict=True)
    tensors = {name: arg for name, arg in named if isinstance(arg, torch.Tensor)}
    return float(sum((1 + (name in tunable.inplace)) * tensor.nbytes for name, tensor in tensors.items()))


@dataclass(frozen=True, kw_only=True)
class Standard:
    """Standard that a kernel is measured against."""

    rivals: Mapping[str, Rival]
    """Other implementations of the operation, by name."""

    demands: Sequence[Demand]
    """Demands on the kernel, in addition to never being slower than its default."""

    flops: Callable[..., float] | None = None
    """(problem, *launch arguments) -> operations on the matrix units; None where memory alone bounds it."""

    moved: Callable[..., float] | None = None
    """(problem, *launch arguments) -> bytes to read and write; None where `_moved` counts them."""

    matrix_dtype: str | None = None
    """Dtype of the dense product whose rate is the ceiling of `flops`; None for the problem's dtype."""

    reads: bool = False
    """Whether a sum over as many bytes is timed too: for a kernel that reads far more than it writes."""

    floor: FoundKernel | None = None
    """A declaration that takes the same arguments and configs and only reads what the kernel reads. Its time
    in the tuned config is the part of the kernel's time that reading takes."""

    @property
    def copies(self) -> bool:
        """Whether a copy of as many bytes is timed too."""
        return any(COPY in demand.over for demand in self.demands)

    def matrix_dtype_of(self, problem: Problem) -> str | None:
        """Return the dtype of the product whose rate bounds a problem; None where memory alone does."""
        return None if self.flops is None else self.matrix_dtype or str(problem["dtype"])

    def work(self, tunable: Declaration, problem: Problem, args: Sequence[Any]) -> tuple[float, float]:
        """Return the bytes to move and the operations on the matrix units of a problem."""
        moved = _moved(tunable, args) if self.moved is None else self.moved(problem, *args)
        return moved, 0.0 if self.flops is None else self.flops(problem, *args)


def compiled(eager: Callable[..., object]) -> Rival:
    """Make a rival: a function of the launch arguments, compiled by torch.compile anew for every shape."""
    return lambda *args: partial(torch.compile(eager, dynamic=False), *args)


MEMORY_BOUND = (
    Demand(
        text="at least 85 % of the bandwidth of a copy, from 64 MiB",
        over=(COPY,),
        worst=0.85,
        where=lambda shape: shape.bytes >= LARGE_BYTES,
    ),
    Demand(text="at least as fast as torch.compile in the geometric mean", over=(COMPILED,), mean=1.0),
)
"""Demands on every kernel that memory bounds."""
