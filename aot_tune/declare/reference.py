"""Check the result of a declaration's `reference`, for a sweep or for checks before it. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aot_tune.declare.declaration import Close
from aot_tune.errors import DeclarationError
from aot_tune.values.parts import named_parts

if TYPE_CHECKING:
    from aot_tune.declare.declaration import Declaration


def closes_of(tunable: Declaration, found: object, named: Mapping[str, Any]) -> Mapping[str, Close]:
    """Return the `Close` of each mutated tensor, by its argument's name; of list members by ``xs[0]``.

    Args:
        tunable: The declaration.
        found: The result of the declaration's `reference`.
        named: The launch arguments by name; None for an argument that the launch goes without.

    Raises:
        DeclarationError: `found` does not have a `Close` of the right shape for each mutated argument.
    """
    values = _by_argument(tunable, found, named)
    arguments = named_parts(values, [named[name] for name in values])
    for name, value in values.items():
        listed = isinstance(value, list | tuple)
        if listed != isinstance(named[name], list | tuple) or (listed and len(value) != len(named[name])):
            given = f"a list of {len(value)}" if listed else f"a {type(value).__name__}"
            wanted = f"a list of {len(named[name])}" if not isinstance(named[name], Tensor) else "one value"
            raise DeclarationError(
                f"{tunable.name}: reference gives {name} {given}; return {wanted}, as the argument is"
            )
    parts = named_parts(values, values.values())
    return {part: _checked(tunable, part, value, arguments[part]) for part, value in parts.items()}


def _by_argument(tunable: Declaration, found: object, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of `reference` for each mutated argument that is not None."""
    wanted = [name for name in tunable.mutated if named.get(name, ...) is not None]
    if isinstance(found, Close | Tensor | list):
        if len(wanted) != 1:
            raise DeclarationError(
                f"{tunable.name}: reference returns one {type(found).__name__} and "
                f"{len(wanted)} arguments are mutated ({', '.join(wanted)}); return a dict "
                "with one for each"
            )
        found = {wanted[0]: found}
    if isinstance(found, Mapping):
        absent = [name for name in found if name in tunable.mutated and name not in wanted]
        found = {name: value for name, value in found.items() if name not in absent or value is not None}
    if not isinstance(found, Mapping) or set(found) != set(wanted):
        returned = _listed(found) if isinstance(found, Mapping) else f"a {type(found).__name__}"
        alone = "a Close or a tensor, or " if len(wanted) == 1 else ""
        raise DeclarationError(
            f"{tunable.name}: reference returns {returned}; "
            f"return {alone}a dict of one for each of {', '.join(wanted)}"
        )
    return dict(found)


def _checked(tunable: Declaration, name: str, value: object, argument: Any) -> Close:
    close = _close(tunable, name, value, argument) if isinstance(value, Tensor) else value
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
    if tuple(shape) != tuple(argument.shape):
        raise DeclarationError(
            f"{tunable.name}: reference gives {name} the shape {tuple(shape)}, the argument has "
            f"{tuple(argument.shape)}; return a value of the argument's shape"
        )
    return close


TOLERANCES = {
    "float64": 1e-10,
    "float32": 1e-4,
    "float16": 2e-3,
    "bfloat16": 1.6e-2,
    "float8_e4m3fn": 0.25,
    "float8_e5m2": 0.5,
}
"""Relative tolerance of a reference that is a plain tensor, by the dtype of its argument: two roundings of
the short types; for float32 sums in another order, but no products in tf32. For other dtypes it is 0."""


def _close(tunable: Declaration, name: str, value: torch.Tensor, argument: torch.Tensor) -> Close:
    """Return the `Close` of a plain tensor; atol is that of a value of the usual size, for cancellation."""
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
