"""Activation functions for float32 tiles in kernels, and in float64 as references. Imports no kernel.

The exponential and the division are the GPU's approximations (ex2.approx, 2 ulp; rcp.approx, 1 ulp): 5
instructions for a SiLU in place of 37 with branches. Relative errors stay below 5e-6 where the result is
above 1e-6 in size, and absolute ones below 1e-11 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import cuda.tile as ct
import torch

from aot_tune.errors import LaunchError

NONE, RELU, SILU, GELU, GELU_TANH = range(5)

NUMBERS = {"none": NONE, "relu": RELU, "silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH}
"""Activation's name, as host functions take it, to its number, as `apply` takes it: a ``ct.Constant``
cannot be a string."""

NAMES = tuple(NUMBERS)
"""Name of each number. A launch takes the number and passes it on to the kernel."""


def check_activation(kernel: str, activation: str, *allowed: str) -> None:
    """Refuse an activation whose name is not among `allowed`, with a LaunchError that lists them."""
    if activation not in allowed:
        raise LaunchError(f"{kernel}: activation is {activation!r}; pass {' or '.join(map(repr, allowed))}")


# In a kernel ------------------------------------------------------------------------------------


def apply(x: Any, activation: Any) -> Any:
    """Apply an activation to a float32 tile; its number selects it while compiling."""
    if activation == RELU:
        x = relu(x)
    elif activation == SILU:
        x = silu(x)
    elif activation == GELU:
        x = gelu(x)
    elif activation == GELU_TANH:
        x = gelu_tanh(x)
    return x


def relu(x: Any) -> Any:
    """Return max(x, 0), and NaN for NaN, as in torch."""
    return ct.maximum(x, 0.0, propagate_nan=True)


def silu(x: Any) -> Any:
    """Return Swish: x sigmoid(x)."""
    return _times_sigmoid(x, x)


def gelu_tanh(x: Any) -> Any:
    """Return GELU's tanh form: x (1 + tanh u) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    return _times_sigmoid(x, x * (1.5957691216057308 + 0.07135481282743617 * x * x))


def gelu(x: Any) -> Any:
    """Return GELU: x Phi(x), Phi being the normal distribution; ``torch.nn.functional.gelu`` uses erf.

    cuda.tile has no erf. The lower tail is Phi(-|x|) = t P(t) exp(-x^2 / 2) with t = 1 / (1 + 0.3 |x|): the
    form of Abramowitz and Stegun 7.1.26. P is fitted anew to a relative error of 1.3e-7 for |x| up to 13.5
    (Lawson's iteration on 400 Chebyshev nodes in t); beyond, the tail is below the normal float32 numbers.
    Computed from the tail, the result keeps the digits that 1 + erf(x / sqrt(2)) cancels for negative x.
    """
    t = _over(1.0, 1.0 + 0.3 * ct.abs(x))
    p = 0.035931737825 * t - 0.158276009883
    p = p * t + 0.208206619851
    p = p * t - 0.055393857574
    p = p * t + 0.129469205230
    p = p * t + 0.099637491873
    p = p * t + 0.120798358592
    p = p * t + 0.119626410990
    tail = p * t * ct.exp2(x * x * -0.7213475204444817, flush_to_zero=True)
    return x * ct.where(x < 0.0, tail, 1.0 - tail)


def _times_sigmoid(x: Any, y: Any) -> Any:
    """Return x / (1 + exp(-y)): 0, the right result, where exp overflows."""
    return _over(x, 1.0 + ct.exp2(y * -1.4426950408889634, flush_to_zero=True))


def _over(x: Any, y: Any) -> Any:
    return ct.truediv(x, y, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


# As references ----------------------------------------------------------------------------------


def reference(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Apply the activation of this name in float64."""
    return _REFERENCES[activation](x.double())


_REFERENCES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}
