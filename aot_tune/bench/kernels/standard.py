"""What a kernel is measured against, declared: other implementations, the work it must do, the demands."""

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
from aot_tune.declare.discovery import Found
from aot_tune.values.problem import Problem

Rival = Callable[..., Call]
"""Takes the launch arguments and returns what is timed; raises where it cannot do that shape, saying why."""

COMPILED = "torch.compile"

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
"""torch's, by the names that kernels take."""


def _moved(tunable: Declaration, args: Sequence[Any]) -> float:
    """Bytes of all tensors: what is read once, what is written once, what is changed in place twice."""
    named = zip(tunable.parameters, args, strict=True)
    tensors = {name: arg for name, arg in named if isinstance(arg, torch.Tensor)}
    return float(sum((1 + (name in tunable.inplace)) * tensor.nbytes for name, tensor in tensors.items()))


@dataclass(frozen=True, kw_only=True)
class Standard:
    """One kernel's."""

    rivals: Mapping[str, Rival]
    """Name to another implementation of the same."""

    demands: Sequence[Demand]
    """What the kernel must reach, beside never being slower than its default."""

    flops: Callable[..., float] | None = None
    """(problem, *launch arguments) -> operations on the matrix units; None where memory alone bounds."""

    moved: Callable[..., float] | None = None
    """(problem, *launch arguments) -> bytes to read and write; None for every tensor once."""

    matrix_dtype: str | None = None
    """Operands of the dense product whose rate is the ceiling of `flops`; None for the problem's dtype."""

    reads: bool = False
    """Whether a sum of as many bytes is timed beside it: for a kernel that reads far more than it writes."""

    floor: Found | None = None
    """A declaration that takes the same arguments and configs and only reads what the kernel reads: timed in
    the tuned config, it says how much of the kernel's time its way of reading takes."""

    @property
    def copies(self) -> bool:
        """Whether a copy of as many bytes is timed beside it."""
        return any(COPY in demand.over for demand in self.demands)

    def matrix_dtype_of(self, problem: Problem) -> str | None:
        """The dtype of the product whose rate bounds a problem; None where memory alone does."""
        return None if self.flops is None else self.matrix_dtype or str(problem["dtype"])

    def work(self, tunable: Declaration, problem: Problem, args: Sequence[Any]) -> tuple[float, float]:
        """Bytes and flops of a problem."""
        moved = _moved(tunable, args) if self.moved is None else self.moved(problem, *args)
        return moved, 0.0 if self.flops is None else self.flops(problem, *args)


def compiled(eager: Callable[..., object]) -> Rival:
    """A rival: a function of the launch arguments through torch.compile, anew for every shape."""
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
"""Of every kernel that memory bounds."""
