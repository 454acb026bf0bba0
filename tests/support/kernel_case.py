"""What one file states of a shipped kernel, for the tests that hold for every kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aot_tune.values.problem import Problem
from tests.support.batches import Batch

BF16 = torch.bfloat16

HALVES = ("bfloat16", "float16")
THREE = (*HALVES, "float32")


@dataclass(frozen=True)
class Call:
    """An operator's overload with arguments for it."""

    name: str
    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def operator(self) -> Any:
        return getattr(getattr(torch.ops.aot_tune, self.name), self.overload)

    def __str__(self) -> str:
        return f"{self.name}.{self.overload}"


@dataclass(frozen=True, kw_only=True)
class Small:
    """Arguments of a host function whose first dimension is 1, without optional ones."""

    args: Mapping[str, torch.Tensor]
    """The tensors by name, outputs among them."""

    unused: tuple[str, ...]
    """Those with a dimension of size 1 in front, whose stride no launch needs."""

    numbers: Mapping[str, int] = field(default_factory=dict)
    """The arguments that are no tensors, where they have no default."""


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """A shipped kernel's calls, sizes and batch."""

    dtypes: Sequence[str]
    """The dtypes that the host function takes; of fp8 what it writes, since its factors are float8_e4m3fn."""

    sizes: Mapping[str, Mapping[str, object]]
    """Problems without their dtype, by what is special in them: ``aligned``, ``ragged``, ``of odd sizes`` and
    ``of size 1`` at least. They are such that few sets of constants are compiled for them."""

    batch: Batch
    """How arguments of a launch are cut into parts of their batch."""

    large: Sequence[Problem]
    """Problems of a served size, for a GPU."""

    host: str = ""
    """The host function, where it has not the kernel's name: that of another kernel, which has the calls."""

    calls: Callable[[], Sequence[Call]] = tuple
    """Makes a call of each overload of the operator, with CPU tensors."""

    refused: Callable[[], Sequence[tuple[str, Call]]] = tuple
    """Makes calls that no run takes, each with a pattern of what is said of it."""

    small: Callable[[], Small] | None = None
    """Makes the arguments of the host function for what all host functions refuse."""

    kept: Mapping[str, str] = field(default_factory=dict)
    """The launch arguments that keep the layout `make_args` gives them, and why; others come in each."""

    no_rivals: str = ""
    """Why the bench has no standard for the kernel; empty where it has one."""


# Calls ------------------------------------------------------------------------------------------------------


def returning(name: str, *args: Any, out: torch.Tensor, **kwargs: Any) -> list[Call]:
    """Calls of an operator that returns its result, or writes it to `out`."""
    return [Call(name, "default", args, kwargs), Call(name, "out", args, {**kwargs, "out": out})]


def attending(name: str, *args: Any, **kwargs: Any) -> list[Call]:
    """Calls of an operator of attention: each also with the logarithms of its sums."""
    calls = returning(name, *args, out=torch.empty_like(args[0]), **kwargs)
    return [
        *calls,
        *(Call(name, {"default": "lse", "out": "lse_out"}[c.overload], c.args, c.kwargs) for c in calls),
    ]


def normal(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Normal numbers, the same for the same sizes."""
    seed = sum(place * size for place, size in enumerate(sizes, 1))
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fp8(*sizes: int) -> torch.Tensor:
    """Normal numbers in float8_e4m3fn."""
    return normal(*sizes, dtype=torch.float32).to(torch.float8_e4m3fn)


def half(*sizes: int) -> torch.Tensor:
    """Zeros in bfloat16."""
    return torch.zeros(sizes, dtype=BF16)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Whole numbers."""
    return torch.tensor(values, dtype=dtype)


# Problems ---------------------------------------------------------------------------------------------------


def problem(**values: object) -> Problem:
    """A problem, stated by its values."""
    return Problem(values)


def sizes_of(names: str, **sizes: Sequence[object]) -> dict[str, dict[str, object]]:
    """Problems by name: ``of_odd_sizes=(33, 1501)`` with the names ``rows cols``."""
    return {
        case.replace("_", " "): dict(zip(names.split(), each, strict=True)) for case, each in sizes.items()
    }


MADE = "the host function makes it, contiguous and aligned"
OURS = "memory of the stream, which the host function takes from `workspace`"
