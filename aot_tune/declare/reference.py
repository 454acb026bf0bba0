"""Check what a declaration's `reference` returned, for a sweep and for the checks before one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aot_tune.errors import DeclarationError

if TYPE_CHECKING:
    import torch

    from aot_tune.declare.declaration import Close, Declaration


def closes_of(tunable: Declaration, found: object, named: Mapping[str, Any]) -> Mapping[str, Close]:
    """The `Close` of each mutated argument, by name.

    Args:
        tunable: The declaration.
        found: The result of its `reference`.
        named: The launch arguments by name.

    Raises:
        DeclarationError: `found` does not have a `Close` of the right shape for each mutated argument.
    """
    import torch

    from aot_tune.declare.declaration import Close

    if isinstance(found, Close | torch.Tensor):
        if len(tunable.mutated) != 1:
            raise DeclarationError(
                f"{tunable.name}: reference returns one {type(found).__name__} and "
                f"{len(tunable.mutated)} arguments are mutated ({', '.join(tunable.mutated)}); return a dict "
                "with one for each"
            )
        found = {tunable.mutated[0]: found}
    if not isinstance(found, Mapping) or set(found) != set(tunable.mutated):
        returned = _listed(found) if isinstance(found, Mapping) else f"a {type(found).__name__}"
        alone = "a Close or a tensor, or " if len(tunable.mutated) == 1 else ""
        raise DeclarationError(
            f"{tunable.name}: reference returns {returned}; "
            f"return {alone}a dict of one for each of {', '.join(tunable.mutated)}"
        )
    found = {
        name: _close(tunable, name, value, named[name]) if isinstance(value, torch.Tensor) else value
        for name, value in found.items()
    }
    for name, close in found.items():
        if not isinstance(close, Close):
            raise DeclarationError(
                f"{tunable.name}: reference gives {name} a {type(close).__name__}; "
                "write a tensor, or Close(value=..., rtol=..., atol=...)"
            )
        for bound, amount in (("rtol", close.rtol), ("atol", close.atol)):
            if not math.isfinite(amount):
                raise DeclarationError(
                    f"{tunable.name}: reference gives {name} {bound}={amount}; give a finite number"
                )
        shape = getattr(close.value, "shape", None)
        if shape is None:
            raise DeclarationError(
                f"{tunable.name}: reference gives {name} a {type(close.value).__name__} as its value; "
                "return a tensor"
            )
        if tuple(shape) != tuple(named[name].shape):
            raise DeclarationError(
                f"{tunable.name}: reference gives {name} the shape {tuple(shape)}, the argument has "
                f"{tuple(named[name].shape)}; return a value of the argument's shape"
            )
    return found


TOLERANCES = {
    "float64": 1e-10,
    "float32": 1e-4,
    "float16": 2e-3,
    "bfloat16": 1.6e-2,
    "float8_e4m3fn": 0.25,
    "float8_e5m2": 0.5,
}
"""The relative tolerance of a reference that is a plain tensor, by the dtype of its argument: two roundings
of the short types; for float32 sums in another order, but no products in tf32. Of other dtypes it is 0."""


def _close(tunable: Declaration, name: str, value: torch.Tensor, argument: torch.Tensor) -> Close:
    """The `Close` of a plain tensor; where elements cancel out, atol is that of a value of the usual size."""
    import torch

    from aot_tune.declare.declaration import Close

    rtol = TOLERANCES.get(str(argument.dtype).removeprefix("torch."), 0.0)
    if rtol == 0 or value.is_meta or value.numel() == 0:
        return Close(value=value, rtol=rtol, atol=0.0)
    mean_square = torch.linalg.vector_norm(value, dtype=torch.float64).item() ** 2 / value.numel()
    if not math.isfinite(mean_square):
        raise DeclarationError(
            f"{tunable.name}: reference gives {name} values that are not finite, so that no tolerance "
            "follows; write Close(value=..., rtol=..., atol=...)"
        )
    return Close(value=value, rtol=rtol, atol=rtol * math.sqrt(mean_square))


def _listed(found: Mapping[object, object]) -> str:
    return f"a dict of {', '.join(map(str, found))}" if found else "an empty dict"
